"""The simulated world: a clock, a bad network, engines that come and go, one pipeline.

Every step does one random thing and then checks the invariants of architecture.md section 3
that can be seen from outside. A failure names the seed: run(seed) repeats it exactly.
"""

from __future__ import annotations

import heapq
import random

from kvferry_connector.wire.hot import FromHalf, FromSidecar, Outcome
from kvferry_native import mix_keys
from kvferry_sidecar.engines.base import CopyStatus, Direction
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.pipeline import Pipeline
from kvferry_sidecar.sessions.model import Peer
from kvferry_sidecar.stages.stores import Tier
from kvferry_sidecar.tiers.host import HostTier
from kvferry_sidecar.tiers.runner import Get, Put
from support.fake_copies import FakeCopies, FakeLayout
from support.fake_pool import FakePool
from support.fake_tier import FakeTier
from support.pipeline_bed import NullLog, value_of
from support.sim_halves import PROMPTS, SimEngine

LIMITS = Limits(
    admissions_max=12,
    key_bytes_max=1500,
    leases_max=10,
    lease_idle_ms_max=800,
    jobs_max=6,
    tombstones_max=16,
    outcomes_unacked_max=24,
    outcome_resend_ms=50,
    fence_ms_max=400,
    copy_ms_max=500,
    save_copies_max=3,
    ranks_wait_ms_max=500,
    stage_ms_max=30,
    stage_bytes_max=9 << 10,
    stage_calls_max=2,
    store_call_bytes_max=4 << 10,
    store_ms_max=300,
    store_retry_ms=50,
    abandoned_calls_max=2,
    write_behind_max=8,
)
SHAPES = [("a", 1, 2, 1), ("b", 1, 2, 1), ("c", 2, 1, 2)]  # name, model, ranks, groups


