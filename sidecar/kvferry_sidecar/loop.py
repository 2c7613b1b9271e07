"""The control loop: one thread that owns all mutable state of the sidecar.

Everything that can happen is a descriptor in one epoll set: the attach socket and its streams,
peers' pidfds, the ZeroMQ socket, the copy engine's eventfd, signals. After the events of a turn
the tickers run; the shortest time any of them asks for bounds the next wait.

Three things are unusual:

* The wait is ``select`` on the epoll descriptor: epoll's own timeout counts milliseconds, while a
  job that polls a fence word wants to be called again within 50 us. (The epoll descriptor is
  made first, so it is far below select's limit of 1024.)
* A ZeroMQ socket's descriptor only says "look at my state"; the state must be read before every
  wait, whatever was done with the socket in between. Such sources register a ``pending`` check.
* Tickers end what nobody confirmed in time, so they are given a time at which all that had come was
  read: that before the turn's events. After the process stood still (SIGSTOP), what waits is read
  first, for ``catch_up_s``: ZeroMQ's own thread has stood still too.
"""

from __future__ import annotations

import faulthandler
import math
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Self

from kvferry_native import Watchdog

from kvferry_sidecar.errors import ExitCode
from kvferry_sidecar.outcomes.histogram import SECONDS, Histogram, HistogramReading

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
HANG_UP = select.EPOLLHUP
BROKEN = select.EPOLLERR

events_per_turn_max = 256  # further ready descriptors wait for the next turn: none starves
wait_s_max = 5.0
late_s_max = 1.0  # a wait that took longer than it should by this: the process stood still
catch_up_s = 0.1
_CATCH_UP_WAIT_S = 0.005

Handler = Callable[[int, float], None]  # (event bits, now_s)
Ticker = Callable[[float], float]  # now_s -> seconds until the next wanted call, math.inf: none


@dataclass(frozen=True, slots=True)
class LoopStats:
    """Progress of the loop, for liveness and status."""

    turns: int
    longest_turn_s: float
    last_turn_at_s: float
    handler_errors: int
    turn_seconds: HistogramReading


