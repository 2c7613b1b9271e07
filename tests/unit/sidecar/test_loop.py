"""The control loop: wake-ups, timers below a millisecond, faults that stay where they are."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time

import pytest
import zmq
from kvferry_sidecar.errors import ExitCode
from kvferry_sidecar.loop import READ, Loop, Signals, wait_s_max
from support.waiting import wait_until


def raise_it(error: BaseException, what: str) -> None:
    raise error


def test_a_ready_descriptor_calls_its_handler_until_unwatched() -> None:
    loop = Loop(raise_it)
    read_fd, write_fd = os.pipe()
    seen: list[bytes] = []
    loop.watch(read_fd, READ, lambda events, now_s: seen.append(os.read(read_fd, 1)))
    loop.turn(0.0)
    assert seen == []
    os.write(write_fd, b"ab")
    loop.turn(5.0)
    loop.turn(5.0)
    assert seen == [b"a", b"b"]
    loop.unwatch(read_fd)
    os.write(write_fd, b"c")
    loop.turn(0.0)
    assert len(seen) == 2
    for fd in (read_fd, write_fd):
        os.close(fd)
    loop.close()


def test_a_handler_closed_by_another_of_the_same_turn_is_not_called() -> None:
    loop = Loop(raise_it)
    pipes = [os.pipe(), os.pipe()]
    called: list[int] = []

    def handler(mine: int, other: int) -> None:
        called.append(mine)
        os.read(mine, 1)
        loop.unwatch(other)

    (one, to_one), (two, to_two) = pipes
    loop.watch(one, READ, lambda events, now_s: handler(one, two))
    loop.watch(two, READ, lambda events, now_s: handler(two, one))
    os.write(to_one, b"x")
    os.write(to_two, b"x")
    loop.turn(1.0)
    loop.turn(0.0)
    assert len(called) == 1
    for pair in pipes:
        for fd in pair:
            os.close(fd)
    loop.close()


def test_an_event_of_a_closed_descriptor_is_none_of_who_got_its_number() -> None:
    loop = Loop(raise_it)
    (one, to_one), (two, to_two), (quiet, to_quiet) = os.pipe(), os.pipe(), os.pipe()
    called: list[str] = []

    def close_two(events: int, now_s: float) -> None:
        os.read(one, 1)
        loop.unwatch(two)
        os.dup2(quiet, two)  # as the kernel does it: the lowest free number
        loop.watch(two, READ, lambda events, now_s: called.append("quiet"))

    loop.watch(one, READ, close_two)
    loop.watch(two, READ, lambda events, now_s: called.append("two"))
    os.write(to_one, b"x")  # ready first, so handled first
    os.write(to_two, b"x")
    loop.turn(1.0)
    loop.turn(0.0)
    assert called == []
    os.write(to_quiet, b"x")
    loop.turn(1.0)
    assert called == ["quiet"]
    for fd in (one, to_one, two, to_two, quiet, to_quiet):
        os.close(fd)
    loop.close()


def test_tickers_bound_the_wait_and_may_ask_for_less_than_a_millisecond() -> None:
    loop = Loop(raise_it)
    assert loop.turn(0.0) == wait_s_max
    loop.add_ticker("never", lambda now_s: math.inf)
    loop.add_ticker("late", lambda now_s: -1.0)
    assert loop.turn(0.0) == 0.0

    def turn_s() -> float:
        started_s = time.perf_counter()
        loop.turn(0.0002)
        return time.perf_counter() - started_s

    # One of them: other work delays many. epoll would round every one up to 1 ms.
    wait_until(lambda: 0.0002 <= turn_s() < 0.001, "a turn of less than a millisecond")
    loop.close()


def test_an_idle_loop_sleeps() -> None:
    loop = Loop(raise_it)
    ends_s = time.monotonic() + 0.3

    def stop_later(now_s: float) -> float:
        if now_s >= ends_s:
            loop.stop(3)
        return ends_s - now_s

    loop.add_ticker("stop", stop_later)
    cpu_s = time.thread_time()
    assert loop.run() == 3
    assert time.thread_time() - cpu_s < 0.1
    assert loop.stats().turns < 20
    loop.close()


def test_a_failing_handler_is_reported_and_the_loop_goes_on() -> None:
    errors: list[tuple[str, str]] = []
    loop = Loop(lambda error, what: errors.append((str(error), what)))
    read_fd, write_fd = os.pipe()

    def handler(events: int, now_s: float) -> None:
        os.read(read_fd, 1)
        raise ValueError("handler")

    def ticker(now_s: float) -> float:
        raise ValueError("ticker")

    loop.watch(read_fd, READ, handler)
    loop.add_ticker("bad", ticker)
    os.write(write_fd, b"x")
    assert loop.turn(1.0) == wait_s_max, "a failing ticker must not make the loop spin"
    assert errors == [("handler", f"descriptor {read_fd}"), ("ticker", "ticker bad")]
    stats = loop.stats()
    assert (stats.turns, stats.handler_errors) == (1, 2)
    assert stats.longest_turn_s > 0.0
    for fd in (read_fd, write_fd):
        os.close(fd)
    loop.close()


def test_zmq_messages_are_not_missed_whatever_was_done_with_the_socket() -> None:
    loop = Loop(raise_it)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client.connect(f"tcp://127.0.0.1:{port}")
    got: list[bytes] = []

    def handler(events: int, now_s: float) -> None:
        identity, body = server.recv_multipart(zmq.NOBLOCK)  # one a turn, although more wait
        got.append(body)
        # A send takes in the descriptor's edge; what it announced must still be seen.
        server.send_multipart([identity, body], zmq.NOBLOCK)

    def pending() -> bool:
        return bool(int(server.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    loop.watch_pending(int(server.getsockopt(zmq.FD)), handler, pending)
    for number in range(200):
        client.send(b"%d" % number)
    end = time.monotonic() + 90
    wait_s = 0.0
    while len(got) < 200:
        assert time.monotonic() < end
        wait_s = loop.turn(wait_s)
    assert got == [b"%d" % number for number in range(200)]
    for socket in (server, client):
        socket.close(linger=0)
    context.term()
    loop.close()


class _StoppedClock:
    """The monotonic clock of a process that was stopped for so long."""

    stopped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.stopped_s


def test_stopped_in_the_middle_of_a_turn_it_ends_nothing_before_it_read_what_came() -> None:
    clock = _StoppedClock()
    loop = Loop(raise_it, clock)
    (one, to_one), (two, to_two) = os.pipe(), os.pipe()
    deadline_s = clock() + 30.0
    happened: list[str] = []

    def stopped(events: int, now_s: float) -> None:
        os.read(one, 1)
        clock.stopped_s = 60.0
        os.write(to_two, b"beat")

    def beat(events: int, now_s: float) -> None:
        happened.append(os.read(two, 4).decode())

    def sweep(now_s: float) -> float:
        happened.extend(["swept"] * (now_s >= deadline_s))
        return deadline_s - now_s

    loop.watch(one, READ, stopped)
    loop.watch(two, READ, beat)
    loop.add_ticker("sweep", sweep)
    os.write(to_one, b"x")
    wait_s = loop.turn(1.0)
    assert happened == []
    assert wait_s == 0.0
    loop.turn(wait_s)
    assert happened == ["beat", "swept"]
    for fd in (one, to_one, two, to_two):
        os.close(fd)
    loop.close()


def test_stopped_while_it_waits_it_reads_what_comes_a_little_later_too() -> None:
    """ZeroMQ's own thread has stood still as well: what its socket has is not there at once."""
    clock = _StoppedClock()
    loop = Loop(raise_it, clock)
    read_fd, write_fd = os.pipe()
    deadline_s = clock() + 30.0
    asked, happened = [0], []

    def pending() -> bool:
        asked[0] += clock.stopped_s > 0.0
        return asked[0] == 3

    loop.watch_pending(read_fd, lambda events, now_s: happened.append("frame"), pending)
    loop.add_ticker(
        "sweep", lambda now_s: math.inf if now_s < deadline_s else happened.append("swept") or 9.0
    )
    loop.turn(0.0)
    clock.stopped_s = 60.0
    loop.turn(0.0)
    assert happened == ["frame", "swept"]
    os.close(read_fd)
    os.close(write_fd)
    loop.close()


