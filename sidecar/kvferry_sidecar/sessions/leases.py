"""Leases: pool entries that may not be evicted because an answer promised them.

A lease is owned by (life of the scheduler half, admission), from the load's submit on by that
job. It falls on every way out: release, idle time, a heartbeat that does not name it, the proven
death or the leaving of its half, and the end of its job. A job's lease falls only with the job.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.sessions.model import SessionKey

Entries = NDArray[np.uint32]


class LeaseKey(NamedTuple):
    """Who asked."""

    life: bytes
    admission: int


@dataclass(frozen=True, slots=True)
class LeasedGroup:
    """Entries (n,) of one group for the chunks (n,) of the lease, ascending.

    The last one's key ends at ``last_end`` tokens (0 without any), the others' with their chunk.
    """

    group: int
    chunks: NDArray[np.int64]
    last_end: int
    entries: Entries


@dataclass(slots=True, eq=False)
class Lease:
    """Entries for the tokens ``(local_tokens, total_tokens]``."""

    key: LeaseKey
    session: SessionKey
    generation: int
    version: bytes
    local_tokens: int
    total_tokens: int
    groups: tuple[LeasedGroup, ...]
    seq: int
    touched_s: float
    sources: dict[str, int]  # tokens by the tier that supplied them
    job: int | None = None
    spoiled: bool = False  # an entry of it was doomed before a job owned it

    def entry_count(self) -> int:
        """Leased entries over all groups."""
        return sum(len(group.entries) for group in self.groups)


class LeaseTable:
    """All leases, least recently confirmed first. ``release`` gives entries back to the pool."""

    def __init__(self, release: Callable[[Entries], None], idle_ms_max: int) -> None:
        self._release_entries = release
        self._idle_s_max = idle_ms_max / 1e3
        self._leases: OrderedDict[LeaseKey, Lease] = OrderedDict()
        self._entries: Counter[SessionKey] = Counter()
        self.idle_falls = 0
        self.beat_falls = 0

    def add(self, lease: Lease) -> None:
        """Register a lease whose entries the pool has just leased; at most one per owner."""
        assert lease.key not in self._leases, "an admission never holds two leases"
        self._leases[lease.key] = lease
        self._entries[lease.session] += lease.entry_count()

    def get(self, key: LeaseKey) -> Lease | None:
        """Return the lease of this owner."""
        return self._leases.get(key)

    def confirm(self, lease: Lease, seq: int, now_s: float) -> None:
        """An ask confirmed it."""
        lease.seq = max(lease.seq, seq)
        self._touch(lease, now_s)

    def drop(self, lease: Lease) -> None:
        """Give its entries back, exactly once."""
        if self._leases.pop(lease.key, None) is not lease:
            raise AssertionError(f"lease of admission {lease.key.admission} was dropped twice")
        self._entries[lease.session] -= lease.entry_count()
        if not self._entries[lease.session]:
            del self._entries[lease.session]
        for group in lease.groups:
            self._release_entries(group.entries)

    def drop_unowned(self, key: LeaseKey) -> None:
        """Give it back unless a job owns it."""
        lease = self._leases.get(key)
        if lease is not None and lease.job is None:
            self.drop(lease)

    def drop_generation(self, generation: int) -> None:
        """The scheduler half is gone: what no job owns falls."""
        self._drop_all([x for x in self._of(generation) if x.job is None])

    def reconcile(self, generation: int, as_of: int, live: Collection[int], now_s: float) -> None:
        """A heartbeat: leases asked up to ``as_of`` that are not in ``live`` fall.

        Those named are alive: their half still counts on them, so their idle time starts anew.
        """
        named = frozenset(live)
        fallen = []
        for lease in self._of(generation):
            if lease.key.admission in named:
                self._touch(lease, now_s)
            elif lease.job is None and lease.seq <= as_of:
                fallen.append(lease)
        self.beat_falls += len(fallen)
        self._drop_all(fallen)

    def drop_idle(self, now_s: float) -> None:
        """Leases that nothing confirmed for ``lease_idle_ms_max`` and no job owns fall."""
        fallen = []
        for lease in self._leases.values():
            if lease.touched_s + self._idle_s_max > now_s:
                break
            if lease.job is None:
                fallen.append(lease)
        self.idle_falls += len(fallen)
        self._drop_all(fallen)

    def due_s(self) -> float:
        """Return when the next lease may fall for not being confirmed; infinite without any."""
        oldest = next(iter(self._leases.values()), None)
        return math.inf if oldest is None else oldest.touched_s + self._idle_s_max

    def spoil(self, entries: Entries) -> None:
        """These entries were doomed: no job that comes later may read them under a lease."""
        for lease in self._leases.values():
            if lease.job is None and any(np.isin(g.entries, entries).any() for g in lease.groups):
                lease.spoiled = True

    def all(self) -> Iterable[Lease]:
        """All leases, least recently confirmed first. Read only."""
        return self._leases.values()

    def drop_stale(self, idle_s: float, now_s: float, *, count_only: bool = False) -> int:
        """Drop what no job owns and nothing confirmed for ``idle_s``; returns how many."""
        stale = [
            lease
            for lease in self._leases.values()
            if lease.job is None and lease.touched_s + idle_s <= now_s
        ]
        if not count_only:
            self._drop_all(stale)
        return len(stale)

    def entry_count(self, session: SessionKey | None = None) -> int:
        """Leased entries of one session, or of all."""
        return self._entries.total() if session is None else self._entries[session]

    def __len__(self) -> int:
        return len(self._leases)

    def _touch(self, lease: Lease, now_s: float) -> None:
        lease.touched_s = now_s
        self._leases.move_to_end(lease.key)

    def _of(self, generation: int) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.generation == generation]

    def _drop_all(self, leases: list[Lease]) -> None:
        for lease in leases:
            self.drop(lease)
