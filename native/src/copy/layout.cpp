#include "kvferry/layout.h"

#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvferry {
namespace {

using Wide = __int128;  // block * stride cannot overflow it

[[noreturn]] void refuse(const std::string& why) {
    throw std::invalid_argument("layout refused: " + why);
}

// Affine in the block, so the two ends bound every block between.
void check_run(const Run& run, size_t index, int64_t num_blocks, uint64_t mapping_bytes) {
    const std::string name = "run " + std::to_string(index);
    if (run.length <= 0) {
        refuse(name + " has length " + std::to_string(run.length) + "; it must be positive");
    }
    for (const int64_t block : {int64_t{0}, num_blocks - 1}) {
        const Wide first = Wide{run.offset} + Wide{block} * run.stride;
        if (first < 0 || first + run.length > Wide{mapping_bytes}) {
            refuse(name + " (offset " + std::to_string(run.offset) + ", stride " +
                   std::to_string(run.stride) + ", length " + std::to_string(run.length) +
                   ") of block " + std::to_string(block) + " leaves the mapping of " +
                   std::to_string(mapping_bytes) + " bytes");
        }
    }
}

bool touches(const Run& run, const Run& next) {
    return next.stride == run.stride && next.offset == run.offset + run.length;
}

}  // namespace

Layout::Layout(std::shared_ptr<const Mapping> mapping, std::span<const int64_t> offsets,
               std::span<const int64_t> strides, std::span<const int64_t> lengths,
               int64_t num_blocks)
    : mapping_(std::move(mapping)), num_blocks_(num_blocks) {
    if (offsets.size() != strides.size() || offsets.size() != lengths.size()) {
        refuse(std::to_string(offsets.size()) + " offsets, " + std::to_string(strides.size()) +
               " strides and " + std::to_string(lengths.size()) + " lengths; they must be equal");
    }
    if (offsets.empty() || offsets.size() > kRunsMax) {
        refuse(std::to_string(offsets.size()) + " runs; 1 to " + std::to_string(kRunsMax) +
               " are possible");
    }
    if (num_blocks < 1 || num_blocks > std::numeric_limits<int32_t>::max()) {
        refuse(std::to_string(num_blocks) + " blocks; block ids are positive 32-bit numbers");
    }
    int64_t payload_bytes = 0;
    for (size_t i = 0; i < offsets.size(); ++i) {
        const Run run{offsets[i], strides[i], lengths[i]};
        check_run(run, i, num_blocks, mapping_->total_bytes());
        if (run.length > kPayloadBytesMax - payload_bytes) {
            refuse("a block has more than " + std::to_string(kPayloadBytesMax) + " bytes");
        }
        payload_bytes += run.length;
        if (!runs_.empty() && touches(runs_.back(), run)) {
            runs_.back().length += run.length;
        } else {
            runs_.push_back(run);
        }
    }
    payload_bytes_ = static_cast<size_t>(payload_bytes);
}

}  // namespace kvferry