class _CountedBeats:
    """In the watchdog's place: says when it is told of progress."""

    def __init__(self, happened: list[str]) -> None:
        self._happened = happened

    def __call__(self, stall_ms: int, exit_code: int, dump_signal: int) -> _CountedBeats:
        return self

    def beat(self) -> None:
        self._happened.append("beat")

    def close(self) -> None:
        pass


def test_each_turn_is_told_to_the_watchdog_once_and_only_when_all_of_it_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []
    monkeypatch.setattr("kvferry_sidecar.loop.Watchdog", _CountedBeats(happened))
    clock = _StoppedClock()
    loop = Loop(raise_it, clock)
    read_fd, write_fd = os.pipe()
    loop.watch(read_fd, READ, lambda events, now_s: happened.append(os.read(read_fd, 1).decode()))
    loop.add_ticker("tick", lambda now_s: happened.append("tick") or 0.0)
    loop.turn(0.0)
    assert happened == ["tick"], "nobody watches yet"
    loop.watch_progress(20)
    for byte in b"ab":
        os.write(write_fd, bytes([byte]))
        loop.turn(0.0)
    clock.stopped_s = 60.0  # reading what came after a stop is a part of the turn
    loop.turn(0.0)
    assert happened[1:] == ["a", "tick", "beat", "b", "tick", "beat", "tick", "beat"]
    loop.end_watch()
    os.close(read_fd)
    os.close(write_fd)
    loop.close()