class World:
    def __init__(self, seed: int, pool: object | None = None) -> None:
        self.rng = random.Random(seed)
        self.now_s = 1000.0
        self.copies = FakeCopies()
        self.pool = pool or FakePool(slots=24)
        self.log = NullLog()
        self.slow = [
            FakeTier(self.copies, self.pool.address, source=source, threads=2)
            for source in ("disk", "external")
        ]
        self.pipeline = Pipeline(
            tiers=[Tier(slow.name, slow.source, slow, "all") for slow in self.slow],
            pool=HostTier(self.pool),
            copies=self.copies,
            send=self.send_down,
            limits=LIMITS,
            log=self.log,
        )
        self.network: list = []
        self.frames = 0
        self.kind = True  # no faults: used to end a run
        self.generations = 0
        self.engines: dict[str, SimEngine] = {}
        self.dying: list[SimEngine] = []
        self.closed: set[FakeLayout] = set()
        self.corrupted: set[int] = set()
        self.first_outcome: dict[tuple[int, int], Outcome] = {}
        self.loaded = 0
        for shape in SHAPES:
            self.start(shape)
        self.kind = False

    # --- engines ----------------------------------------------------------------------------

    def start(self, shape: tuple[str, int, int, int]) -> None:
        name, model, ranks, groups = shape
        engine = SimEngine(
            name,
            model,
            ranks,
            groups,
            self.generations + 1,
            self.rng,
            self.send_up,
            self.copies,
        )
        self.generations += 1 + ranks
        self.engines[name] = engine
        self.pipeline.on_session_ready(engine.session, self.now_s)

    def kill(self, name: str, *, bye: bool = False) -> None:
        engine = self.engines.pop(name)
        engine.alive = False
        self.loaded += engine.loaded
        gone = self.pipeline.on_bye if bye else self.pipeline.on_peer_dead
        peers = engine.peers()
        self.rng.shuffle(peers)
        for peer in peers:
            gone(peer, self.now_s)
        self.dying.append(engine)
        self.start(next(shape for shape in SHAPES if shape[0] == name))

    # --- network ----------------------------------------------------------------------------

    def send_up(self, peer: Peer, message: FromHalf, raw: list[bytes]) -> None:
        self._post("up", peer, message, raw)

    def send_down(self, peer: Peer, message: FromSidecar) -> None:
        if isinstance(message, Outcome):
            self._check_outcome(peer, message)
        self._post("down", peer, message, [])

    def _post(self, way: str, peer: Peer, message: object, raw: list[bytes]) -> None:
        copies = 1
        delay_s = self.rng.uniform(0, 0.002)
        if not self.kind:
            luck = self.rng.random()
            copies = 0 if luck < 0.05 else 2 if luck < 0.1 else 1
        for _ in range(copies):
            if not self.kind and self.rng.random() < 0.05:
                delay_s = self.rng.uniform(0, 1.5)
            self.frames += 1
            entry = (self.now_s + delay_s, self.frames, way, peer, message, raw)
            heapq.heappush(self.network, entry)

    def deliver(self) -> None:
        while self.network and self.network[0][0] <= self.now_s:
            _, _, way, peer, message, raw = heapq.heappop(self.network)
            engine = self.engines.get(peer.session.key.engine_id)
            if engine is None or engine.session is not peer.session:
                continue  # a stale generation: the transport refuses it
            if way == "up":
                self.pipeline.on_message(peer, message, raw, self.now_s)
            else:
                engine.on_message(peer, message, self.now_s)

    # --- one step ---------------------------------------------------------------------------

    def step(self) -> None:
        self.now_s += self.rng.expovariate(400)
        self.deliver()
        engine = self.rng.choice(list(self.engines.values()))
        self._act(engine)
        if self.copies.running and self.rng.random() < 0.5:
            self._finish_a_copy()
        if self.rng.random() < 0.7:
            self.pipeline.on_copies(self.now_s)
        for slow in self.slow:
            self._finish_a_call(slow)
        if self.rng.random() < 0.7:
            self.pipeline.on_stores(self.now_s)
        self.pipeline.on_tick(self.now_s)
        for live in self.engines.values():
            live.ask_for_jobs(self.now_s)
        self.check()

    def _act(self, engine: SimEngine) -> None:
        luck = self.rng.random()
        if luck < 0.30:
            engine.advance()
        elif luck < 0.42:
            engine.save(self.now_s)
        elif luck < 0.54:
            engine.new_request()
        elif luck < 0.90:
            self._go_on(engine)
        elif luck < 0.93:
            engine.cancel()
        elif luck < 0.96:
            self.pipeline.on_beat(engine.scheduler, engine.beat(), self.now_s)
        elif luck < 0.962:
            engine.rotate()
            self.pipeline.on_version(engine.session, self.now_s)
        elif luck < 0.963:
            self.kill(engine.name, bye=not engine.jobs)
        elif luck < 0.97 and self.copies.memory:
            self._corrupt()
        elif luck < 0.975:
            self.now_s += self.rng.uniform(0, 0.6)  # everything stands still for a while

    def _go_on(self, engine: SimEngine) -> None:
        if not engine.requests:
            return
        request = self.rng.choice(list(engine.requests.values()))
        luck = self.rng.random()
        if request.state == "leased" and luck < 0.8:
            engine.load(request, self.now_s)
        elif request.state in {"probed", "asked"} and luck < 0.7:
            engine.ask(request)
        elif request.state == "probed" and luck < 0.8:
            engine.grow(request)
        elif request.state != "loading":
            engine.drop(request, tell=luck < 0.95)

    def _finish_a_copy(self) -> None:
        ticket = self.rng.choice(list(self.copies.running))
        luck = self.rng.random()
        late = CopyStatus.DONE if luck < 0.1 else CopyStatus.FAILED if luck < 0.13 else None
        self.copies.finish(ticket, late)

    def _finish_a_call(self, slow: FakeTier) -> None:
        luck = self.rng.random()
        if luck < 0.002:
            slow.answering = not slow.answering
        elif luck < 0.003:
            slow.stored.clear()
        if slow.open and luck < 0.3:
            slow.finish(self.rng.choice(list(slow.open)))

    def _corrupt(self) -> None:
        offset = self.rng.choice(list(self.copies.memory))
        self.copies.memory[offset] += 10**12
        self.corrupted.add(offset)

    # --- the end of a run -------------------------------------------------------------------

    def settle(self) -> None:
        """No more faults: everything that is open must end, and nothing may be left."""
        self.kind = True
        for _ in range(400):
            self.now_s += 0.02
            self.deliver()
            for engine in self.engines.values():
                engine.advance()
                engine.ask_for_jobs(self.now_s)
                for request in list(engine.requests.values()):
                    if request.state != "loading":
                        engine.drop(request, tell=False)
                self.pipeline.on_beat(engine.scheduler, engine.beat(), self.now_s)
            self.copies.finish_all()
            self.pipeline.on_copies(self.now_s)
            for slow in self.slow:
                slow.answering = True
                slow.finish_all()
            self.pipeline.on_stores(self.now_s)
            self.pipeline.on_tick(self.now_s)
            self.check()
        assert self.pipeline.check() == []
        assert self.pipeline.drained(), self.pipeline.snapshot()
        stats = self.pool.stats()
        assert (stats.writing, stats.leased, stats.doomed) == (0, 0, 0)
        snapshot = self.pipeline.snapshot()
        assert snapshot.ledger.open == 0
        assert snapshot.violations == []
        assert all(not engine.jobs for engine in self.engines.values())
        assert {text.split(" {")[0] for text in self.log.errors} <= {"checksum mismatch"}
        self.loaded += sum(engine.loaded for engine in self.engines.values())

    # --- invariants -------------------------------------------------------------------------

    def check(self) -> None:
        self._close_what_is_idle()
        owned = {
            layout: {block for sim in engine.jobs.values() for block in sim.blocks}
            for engine in self.engines.values()
            for layout in engine.engine.layouts.values()
        }
        for copy in self.copies.running.values():
            layout = copy.extents.layout
            assert layout not in self.closed, "a copy runs over memory that was closed"
            blocks = set(copy.extents.blocks.tolist())
            assert layout not in owned or blocks <= owned[layout], "a copy over freed blocks"
            if isinstance(self.pool, FakePool):
                self._check_slots(copy)
        for slow in self.slow if isinstance(self.pool, FakePool) else ():
            self._check_calls(slow)
        if self.frames % 16 == 0:
            assert self.pipeline.check() == []
            self._check_visible()

    def _check_slots(self, copy) -> None:
        """Invariants 1 and 3: a gather writes reserved slots, a scatter reads leased ones."""
        state = {e.slot: e for e in self.pool._entries.values()}
        for offset in copy.extents.pool_offsets.tolist():
            entry = state[offset // self.pool.slab_bytes]
            if copy.direction is Direction.GATHER:
                assert entry.state == "writing"
            else:
                assert entry.leases > 0

    def _check_calls(self, slow: FakeTier) -> None:
        """The same for calls into stores, however late they are."""
        state = {e.slot: e for e in self.pool._entries.values()}
        for call in slow.open.values():
            for item in call.items if isinstance(call, Get | Put) else ():
                entry = state[(item.address - self.pool.address) // self.pool.slab_bytes]
                assert entry.key == item.key
                assert entry.state == "writing" if isinstance(call, Get) else entry.leases > 0

    def _check_visible(self) -> None:
        """Invariant 3: a visible key has all its bytes, of every shard, of the right content."""
        if not isinstance(self.pool, FakePool):
            return
        named = {}
        for engine in self.engines.values():
            for version, namespace in engine.session.namespaces.items():
                for prompt in range(PROMPTS):
                    named |= self._names(engine, version, namespace, prompt)
        for entry in self.pool._entries.values():
            if entry.state != "ready" or entry.key not in named:
                continue
            salt, prompt, chunk, group = named[entry.key]
            for shard in range(entry.shards):
                offset = entry.slot * self.pool.slab_bytes + shard * 1024
                right = value_of(salt + prompt, chunk, shard, group)
                value = self.copies.memory[offset]
                assert value == right or offset in self.corrupted, "wrong bytes are visible"

    _hash_frames: dict[int, bytes] = {}  # noqa: RUF012 - the same for every world

    def _names(self, engine, version, namespace, prompt):
        from support.pipeline_bed import HASH_BYTES, chain

        frame = self._hash_frames.setdefault(prompt, chain(prompt, 7))
        salt = engine.salts[version]
        return {
            key.tobytes(): (salt, prompt, chunk, group)
            for group in range(engine.groups)
            for chunk, key in enumerate(mix_keys(namespace, group, 0, frame, HASH_BYTES, 0, 1))
        }

    def _close_what_is_idle(self) -> None:
        """The registry closes a dead engine's mappings once the pipeline lets go of them."""
        for engine in list(self.dying):
            if not self.pipeline.busy(engine.session):
                self.closed |= set(engine.engine.layouts.values())
                self.dying.remove(engine)

    def _check_outcome(self, peer: Peer, outcome: Outcome) -> None:
        """Invariant 2: one end per rank and job; a repeated submit may only be told so."""
        key = (peer.generation, outcome.job)
        first = self.first_outcome.setdefault(key, outcome)
        assert outcome == first or outcome.reason == "tombstone", (first, outcome)
        owner = self.engines.get(peer.session.key.engine_id)
        if owner is not None and owner.session is peer.session and outcome.job in owner.jobs:
            owner.check_untouched(owner.jobs[outcome.job], peer.rank)
