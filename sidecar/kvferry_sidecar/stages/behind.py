"""Write-behind: what entered the pool is written on to slower tiers, when they have time for it.

A save ends with the pool; nothing waits for a slower tier. Waiting objects are known by their
keys alone and may be evicted meanwhile; they are leased only while a put reads them. The queue of
a tier is bounded: over the bound its oldest entry, the coldest, is dropped and counted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.limits import Limits
from kvferry_sidecar.sessions.admissions import Keys
from kvferry_sidecar.stages.stores import StoreDesk, Tier, TierState
from kvferry_sidecar.tiers.host import HostTier
from kvferry_sidecar.tiers.runner import CallResult, Put
from kvferry_sidecar.tiers.store import Form, Item, Whose

Waiting = deque[tuple[bytes, Form, Whose]]


class WriteBehind:
    """Queues by tier. Owned by the control loop."""

    def __init__(self, pool: HostTier, desk: StoreDesk, limits: Limits) -> None:
        self._pool = pool
        self._desk = desk
        self._limits = limits
        self._queues: dict[Tier, Waiting] = {
            tier: deque() for tier in desk.tiers if tier.policy != "none"
        }
        self._disks = [tier for tier in desk.tiers if tier.source == "disk"]
        self.wanted = bool(self._queues)  # whether a tier takes anything
        self._putting: Counter[Tier] = Counter()  # calls
        self._writing: Counter[Tier] = Counter()  # their objects

    def entered(self, keys: Keys, form: Form, whose: Whose, origin: Tier | None = None) -> None:
        """Objects were committed to the pool: by a save, or fetched from ``origin``."""
        self._offer(keys, form, whose, "all", origin)

    def reused(self, keys: Keys, form: Form, whose: Whose) -> None:
        """Objects of the pool were loaded by an engine."""
        self._offer(keys, form, whose, "reused", None)

    def pump(self, now_s: float) -> None:
        """Start the puts that there is room for."""
        for tier, queue in self._queues.items():
            if tier.state is TierState.OFF and queue:
                self._drop(tier, len(queue), "put_dropped_off")
            room = max(1, tier.runner.threads - 1) if tier.runner is not None else 0
            while queue and tier.on and self._putting[tier] < room:
                self._start(tier, queue, now_s)

    def waiting(self) -> int:
        """Objects that are still to be written, to tiers that can take them."""
        return sum(len(queue) for tier, queue in self._queues.items() if tier.on)

    def backlog(self) -> dict[str, int]:
        """Objects that wait or are being written now, by tier, also for one that is paused."""
        return {t.name: len(queue) + self._writing[t] for t, queue in self._queues.items()}

    def _offer(
        self, keys: Keys, form: Form, whose: Whose, policy: str, origin: Tier | None
    ) -> None:
        for tier, queue in self._queues.items():
            if tier.policy != policy or tier is origin or tier.state is TierState.OFF:
                continue
            assert tier.runner is not None, "a tier that is not off has a runner"
            if form.payload_bytes > tier.runner.value_bytes_max:
                tier.counts["put_too_large"] += len(keys)
                continue
            names = split(keys)
            if tier.source == "disk":
                names = [name for name in names if self._disk_of(name) is tier]
            queue.extend((name, form, whose) for name in names)
            self._drop(tier, len(queue) - self._limits.write_behind_max, "put_dropped_full")

    def _disk_of(self, key: bytes) -> Tier:
        """Return the path that takes this key: they share what is written, also after one fails."""
        disks = [tier for tier in self._disks if tier.state is not TierState.OFF]
        return disks[key[0] % len(disks)]

    def _drop(self, tier: Tier, count: int, why: str) -> None:
        queue = self._queues[tier]
        for _ in range(count):
            queue.popleft()
        if count > 0:
            tier.counts[why] += count

    def _start(self, tier: Tier, queue: Waiting, now_s: float) -> None:
        names, form = self._take(tier, queue)
        keys = np.frombuffer(b"".join(names), np.uint8).reshape(-1, 16)
        keys = keys[self._pool.present(keys)]
        entries = self._pool.lease(keys, use=False)
        items = items_of(self._pool, keys[: len(entries)], entries, form, names)
        tier.counts["put_evicted_before"] += len(names) - len(items)
        if not items:
            self._pool.release(entries)
            return

        def done(result: CallResult, later_s: float) -> None:
            self._putting[tier] -= 1
            self._writing[tier] -= len(items)
            self._pool.release(entries)
            tier.counts["put_objects"] += sum(result.stored)
            tier.counts["put_bytes"] += sum(result.stored) * form.payload_bytes
            tier.counts["put_failed"] += len(items) - sum(result.stored)
            self.pump(later_s)

        self._putting[tier] += 1
        self._writing[tier] += len(items)
        self._desk.send(tier, Put(tuple(items)), now_s, done)

    def _take(self, tier: Tier, queue: Waiting) -> tuple[dict[bytes, Whose], Form]:
        """Take the oldest objects of one form, as many as one call should carry."""
        assert tier.runner is not None, "a tier that is on has a runner"
        form = queue[0][1]
        most = max(1, self._limits.store_call_bytes_max // max(1, form.payload_bytes))
        most = min(most, tier.runner.batch_max)
        names: dict[bytes, Whose] = {}
        while queue and len(names) < most and queue[0][1] == form:
            name, _, whose = queue.popleft()
            names[name] = whose
        return names, form


def split(keys: Keys) -> list[bytes]:
    """Return each key (n, 16) as bytes."""
    data = keys.tobytes()
    return [data[at : at + 16] for at in range(0, len(data), 16)]


def items_of(
    pool: HostTier,
    keys: Keys,
    entries: NDArray[np.uint32],
    form: Form,
    put: Mapping[bytes, Whose] | None = None,
) -> list[Item]:
    """Return entries as items of a call; of a ``put`` only those whose checksums are known."""
    addresses = (pool.payload_offsets(entries) + np.uint64(pool.address)).tolist()
    seeds = pool.seeds(entries).tolist()
    names, room_bytes = split(keys), pool.room_bytes(form.payload_bytes)
    if put is None:
        return [
            Item(name, seed, address, form, room_bytes=room_bytes)
            for name, seed, address in zip(names, seeds, addresses, strict=True)
        ]
    columns = [pool.crcs(entries, shard) for shard in range(len(form.shard_bytes))]
    known = np.logical_and.reduce([stored for _, stored in columns])
    rows = np.stack([values for values, _ in columns], axis=1).tolist()
    return [
        Item(names[i], seeds[i], addresses[i], form, tuple(rows[i]), room_bytes, put[names[i]])
        for i in np.flatnonzero(known)
    ]
