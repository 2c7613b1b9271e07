#include "kvferry/copy_engine.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "copy_job.h"
#include "signals_blocked.h"

namespace kvferry {
namespace {

[[noreturn]] void refuse(const std::string& why) {
    throw std::invalid_argument("copy refused: " + why);
}

void check_shape(const CopyRequest& request) {
    const size_t chunks = request.blocks.size();
    const bool scatter = request.direction == CopyDirection::kScatter;
    if (!scatter && request.direction != CopyDirection::kGather) {
        refuse("direction " + std::to_string(static_cast<int>(request.direction)) +
               " is neither GATHER (0) nor SCATTER (1)");
    }
    if (chunks > CopyEngine::kChunksMax) {
        refuse(std::to_string(chunks) + " chunks in one job; split it at " +
               std::to_string(CopyEngine::kChunksMax));
    }
    const auto check_length = [chunks](size_t length, const char* name) {
        if (length != chunks) {
            refuse(std::to_string(chunks) + " blocks but " + std::to_string(length) + " " + name);
        }
    };
    check_length(request.pool_offsets.size(), "pool offsets");
    if (!request.seeds.empty()) {
        check_length(request.seeds.size(), "seeds");
    }
    if (!request.expected.empty()) {
        check_length(request.expected.size(), "expected checksums");
        if (!request.crc || !scatter) {
            refuse("expected checksums are compared only by a SCATTER with crc=True");
        }
    }
}

void check_places(const CopyRequest& request) {
    const int64_t num_blocks = request.layout->num_blocks();
    for (size_t i = 0; i < request.blocks.size(); ++i) {
        // Block 0 is the engine's null block: many requests share it, none owns it.
        if (request.blocks[i] < 1 || request.blocks[i] >= num_blocks) {
            refuse("block " + std::to_string(request.blocks[i]) + " at index " + std::to_string(i) +
                   " is not in 1 .. " + std::to_string(num_blocks - 1));
        }
    }
    const auto address = reinterpret_cast<uint64_t>(request.pool);
    const uint64_t payload = request.layout->payload_bytes();
    const uint64_t reach = request.pool_bytes != 0 ? request.pool_bytes
                                                   : std::numeric_limits<uint64_t>::max() - address;
    if (address == 0) {
        refuse("the pool's address is 0");
    }
    for (size_t i = 0; i < request.pool_offsets.size(); ++i) {
        if (payload > reach || request.pool_offsets[i] > reach - payload) {
            refuse("pool offset " + std::to_string(request.pool_offsets[i]) + " at index " +
                   std::to_string(i) + " with a payload of " + std::to_string(payload) +
                   " bytes leaves the pool of " + std::to_string(reach) + " bytes");
        }
    }
}

void announce(int event_fd) noexcept {
    // Cannot fail: the counter is 0 or 1 (see publish and poll).
    [[maybe_unused]] const int result = eventfd_write(event_fd, 1);
}

}  // namespace

CopyEngine::CopyEngine(size_t threads, size_t jobs_max)
    : thread_count_(threads), jobs_max_(jobs_max) {
    if (threads < 1 || threads > kThreadsMax) {
        refuse(std::to_string(threads) + " threads; 1 to " + std::to_string(kThreadsMax) +
               " are possible");
    }
    if (jobs_max < 1 || jobs_max > kJobsMax) {
        refuse("jobs_max " + std::to_string(jobs_max) + "; 1 to " + std::to_string(kJobsMax) +
               " are possible");
    }
    // Publishing must not allocate: nobody could be told of its failure.
    finished_.reserve(jobs_max);
    event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_fd_ < 0) {
        throw std::system_error(errno, std::generic_category(), "cannot create an eventfd");
    }
    const SignalsBlocked inherited_by_threads;
    try {
        for (size_t i = 0; i < threads; ++i) {
            threads_.emplace_back([this] { work(); });
            pthread_setname_np(threads_.back().native_handle(), "kvferry-copy");
        }
    } catch (...) {
        close();
        ::close(event_fd_);
        throw;
    }
}

CopyEngine::~CopyEngine() {
    close();
    ::close(event_fd_);
}

size_t CopyEngine::pending() const {
    const std::lock_guard lock(mutex_);
    return pending_.size();
}

