"""A store's own threads: calls go in with a ticket, results come out when they have returned.

Nothing here waits for a store on behalf of the control loop. A call that hangs keeps its thread
and its items' memory until it returns; what waits behind it can be taken back.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry_sidecar.tiers import value
from kvferry_sidecar.tiers.store import Item, Listed, Lists, Source, Store, StoreError

Crcs = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Find:
    """Which keys are there, list by list. A list with ``stop`` ends at its first hole.

    What lies behind a hole of a prefix is of no use, so it need not be asked for.
    """

    lists: tuple[tuple[bytes, ...], ...]
    stop: bool


@dataclass(frozen=True, slots=True)
class Get:
    """Read these payloads into place and verify them."""

    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Put:
    """Store these payloads."""

    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget these keys."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class List:
    """Name up to ``most`` objects behind the key ``after``: of a store that can."""

    after: bytes
    most: int


Call = Find | Get | Put | Drop | List


@dataclass(frozen=True, slots=True)
class CallResult:
    """A call that has returned, or was taken back (``started`` is False).

    ``found``: per list of a Find; ``crcs``: per item of a Get, None for a miss; ``stored``: per
    item of a Put; ``listed``: of a List. They are empty after an ``error``.
    """

    ticket: int
    started: bool
    seconds: float
    error: str = ""
    final: bool = False
    found: tuple[tuple[bool, ...], ...] = ()
    crcs: tuple[Crcs | None, ...] = ()
    stored: tuple[bool, ...] = ()
    damaged: int = 0  # items whose bytes did not verify
    listed: tuple[Listed, ...] = ()


class SlowTier(Protocol):
    """What the pipeline sees of a store: StoreRunner, and a simulated one in tests."""

    name: str
    source: Source
    value_bytes_max: int
    batch_max: int
    threads: int

    def submit(self, ticket: int, call: Call) -> None:
        """Queue a call; the memory of its items belongs to it until its result was collected."""

    def take_back(self) -> None:
        """Return what has not started yet, as results that say so."""

    def collect(self) -> list[CallResult]:
        """Results since the last call."""

    def facts(self) -> dict[str, str | int]:
        """Return what the store says of itself."""


class StoreRunner:
    """Threads of one store. Puts use all of them but one, so that a get never waits for puts."""

    def __init__(self, store: Store, threads: int, wake_fd: int) -> None:
        self.name = store.name
        self.source: Source = store.source
        self.value_bytes_max = store.value_bytes_max
        self.batch_max = store.batch_max
        self.threads = threads
        self._store = store
        self._wake_fd = wake_fd
        self._lock = threading.Condition()
        self._first: deque[tuple[int, Call]] = deque()
        self._puts: deque[tuple[int, Call]] = deque()
        self._results: list[CallResult] = []
        self._putting = 0
        self._closed = False
        self._workers = [
            threading.Thread(target=self._work, name=f"{store.name}-{n}", daemon=True)
            for n in range(threads)
        ]
        for worker in self._workers:
            worker.start()

    def submit(self, ticket: int, call: Call) -> None:
        """See SlowTier."""
        with self._lock:
            queue = self._puts if isinstance(call, Put | Drop) else self._first
            queue.append((ticket, call))
            self._lock.notify()

    def take_back(self) -> None:
        """See SlowTier."""
        with self._lock:
            for queue in (self._first, self._puts):
                self._results += [CallResult(ticket, False, 0.0) for ticket, _ in queue]
                queue.clear()
        os.eventfd_write(self._wake_fd, 1)

    def collect(self) -> list[CallResult]:
        """See SlowTier."""
        with self._lock:
            results, self._results = self._results, []
        return results

    def facts(self) -> dict[str, str | int]:
        """See SlowTier."""
        return self._store.facts()

    def close(self, wait_s: float) -> bool:
        """Start nothing more; True when every call returned in time and the store is closed.

        False: a call is still in there and may touch the pool, which therefore must stay mapped
        until the process ends.
        """
        if not self.join(wait_s):
            return False
        try:
            self._store.close()
        except StoreError:
            return False
        return True

    def join(self, wait_s: float) -> bool:
        """End the threads and leave the store open; False: a call did not return in time."""
        end_s = time.monotonic() + wait_s
        with self._lock:
            self._closed = True
            self._first.clear()
            self._puts.clear()
            self._lock.notify_all()
        for worker in self._workers:
            worker.join(max(0.0, end_s - time.monotonic()))
        return not any(worker.is_alive() for worker in self._workers)

    # --- the threads ------------------------------------------------------------------------

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            ticket, call = taken
            started_s = time.monotonic()
            result = self._do(ticket, call, started_s)
            with self._lock:
                self._results.append(result)
                self._putting -= isinstance(call, Put | Drop)
                self._lock.notify()
            os.eventfd_write(self._wake_fd, 1)

    def _next(self) -> tuple[int, Call] | None:
        puts_max = max(1, self.threads - 1)
        with self._lock:
            while not self._closed:
                if self._first:
                    return self._first.popleft()
                if self._puts and self._putting < puts_max:
                    self._putting += 1
                    return self._puts.popleft()
                self._lock.wait()
        return None

    def _do(self, ticket: int, call: Call, started_s: float) -> CallResult:
        error, final = "", False
        found: tuple[tuple[bool, ...], ...] = ()
        crcs: tuple[Crcs | None, ...] = ()
        stored: tuple[bool, ...] = ()
        listed: tuple[Listed, ...] = ()
        damaged = 0
        try:
            match call:
                case Find():
                    found = tuple(self._find(keys, call.stop) for keys in call.lists)
                case Get():
                    crcs, damaged = self._get(call.items)
                case Put():
                    stored = self._put(call.items)
                case Drop():
                    self._store.remove(call.keys)
                case List() if isinstance(self._store, Lists):
                    listed = tuple(self._store.listed(call.after, call.most))
        except StoreError as failure:
            error, final = str(failure), failure.final
        except Exception as failure:  # noqa: BLE001 - a bug of one store must not end its threads
            error = f"{type(failure).__name__}: {failure}"
        seconds = time.monotonic() - started_s
        return CallResult(ticket, True, seconds, error, final, found, crcs, stored, damaged, listed)

    def _find(self, keys: Sequence[bytes], stop: bool) -> tuple[bool, ...]:
        """Ask in slices: a prefix that is not there costs one slice, not all its keys."""
        found: list[bool] = []
        for at in range(0, len(keys), self._store.batch_max):
            found += self._store.exists(keys[at : at + self._store.batch_max])
            if stop and not found[-1]:
                break
        return (*found, *(False,) * (len(keys) - len(found)))

    def _put(self, items: Sequence[Item]) -> tuple[bool, ...]:
        """Store what is not there yet: another node may have brought the same prefix."""
        there = self._store.exists([item.key for item in items])
        missing = [item for item, known in zip(items, there, strict=True) if not known]
        done = iter(self._store.put(missing, [value.pack(item) for item in missing]))
        return tuple(known or next(done) for known in there)

    def _get(self, items: Sequence[Item]) -> tuple[tuple[Crcs | None, ...], int]:
        """Read and verify; what does not verify is a miss, and forgotten by the store."""
        headers = self._store.get(items)
        crcs = value.verify(headers, items)
        bad = [
            item.key
            for item, header, good in zip(items, headers, crcs, strict=True)
            if header is not None and good is None
        ]
        if bad:
            self._store.remove(bad)
        return tuple(crcs), len(bad)
