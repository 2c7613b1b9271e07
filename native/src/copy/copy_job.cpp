#include "copy_job.h"

#include <utility>

#include "kvferry/copy_kernel.h"

namespace kvferry {
namespace {

constexpr size_t kPieceBytesMin = size_t{256} << 10;
constexpr size_t kPieceBytesMax = size_t{2} << 20;
constexpr size_t kStepBytes = 4096;
constexpr size_t kAheadBytes = 2 * kStepBytes;

// Walks over the bytes a piece will read, some KiB before they are read. Stays on its last run at
// the end of the piece.
template <CopyDirection direction>
class Ahead {
  public:
    Ahead(const CopyRequest& request, size_t chunk, size_t chunks_end) noexcept
        : request_(request), chunk_(chunk), chunks_end_(chunks_end) {
        enter();
        // A multiple of the step keeps this walk and the copy's at the same places in their runs.
        const size_t step = std::min(left_, kStepBytes);
        advance((kAheadBytes + step - 1) / step * step);
    }

    const std::byte* here() const noexcept { return here_; }

    void advance(size_t bytes) noexcept {
        while (bytes >= left_) {
            const size_t passed = left_;
            if (!next()) {
                return;
            }
            bytes -= passed;
        }
        here_ += bytes;
        left_ -= bytes;
    }

  private:
    bool next() noexcept {
        if (direction == CopyDirection::kGather && run_ + 1 < request_.layout->runs().size()) {
            ++run_;
        } else if (chunk_ + 1 < chunks_end_) {
            ++chunk_;
            run_ = 0;
        } else {
            return false;
        }
        enter();
        return true;
    }

    void enter() noexcept {
        const Layout& layout = *request_.layout;
        if constexpr (direction == CopyDirection::kGather) {
            const Run& run = layout.runs()[run_];
            here_ = layout.at(run, request_.blocks[chunk_]);
            left_ = static_cast<size_t>(run.length);
        } else {
            here_ = request_.pool + request_.pool_offsets[chunk_];
            left_ = layout.payload_bytes();
        }
    }

    const CopyRequest& request_;
    size_t chunk_;
    const size_t chunks_end_;
    size_t run_ = 0;
    const std::byte* here_ = nullptr;
    size_t left_ = 0;
};

template <CopyDirection direction, bool with_crc>
uint32_t copy_chunk(const CopyRequest& request, const CopyKernel& kernel, size_t chunk,
                    Ahead<direction>& ahead, uint32_t crc) noexcept {
    const Layout& layout = *request.layout;
    std::byte* packed = request.pool + request.pool_offsets[chunk];
    for (const Run& run : layout.runs()) {
        std::byte* paged = layout.at(run, request.blocks[chunk]);
        for (auto left = static_cast<size_t>(run.length); left > 0;) {
            const size_t step = std::min(left, kStepBytes);
            std::byte* dst = direction == CopyDirection::kGather ? packed : paged;
            const std::byte* src = direction == CopyDirection::kGather ? paged : packed;
            if constexpr (with_crc) {
                crc = kernel.copy_crc(dst, src, step, ahead.here(), crc);
            } else {
                kernel.copy(dst, src, step, ahead.here());
            }
            ahead.advance(step);
            packed += step;
            paged += step;
            left -= step;
        }
    }
    return crc;
}

// Returns the chunk that did not verify, or `end`.
template <CopyDirection direction, bool with_crc>
size_t copy_chunks(const CopyRequest& request, std::vector<uint32_t>& crcs, size_t begin,
                   size_t end) noexcept {
    const CopyKernel& kernel = copy_kernels().front();
    Ahead<direction> ahead(request, begin, end);
    size_t chunk = begin;
    for (; chunk < end; ++chunk) {
        const uint32_t seed = request.seeds.empty() ? 0 : request.seeds[chunk];
        const uint32_t crc = copy_chunk<direction, with_crc>(request, kernel, chunk, ahead, seed);
        if constexpr (with_crc && direction == CopyDirection::kGather) {
            crcs[chunk] = crc;
        }
        if constexpr (with_crc && direction == CopyDirection::kScatter) {
            if (crc != request.expected[chunk]) {
                break;
            }
        }
    }
    kernel.fence();
    return chunk;
}

void lower(std::atomic<int64_t>& least, int64_t value) noexcept {
    int64_t seen = least.load();
    while ((seen < 0 || value < seen) && !least.compare_exchange_weak(seen, value)) {
    }
}

size_t piece_bytes(size_t job_bytes, size_t threads) {
    return std::clamp(job_bytes / (4 * threads), kPieceBytesMin, kPieceBytesMax);
}

}  // namespace

CopyJob::CopyJob(CopyRequest what, size_t threads, bool fails_)
    : request(std::move(what)), fails(fails_) {
    const size_t chunks = request.blocks.size();
    const size_t payload = request.layout->payload_bytes();
    chunks_per_piece = std::max(size_t{1}, piece_bytes(chunks * payload, threads) / payload);
    pieces = (chunks + chunks_per_piece - 1) / chunks_per_piece;
    open_pieces = pieces;
    if (request.crc && request.direction == CopyDirection::kGather) {
        crcs.resize(chunks);
    }
}

CopyStatus CopyJob::run_piece(uint64_t piece) noexcept {
    Clock::rep unset = 0;
    started.compare_exchange_strong(unset, Clock::now().time_since_epoch().count());
    const size_t begin = piece * chunks_per_piece;
    const size_t end = std::min(begin + chunks_per_piece, request.blocks.size());
    const bool gather = request.direction == CopyDirection::kGather;
    // A scatter with nothing to compare with is copied plainly.
    const bool checked = request.crc && (gather || !request.expected.empty());
    const auto copy = gather ? (checked ? copy_chunks<CopyDirection::kGather, true>
                                        : copy_chunks<CopyDirection::kGather, false>)
                             : (checked ? copy_chunks<CopyDirection::kScatter, true>
                                        : copy_chunks<CopyDirection::kScatter, false>);
    const size_t stopped_at = copy(request, crcs, begin, end);
    moved_bytes += (stopped_at - begin) * request.layout->payload_bytes();
    stopped = Clock::now().time_since_epoch().count();
    if (stopped_at < end) {
        lower(bad_index, static_cast<int64_t>(stopped_at));
        return CopyStatus::kChecksum;
    }
    return fails ? CopyStatus::kFailed : CopyStatus::kDone;
}

CopyCompletion CopyJob::completion() {
    CopyCompletion result;
    result.ticket = request.ticket;
    result.status = status;
    result.moved_bytes = moved_bytes;
    result.seconds = std::chrono::duration<double>(Clock::duration(stopped - started)).count();
    result.bad_index = bad_index;
    result.crcs = std::move(crcs);
    return result;
}

}  // namespace kvferry
