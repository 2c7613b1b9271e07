"""What became of the last requests: a ring with a short timeline per admission.

The control loop writes; other threads may read a record at any time. So a record only grows:
its events are appended, its other fields are set once per stage and never taken back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry_sidecar.outcomes.reasons import Reason

events_max = 48  # of one record; further ones are counted
prefixes_max = 512  # hottest prefixes that are told apart
RecordKey = tuple[bytes, int]  # (life of the scheduler half, admission)


class Event(NamedTuple):
    """One thing that happened at ``at_s`` (monotonic). ``seconds``: how long it took."""

    at_s: float
    what: str
    tokens: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    detail: str = ""


class Why(NamedTuple):
    """Why a lookup found no more, with the facts of this case."""

    reason: Reason
    detail: str = ""


_NOTHING = Why(Reason.NONE)


@dataclass(slots=True, eq=False)
class Record:
    """One admission of one request. Token counts are prefixes from token 0.

    ``wanted_tokens`` is the longest hit that was possible, ``offered_tokens`` what was leased.
    """

    engine: str
    request: str
    admission: int
    at_s: float
    prompt_tokens: int
    hint_tokens: int | None = None
    local_tokens: int | None = None
    wanted_tokens: int = 0
    offered_tokens: int = 0
    sources: Mapping[str, int] = field(default_factory=dict)
    why: Why = _NOTHING
    asks: int = 0
    load: str = ""  # "", "open", "done", "failed", "cancelled"
    load_reason: Reason = Reason.NONE
    loaded_tokens: int = 0
    saves: int = 0
    saved_objects: int = 0
    ended_s: float = 0.0  # the engine forgot it
    events: list[Event] = field(default_factory=list)
    events_lost: int = 0

    def note(self, event: Event) -> None:
        """Append one event, as long as there is room."""
        if len(self.events) < events_max:
            self.events.append(event)
        else:
            self.events_lost += 1


class Records:
    """The last ``records_max`` admissions of all engines, oldest first."""

    def __init__(self, records_max: int) -> None:
        self._records_max = records_max
        self._ring: OrderedDict[RecordKey, Record] = OrderedDict()
        self.dropped = 0

    def open(self, key: RecordKey, record: Record) -> Record:
        """Begin a record; the oldest one goes where the ring is full."""
        self._ring[key] = record
        self._ring.move_to_end(key)
        if len(self._ring) > self._records_max:
            self._ring.popitem(last=False)
            self.dropped += 1
        return record

    def get(self, key: RecordKey) -> Record | None:
        """Return one record while it is in the ring."""
        return self._ring.get(key)

    def all(self) -> tuple[Record, ...]:
        """Return the records, oldest first; only pointers are copied."""
        return tuple(self._ring.values())

    def __len__(self) -> int:
        return len(self._ring)


class Hot(NamedTuple):
    """One of the hottest prefixes: its first chunk's key, and what was loaded of it."""

    key: str
    engine: str
    hits: int
    hit_tokens: int
    longest_tokens: int
    last_use_s: float


class Prefixes:
    """Hits by the prompt's first chunk: bounded, the least used one gives way to a new one."""

    def __init__(self, prefixes_max: int = prefixes_max) -> None:
        self._prefixes_max = prefixes_max
        self._named: dict[bytes, Hot] = {}
        self.dropped = 0

    def hit(self, key: bytes, engine: str, tokens: int, total_tokens: int, now_s: float) -> None:
        """Count a hit of ``tokens`` that ends at ``total_tokens``."""
        known = self._named.get(key)
        if known is None:
            if len(self._named) >= self._prefixes_max:
                least = min(self._named, key=lambda one: self._named[one].hit_tokens)
                del self._named[least]
                self.dropped += 1
            known = Hot(key.hex(), engine, 0, 0, 0, now_s)
        self._named[key] = Hot(
            known.key,
            engine,
            known.hits + 1,
            known.hit_tokens + tokens,
            max(known.longest_tokens, total_tokens),
            now_s,
        )

    def hottest(self, count: int) -> list[Hot]:
        """Return those with the most tokens."""
        return sorted(self._named.values(), key=lambda one: -one.hit_tokens)[:count]


class Evicted:
    """When which key left the pool: bounded, the oldest is forgotten first."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._at_s: OrderedDict[bytes, float] = OrderedDict()

    def note(self, keys: bytes, now_s: float) -> None:
        """These 16-byte keys were evicted."""
        at_s = self._at_s
        for begin in range(0, len(keys), 16):
            key = keys[begin : begin + 16]
            at_s.pop(key, None)
            at_s[key] = now_s
        while len(at_s) > self._keys_max:
            at_s.popitem(last=False)

    def at_s(self, key: bytes) -> float | None:
        """Return when a key was evicted last, None where that is not known."""
        return self._at_s.get(key)

    def __len__(self) -> int:
        return len(self._at_s)
