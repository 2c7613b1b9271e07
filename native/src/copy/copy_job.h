// One job and the copy of one of its pieces.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
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
    std::vector<uint32_t> crcs;  // one writer per element

    // Copies the chunks of a piece. What does not end as kDone has stopped at its first bad chunk.
    CopyStatus run_piece(uint64_t piece) noexcept;

    CopyCompletion completion();
};

}  // namespace kvferry
