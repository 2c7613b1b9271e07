#include "kvferry/watchdog.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <future>
#include <stdexcept>
#include <system_error>

namespace kvferry {

namespace {

using Clock = std::chrono::steady_clock;

Watchdog::Plan checked(Watchdog::Plan plan) {
    if (plan.stall.count() < Watchdog::kTicksPerStall) {
        throw std::invalid_argument("a watchdog needs a stall of at least 20 ms");
    }
    return plan;
}

void say_last_words(const Watchdog::Plan& plan) {
    char text[160];
    const int length = std::snprintf(
        text, sizeof text,
        "kvferry: the control loop made no progress for %lld ms; ending with code %d\n",
        static_cast<long long>(plan.stall.count()), plan.exit_code);
    // Nothing can be done about a stderr that takes nothing.
    [[maybe_unused]] const ssize_t written = ::write(2, text, static_cast<size_t>(length));
    if (plan.dump_signal != 0) {
        std::raise(plan.dump_signal);
    }
}

}  // namespace

Watchdog::Watchdog(Plan plan)
    : plan_(checked(plan)), tick_(std::chrono::nanoseconds(plan.stall) / kTicksPerStall) {
    // From here on, not from the thread's first turn: a stop in between is a gap as well.
    thread_ = std::thread([this, start = Clock::now()] { run(start); });
}

Watchdog::~Watchdog() {
    close();
}

void Watchdog::close() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) {
        thread_.join();
    }
}

void Watchdog::run(std::chrono::steady_clock::time_point last) {
    uint64_t seen = beats_.load(std::memory_order_relaxed);
    int silent_ticks = 0;
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, tick_, [this] { return closing_; })) {
        const auto now = Clock::now();
        const bool gap = now - last > kGapTicks * tick_;
        last = now;
        const uint64_t beats = beats_.load(std::memory_order_relaxed);
        if (gap) {
            gaps_.fetch_add(1, std::memory_order_relaxed);
        }
        if (gap || beats != seen) {
            seen = beats;
            silent_ticks = 0;
        } else if (++silent_ticks >= kTicksPerStall) {
            end();
        }
    }
}

void Watchdog::end() const {
    // By another thread: where nobody reads stderr any more, both writes wait for ever.
    std::promise<void> said;
    std::future<void> words = said.get_future();
    try {
        std::thread([this, &said] {
            say_last_words(plan_);
            said.set_value();
        }).detach();
        words.wait_for(kWordsMax);
    } catch (const std::system_error&) {
        // No thread is to be had: it ends without a word, but it ends.
    }
    ::_exit(plan_.exit_code);
}

}  // namespace kvferry
