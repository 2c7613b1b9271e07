// Ends the process when its control loop makes no progress.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace kvferry {

// A thread that needs no lock of anybody's (in Python: not the GIL) counts its own ticks since the
// last beat; when they add up to `stall`, it says so on stderr and ends the process by _exit, at
// the latest kWordsMax later: nobody may be reading what it says.
//
// Its own ticks, not the clock: a process that was stopped (SIGSTOP, a frozen cgroup, a debugger)
// or starved did not tick either. A gap between two ticks starts the count anew.
class Watchdog {
  public:
    struct Plan {
        std::chrono::milliseconds stall;
        int exit_code;
        int dump_signal = 0;  // raised before the end, for a handler that prints stacks; 0: none
    };

    static constexpr int kTicksPerStall = 20;
    static constexpr int kGapTicks = 4;  // a tick this many times as late is a gap
    static constexpr std::chrono::seconds kWordsMax{2};

    // Throws std::invalid_argument for a stall of less than kTicksPerStall milliseconds.
    explicit Watchdog(Plan plan);
    ~Watchdog();
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;

    void beat() noexcept { beats_.fetch_add(1, std::memory_order_relaxed); }
    uint64_t gaps() const noexcept { return gaps_.load(std::memory_order_relaxed); }

    // Stops the thread; nothing is watched afterwards.
    void close();

  private:
    void run(std::chrono::steady_clock::time_point last);
    [[noreturn]] void end() const;

    const Plan plan_;
    const std::chrono::nanoseconds tick_;
    std::atomic<uint64_t> beats_{0};
    std::atomic<uint64_t> gaps_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
    bool closing_ = false;
    std::thread thread_;
};

}  // namespace kvferry
