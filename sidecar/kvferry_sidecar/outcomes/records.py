"""What became of the last requests: one record per admission, in a ring.

The control loop writes, several times per request, so a record is plain fields: its timeline is
made when somebody asks. Other threads may read it at any time: every field is set once per stage
and never taken back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from kvferry_sidecar.outcomes.reasons import Reason

jobs_max = 32  # of one record; further ones are counted
prefixes_max = 512  # hottest prefixes that are told apart
RecordKey = tuple[bytes, int]  # (life of the scheduler half, admission)


class Why(NamedTuple):
    """Why a lookup found no more, with the facts of this case."""

    reason: Reason
    detail: str = ""


class JobEnd(msgspec.Struct, frozen=True, gc=False):
    """One settled job. ``stages``: seconds of its slowest rank at its fence, queued, copied."""

    kind: str
    status: str
    reason: Reason
    end_tokens: int
    moved_bytes: int
    opened_s: float
    ended_s: float
    stages: tuple[float, float, float]


NO_WHY = Why(Reason.NONE)


class Record(msgspec.Struct, eq=False, gc=False):
    """One admission of one request. Token counts are prefixes from token 0, times monotonic.

    ``wanted_tokens`` is the longest hit that was possible, ``offered_tokens`` what was leased.
    ``trace`` is the engine's trace context; ``trace_id`` names the trace that was exported.
    """

    engine: tuple[str, str]
    request: str
    admission: int
    at_s: float
    prompt_tokens: int
    hint_tokens: int | None = None
    hint_s: float = 0.0
    held_s: float = 0.0  # an ask began to wait for slower tiers
    local_tokens: int | None = None
    wanted_tokens: int = 0
    offered_tokens: int = 0
    answer_s: float = 0.0
    sources: Mapping[str, int] | None = None
    why: Why = NO_WHY
    asks: int = 0
    load: str = ""  # "", "open", "done", "failed", "cancelled"
    load_s: float = 0.0
    load_reason: Reason = Reason.NONE
    loaded_tokens: int = 0
    saves: int = 0
    saved_objects: int = 0
    ended_s: float = 0.0  # the engine forgot it
    jobs: tuple[JobEnd, ...] = ()
    jobs_lost: int = 0
    trace: str = ""
    trace_id: str = ""  # written by the traces' thread

    def settled(self, job: JobEnd) -> None:
        """Append one job, as long as there is room."""
        if len(self.jobs) < jobs_max:
            self.jobs += (job,)
        else:
            self.jobs_lost += 1


class Records:
    """The last ``records_max`` admissions of all engines, oldest first."""

    def __init__(self, records_max: int) -> None:
        self._records_max = records_max
        self._ring: OrderedDict[RecordKey, Record] = OrderedDict()
        self.get = self._ring.get  # (key): one record while it is in the ring; asked per message
        self.dropped = 0

    def open(self, key: RecordKey, record: Record) -> Record:
        """Begin a record; the oldest one goes where the ring is full."""
        if key in self._ring:
            self._ring.move_to_end(key)
        self._ring[key] = record
        if len(self._ring) > self._records_max:
            self._ring.popitem(last=False)
            self.dropped += 1
        return record

    def admissions_of(self, life: bytes) -> list[int]:
        """Return the admissions of one scheduler half that are in the ring."""
        return [admission for owner, admission in self._ring if owner == life]

    def all(self) -> tuple[Record, ...]:
        """Return the records, oldest first; only pointers are copied."""
        return tuple(self._ring.values())

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


class Prefixes:
    """Hits by the prompt's first chunk: bounded, the least used one gives way to a new one."""

    def __init__(self, prefixes_max: int = prefixes_max) -> None:
        self._prefixes_max = prefixes_max
        self._named: dict[bytes, Hot] = {}
        self.dropped = 0

    def hit(
        self, key: bytes, engine: tuple[str, str], tokens: int, total_tokens: int, now_s: float
    ) -> None:
        """Count a hit of ``tokens`` that ends at ``total_tokens``."""
        hot = self._named.get(key)
        if hot is None:
            if len(self._named) >= self._prefixes_max:
                least = min(self._named, key=lambda one: self._named[one].hit_tokens)
                del self._named[least]
                self.dropped += 1
            hot = self._named[key] = Hot(key, engine)
        hot.hits += 1
        hot.hit_tokens += tokens
        hot.longest_tokens = max(hot.longest_tokens, total_tokens)
        hot.last_use_s = now_s

    def hottest(self, count: int) -> list[Hot]:
        """Return those with the most tokens, as they are now."""
        found = sorted(self._named.values(), key=lambda one: -one.hit_tokens)
        return [replace(one) for one in found[:count]]
