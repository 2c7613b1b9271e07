"""The host tier: committed chunk stripes in the shared-memory pool.

Thin and typed: the native Pool holds index, slots and states; this class gives the sidecar the
few words it needs and turns the reserve codes into names.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from kvferry_native import Pool, PoolFull, PoolStats
from numpy.typing import NDArray

from kvferry_sidecar.outcomes.histogram import HistogramReading
from kvferry_sidecar.tiers.store import memory_at

Keys = NDArray[np.uint8]  # (n, 16)
Entries = NDArray[np.uint32]  # (n,)

_STORED = -1
_BEING_WRITTEN = -2
_FULL = -3
_UNIT_BYTES, _TRAILER_BYTES = 512, 132  # of slots: pool_format.h
_FEW = 32  # numbers that Python compares in less time than NumPy needs to begin


class Absence(enum.IntEnum):
    """What is known of a key that is not ready and was not evicted."""

    BEING_WRITTEN = -2
    UNKNOWN = -1


# To name a member of an enum costs Python 3.11 more than a call.
_WRITTEN, _UNKNOWN = Absence.BEING_WRITTEN, Absence.UNKNOWN


class Owner(NamedTuple):
    """Whose objects they will be: a namespace (16 bytes) and how many bytes it may have; 0: any."""

    namespace: bytes
    quota_bytes: int = 0


NOBODY = Owner(b"")


class Pin(enum.IntEnum):
    """How an object is kept: ``SOFT`` goes when nothing else can, ``HARD`` never."""

    NONE = 0
    SOFT = 1
    HARD = 2


class Holding(NamedTuple):
    """An owner that has objects; ``number`` as in a Scan, the namespace of nobody is b""."""

    number: int
    namespace: bytes
    objects: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Scan:
    """Ready objects among some places of the pool; all arrays (n,), ``keys`` (n, 16).

    ``next``: the place to go on with, -1 at the end. ``bytes``: of the slots.
    """

    next: int
    entries: Entries
    keys: Keys
    owners: NDArray[np.uint32]
    groups: NDArray[np.uint32]
    ages_s: NDArray[np.uint32]
    bytes: NDArray[np.uint64]
    pins: NDArray[np.uint8]


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """What became of n keys: ``index`` (m,) of those reserved, with their ``entries`` (m,)."""

    index: NDArray[np.int64]
    entries: Entries
    stored: int
    being_written: int
    full: int


class HostTier:
    """One pool. Not thread safe: the control loop owns it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.slab_bytes = pool.slab_bytes
        self.address = pool.address

    def prefix(self, keys: Keys) -> int:
        """Number of leading keys that are ready."""
        return self._pool.prefix(keys)

    def present(self, keys: Keys) -> NDArray[np.bool_]:
        """Which keys are ready."""
        return self._pool.present(keys)

    def run(self, keys: Keys) -> tuple[int, Absence | float]:
        """Number of leading keys that are ready, and why the next one is not.

        The seconds since it was evicted, or another cause; unknown where there is no next one.
        """
        count, told = self._pool.run(keys)
        if told >= 0:
            return count, told
        return count, _WRITTEN if told == _BEING_WRITTEN else _UNKNOWN

    def unheard_of(self, keys: Keys) -> bool:
        """Whether not even the first key is here, and nothing is known of it."""
        return self._pool.unheard_of(keys)

    def refresh(self, keys: Keys) -> None:
        """Mark the leading ready keys recently used, the head of the prefix last."""
        self._pool.refresh(keys)

    def lease(self, keys: Keys, *, use: bool = True) -> Entries:
        """Lease the leading ready keys; no longer than ``keys``.

        Without ``use`` they are only kept from eviction, which is no sign of reuse.
        """
        return self._pool.lease(keys) if use else self._pool.lease(keys, use=False)

    def release(self, entries: Entries) -> None:
        """Undo one lease of each."""
        self._pool.release(entries)

    def reserve(
        self,
        keys: Keys,
        payload_bytes: int,
        shards: int,
        owner: Owner = NOBODY,
        group: int = 0,
    ) -> Reservation:
        """Take a slot for every key that is not there yet.

        ``payload_bytes`` is the whole stripe. ValueError when it exceeds a slab. A size that the
        pool has no class left for (64 others hold objects) is a full pool, and so is a quota that
        leaves nothing of the owner's own to evict.
        """
        try:
            codes = self._pool.reserve(
                keys, payload_bytes, shards, owner.namespace, owner.quota_bytes, group
            )
        except PoolFull:
            codes = np.full(len(keys), _FULL, np.int64)
        if len(codes) <= _FEW and min(codes.tolist(), default=0) >= 0:
            return Reservation(np.arange(len(codes)), codes.astype(np.uint32), 0, 0, 0)
        index = np.flatnonzero(codes >= 0)
        return Reservation(
            index=index,
            entries=codes[index].astype(np.uint32),
            stored=int(np.count_nonzero(codes == _STORED)),
            being_written=int(np.count_nonzero(codes == _BEING_WRITTEN)),
            full=int(np.count_nonzero(codes == _FULL)),
        )

    def payload_offsets(self, entries: Entries) -> NDArray[np.uint64]:
        """Bytes from the pool's start to each payload."""
        return self._pool.payload_offsets(entries)

    @staticmethod
    def room_bytes(payload_bytes: int) -> int:
        """Return how many bytes behind such a payload are its slot's, and mean nothing."""
        return -(payload_bytes + _TRAILER_BYTES) % _UNIT_BYTES

    def payload(self, entries: Entries, count: int) -> NDArray[np.uint8]:
        """The first entry's ``count`` payload bytes, in place: valid while it is held."""
        at = self.address + int(self.payload_offsets(entries)[0])
        return np.frombuffer(memory_at(at, count), np.uint8)

    def seeds(self, entries: Entries) -> NDArray[np.uint32]:
        """CRC seed of each entry, from its key."""
        return self._pool.seeds(entries)

    def crcs(self, entries: Entries, shard: int) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """Stored CRC32C of one shard of each entry, and whether one is stored."""
        return self._pool.crcs(entries, shard)

    def set_crcs(self, entries: Entries, shard: int, crcs: NDArray[np.uint32]) -> None:
        """Store the CRC32C of one shard of each reserved entry."""
        self._pool.set_crcs(entries, shard, crcs)

    def commit(self, entries: Entries) -> None:
        """Make reserved entries visible, in prefix order."""
        self._pool.commit(entries)

    def abort(self, entries: Entries) -> None:
        """Give reserved slots back; nothing of them was ever visible."""
        self._pool.abort(entries)

    def doom(self, entries: Entries) -> None:
        """Make entries invisible at once; freed with their last lease."""
        self._pool.doom(entries)

    def clear(self) -> int:
        """Drop what is neither leased, being written nor pinned hard; returns how many."""
        return self._pool.clear()

    def evict_to(self, used_bytes: int, most: int) -> int:
        """Evict the coldest until ``used_bytes`` are used, at most ``most`` objects; how many.

        What is leased, being written or pinned stays.
        """
        return self._pool.evict_to(used_bytes, most)

    def pin(self, entries: Entries, pin: Pin) -> None:
        """Keep ready objects as ``pin`` says, also over restarts; others stay as they are."""
        self._pool.pin(entries, int(pin))

    def find(self, keys: Keys) -> Entries:
        """Return the entries of those keys that are ready, valid until the loop's turn ends."""
        rows = [self._pool.lease(keys[at : at + 1], use=False) for at in range(len(keys))]
        entries: Entries = np.concatenate([*rows, np.empty(0, np.uint32)])
        self._pool.release(entries)
        return entries

    def scan(self, first: int, count: int) -> Scan:
        """Look at ``count`` places from ``first`` on; costs some 10 ns each."""
        at, entries, keys, owners, groups, ages_s, sizes, pins = self._pool.scan(first, count)
        at = -1 if at >= self._pool.stats().keys_max else at
        return Scan(at, entries, keys.reshape(-1, 16), owners, groups, ages_s, sizes, pins)

    def holdings(self) -> list[Holding]:
        """Return every owner that has objects."""
        return [
            Holding(number, b"" if name == bytes(16) else name, objects, total_bytes)
            for number, name, objects, total_bytes in self._pool.holdings()
        ]

    def take_evicted(self) -> bytes:
        """Keys evicted since the last call, 16 bytes each, oldest first."""
        return self._pool.take_evicted()

    def residence(self) -> HistogramReading:
        """Seconds that evicted objects had been here, whole ones."""
        bounds, counts, total_s = self._pool.residence()
        return HistogramReading(tuple(bounds), counts, total_s)

    def stats(self) -> PoolStats:
        """Counters of the pool."""
        return self._pool.stats()

    def check(self) -> list[str]:
        """Integrity violations; empty when sound."""
        return self._pool.check()

    def close(self) -> None:
        """Unmap the segment; what is committed stays in it."""
        self._pool.close()