void CopyEngine::submit(CopyRequest request) {
    if (request.layout == nullptr) {
        refuse("it has no layout");
    }
    check_shape(request);
    check_places(request);
    const uint64_t ticket = request.ticket;
    const auto job =
        std::make_shared<CopyJob>(std::move(request), thread_count_, take_injected_failure());
    {
        const std::lock_guard lock(mutex_);
        if (closing_) {
            refuse("the engine is closed");
        }
        if (pending_.size() >= jobs_max_) {
            refuse(std::to_string(jobs_max_) + " jobs are pending; poll completions first");
        }
        if (!pending_.emplace(ticket, job).second) {
            refuse("ticket " + std::to_string(ticket) + " is still pending");
        }
        if (job->pieces > 0) {
            queue_.push_back(job);
        }
    }
    if (job->pieces == 0) {
        publish(*job);
    } else {
        wake_.notify_all();
    }
}

void CopyEngine::cancel(uint64_t ticket) {
    JobRef job;
    {
        const std::lock_guard lock(mutex_);
        const auto found = pending_.find(ticket);
        if (found == pending_.end()) {
            return;
        }
        job = found->second;
        std::erase(queue_, job);
    }
    drop_rest(job, CopyStatus::kCancelled);
}

std::vector<CopyCompletion> CopyEngine::poll() {
    std::vector<JobRef> jobs;
    std::vector<CopyCompletion> completions;
    {
        const std::lock_guard lock(mutex_);
        if (finished_.empty()) {
            return {};
        }
        jobs.reserve(finished_.size());
        completions.reserve(finished_.size());
        for (const CopyJob* job : finished_) {
            const auto found = pending_.find(job->request.ticket);
            jobs.push_back(std::move(found->second));
            pending_.erase(found);
        }
        finished_.clear();
        eventfd_t announced;
        [[maybe_unused]] const int result = eventfd_read(event_fd_, &announced);
    }
    for (const JobRef& job : jobs) {
        completions.push_back(job->completion());
    }
    return completions;
}

void CopyEngine::close() {
    std::deque<JobRef> unstarted;
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
        unstarted.swap(queue_);
    }
    wake_.notify_all();
    for (const JobRef& job : unstarted) {
        drop_rest(job, CopyStatus::kCancelled);
    }
    const std::lock_guard lock(join_mutex_);
    for (std::thread& thread : threads_) {
        thread.join();
    }
    threads_.clear();
}

void CopyEngine::work() noexcept {
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [this] { return closing_ || !queue_.empty(); });
        if (queue_.empty()) {
            return;
        }
        const JobRef job = queue_.front();
        lock.unlock();
        for (uint64_t piece; (piece = job->next_piece.fetch_add(1)) < job->pieces;) {
            job->run_piece(piece);
            if (job->fails) {
                drop_rest(job, CopyStatus::kFailed);
            }
            settle(*job, 1);
        }
        lock.lock();
        if (!queue_.empty() && queue_.front() == job) {
            queue_.pop_front();
        }
    }
}

// Claims the pieces nobody has taken. A checksum mismatch outranks every other end.
void CopyEngine::drop_rest(const JobRef& job, CopyStatus status) {
    const uint64_t taken = std::min(job->next_piece.exchange(job->pieces), job->pieces);
    const uint64_t dropped = job->pieces - taken;
    CopyStatus done = CopyStatus::kDone;
    if (dropped > 0 || status == CopyStatus::kFailed) {
        job->status.compare_exchange_strong(done, status);
    }
    if (dropped > 0) {
        settle(*job, dropped);
    }
}

// The caller that ends the last open piece publishes; the counter orders all threads' copies
// before it.
void CopyEngine::settle(CopyJob& job, uint64_t pieces) {
    if (job.open_pieces.fetch_sub(pieces) == pieces) {
        publish(job);
    }
}

// The descriptor is written and read under the lock, so that it is readable exactly while
// completions wait.
void CopyEngine::publish(CopyJob& job) {
    const std::lock_guard lock(mutex_);
    finished_.push_back(&job);
    if (finished_.size() == 1) {
        announce(event_fd_);
    }
}

bool CopyEngine::take_injected_failure() noexcept {
    size_t left = failures_to_inject_;
    while (left > 0 && !failures_to_inject_.compare_exchange_weak(left, left - 1)) {
    }
    return left > 0;
}

}  // namespace kvferry
