// Copies between an engine's blocks and the pool, on threads of its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "kvferry/layout.h"

namespace kvferry {

enum class CopyDirection : int {
    kGather = 0,   // engine blocks -> pool (save)
    kScatter = 1,  // pool -> engine blocks (load)
};

enum class CopyStatus : int { kDone = 0, kCancelled = 1, kChecksum = 2, kFailed = 3 };

// One job: chunk i is block blocks[i] of the layout against the payload at pool + pool_offsets[i].
struct CopyRequest {
    uint64_t ticket = 0;
    CopyDirection direction = CopyDirection::kGather;
    std::shared_ptr<const Layout> layout;
    std::byte* pool = nullptr;
    uint64_t pool_bytes = 0;  // 0: unknown, offsets are only checked for overflow
    std::vector<int32_t> blocks;
    std::vector<uint64_t> pool_offsets;
    bool crc = false;
    std::vector<uint32_t> seeds;     // empty: 0 for every chunk
    std::vector<uint32_t> expected;  // empty: a scatter is not verified
};

struct CopyCompletion {
    uint64_t ticket = 0;
    CopyStatus status = CopyStatus::kDone;
    uint64_t moved_bytes = 0;
    double seconds = 0;          // from the first piece's start to the last one's end
    int64_t bad_index = -1;      // first chunk whose checksum differed
    std::vector<uint32_t> crcs;  // of a gather with crc; a chunk that was not copied has 0
};

struct CopyJob;

// A job is cut into pieces of whole chunks, which the threads take from its counter: no descriptor
// per run exists. Pieces go by block id (neighbouring blocks share page tables), jobs in the order
// of their submission. A completion is published after the job's last piece has stopped, and only
// then may the memory be used for something else. All methods may be called from any thread.
class CopyEngine {
  public:
    static constexpr size_t kThreadsMax = 256;
    static constexpr size_t kJobsMax = 65536;
    static constexpr size_t kChunksMax = size_t{1} << 20;

    // Throws std::invalid_argument or std::system_error. `jobs_max` bounds jobs not yet polled.
    explicit CopyEngine(size_t threads, size_t jobs_max = kJobsMax);
    ~CopyEngine();
    CopyEngine(const CopyEngine&) = delete;
    CopyEngine& operator=(const CopyEngine&) = delete;

    // Readable exactly while completions wait to be polled.
    int event_fd() const noexcept { return event_fd_; }
    // Jobs submitted whose completion was not polled yet.
    size_t pending() const;

    // Throws std::invalid_argument; nothing was started then.
    void submit(CopyRequest request);
    // Starts no further piece of the job; unknown and finished tickets are ignored.
    void cancel(uint64_t ticket);
    std::vector<CopyCompletion> poll();
    // Cancels what has not started, waits for what runs; completions can still be polled.
    void close();

    // For fault tests: the next `count` jobs submitted end as kFailed after their first piece.
    void inject_failures(size_t count) noexcept { failures_to_inject_ = count; }

  private:
    using JobRef = std::shared_ptr<CopyJob>;

    void work() noexcept;
    void drop_rest(const JobRef& job, CopyStatus status);
    void settle(CopyJob& job, uint64_t pieces);
    void publish(CopyJob& job);
    bool take_injected_failure() noexcept;

    const size_t thread_count_;
    const size_t jobs_max_;
    int event_fd_ = -1;
    std::atomic<size_t> failures_to_inject_{0};

    mutable std::mutex mutex_;  // guards the five below
    std::condition_variable wake_;
    std::deque<JobRef> queue_;                      // may have pieces left to take
    std::unordered_map<uint64_t, JobRef> pending_;  // not polled yet
    std::vector<CopyJob*> finished_;                // owned by pending_
    bool closing_ = false;

    std::mutex join_mutex_;
    std::vector<std::thread> threads_;
};

}  // namespace kvferry
