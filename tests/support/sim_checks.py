"""The invariants of architecture.md section 3, as far as they can be seen between two steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvferry_connector.wire.hot import Outcome
from kvferry_native import mix_keys
from kvferry_sidecar.engines.base import Direction
from kvferry_sidecar.outcomes.ledger import PartKey
from kvferry_sidecar.sessions.model import Peer
from kvferry_sidecar.stages.saves import SaveWork
from kvferry_sidecar.tiers.runner import Get, Put
from support.fake_copies import FakeLayout, Running
from support.fake_pool import FakePool
from support.fake_tier import FakeTier
from support.pipeline_bed import HASH_BYTES, chain
from support.sim_blocks import CHUNKS_MAX, PROMPTS, content
from support.sim_engine import SimEngine
from support.sim_sidecar import SimSidecar, namespace_of

if TYPE_CHECKING:
    from support.sim_world import World


class SimChecks:
    """Looks at a whole world; what it remembers is of the sidecar that lives."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.kept: set[int] = set()  # entries that the last death left
        self._outcomes: dict[PartKey, Outcome] = {}
        # Of each running copy: uses of the engine's blocks, and entries of the pool's slots.
        self._reads: dict[Running, tuple[dict[int, int], dict[int, int]]] = {}
        self._names: dict[bytes, dict[bytes, tuple[int, bytes, int, int, int]]] = {}

    def forget(self) -> None:
        """Another sidecar starts, with its own generations."""
        self._outcomes.clear()
        self._reads.clear()

    def check(self) -> None:
        """Everything that must hold between any two things that happen."""
        sidecar = self._world.sidecar
        if sidecar is None:
            return
        lent = self._lent()
        for copy in sidecar.copies.running.values():
            self._check_copy(sidecar, copy, lent)
        if len(self._reads) > len(sidecar.copies.running):
            running = set(map(id, sidecar.copies.running.values()))
            self._reads = {c: x for c, x in self._reads.items() if id(c) in running}
        self._check_stripes(sidecar)
        for tier in sidecar.tiers if isinstance(self._world.pool, FakePool) else ():
            self._check_calls(tier)
        if self._world.rng.random() < 0.06:
            assert sidecar.pipeline.check() == []
            self._check_visible()

    def _lent(self) -> dict[FakeLayout, SimEngine]:
        """Memory of ranks that live, by whose it is."""
        return {
            layout: engine
            for engine in self._world.engines.values()
            for rank in engine.ranks
            if rank.process.alive
            for layout in rank.layouts
        }

    def _check_copy(
        self, sidecar: SimSidecar, copy: Running, lent: dict[FakeLayout, SimEngine]
    ) -> None:
        """Invariants 1 and 3: engine blocks and pool slots stay what they were at its start."""
        layout = copy.extents.layout
        engine = lent.get(layout)
        entries: dict[int, int] = {}
        if isinstance(self._world.pool, FakePool):
            entries = self._entries_of(copy)
        blocks = copy.extents.blocks.tolist()
        uses = {} if engine is None else {b: engine.pool.blocks[b].uses for b in blocks}
        first = self._reads.setdefault(copy, (uses, entries))
        if engine is not None:
            assert first[0] == uses, "a block was allocated anew under a copy"
            held = all(engine.pool.blocks[b].ref_cnt > 0 for b in blocks)
            assert held, f"a {copy.direction.name} over freed blocks"
        assert first[1] == entries, "a slot was reused under a copy"

    def _entries_of(self, copy: Running) -> dict[int, int]:
        """A gather writes reserved slots, a scatter reads leased ones. Slot -> entry."""
        by_slot = {entry.slot: (n, entry) for n, entry in self._world.pool._entries.items()}
        found = {}
        for offset in copy.extents.pool_offsets.tolist():
            number, entry = by_slot[offset // self._world.pool.slab_bytes]
            if copy.direction is Direction.GATHER:
                assert entry.state == "writing"
            else:
                assert entry.leases > 0
                if copy not in self._reads:
                    self._saw_read(entry.state, number)
            found[entry.slot] = number
        return found

    def _saw_read(self, state: str, entry: int) -> None:
        if state == "doomed":  # leased before that: no lease of it is given any more
            self._world.saw("a load read what another one found damaged")
        if entry in self.kept:
            self._world.saw("an object of before the sidecar's death was loaded")

    def _check_stripes(self, sidecar: SimSidecar) -> None:
        """Invariant 2: each reserved stripe has its open job, each leased one its lease."""
        runs = sidecar.pipeline._jobs._runs.values()
        saves = [run.work for run in runs if isinstance(run.work, SaveWork)]
        reserved = sum(len(group.entries) for work in saves for group in work._groups)
        calls = [opened.call for opened in sidecar.pipeline._stores._open.values()]
        reserved += sum(len(call.items) for call in calls if isinstance(call, Get))
        stats = self._world.pool.stats()
        assert stats.writing == reserved, f"{stats.writing} stripes, {reserved} are somebody's"

    def _check_calls(self, tier: FakeTier) -> None:
        """The same for calls into stores, however late they are."""
        pool = self._world.pool
        state = {entry.slot: entry for entry in pool._entries.values()}
        for call in tier.open.values():
            for item in call.items if isinstance(call, Get | Put) else ():
                entry = state[(item.address - pool.address) // pool.slab_bytes]
                assert entry.key == item.key
                assert entry.state == "writing" if isinstance(call, Get) else entry.leases > 0

    def _check_visible(self) -> None:
        """Invariant 3: a visible key has all its bytes, of every shard, of the right content."""
        if not isinstance(self._world.pool, FakePool):
            return
        names = self._all_names()
        for entry in self._world.pool._entries.values():
            if entry.state != "ready" or entry.key not in names:
                continue
            model, version, prompt, chunk, group = names[entry.key]
            for shard in range(entry.shards):
                offset = entry.slot * self._world.pool.slab_bytes + shard * 1024
                right = content(model, version, prompt, chunk, shard, group)
                value = self._world.memory[offset]
                assert value == right or offset in self._world.corrupted, "wrong bytes are visible"

    def _all_names(self) -> dict[bytes, tuple[int, bytes, int, int, int]]:
        """What each key of the engines' current versions stands for."""
        found: dict[bytes, tuple[int, bytes, int, int, int]] = {}
        for engine in self._world.engines.values():
            version, shape = engine.half._version, engine.shape
            geometries: list[Any] = [SimpleNamespace(digest=bytes([shape.model]) * 16)]
            namespace = namespace_of(geometries * shape.ranks, version)
            if namespace not in self._names:
                self._names[namespace] = {
                    key.tobytes(): (shape.model, version, prompt, chunk, group)
                    for group in range(shape.groups)
                    for prompt in range(PROMPTS)
                    for chunk, key in enumerate(
                        mix_keys(namespace, group, 0, chain(prompt, CHUNKS_MAX), HASH_BYTES, 0, 1)
                    )
                }
            found |= self._names[namespace]
        return found

    def check_outcome(self, sidecar: SimSidecar, peer: Peer, outcome: Outcome) -> None:
        """Invariant 2: one end per rank and job, after its copies stopped."""
        key = PartKey(peer.generation, outcome.job)
        first = self._outcomes.setdefault(key, outcome)
        assert outcome == first or outcome.reason == "tombstone", (first, outcome)
        copying = {part.key for part, _ in sidecar.pipeline._jobs.desk._tickets.values()}
        assert key not in copying, f"{outcome} is sent while its copies run"