class Timed:
    """A handler and how long it takes."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._seconds = Histogram(SECONDS)
        self._begin, self._end = self._seconds.begin, self._seconds.end

    def __call__(self, events: int, now_s: float) -> None:
        """Handle, and count the seconds."""
        self._begin()
        self._handler(events, now_s)
        self._end()

    def reading(self) -> HistogramReading:
        """Return the seconds of all calls so far."""
        return self._seconds.reading()


class Loop:
    """One thread, one epoll set. ``on_error`` is told of every exception that left a handler.

    An idle loop turns every ``idle_s_max``, so that liveness and the watchdog can count turns.
    """

    def __init__(
        self,
        on_error: Callable[[BaseException, str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        idle_s_max: float = wait_s_max,
    ) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._new: set[int] = set()  # watched since the events at hand were read
        self._tickers: list[tuple[str, Ticker]] = []
        self._pending: list[tuple[Callable[[], bool], Handler]] = []
        self._clock = clock
        self._idle_s_max = idle_s_max
        self._watchdog: Watchdog | None = None
        self._on_error = on_error
        self._exit_code: int | None = None
        self._turns = 0
        self._longest_turn_s = 0.0
        self._last_turn_at_s = self._ticked_at_s = clock()
        self._handler_errors = 0
        self._turn_seconds = Histogram(SECONDS[3:])
        self._observe_turn = self._turn_seconds.observe

    @property
    def last_turn_at_s(self) -> float:
        """End of the last turn (monotonic). Any thread may read it."""
        return self._last_turn_at_s

    def now_s(self) -> float:
        """Return the loop's clock, seconds (monotonic)."""
        return self._clock()

    def watch(self, fd: int, events: int, handler: Handler) -> None:
        """Call ``handler`` while ``fd`` has any of ``events`` (level triggered)."""
        self._epoll.register(fd, events)
        self._handlers[fd] = handler
        self._new.add(fd)

    def rearm(self, fd: int, events: int) -> None:
        """Change what is waited for on a watched descriptor."""
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Stop watching; must be called before the descriptor is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def watch_pending(self, fd: int, handler: Handler, pending: Callable[[], bool]) -> None:
        """Watch a source whose descriptor does not tell its whole state (ZeroMQ).

        ``pending`` is asked before every wait; while it holds, the loop does not wait and calls
        ``handler`` once a turn.
        """
        self._epoll.register(fd, READ)
        # The descriptor only ends the wait: the handler is called once a turn, from ``_take``.
        self._handlers[fd] = lambda _events, _now_s: None
        self._pending.append((pending, handler))

    def add_ticker(self, name: str, ticker: Ticker) -> None:
        """Call ``ticker`` at the end of every turn; it says when it must be called again."""
        self._tickers.append((name, ticker))

    def stop(self, exit_code: int) -> None:
        """End ``run`` after this turn; the first call's code counts."""
        if self._exit_code is None:
            self._exit_code = exit_code

    def run(self) -> int:
        """Turn until ``stop``; returns its exit code."""
        wait_s, self._ticked_at_s = 0.0, self._clock()
        while self._exit_code is None:
            wait_s = self.turn(wait_s)
        return self._exit_code

    def turn(self, wait_s: float) -> float:
        """Wait at most ``wait_s``, handle what came, tick; returns how long the next may wait."""
        if any(pending() for pending, _ in self._pending):
            wait_s = 0.0
        if wait_s > 0.0:
            select.select([self._epoll], [], [], wait_s)
        started_s = now_s = self._clock()
        self._take(now_s)
        if started_s - self._ticked_at_s > wait_s + late_s_max:
            now_s = self._catch_up(started_s + catch_up_s)
        self._ticked_at_s, next_s = now_s, math.inf
        for name, ticker in self._tickers:
            next_s = min(next_s, self._ticked(name, ticker, now_s))
        ended_s = self._clock()
        next_s = min(self._idle_s_max, next_s - (ended_s - now_s))
        self._turns += 1
        self._longest_turn_s = max(self._longest_turn_s, ended_s - started_s)
        self._observe_turn(ended_s - started_s)
        self._last_turn_at_s = ended_s
        if self._watchdog is not None:
            self._watchdog.beat()
        return max(next_s, 0.0)

    def stats(self) -> LoopStats:
        """Return the progress so far."""
        return LoopStats(
            self._turns,
            self._longest_turn_s,
            self._last_turn_at_s,
            self._handler_errors,
            self._turn_seconds.reading(),
        )

    def watch_progress(self, stall_ms: int) -> None:
        """From here on the loop must turn, and the process end after it, within ``stall_ms``.

        Else a native thread ends the process with ExitCode.STALLED and the stacks of all threads.
        """
        # The watchdog's last words; sent by hand, the signal prints where a sidecar is.
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        self._watchdog = Watchdog(stall_ms, ExitCode.STALLED, signal.SIGUSR2)

    def end_watch(self) -> None:
        """Nothing is watched any more."""
        if self._watchdog is not None:
            self._watchdog.close()

    def close(self) -> None:
        """Close the epoll set; watched descriptors stay their owners'."""
        self._epoll.close()

    def _take(self, now_s: float) -> None:
        """Handle what has come."""
        self._new.clear()
        for fd, events in self._epoll.poll(0, events_per_turn_max):
            handler = self._handlers.get(fd)
            # An earlier handler of this turn may have closed it, and the number may be another's by
            # now: a pidfd that got it would read as a proven death.
            if handler is not None and fd not in self._new:
                self._guarded(f"descriptor {fd}", handler, events, now_s)
        for pending, handler in self._pending:
            if pending():
                self._guarded("pending", handler, READ, now_s)

    def _catch_up(self, end_s: float) -> float:
        """Handle what comes until ``end_s``; returns a time before which all of it had come."""
        while True:
            select.select([self._epoll], [], [], _CATCH_UP_WAIT_S)
            now_s = self._clock()
            self._take(now_s)
            if now_s >= end_s:
                return now_s

    def _guarded(self, what: str, handler: Handler, events: int, now_s: float) -> None:
        try:
            handler(events, now_s)
        except Exception as error:  # noqa: BLE001 - one bug must not end every engine's cache
            self._handler_errors += 1
            self._on_error(error, what)

    def _ticked(self, name: str, ticker: Ticker, now_s: float) -> float:
        try:
            return ticker(now_s)
        except Exception as error:  # noqa: BLE001 - as above
            self._handler_errors += 1
            self._on_error(error, f"ticker {name}")
            return math.inf  # a ticker that always fails must not make the loop spin


class Signals:
    """SIGTERM, SIGINT and SIGHUP as loop events; a context manager of the main thread.

    Python runs signal handlers between bytecodes, where state may be half changed. So the handler
    does nothing, and the signal's number arrives through the wake-up descriptor. An ignored SIGHUP
    stays ignored (nohup).
    """

    def __init__(self, loop: Loop, on_signal: Callable[[int, float], None]) -> None:
        self._loop = loop
        self._on_signal = on_signal
        self._read_fd = -1
        self._write_fd = -1
        self._former: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._former[number] = signal.signal(number, _ignore)
        self._loop.watch(self._read_fd, READ, self._on_readable)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.unwatch(self._read_fd)
        for number, former in self._former.items():
            signal.signal(number, former)  # type: ignore[arg-type]  # what signal() returned
        signal.set_wakeup_fd(-1)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _on_readable(self, _events: int, now_s: float) -> None:
        for number in os.read(self._read_fd, 64):
            self._on_signal(number, now_s)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """See Signals."""
