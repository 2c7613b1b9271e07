"""What became of the last requests: one record per admission, in a ring.

The control loop writes, several times per request, so a stage sets one field, and what follows from
several is worked out when somebody asks. Other threads may read a record at any time: what was set
is never taken back.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvferry_sidecar.outcomes.reasons import Reason

jobs_max = 32  # of one record; further ones are counted
RecordKey = tuple[bytes, int]  # (life of the scheduler half, admission)
# What an ask was answered: tokens the engine has itself (None: refused without a look), the longest
# hit that was possible, what was leased, whence, when.
Answered = tuple[int | None, int, int, Mapping[str, int], float]


class Why(NamedTuple):
    """Why a lookup found no more, with the facts of this case."""

    reason: Reason
    detail: str = ""


class JobEnd(msgspec.Struct, frozen=True, gc=False):
    """One settled job. ``stages``: seconds of its slowest rank at its fence, queued, copied.

    ``start_tokens`` is a load's; ``objects``: those that a save stored.
    """

    kind: str
    status: str
    reason: Reason
    end_tokens: int
    moved_bytes: int
    opened_s: float
    ended_s: float
    stages: tuple[float, float, float]
    start_tokens: int = 0
    objects: int = 0

    @property
    def loaded_tokens(self) -> int:
        """Tokens that it loaded."""
        return (
            self.end_tokens - self.start_tokens
            if (self.kind, self.status) == ("load", "done")
            else 0
        )


NO_WHY = Why(Reason.NONE)


class Record(msgspec.Struct, eq=False, gc=False):
    """One admission of one request. Token counts are prefixes from token 0, times monotonic.

    ``trace`` is the engine's trace context; ``trace_id`` names the trace that was exported.
    """

    engine: tuple[str, str]
    request: str
    key: RecordKey
    at_s: float
    prompt_tokens: int
    hint: tuple[int, float] | None = None  # its tokens, and when
    could_hit_tokens: int = 0  # as the hint of nothing went out
    held_s: float = 0.0  # an ask began to wait for slower tiers
    answered: Answered | None = None  # the last one
    asked_again: int = 0
    why: Why = NO_WHY
    prefix: bytes = b""  # key of its first chunk, where something hit
    load_s: float = 0.0  # the last one was opened
    ended_s: float = 0.0  # the engine forgot it
    jobs: tuple[JobEnd, ...] = ()
    jobs_lost: int = 0
    lost_objects: int = 0  # by those
    lost_tokens: int = 0
    trace: str = ""
    trace_id: str = ""  # written by the traces' thread

    @property
    def admission(self) -> int:
        """Its number, of the scheduler half's."""
        return self.key[1]

    @property
    def hint_tokens(self) -> int | None:
        """Tokens of the hint; None before it."""
        return None if self.hint is None else self.hint[0]

    @property
    def hint_s(self) -> float:
        """When the hint went out; 0 before it."""
        return 0.0 if self.hint is None else self.hint[1]

    @property
    def asks(self) -> int:
        """Asks that were answered."""
        return 0 if self.answered is None else 1 + self.asked_again

    @property
    def local_tokens(self) -> int | None:
        """Tokens that the engine had itself; None where it was not looked."""
        return None if self.answered is None else self.answered[0]

    @property
    def wanted_tokens(self) -> int:
        """The longest hit that was possible."""
        return self.could_hit_tokens if self.local_tokens is None else self._answer[1]

    @property
    def offered_tokens(self) -> int:
        """What was leased, or the engine's own."""
        return self._answer[2]

    @property
    def sources(self) -> Mapping[str, int]:
        """Tokens that were offered, by tier."""
        return self._answer[3]

    @property
    def answer_s(self) -> float:
        """When the last answer went out; 0 before it."""
        return self._answer[4]

    @property
    def load(self) -> str:
        """How the last load is: "" for none, "open", "done", "failed", "cancelled"."""
        if not self.load_s:
            return ""
        end = self._load_end()
        return "open" if end is None else end.status

    @property
    def load_reason(self) -> Reason:
        """Why the last load ended so."""
        end = self._load_end()
        return Reason.NONE if end is None else end.reason

    @property
    def loaded_tokens(self) -> int:
        """Tokens of all loads that were done."""
        return self.lost_tokens + sum(job.loaded_tokens for job in self.jobs)

    @property
    def saves(self) -> int:
        """Saves that ended, of the jobs that are kept."""
        return sum(job.kind == "save" for job in self.jobs)

    @property
    def saved_objects(self) -> int:
        """Objects of all saves that were done."""
        return self.lost_objects + sum(job.objects for job in self.jobs)

    def settled(self, job: JobEnd) -> None:
        """Append one job, as long as there is room; a load takes the last place then."""
        if len(self.jobs) < jobs_max:
            self.jobs += (job,)
            return
        lost = job
        if job.kind == "load":
            lost, self.jobs = self.jobs[-1], (*self.jobs[:-1], job)
        self.jobs_lost += 1
        self.lost_objects += lost.objects
        self.lost_tokens += lost.loaded_tokens

    @property
    def _answer(self) -> Answered:
        return self.answered or (None, 0, 0, {}, 0.0)

    def _load_end(self) -> JobEnd | None:
        ends = (job for job in reversed(self.jobs) if job.kind == "load")
        end = next(ends, None)
        return end if end is not None and end.opened_s >= self.load_s > 0 else None


class Records:
    """The last ``records_max`` admissions of all engines, oldest first."""

    def __init__(self, records_max: int) -> None:
        self._records_max = records_max
        self._ring: deque[Record] = deque()  # oldest first
        self._named: dict[RecordKey, Record] = {}  # the same ones
        self.get = self._named.get  # (key): one record while it is in the ring; asked per message
        self.dropped = 0

    def open(self, record: Record) -> None:
        """Begin a record; the oldest one goes where the ring is full."""
        ring, named, key = self._ring, self._named, record.key
        if key in named:
            ring.remove(named[key])  # its hashes came again, which is rare
        elif len(ring) >= self._records_max:
            del named[ring.popleft().key]
            self.dropped += 1
        ring.append(record)
        named[key] = record

    def admissions_of(self, life: bytes) -> list[int]:
        """Return the admissions of one scheduler half that are in the ring."""
        return [admission for owner, admission in self._named if owner == life]

    def all(self) -> tuple[Record, ...]:
        """Return the records, oldest first; only pointers are copied."""
        return tuple(self._ring)

    def __len__(self) -> int:
        return len(self._ring)


@dataclass(slots=True, eq=False)
class Hot:
    """One of the hottest prefixes: its first chunk's key, and what was offered of it."""

    key: bytes
    engine: tuple[str, str]
    hits: int = 0
    hit_tokens: int = 0
    longest_tokens: int = 0
    last_use_s: float = 0.0


def hottest(records: Iterable[Record], count: int) -> list[Hot]:
    """Return the prefixes that were offered most tokens of, by the prompts' first chunks."""
    found: dict[bytes, Hot] = {}
    for record in records:
        if not record.prefix:
            continue
        hot = found.setdefault(record.prefix, Hot(record.prefix, record.engine))
        hot.hits += 1
        hot.hit_tokens += record.offered_tokens - (record.local_tokens or 0)
        hot.longest_tokens = max(hot.longest_tokens, record.offered_tokens)
        hot.last_use_s = max(hot.last_use_s, record.answer_s)
    return heapq.nlargest(count, found.values(), key=lambda one: one.hit_tokens)
