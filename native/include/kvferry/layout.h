// Where one block's bytes lie in a mapping: a formula, validated once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvferry/mapping.h"

namespace kvferry {

// Run r of block b covers [offset + b * stride, ... + length) bytes of the mapping.
struct Run {
    int64_t offset;
    int64_t stride;
    int64_t length;
};

// The runs of a block in the order in which a chunk's payload packs them. Runs that touch in every
// block are merged, so num_runs() may be smaller than what was given.
class Layout {
  public:
    static constexpr size_t kRunsMax = size_t{1} << 20;
    static constexpr int64_t kPayloadBytesMax = int64_t{1} << 40;

    // Throws std::invalid_argument when a run is empty or leaves the mapping in any block.
    Layout(std::shared_ptr<const Mapping> mapping, std::span<const int64_t> offsets,
           std::span<const int64_t> strides, std::span<const int64_t> lengths, int64_t num_blocks);

    std::span<const Run> runs() const noexcept { return runs_; }
    size_t payload_bytes() const noexcept { return payload_bytes_; }
    int64_t num_blocks() const noexcept { return num_blocks_; }

    std::byte* at(const Run& run, int64_t block) const noexcept {
        return mapping_->data() + run.offset + block * run.stride;
    }

  private:
    std::shared_ptr<const Mapping> mapping_;
    std::vector<Run> runs_;
    size_t payload_bytes_ = 0;
    int64_t num_blocks_ = 0;
};

}  // namespace kvferry
