"""A pool in plain Python with the native Pool's interface, and a check of its own rules.

Entries live in slots of one slab each; the least recently used ready entry without a lease is
evicted. Any misuse (commit of a free slot, release without a lease) fails the test at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np


@dataclass
class Entry:
    key: bytes
    slot: int
    shards: int
    state: str = "writing"
    leases: int = 0
    used: int = 0
    crcs: dict[int, int] = field(default_factory=dict)
    owner: bytes = b""
    group: int = 0
    stored_s: float = 0.0
    pin: int = 0


class FakePool:
    def __init__(self, slots: int = 64, slab_bytes: int = 1 << 20) -> None:
        self.slab_bytes = slab_bytes
        self.address = 0x1000
        self._free = list(range(slots))[::-1]
        self._slots = slots
        self._index: dict[bytes, int] = {}
        self._entries: dict[int, Entry] = {}
        self._next = 1
        self._clock = 0
        self.evictions = 0
        self._evicted_s: dict[bytes, float] = {}
        self._evicted = b""
        self.clock: Callable[[], float] = time.monotonic

    def recover(self) -> None:
        """Be as found after kill -9: what is not ready is free, leases are gone."""
        for number, entry in list(self._entries.items()):
            entry.leases = 0
            if entry.state != "ready":
                self._drop(number)

    def _ready(self, key: bytes) -> int | None:
        entry = self._index.get(key)
        return entry if entry is not None and self._entries[entry].state == "ready" else None

    def prefix(self, keys: np.ndarray) -> int:
        for count, key in enumerate(keys):
            if self._ready(key.tobytes()) is None:
                return count
        return len(keys)

    def present(self, keys: np.ndarray) -> np.ndarray:
        return np.array([self._ready(key.tobytes()) is not None for key in keys], dtype=np.bool_)

    def run(self, keys: np.ndarray) -> tuple[int, float]:
        count = self.prefix(keys)
        key = keys[count : count + 1].tobytes()
        number = self._index.get(key)
        if number is not None and self._entries[number].state == "writing":
            return count, -2.0
        at_s = self._evicted_s.get(key)
        return count, -1.0 if at_s is None else self.clock() - at_s

    def unheard_of(self, keys: np.ndarray) -> bool:
        return self.run(keys[:1]) == (0, -1.0) and len(keys) > 0

    def refresh(self, keys: np.ndarray) -> None:
        for key in reversed(keys[: self.prefix(keys)]):
            self._touch(self._index[key.tobytes()])

    def lease(self, keys: np.ndarray, use: bool = True) -> np.ndarray:
        ids = [self._index[key.tobytes()] for key in keys[: self.prefix(keys)]]
        for entry in ids:
            self._entries[entry].leases += 1
            if use:
                self._touch(entry)
        return np.array(ids, dtype=np.uint32)

    def release(self, entries: np.ndarray) -> None:
        for number in entries.tolist():
            entry = self._entries[number]
            assert entry.leases > 0, f"entry {number} is released without a lease"
            entry.leases -= 1
            if entry.state == "doomed" and entry.leases == 0:
                self._drop(number)

    def reserve(
        self,
        keys: np.ndarray,
        payload_bytes: int,
        shards: int,
        owner: bytes = b"",
        quota_bytes: int = 0,
        group: int = 0,
    ) -> np.ndarray:
        if payload_bytes > self.slab_bytes:
            raise ValueError(f"{payload_bytes} bytes exceed a slab of {self.slab_bytes}")
        assert owner, "the pipeline says whose objects they are"
        slots_max = quota_bytes // self.slab_bytes if quota_bytes else self._slots
        return np.array(
            [self._reserve(key.tobytes(), shards, owner, group, slots_max) for key in keys],
            dtype=np.int64,
        )

    def _reserve(self, key: bytes, shards: int, owner: bytes, group: int, slots_max: int) -> int:
        known = self._index.get(key)
        if known is not None:
            return -1 if self._entries[known].state == "ready" else -2
        while sum(e.owner == owner for e in self._entries.values()) >= slots_max:
            if not self._evict(owner):
                return -3
        if not self._free and not self._evict():
            return -3
        number, self._next = self._next, self._next + 1
        self._entries[number] = Entry(key, self._free.pop(), shards, owner=owner, group=group)
        self._index[key] = number
        self._touch(number)
        return number

    def _evict(self, owner: bytes | None = None) -> bool:
        idle = [
            (entry.pin, entry.used, number)
            for number, entry in self._entries.items()
            if entry.state == "ready" and entry.leases == 0 and entry.pin < 2
            if owner is None or entry.owner == owner
        ]
        if not idle:
            return False
        number = min(idle)[2]
        self._evicted_s[self._entries[number].key] = self.clock()
        self._evicted += self._entries[number].key
        self._drop(number)
        self.evictions += 1
        return True

    def evict_to(self, used_bytes: int, most: int) -> int:
        """Evict some, of a pool without soft pins."""
        evicted = 0
        while evicted < most and self.stats().used_bytes > used_bytes and self._evict():
            evicted += 1
        return evicted

    def payload_offsets(self, entries: np.ndarray) -> np.ndarray:
        slots = [self._entries[number].slot for number in entries.tolist()]
        return np.array(slots, dtype=np.uint64) * np.uint64(self.slab_bytes)

    def set_crcs(self, entries: np.ndarray, shard: int, crcs: np.ndarray) -> None:
        assert entries.flags.c_contiguous, "as the native pool wants them"
        for number, crc in zip(entries.tolist(), crcs.tolist(), strict=True):
            entry = self._entries[number]
            assert entry.state == "writing"
            assert shard < entry.shards
            entry.crcs[shard] = crc

    def crcs(self, entries: np.ndarray, shard: int) -> tuple[np.ndarray, np.ndarray]:
        found = [self._entries[number].crcs.get(shard) for number in entries.tolist()]
        return (
            np.array([crc or 0 for crc in found], dtype=np.uint32),
            np.array([crc is not None for crc in found], dtype=np.bool_),
        )

    def seeds(self, entries: np.ndarray) -> np.ndarray:
        keys = [self._entries[number].key for number in entries.tolist()]
        return np.array([int.from_bytes(key[:4], "little") for key in keys], dtype=np.uint32)

    def commit(self, entries: np.ndarray) -> None:
        for number in entries.tolist():
            entry = self._entries[number]
            assert entry.state == "writing"
            assert sorted(entry.crcs) == list(range(entry.shards)), "committed without all shards"
            entry.state = "ready"
            entry.stored_s = self.clock()

    def abort(self, entries: np.ndarray) -> None:
        for number in entries.tolist():
            assert self._entries[number].state == "writing"
            self._drop(number)

    def doom(self, entries: np.ndarray) -> None:
        for number in entries.tolist():
            entry = self._entries[number]
            if entry.state == "doomed":
                continue
            entry.state = "doomed"
            del self._index[entry.key]
            if entry.leases == 0:
                self._drop(number)

    def clear(self) -> int:
        idle = [
            n
            for n, e in self._entries.items()
            if e.state == "ready" and e.leases == 0 and e.pin < 2
        ]
        for number in idle:
            self._drop(number)
        return len(idle)

    def pin(self, entries: np.ndarray, level: int) -> None:
        for number in entries.tolist():
            self._entries[number].pin = level

    def _owners(self) -> list[bytes]:
        return sorted({entry.owner for entry in self._entries.values()})

    def scan(self, first: int, count: int) -> tuple:
        owners = self._owners()
        ready = [
            (n, e) for n, e in self._entries.items() if e.state == "ready" and n < first + count
        ]
        ready = [(n, e) for n, e in ready if n >= first]
        return (
            first + count,
            np.array([n for n, _ in ready], np.uint32),
            np.frombuffer(b"".join(e.key for _, e in ready), np.uint8),
            np.array([owners.index(e.owner) for _, e in ready], np.uint32),
            np.array([e.group for _, e in ready], np.uint32),
            np.array([max(0, int(self.clock() - e.stored_s)) for _, e in ready], np.uint32),
            np.full(len(ready), self.slab_bytes, np.uint64),
            np.array([e.pin for _, e in ready], np.uint8),
        )

    def holdings(self) -> list[tuple[int, bytes, int, int]]:
        owners = [entry.owner for entry in self._entries.values()]
        return [
            (number, name, owners.count(name), owners.count(name) * self.slab_bytes)
            for number, name in enumerate(self._owners())
        ]

    def residence(self) -> tuple[list[float], list[int], float]:
        return [1.0], [0, 0], 0.0

    def take_evicted(self) -> bytes:
        taken, self._evicted = self._evicted, b""
        return taken

    def stats(self) -> SimpleNamespace:
        states = [entry.state for entry in self._entries.values()]
        return SimpleNamespace(
            ready=states.count("ready"),
            writing=states.count("writing"),
            doomed=states.count("doomed"),
            leased=sum(entry.leases > 0 for entry in self._entries.values()),
            evictions=self.evictions,
            total_bytes=self._slots * self.slab_bytes,
            used_bytes=len(states) * self.slab_bytes,
            keys_max=max(self._next, 1),
            pinned_hard_bytes=sum(e.pin == 2 for e in self._entries.values()) * self.slab_bytes,
        )

    def check(self) -> list[str]:
        used = [entry.slot for entry in self._entries.values()]
        found = []
        if sorted(used + self._free) != list(range(self._slots)):
            found.append("slots are lost or used twice")
        if any(self._entries[number].key != key for key, number in self._index.items()):
            found.append("index and entries differ")
        return found

    def close(self) -> None:
        pass

    def _touch(self, number: int) -> None:
        self._clock += 1
        self._entries[number].used = self._clock

    def _drop(self, number: int) -> None:
        entry = self._entries.pop(number)
        if self._index.get(entry.key) == number:
            del self._index[entry.key]
        self._free.append(entry.slot)
