// The watchdog: what ends the process, and what must not.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "check.h"
#include "kvferry/watchdog.h"

using kvferry::Watchdog;
using namespace std::chrono_literals;

namespace {

constexpr int kCode = 6;

// Runs `body` in a child with a watchdog of `stall`; returns its wait status.
template <class Body>
int status_of(std::chrono::milliseconds stall, Body body) {
    const pid_t child = ::fork();
    CHECK(child >= 0);
    if (child == 0) {
        Watchdog watchdog({stall, kCode});
        body(watchdog);
        watchdog.close();
        ::_exit(0);
    }
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
    return status;
}

void test_a_loop_without_progress_is_ended() {
    const int status = status_of(200ms, [](Watchdog&) {
        for (;;) {
            ::pause();
        }
    });
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == kCode);
}

void test_a_loop_that_beats_is_not() {
    const int status = status_of(2000ms, [](Watchdog& watchdog) {
        for (int i = 0; i < 300; ++i) {
            watchdog.beat();
            std::this_thread::sleep_for(10ms);
        }
    });
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// Stopped for longer than the stall, again and again: it never ran long enough without a beat.
void test_a_stopped_process_is_not() {
    const pid_t child = ::fork();
    CHECK(child >= 0);
    if (child == 0) {
        Watchdog watchdog({1000ms, kCode});
        for (int i = 0; i < 2; ++i) {
            ::raise(SIGSTOP);
            watchdog.beat();
        }
        // The watching thread may be given the processor long after this one.
        for (int i = 0; i < 3000 && watchdog.gaps() == 0; ++i) {
            watchdog.beat();
            std::this_thread::sleep_for(10ms);
        }
        ::_exit(watchdog.gaps() > 0 ? 0 : 1);
    }
    int status = 0;
    for (int i = 0; i < 2; ++i) {
        CHECK(::waitpid(child, &status, WUNTRACED) == child);
        CHECK(WIFSTOPPED(status));
        std::this_thread::sleep_for(1500ms);
        CHECK(::kill(child, SIGCONT) == 0);
    }
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void test_the_dump_signal_comes_first() {
    const pid_t child = ::fork();
    CHECK(child >= 0);
    if (child == 0) {
        std::signal(SIGUSR2, [](int) { ::_exit(7); });
        Watchdog watchdog({100ms, kCode, SIGUSR2});
        for (;;) {
            ::pause();
        }
    }
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
}

void test_a_stderr_that_nobody_reads_does_not_keep_it() {
    const int status = status_of(100ms, [](Watchdog&) {
        int ends[2];
        CHECK(::pipe(ends) == 0);
        CHECK(::fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0);
        while (::write(ends[1], "full", 4) > 0) {
        }
        CHECK(::fcntl(ends[1], F_SETFL, 0) == 0);
        CHECK(::dup2(ends[1], 2) == 2);
        for (;;) {
            ::pause();
        }
    });
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == kCode);
}

void test_a_stall_too_short_to_tick_is_refused() {
    CHECK_THROWS(Watchdog({5ms, kCode}), std::invalid_argument);
}

}  // namespace

int main() {
    test_a_loop_without_progress_is_ended();
    test_a_loop_that_beats_is_not();
    test_a_stopped_process_is_not();
    test_the_dump_signal_comes_first();
    test_a_stderr_that_nobody_reads_does_not_keep_it();
    test_a_stall_too_short_to_tick_is_refused();
    return 0;
}
