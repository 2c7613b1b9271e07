#include "copy_job.h"

#include <numeric>
#include <span>
#include <utility>

#include "kvferry/copy_kernel.h"

namespace kvferry {
namespace {

constexpr size_t kPieceBytesMin = size_t{256} << 10;
constexpr size_t kPieceBytesMax = size_t{2} << 20;
constexpr size_t kStepBytes = 4096;
constexpr size_t kAheadBytes = 2 * kStepBytes;

// Goes over a piece by tiles of whole runs, a page or more of a payload, and within a tile over the
// chunks in the order of their blocks: the tile's places in neighbouring blocks share page tables,
// and at random places it is those that cost.
template <CopyDirection direction>
class Walk {
  public:
    Walk(const CopyRequest& request, std::span<const uint32_t> chunks) noexcept
        : request_(request), runs_(request.layout->runs()), chunks_(chunks) {
        enter_tile();
        enter_chunk();
    }

    bool done() const noexcept { return run_ == runs_.size(); }
    size_t chunk() const noexcept { return chunks_[at_]; }
    size_t bytes() const noexcept { return std::min(left_, kStepBytes); }
    const std::byte* src() const noexcept { return kGather ? paged_ : packed_; }
    std::byte* dst() const noexcept { return kGather ? packed_ : paged_; }

    // Past the end src() stays where it was: it is only a hint then.
    void advance() noexcept {
        const size_t step = bytes();
        left_ -= step;
        paged_ += step;
        packed_ += step;
        if (left_ > 0) {
            return;
        }
        if (++run_ < tile_end_) {
            enter_run();
        } else if (++at_ < chunks_.size()) {
            enter_chunk();
        } else if (!done()) {
            enter_tile();
            enter_chunk();
        }
    }

  private:
    static constexpr bool kGather = direction == CopyDirection::kGather;

    void enter_tile() noexcept {
        at_ = 0;
        tile_at_ += tile_bytes_;
        tile_bytes_ = 0;
        for (tile_ = tile_end_; tile_end_ < runs_.size() && tile_bytes_ < kStepBytes; ++tile_end_) {
            tile_bytes_ += static_cast<size_t>(runs_[tile_end_].length);
        }
    }

    void enter_chunk() noexcept {
        run_ = tile_;
        packed_ = request_.pool + request_.pool_offsets[chunk()] + tile_at_;
        enter_run();
    }

    void enter_run() noexcept {
        paged_ = request_.layout->at(runs_[run_], request_.blocks[chunk()]);
        left_ = static_cast<size_t>(runs_[run_].length);
    }

    const CopyRequest& request_;
    const std::span<const Run> runs_;
    const std::span<const uint32_t> chunks_;
    size_t tile_ = 0;  // runs [tile_, tile_end_)
    size_t tile_end_ = 0;
    size_t tile_at_ = 0;  // in the payload
    size_t tile_bytes_ = 0;
    size_t at_ = 0;
    size_t run_ = 0;
    std::byte* paged_ = nullptr;
    std::byte* packed_ = nullptr;
    size_t left_ = 0;
};

// `crcs` are of the job's chunks: seeds before, checksums after.
template <CopyDirection direction, bool with_crc>
void copy_chunks(const CopyRequest& request, std::span<const uint32_t> chunks,
                 std::vector<uint32_t>& crcs) noexcept {
    const CopyKernel& kernel = copy_kernels().front();
    Walk<direction> here(request, chunks);
    Walk<direction> ahead = here;
    for (size_t fetched = 0; fetched < kAheadBytes && !ahead.done(); ahead.advance()) {
        fetched += ahead.bytes();
    }
    for (; !here.done(); here.advance()) {
        if constexpr (with_crc) {
            uint32_t& crc = crcs[here.chunk()];
            crc = kernel.copy_crc(here.dst(), here.src(), here.bytes(), ahead.src(), crc);
        } else {
            kernel.copy(here.dst(), here.src(), here.bytes(), ahead.src());
        }
        if (!ahead.done()) {
            ahead.advance();
        }
    }
    kernel.fence();
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
    order.resize(chunks);
    if (checked()) {
        crcs.resize(chunks);
    }
}

void CopyJob::sort_order() noexcept {
    std::iota(order.begin(), order.end(), uint32_t{0});
    std::sort(order.begin(), order.end(),
              [this](uint32_t a, uint32_t b) { return request.blocks[a] < request.blocks[b]; });
}

void CopyJob::run_piece(uint64_t piece) noexcept {
    Clock::rep unset = 0;
    started.compare_exchange_strong(unset, Clock::now().time_since_epoch().count());
    std::call_once(sorted, [this] { sort_order(); });
    const size_t begin = piece * chunks_per_piece;
    const std::span<const uint32_t> chunks =
        std::span(order).subspan(begin, std::min(chunks_per_piece, order.size() - begin));
    if (checked() && !request.seeds.empty()) {
        for (const uint32_t chunk : chunks) {
            crcs[chunk] = request.seeds[chunk];
        }
    }
    const auto copy = gather() ? (checked() ? copy_chunks<CopyDirection::kGather, true>
                                            : copy_chunks<CopyDirection::kGather, false>)
                               : (checked() ? copy_chunks<CopyDirection::kScatter, true>
                                            : copy_chunks<CopyDirection::kScatter, false>);
    copy(request, chunks, crcs);
    size_t good = chunks.size();
    if (!request.expected.empty()) {
        for (const uint32_t chunk : chunks) {
            if (crcs[chunk] != request.expected[chunk]) {
                --good;
                lower(bad_index, chunk);
                status = CopyStatus::kChecksum;
            }
        }
    }
    moved_bytes += good * request.layout->payload_bytes();
    stopped = Clock::now().time_since_epoch().count();
}

CopyCompletion CopyJob::completion() {
    CopyCompletion result;
    result.ticket = request.ticket;
    result.status = status;
    result.moved_bytes = moved_bytes;
    result.seconds = std::chrono::duration<double>(Clock::duration(stopped - started)).count();
    result.bad_index = bad_index;
    if (gather()) {
        result.crcs = std::move(crcs);
    }
    return result;
}

}  // namespace kvferry
