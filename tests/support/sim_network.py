"""The hot channel of a simulation: frames that are lost, late, repeated, overtaken or garbled.

A frame carries (epoch, generation), and who receives it checks both: as wire/codec.py has it.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry_connector.wire.hot import (
    Answer,
    Ask,
    Cancel,
    Error,
    FromHalf,
    FromSidecar,
    Hint,
    JobState,
    JobStatus,
    NeedFull,
    Outcome,
    OutcomeAck,
    Probe,
    Release,
    Submit,
)

# Without Stored and Removed, which routers read: nothing rests on them.
KINDS = (
    Probe, Ask, Release, Submit, Cancel, JobStatus, OutcomeAck,
    Hint, Answer, NeedFull, Outcome, JobState, Error,
)  # fmt: skip
FAULTS = ("lost", "late", "repeated", "garbled")
_RARE = (Cancel, JobStatus, JobState, NeedFull, Error, Release)
_LATE_S_MAX = 1.2

Message = FromHalf | FromSidecar
LinkKey = tuple[int, int]  # (epoch, generation)


@dataclass(frozen=True, slots=True)
class SimFrame:
    """One frame on its way."""

    up: bool
    key: LinkKey
    message: Message
    raw: tuple[bytes, ...]
    number: int
    garbled: bool


@dataclass(eq=False)
class SimNetwork:
    """Delivers frames when their time has come. ``faults`` counts by (kind, fault)."""

    rng: random.Random
    deliver_up: Callable[[SimFrame], None]
    deliver_down: Callable[[SimFrame], None]
    fair: bool = False  # no faults: used to end a run
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    posted: int = 0
    _queue: list[tuple[float, int, SimFrame]] = field(default_factory=list)
    _newest: dict[tuple[bool, LinkKey], int] = field(default_factory=dict)

    def post(
        self, now_s: float, up: bool, key: LinkKey, message: Message, raw: tuple[bytes, ...] = ()
    ) -> None:
        """Send a frame into whatever happens to it."""
        name = type(message).__name__
        fault = None if self.fair else self._draw(message)
        if fault is not None:
            self.faults[name, fault] += 1
        if fault == "lost":
            return
        for _ in range(2 if fault == "repeated" else 1):
            delay_s = self.rng.uniform(0, _LATE_S_MAX if fault == "late" else 0.002)
            self.posted += 1
            frame = SimFrame(up, key, message, raw, self.posted, fault == "garbled")
            heapq.heappush(self._queue, (now_s + delay_s, self.posted, frame))

    def deliver(self, now_s: float) -> None:
        """Hand over every frame whose time has come."""
        while self._queue and self._queue[0][0] <= now_s:
            frame = heapq.heappop(self._queue)[2]
            way = (frame.up, frame.key)
            newest = self._newest.get(way, 0)
            if frame.number < newest:
                self.faults[type(frame.message).__name__, "overtaken"] += 1
            self._newest[way] = max(newest, frame.number)
            (self.deliver_up if frame.up else self.deliver_down)(frame)

    def _draw(self, message: Message) -> str | None:
        each = 0.14 if isinstance(message, _RARE) else 0.03
        luck = self.rng.random()
        return FAULTS[int(luck / each)] if luck < each * len(FAULTS) else None
