"""Long work, and how far it is: in the log, the status document and the page.

Whoever works does nothing for it: progress is measured when somebody looks, by a function of the
work's own that any thread may call.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from structlog.typing import FilteringBoundLogger as Log

look_s = 1.0  # between two looks of the control loop
log_s = 10.0  # between two lines of the log
ended_max = 8  # pieces of work that are told after their end

Measure = Callable[[], tuple[int, int]]  # (done, total)


class WorkStatus(msgspec.Struct, frozen=True):
    """One piece of work. ``left_s``: at the pace so far; None: not known."""

    name: str
    unit: str
    done: int
    total: int
    seconds: float
    left_s: float | None


class Progress:
    """What is under way on this sidecar, and what ended last."""

    def __init__(self, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._works: dict[str, tuple[str, Measure, float]] = {}  # name -> unit, measure, began
        self._ended: deque[WorkStatus] = deque(maxlen=ended_max)
        self._told_s = 0.0

    def begin(self, name: str, unit: str, measure: Measure) -> None:
        """Work begins. One of each name at a time: the same again goes on."""
        self._works.setdefault(name, (unit, measure, self._clock()))

    def end(self, name: str) -> None:
        """It has ended, well or not; what is complete ends by itself (``tick``)."""
        if (work := self._works.pop(name, None)) is not None:
            self._tell_end(_status(name, *work, self._clock()))

    def took(self, name: str, unit: str, total: int, seconds: float) -> None:
        """Work that nobody could measure meanwhile has ended after so many seconds."""
        self._tell_end(WorkStatus(name, unit, total, total, round(seconds, 3), 0.0))

    @contextmanager
    def during(self, name: str, unit: str, measure: Measure) -> Iterator[None]:
        """Work lasts as long as this context."""
        self.begin(name, unit, measure)
        try:
            yield
        finally:
            self.end(name)

    def reading(self) -> list[WorkStatus]:
        """Return what is under way. Any thread may ask."""
        now_s = self._clock()
        return [_status(name, *work, now_s) for name, work in list(self._works.items())]

    def ended(self) -> list[WorkStatus]:
        """Return what ended last, oldest first. Any thread may ask."""
        return list(self._ended.copy())

    def tick(self, now_s: float) -> float:
        """End what is complete, tell the log now and then; returns seconds until wanted again."""
        if not self._works:
            self._told_s = now_s
            return math.inf
        told = now_s >= self._told_s + log_s
        self._told_s = now_s if told else self._told_s
        for work in self.reading():
            if work.done >= work.total:
                self.end(work.name)
            elif told:
                self._log.info("progress", **msgspec.to_builtins(work))
        return look_s

    def _tell_end(self, work: WorkStatus) -> None:
        self._ended.append(work)
        event = "done" if work.done >= work.total else "ended early"
        self._log.info(event, **msgspec.to_builtins(work))


def countdown(total: int, left: Callable[[], int]) -> Measure:
    """Return the measure of work that ends when nothing is left of ``total``, or of what came."""

    def measure() -> tuple[int, int]:
        now_left = left()
        return max(0, total - now_left), max(total, now_left)

    return measure


def _status(name: str, unit: str, measure: Measure, began_s: float, now_s: float) -> WorkStatus:
    done, total = measure()
    seconds = now_s - began_s
    left_s = round(seconds / done * max(0, total - done), 1) if done else None
    return WorkStatus(name, unit, done, total, round(seconds, 3), left_s)
