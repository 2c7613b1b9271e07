"""Faults of copies and of the pool: late, failed, and the process killed at a named point."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry_native import Pool

from kvferry_sidecar.engines.base import CopyEngine, CopyResult, CopyStatus, Direction, Extents
from kvferry_sidecar.faults.rules import Book, Rule
from kvferry_sidecar.tiers.host import NOBODY, Entries, HostTier, Keys, Owner, Reservation


def die() -> None:
    """End this process as a kill from outside would: nothing is flushed, closed or given back."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(slots=True)
class _Kept:
    rule: Rule
    due_s: float
    direction: Direction
    extents: Extents


class FaultyCopies:
    """A copy engine before another one: a copy that is kept back has not started yet."""

    def __init__(self, engine: CopyEngine, book: Book, now_s: Callable[[], float]) -> None:
        self._engine, self._book, self._now_s = engine, book, now_s
        self._kept: dict[int, _Kept] = {}
        self._results: list[CopyResult] = []
        book.on_change.append(self._let_go)

    def wake_fd(self) -> int:
        """Descriptor of the engine's results; ``tick`` tells of the others."""
        return self._engine.wake_fd()

    def submit(self, ticket: int, direction: Direction, extents: Extents) -> None:
        """Start a copy, later or never if a rule says so."""
        rule = self._book.draw("save" if direction is Direction.GATHER else "load")
        if rule is None or rule.action == "kill":
            self._engine.submit(ticket, direction, extents)
            if rule is not None:
                die()
        elif rule.action == "fail":
            self._ended(ticket, CopyStatus.FAILED)
        elif rule.action == "break":  # it names a chunk that the copy does not have
            self._ended(ticket, CopyStatus.CHECKSUM, bad_index=len(extents.blocks))
        else:
            rule.held += 1
            held_s = rule.ms / 1e3 if rule.action == "delay" else math.inf
            self._kept[ticket] = _Kept(rule, self._now_s() + held_s, direction, extents)

    def cancel(self, ticket: int) -> None:
        """Stop early; one that has not started is cancelled at once."""
        kept = self._kept.pop(ticket, None)
        if kept is None:
            self._engine.cancel(ticket)
            return
        kept.rule.held -= 1
        self._ended(ticket, CopyStatus.CANCELLED)

    def collect(self) -> list[CopyResult]:
        """Results since the last call."""
        results, self._results = self._results, []
        return [*results, *self._engine.collect()]

    def close(self) -> None:
        """Start nothing more, and close the engine."""
        self._kept.clear()
        self._engine.close()

    def waiting(self) -> bool:
        """Whether there are results that ``wake_fd`` does not tell of."""
        return bool(self._results)

    def tick(self, now_s: float) -> float:
        """Start what is due; returns seconds until the next."""
        for ticket in [t for t, kept in self._kept.items() if kept.due_s <= now_s]:
            self._start(ticket)
        return min((kept.due_s - now_s for kept in self._kept.values()), default=math.inf)

    def _let_go(self) -> None:
        for ticket in list(self._kept):
            self._start(ticket)

    def _start(self, ticket: int) -> None:
        kept = self._kept.pop(ticket)
        kept.rule.held -= 1
        try:
            self._engine.submit(ticket, kept.direction, kept.extents)
        except ValueError:  # as the desk does, had it been told at once
            self._ended(ticket, CopyStatus.FAILED)

    def _ended(self, ticket: int, status: CopyStatus, bad_index: int = -1) -> None:
        self._results.append(CopyResult(ticket, status, 0, 0.0, bad_index, None))


class FaultyPool(HostTier):
    """The host tier with points to fail, wait and die at. A delay stops the whole loop."""

    def __init__(self, pool: Pool, book: Book) -> None:
        super().__init__(pool)
        self._book = book

    def reserve(
        self,
        keys: Keys,
        payload_bytes: int,
        shards: int,
        owner: Owner = NOBODY,
        group: int = 0,
    ) -> Reservation:
        """As in HostTier."""
        self._point("reserve")
        taken = super().reserve(keys, payload_bytes, shards, owner, group)
        self._point("reserved")
        return taken

    def commit(self, entries: Entries) -> None:
        """As in HostTier; a commit that fails leaves nothing to be seen."""
        rule = self._point("commit")
        if rule is not None and rule.action == "fail":
            self.abort(entries)
            return
        super().commit(entries)
        self._point("committed")

    def doom(self, entries: Entries) -> None:
        """As in HostTier."""
        self._point("doom")
        super().doom(entries)

    def _point(self, name: str) -> Rule | None:
        rule = self._book.draw(name)
        if rule is not None and rule.action == "kill":
            die()
        if rule is not None and rule.action == "delay":
            time.sleep(rule.ms / 1e3)
        return rule
