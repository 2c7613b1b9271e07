// One job and the copy of one of its pieces.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "kvferry/copy_engine.h"

namespace kvferry {

struct CopyJob {
    using Clock = std::chrono::steady_clock;

    // `threads` only guides the size of a piece.
    CopyJob(CopyRequest what, size_t threads, bool fails);

    const CopyRequest request;
    const bool fails;  // an injected failure
    size_t chunks_per_piece = 1;
    uint64_t pieces = 0;

    std::atomic<uint64_t> next_piece{0};  // the counter the threads take from; may pass `pieces`
    std::atomic<uint64_t> open_pieces;    // neither stopped nor dropped; 0 ends the job

    std::atomic<CopyStatus> status{CopyStatus::kDone};
    std::atomic<uint64_t> moved_bytes{0};
    std::atomic<int64_t> bad_index{-1};
    std::atomic<Clock::rep> started{0};
    std::atomic<Clock::rep> stopped{0};
    std::vector<uint32_t> crcs;   // of `checked` jobs; one writer per element
    std::vector<uint32_t> order;  // the chunks by block; sorted by the first piece
    std::once_flag sorted;

    bool gather() const noexcept { return request.direction == CopyDirection::kGather; }
    // A scatter with nothing to compare with is copied plainly.
    bool checked() const noexcept { return request.crc && (gather() || !request.expected.empty()); }

    // Copies the chunks of a piece. A chunk that does not verify does not end the job: the first
    // of all of them is reported, in whatever order they are copied.
    void run_piece(uint64_t piece) noexcept;

    CopyCompletion completion();

  private:
    void sort_order() noexcept;
};

}  // namespace kvferry
