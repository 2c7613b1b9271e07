"""Warming: objects that an operator lists are brought from slower tiers into the pool.

One batch at a time, so that what requests wait for comes first. It goes from tier to tier: what
one has is fetched from it, the rest is looked for in the next.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from kvferry_sidecar.stages.behind import items_of
from kvferry_sidecar.stages.core import Core
from kvferry_sidecar.stages.stores import StoreDesk, Tier, publish
from kvferry_sidecar.tiers.runner import CallResult, Find, Get
from kvferry_sidecar.tiers.store import Form, Whose


class Wanted(NamedTuple):
    """One object of a list."""

    namespace: bytes
    group: int
    key: bytes


class Taken(msgspec.Struct, frozen=True):
    """What became of a list: ``taken`` of its first objects, the others wait for room.

    Of those taken: ``there`` are in the pool already; ``unknown`` are of a namespace or group that
    no engine has registered since the start, so that their form is not known.
    """

    taken: int
    there: int
    unknown: int


class WarmReading(msgspec.Struct, frozen=True):
    """Objects that wait or are being fetched now, and what became of others since the start.

    ``namespaces``: those whose objects can be fetched, with their groups.
    """

    waiting: int
    counts: dict[str, int]  # fetched, absent, failed, full
    namespaces: dict[str, list[int]]


@dataclass(slots=True)
class _Batch:
    """Objects of one form that are still looked for. ``tier``: the one that is asked.

    ``fetching``: further objects that it has and that are being read.
    """

    namespace: bytes
    group: int
    form: Form
    keys: list[bytes]
    tier: int = -1
    fetching: int = 0


class Warmer:
    """Owned by the control loop."""

    def __init__(self, core: Core, desk: StoreDesk) -> None:
        self._core = core
        self._desk = desk
        self._queue: deque[Wanted] = deque()
        self._batch: _Batch | None = None
        self.counts: Counter[str] = Counter()

    def add(self, wanted: Sequence[Wanted], now_s: float, *, dry_run: bool) -> Taken:
        """Take the objects of a list that there is room for, in their order."""
        room = 0 if self._core.draining else self._core.limits.warm_objects_max - self.waiting()
        taken = list(wanted[: max(0, room)])
        known = [one for one in taken if self._form_of(one) is not None]
        keys = np.frombuffer(b"".join(one.key for one in known), np.uint8).reshape(-1, 16)
        there = self._core.pool.present(keys).tolist()
        if not dry_run:
            self._queue.extend(one for one, has in zip(known, there, strict=True) if not has)
            self.pump(now_s)
        return Taken(len(taken), sum(there), len(taken) - len(known))

    def waiting(self) -> int:
        """Objects that are neither in the pool yet nor known to be absent."""
        batch = self._batch
        return len(self._queue) + (len(batch.keys) + batch.fetching if batch is not None else 0)

    def reading(self) -> WarmReading:
        """Return how it goes."""
        known = self._core.journal.namespaces.groups()
        return WarmReading(self.waiting(), dict(self.counts), known)

    def pump(self, now_s: float) -> None:
        """Go on, when nothing is under way."""
        if self._core.draining:
            self.counts["failed"] += len(self._queue)
            self._queue.clear()
        while self._batch is None and self._queue:
            self._batch = self._take()
            self._ask_next(now_s)

    def _form_of(self, one: Wanted) -> Form | None:
        known = self._core.journal.namespaces.find(one.namespace)
        return known.forms.get(one.group) if known is not None else None

    def _take(self) -> _Batch | None:
        """Take the first objects of one form, as many as one call should carry."""
        first = self._queue[0]
        form = self._form_of(first)
        runners = [tier.runner for tier in self._desk.tiers if tier.runner is not None]
        if form is None or not runners:
            self._queue.popleft()
            self.counts["failed"] += 1
            return None
        most = self._core.limits.store_call_bytes_max // max(1, form.payload_bytes)
        most = max(1, min(most, *(runner.batch_max for runner in runners)))
        keys: list[bytes] = []
        while self._queue and len(keys) < most and self._queue[0][:2] == first[:2]:
            keys.append(self._queue.popleft().key)
        return _Batch(first.namespace, first.group, form, list(dict.fromkeys(keys)))

    def _ask_next(self, now_s: float) -> None:
        """Look for what is missing in the next tier that is on; without one it is absent."""
        batch = self._batch
        if batch is None:
            return
        tiers = self._desk.tiers
        batch.tier += 1
        while batch.tier < len(tiers) and not _takes(tiers[batch.tier], batch.form):
            batch.tier += 1
        if batch.tier == len(tiers) or not batch.keys:
            self.counts["absent"] += len(batch.keys)
            self._batch = None
            return
        tier = tiers[batch.tier]

        def done(result: CallResult, later_s: float) -> None:
            found = result.found[0] if result.found else (False,) * len(batch.keys)
            here = [key for key, has in zip(batch.keys, found, strict=True) if has]
            batch.keys = [key for key, has in zip(batch.keys, found, strict=True) if not has]
            if here:
                self._fetch(batch, tier, here, later_s)
            else:
                self._go_on(later_s)

        self._desk.send(tier, Find((tuple(batch.keys),), stop=False), now_s, done)

    def _fetch(self, batch: _Batch, tier: Tier, names: list[bytes], now_s: float) -> None:
        keys = np.frombuffer(b"".join(names), np.uint8).reshape(-1, 16)
        pool, form = self._core.pool, batch.form
        owner = self._core.owner_of(batch.namespace)
        shards = len(form.shard_bytes)
        try:
            reserved = pool.reserve(keys, form.payload_bytes, shards, owner, batch.group)
        except ValueError:  # larger than a slab: of a node whose slabs are larger
            self.counts["failed"] += len(names)
            self._go_on(now_s)
            return
        self._core.note_evictions()
        self.counts["full"] += reserved.full
        keys, entries = np.ascontiguousarray(keys[reserved.index]), reserved.entries
        if not len(entries) or not tier.on:
            pool.abort(entries)
            self._go_on(now_s)
            return

        def done(result: CallResult, later_s: float) -> None:
            batch.fetching = 0
            good = publish(pool, entries, result.crcs or (None,) * len(entries))
            self.counts["fetched"] += int(good.sum())
            self.counts["failed"] += int((~good).sum())
            tier.counts["get_objects"] += int(good.sum())
            tier.counts["get_bytes"] += int(good.sum()) * form.payload_bytes
            if tier.source == "external":
                whose = Whose(batch.namespace, batch.group)
                self._core.behind.entered(keys[good], form, whose, tier)
            self._go_on(later_s)

        items = items_of(pool, keys, entries, form)
        batch.fetching = len(items)
        self._desk.send(tier, Get(tuple(items)), now_s, done)

    def _go_on(self, now_s: float) -> None:
        self._ask_next(now_s)
        self.pump(now_s)


def _takes(tier: Tier, form: Form) -> bool:
    """Whether a tier may be asked for objects of this form."""
    runner = tier.runner if tier.on else None
    return runner is not None and form.payload_bytes <= runner.value_bytes_max