STUCK = """
import select, sys
from kvferry_sidecar.loop import Loop
def fail(error, what): raise error
def hang(*_):
    while True:
        if sys.argv[1] == "sleeping":
            select.select([], [], [], 1.0)
loop = Loop(fail)
loop.add_ticker("tick", lambda now_s: 0.0 if loop.stats().turns < 3 else hang())
loop.watch_progress(200)
loop.run()
"""


@pytest.mark.parametrize("how", ["sleeping", "spinning"])
def test_a_turn_that_never_ends_ends_the_process(how: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUCK, how], capture_output=True, text=True, timeout=90, check=False
    )
    assert ended.returncode == ExitCode.STALLED
    assert "no progress for 200 ms" in ended.stderr
    assert "in hang" in ended.stderr, "the stack says where"


SIGNALLED = """
import sys, time
from kvferry_sidecar.loop import Loop, Signals
def fail(error, what): raise error
loop = Loop(fail)
def on_signal(number, now_s):
    print("signal", number, flush=True)
    loop.stop(40 + number)
with Signals(loop, on_signal):
    print("up", flush=True)
    code = loop.run()
loop.close()
sys.exit(code)
"""


def test_signals_arrive_as_events_of_an_idle_loop() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        child = subprocess.Popen(
            [sys.executable, "-c", SIGNALLED], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.send_signal(number)
        assert child.wait(90) == 40 + number
        assert child.stdout.read() == f"signal {number.value}\n"
        child.stdout.close()


def test_signal_handling_is_put_back() -> None:
    loop = Loop(raise_it)
    before = signal.getsignal(signal.SIGTERM)
    with Signals(loop, lambda number, now_s: None):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    loop.close()


def test_an_ignored_hang_up_stays_ignored() -> None:
    loop = Loop(raise_it)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(loop, lambda number, now_s: None):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    loop.close()
