"""The simulated world: a clock, a bad network, engines and sidecars that come and go.

Every step does one random thing and then checks the invariants of architecture.md section 3 that
can be seen from outside. ``saw(name)`` notes a situation that a run must have met. A failure names
the seed: run(seed) repeats it exactly.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from kvferry_connector import lookup, scheduler_half, worker_half
from kvferry_connector.jobs import Report
from kvferry_connector.log import LOGGER
from kvferry_connector.wire.hot import FromSidecar, JobState, NeedFull, Outcome
from kvferry_sidecar.sessions.model import Peer
from support.fake_pool import FakePool
from support.node_messages import engine_registration
from support.sim_checks import SimChecks
from support.sim_engine import SimEngine
from support.sim_network import SimFrame, SimNetwork
from support.sim_rank import Shape
from support.sim_sidecar import SimProcess, SimSidecar, Stored

SHAPES = (Shape("a", 1, 2, 1), Shape("b", 1, 2, 1), Shape("c", 2, 1, 2))
SLOTS = 24
# What breaks, by name; the copies' and the frames' faults are drawn where they happen.
FAULTS = (
    "sidecar killed", "sidecar stopped", "sidecar drained", "engine killed", "engine stopped",
    "rank killed", "rank stopped", "stream lost", "rotated", "cancelled", "corrupted",
    "clock jumped",
)  # fmt: skip


class World:
    """``pool``: a FakePool, or a native one with ``reopen`` to attach it after a death."""

    def __init__(self, seed: int, pool: Any = None, reopen: Any = None) -> None:
        self.rng = random.Random(seed)
        self.now_s = 1000.0
        self.network = SimNetwork(self.rng, self._deliver_up, self._deliver_down)
        self.pool = pool or FakePool(slots=SLOTS)
        self._reopen = reopen
        self.memory: dict[int, int] = {}  # the pool's payloads, by offset
        self.stores: dict[str, Stored] = {"disk": {}, "external": {}}
        self.corrupted: set[int] = set()
        self.seen: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.snapshots: list[Any] = []  # of sidecars that are gone
        self.engines: dict[str, SimEngine] = {}
        self.sidecar: SimSidecar | None = None
        self._epochs = self._inodes = self._instances = 0
        self._start_s = 0.0  # when the next sidecar starts
        self._pending: dict[str, float] = {}  # when the next life of an engine starts
        self._reported: set[tuple[bytes, int, int]] = set()
        self.checks = SimChecks(self)
        self.loaded = self.loads_failed = 0
        self._start_sidecar()
        for shape in SHAPES:
            self._start_engine(shape)

    def saw(self, name: str) -> None:
        """A situation of interest has come up."""
        self.seen[name] += 1

    def new_process(self) -> SimProcess:
        self._inodes += 1
        return SimProcess(self._inodes)

    # --- processes ----------------------------------------------------------------------------

    def _start_sidecar(self) -> None:
        self._epochs += 1
        if self._epochs > 1:
            if self._reopen is not None:
                self.pool = self._reopen(self._epochs)
            else:
                self.pool.recover()
                self.checks.kept = set(self.pool._entries)
        self.checks.forget()
        sidecar = SimSidecar(
            self._epochs, self.pool, self.memory, self.stores, self.rng, self._send_down
        )
        sidecar.now_s = self.now_s
        self.sidecar = sidecar

    def kill_sidecar(self) -> None:
        """kill -9: each half learns of it in its own time."""
        sidecar = self.sidecar
        assert sidecar is not None
        for part in sidecar.pipeline._jobs.open_parts().values():
            self.saw(f"the sidecar died with a {part.run.work.kind} {part.state.value}")
        if len(sidecar.pipeline._core.outbox):
            self.saw("the sidecar died with outcomes not acknowledged")
        if sidecar.pipeline._core.draining:
            self.saw("the sidecar drained" if sidecar.pipeline.drained() else "a drain was cut off")
        self._keep_books(sidecar)
        sidecar.kill()
        self.sidecar = None
        for engine in self.engines.values():
            for client in engine.clients():
                client.died(sidecar.epoch, self.now_s + self.rng.uniform(0, 0.3))
        self._start_s = self.now_s + self.rng.uniform(0, 0.5)

    def _keep_books(self, sidecar: SimSidecar) -> None:
        self.snapshots.append(sidecar.pipeline.snapshot())
        self.seen += sidecar.seen
        self.faults += sidecar.faults
        errors = {text.split(" {")[0] for text in sidecar.log.errors}
        assert errors <= {"checksum mismatch"}, sidecar.log.errors

    def _start_engine(self, shape: Shape) -> None:
        if not self._instances or self.rng.random() < 0.5:  # else: the very same ids again
            self._instances += 1
        version = bytes(16)

        def describe(config: Any, _cache: Any, _life: bytes) -> Any:
            parallel = config.parallel_config
            ranks = list(range(parallel.world_size))
            return engine_registration(ranks, life=parallel.life, version=version)

        with patch.object(scheduler_half, "describe_engine", describe):
            self.engines[shape.name] = SimEngine(self, shape, f"i{self._instances}")

    def kill_engine(self, name: str) -> None:
        """All its processes die, in any order; another life starts, perhaps before it is seen."""
        engine = self.engines.pop(name)
        self.loaded += engine.loaded
        self.loads_failed += engine.loads_failed
        for process in engine.processes:
            self._kill_process(process)
        self._pending[name] = self.now_s + self.rng.uniform(0, 0.4)

    def _kill_process(self, process: SimProcess) -> None:
        if process.alive:
            process.alive, process.seen_s = False, self.now_s + self.rng.uniform(0, 0.2)

    # --- network ------------------------------------------------------------------------------

    def _send_down(self, peer: Peer, message: FromSidecar) -> None:
        sidecar = self.sidecar
        assert sidecar is not None
        if isinstance(message, Outcome):
            self.checks.check_outcome(sidecar, peer, message)
        elif isinstance(message, JobState):
            self.saw(f"a rank asked for a job that is {message.state}")
        elif isinstance(message, NeedFull):
            self.saw("the full list was asked for")
        self.network.post(self.now_s, False, (sidecar.epoch, peer.generation), message)

    def _deliver_up(self, frame: SimFrame) -> None:
        if self.sidecar is not None:
            self.sidecar.take(frame, self.now_s)

    def _deliver_down(self, frame: SimFrame) -> None:
        for engine in self.engines.values():
            for client in engine.clients():
                link = client.published
                if link is not None and link.key == frame.key and client.process.alive:
                    client.inbox.append(frame)

    # --- one step -----------------------------------------------------------------------------

    def step(self) -> None:
        """One thing happens; then everything is looked at."""
        self.now_s += self.rng.expovariate(250)
        self._fault(self.rng.random())
        if self.sidecar is None and self.now_s >= self._start_s:
            self._start_sidecar()
        for name in [name for name, start_s in self._pending.items() if start_s <= self.now_s]:
            del self._pending[name]
            self._start_engine(next(shape for shape in SHAPES if shape.name == name))
        for name in [n for n, engine in self.engines.items() if engine.ends_s <= self.now_s]:
            self.kill_engine(name)
        if self.engines:
            engines = list(self.engines.values())
            for _ in range(4):
                self.rng.choice(engines).act()
        self._turn()
        self.checks.check()

    def _turn(self, *, whole: bool = False) -> None:
        sidecar = self.sidecar
        if sidecar is None or sidecar.runs(self.now_s):
            self.network.deliver(self.now_s)
        for engine in self.engines.values():
            for client in engine.clients():
                client.live_on(self.now_s)
        if sidecar is not None and sidecar.runs(self.now_s):
            while sidecar.copies.running and self.rng.random() < 0.6:
                sidecar.finish_a_copy()
            for tier in sidecar.tiers:
                tier.answering |= self.network.fair
                sidecar.finish_a_call(tier)
            sidecar.turn(self.now_s, whole=whole)
            drained = sidecar.pipeline._core.draining and sidecar.pipeline.drained()
            if drained or self.now_s >= sidecar.drain_until_s:
                self.kill_sidecar()

    def _fault(self, luck: float) -> None:
        """Now and then something breaks; each kind is counted."""
        sidecar = self.sidecar
        at = int(luck / 0.0016)
        if at >= len(FAULTS):
            return
        name = FAULTS[at]
        if not self.engines or (sidecar is None and name.startswith("sidecar")):
            return
        engine = self.rng.choice(list(self.engines.values()))
        match name:
            case "sidecar killed":
                self.kill_sidecar()
            case "sidecar stopped" if sidecar is not None:
                sidecar.stopped_until_s = self.now_s + self.rng.uniform(0, 1.0)
            case "sidecar drained" if sidecar is not None:
                sidecar.pipeline.drain(self.now_s)
                sidecar.drain_until_s = self.now_s + 0.25  # its supervisor's patience
            case "engine killed":
                self.kill_engine(engine.shape.name)
            case "rank killed":
                self._kill_process(self.rng.choice(engine.processes))
                engine.ends_s = self.now_s + self.rng.uniform(0, 0.6)  # the others notice then
            case "engine stopped":
                engine.stopped_until_s = self.now_s + self.rng.uniform(0, 1.2)
            case "rank stopped":
                rank = self.rng.choice(engine.ranks)
                rank.stopped_until_s = self.now_s + self.rng.uniform(0, 1.2)
            case "stream lost":
                self.rng.choice(engine.clients()).lose_stream(self.now_s)
            case "rotated":
                engine.half.rotate()
            case "cancelled":
                if not engine.half._jobs._open:
                    return
                engine.half._lookup.cancel(self.rng.choice(list(engine.half._jobs._open)))
            case "corrupted":
                if not self.memory:
                    return
                offset = self.rng.choice(self._leased() or list(self.memory))
                self.memory[offset] += 10**20
                self.corrupted.add(offset)
            case "clock jumped":
                self.now_s += self.rng.uniform(0, 0.6)
        self.faults[name] += 1

    def _leased(self) -> list[int]:
        """Where the bytes are that somebody was promised."""
        if not isinstance(self.pool, FakePool):
            return []
        slots = {entry.slot for entry in self.pool._entries.values() if entry.leases}
        return [offset for offset in self.memory if offset // self.pool.slab_bytes in slots]

    # --- the end of a run -------------------------------------------------------------------

    def settle(self) -> None:
        """No more faults: everything that is open must end, and nothing may be left."""
        self.network.fair = True
        for _ in range(900):
            self.now_s += 0.01
            if self.sidecar is None and self.now_s >= self._start_s:
                self._start_sidecar()
            for name in list(self._pending):
                del self._pending[name]
                self._start_engine(next(shape for shape in SHAPES if shape.name == name))
            for name in [n for n, e in self.engines.items() if e.ends_s < math.inf]:
                self.kill_engine(name)
            for engine in self.engines.values():
                engine.settle()
            for _ in range(4):
                self._turn(whole=True)
            self.checks.check()
        self._assert_idle()

    def _assert_idle(self) -> None:
        sidecar = self.sidecar
        assert sidecar is not None
        assert sidecar.pipeline.check() == []
        assert sidecar.pipeline.drained(), sidecar.pipeline.snapshot()
        stats = self.pool.stats()
        assert (stats.writing, stats.leased, stats.doomed) == (0, 0, 0)
        assert sidecar.registry.leaving == 0
        for engine in self.engines.values():
            assert not engine.half._jobs, f"jobs are left in {engine.shape.name}"
            assert engine.half._jobs.pinned_blocks == 0
            assert not engine.requests
            assert not engine.leaving
            assert engine.pool.room() == len(engine.pool.blocks) - 1
            assert engine.half._lookup._live == set()
            assert all(not rank.half._open for rank in engine.ranks)
            assert all(client.published and client.published.ready for client in engine.clients())
            self.loaded += engine.loaded
            self.loads_failed += engine.loads_failed
        self._keep_books(sidecar)
        assert self.snapshots[-1].violations == []

    def reported(self, engine: SimEngine, rank: int, job: int, end: Report) -> None:
        """A worker half tells the scheduler half of the end of a job."""
        key = (engine.life, rank, job)
        assert key not in self._reported, f"rank {rank} reports job {job} twice"
        self._reported.add(key)
        self.saw(f"report {end.status}/{end.reason}")


@contextmanager
def simulated(world: World) -> Iterator[World]:
    """Let the connector read the world's clock and its random numbers, and log nothing."""
    clock = SimpleNamespace(monotonic=lambda: world.now_s, perf_counter=lambda: world.now_s)
    chance = SimpleNamespace(urandom=world.rng.randbytes)
    logger = logging.getLogger(LOGGER)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with (
            patch.object(lookup, "time", clock),
            patch.object(worker_half, "time", clock),
            patch.object(scheduler_half, "time", clock),
            patch.object(scheduler_half, "os", chance),
        ):
            yield world
    finally:
        logger.setLevel(level)
