"""A simulated engine: the real scheduler half and worker halves under a small model of vLLM.

The model keeps vLLM's promises: hooks in vLLM's order, two steps in flight, ranks that run at
their own pace, a load ends when all ranks have reported it, blocks are reused the moment nobody
holds them. What a block holds says which tokens, weights, rank and group it was computed for, so
that a wrong, late or torn copy is seen.
"""

from __future__ import annotations

import math
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING

from kvferry_connector.meta import FerryHandshake, FerryWorkerMetadata
from kvferry_connector.scheduler_half import SchedulerHalf
from kvferry_connector.wire.attach import RegisterEngine
from kvferry_sidecar.sessions.registry import Offer
from support.pipeline_bed import BLOCK
from support.sim_blocks import (
    CHUNKS_MAX,
    PROMPTS,
    SimBlock,
    SimBlockPool,
    SimRequest,
    content,
    hashes_of,
    output_of,
)
from support.sim_client import SimClient, make_hello
from support.sim_rank import BLOCKS, CONFIG, Shape, SimRank, Step
from support.sim_sidecar import SimProcess

if TYPE_CHECKING:
    from support.sim_world import World

BATCH_TOKENS = 48
IN_FLIGHT_MAX = 2


class SimEngine:
    """One life of an engine."""

    def __init__(self, world: World, shape: Shape, instance: str) -> None:
        self.world, self.shape, self.instance = world, shape, instance
        self.rng = world.rng
        process = world.new_process()
        alone = shape.ranks == 1  # then one process is all halves
        self.life = self.rng.randbytes(16)
        self.pool = SimBlockPool(BLOCKS, self.rng, self._scribble)
        self.half = self._scheduler_half()
        self.client: SimClient | None = None
        self.half._make_client = lambda _config, _half, registration: self._client_of(
            registration, process
        )
        self.ranks = [
            SimRank(self, rank, process if alone else world.new_process())
            for rank in range(shape.ranks)
        ]
        self.processes = list(
            {id(p): p for p in (process, *(r.process for r in self.ranks))}.values()
        )
        self.half.attach(
            [FerryHandshake.of(rank, CONFIG, self.half._half) for rank in range(shape.ranks)]
        )
        self.half._jobs.pool = self.pool
        self.half._saver.manager = self
        self.requests: dict[str, SimRequest] = {}
        self.leaving: dict[str, SimRequest] = {}  # aborted while they load
        self.steps: deque[Step] = deque()
        self._receiving: dict[str, tuple[set[int], bool]] = {}
        self._names = 0
        self.stopped_until_s = 0.0
        self.ends_s = math.inf  # one of its processes is dead: when the others follow
        self.loaded = self.loads_failed = 0

    def _scheduler_half(self) -> SchedulerHalf:
        shape = self.shape
        spec = SimpleNamespace(block_size=BLOCK, dcp_sharded=False)
        return SchedulerHalf(
            SimpleNamespace(
                parallel_config=SimpleNamespace(
                    decode_context_parallel_size=1,
                    world_size=shape.ranks,
                    data_parallel_index=0,
                    life=self.life,
                ),
                kv_transfer_config=SimpleNamespace(
                    engine_id=shape.name, kv_load_failure_policy="recompute"
                ),
                instance_id=self.instance,
            ),
            SimpleNamespace(
                kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * shape.groups,
                num_blocks=BLOCKS,
            ),
            CONFIG,
        )

    def _client_of(self, registration: RegisterEngine, process: SimProcess) -> SimClient:
        hello = make_hello(self.shape.name, self.instance, -1, process.inode)
        self.client = SimClient(self.world, process, hello, registration, Offer())
        return self.client

    def clients(self) -> list[SimClient]:
        assert self.client is not None
        return [self.client, *(rank.client for rank in self.ranks)]

    def value(self, version: bytes, prompt: int, chunk: int, rank: int, group: int) -> int:
        return content(self.shape.model, version, prompt, chunk, rank, group)

    def get_blocks(self, name: str) -> SimpleNamespace:
        """As KVCacheManager: the full tables of a request."""
        return SimpleNamespace(blocks=tuple(self.requests[name].blocks))

    # --- what happens -------------------------------------------------------------------------

    def act(self) -> None:
        """One thing that an engine does next."""
        luck = self.rng.random()
        if self.world.now_s < self.stopped_until_s:
            return
        if not self.processes[0].alive and (luck < 0.35 or luck >= 0.85):
            return
        if luck < 0.10 and len(self.requests) < 6:
            self.new_request()
        elif luck < 0.13 and self.requests:
            self.abort(self.rng.choice(list(self.requests.values())))
        elif luck < 0.15:
            self._preempt()
        elif luck < 0.35 and len(self.steps) < IN_FLIGHT_MAX:
            self.schedule()
        elif luck < 0.85:
            busy = [rank for rank in self.ranks if rank.runs(self.world.now_s)]
            if busy:
                self.rng.choice(busy).run()
        else:
            self.process()

    def new_request(self) -> SimRequest:
        self._names += 1
        tokens = self.rng.randrange(10, (CHUNKS_MAX - 2) * BLOCK)
        request = SimRequest(
            f"{self.shape.name}{self._names}",
            self.rng.randrange(PROMPTS),
            tokens,
            self.rng.randrange(1, 2 * BLOCK),
            self.rng.choice((0, 0, 0, BLOCK, 2 * BLOCK)),
            self.shape.groups,
        )
        request.local_tokens = min(request.local_tokens, (tokens - 1) // BLOCK * BLOCK)
        self.requests[request.request_id] = request
        self.half.new_request(request)
        return request

    def abort(self, request: SimRequest) -> None:
        """vLLM finishes it: at once, or once its load has ended."""
        if request.in_flight:
            return
        self.half.finished(request)  # it holds its blocks still: what it gathered is saved
        del self.requests[request.request_id]
        if request.state == "loading":
            self.world.saw("aborted while it loads")
            self.leaving[request.request_id] = request
        else:
            self._free(request)

    def _preempt(self) -> None:
        running = [r for r in self.requests.values() if r.state == "running" and not r.in_flight]
        if running:
            request = self.rng.choice(running)
            self._free(request)
            request.state, request.num_computed_tokens = "waiting", 0
            request.num_preemptions += 1

    def schedule(self) -> None:
        """One scheduling pass; its step is in flight afterwards."""
        scheduled: dict[str, int] = {}
        writes: list[tuple[int, int, list[SimBlock]]] = []
        named = []
        version = self.half._version
        for request in list(self.requests.values()):
            if request.state == "loading" or request.in_flight:
                continue
            tokens = self._admit(request)
            if tokens:
                scheduled[request.request_id] = tokens
                named.append(request)
                writes += self._computed(request, request.num_computed_tokens, tokens)
        output = output_of(scheduled)
        meta = self.half.build(output)
        for request in named:
            request.num_computed_tokens += scheduled[request.request_id]
            request.in_flight += 1
        step = Step(meta, output, version, writes, named)
        self.steps.append(step)
        for rank in self.ranks:
            rank.ahead.append(step)
        if not scheduled and not self.half.pending() and self.half._jobs:
            self.world.saw("the engine would sleep with jobs open")

    def _admit(self, request: SimRequest) -> int:
        """Return how many tokens of a request this step computes, allocating its blocks."""
        external = 0
        if request.state == "waiting":
            found, later = self.half.matched(request, request.local_tokens)
            if found is None:
                self.world.saw("asked again later")
                return 0
            assert later == (found > 0)
            external = found
            request.num_computed_tokens = request.local_tokens
        have = request.num_computed_tokens
        tokens = 0 if external else min(BATCH_TOKENS, request.num_tokens - have)
        wanted = -(-(have + external + tokens) // BLOCK)
        missing = wanted - (len(request.blocks[0]) if request.blocks else 0)
        if missing * self.shape.groups > self.pool.room():
            if external:
                self.world.saw("a hit without blocks")
            return 0
        request.blocks = request.blocks or [[] for _ in range(self.shape.groups)]
        for group in request.blocks:
            group.extend(self.pool.take(missing))
        if request.state == "waiting":
            self._write(request, 0, request.local_tokens)
        blocks = SimpleNamespace(blocks=tuple(request.blocks))
        self.half.allocated(request, blocks, external)
        if not external:
            request.state = "running"
            return tokens
        admission = self.half._requests[request.request_id].admission
        assert self.half.loaded_groups(request) == tuple(range(self.shape.groups))
        request.state, request.load = "loading", (have, have + external, admission.version)
        return 0

    def _computed(
        self, request: SimRequest, start: int, tokens: int
    ) -> list[tuple[int, int, list[SimBlock]]]:
        chunks = range(start // BLOCK, (start + tokens) // BLOCK)
        return [(request.prompt, chunk, [g[chunk] for g in request.blocks]) for chunk in chunks]

    def _write(self, request: SimRequest, start: int, end: int) -> None:
        """What the engine's own prefix cache holds of it."""
        for prompt, chunk, blocks in self._computed(request, start, end - start):
            for rank in self.ranks:
                for group, block in enumerate(blocks):
                    value = self.value(self.half._version, prompt, chunk, rank.rank, group)
                    rank.layouts[group].values[block.block_id] = value

    def settle(self) -> None:
        """Run everything that is there to its end, and start nothing new."""
        for request in list(self.requests.values()):
            if request.state != "loading":
                self.abort(request)
        if not self.steps:
            self.schedule()
        for rank in self.ranks:
            while rank.ahead:
                rank.run()
        while self.steps and len(self.steps[0].finished) == len(self.ranks):
            self.process()

    # --- the end of a step --------------------------------------------------------------------

    def process(self) -> None:
        """Take the output of the oldest step, once all ranks have run it."""
        if not self.steps or len(self.steps[0].finished) < len(self.ranks):
            return
        step = self.steps.popleft()
        meta: FerryWorkerMetadata | None = None
        for rank, (_, reports) in sorted(step.finished.items()):
            self._note_reports(rank, reports)
            if reports is not None:
                meta = reports if meta is None else meta.aggregate(reports)
        if meta is not None:
            self.half.reported(meta)
        finished, failed = self._received(step)
        if finished or failed:
            self.half.loaded(SimpleNamespace(finished_recving=finished, failed_recving=failed))
            for name in sorted(finished):
                self._load_ended(name, ok=name not in failed)
        for request in step.requests:
            request.in_flight -= 1
            if request.num_computed_tokens >= request.num_tokens and request.state == "running":
                self._sampled(request)

    def _note_reports(self, rank: int, reports: FerryWorkerMetadata | None) -> None:
        for job, ends in (reports.reports if reports is not None else {}).items():
            assert len(ends) == 1, f"job {job} has {len(ends)} ends on rank {rank}"
            self.world.reported(self, rank, job, ends[0])

    def _received(self, step: Step) -> tuple[set[str], set[str]]:
        """As vLLM's aggregator: a load has ended when every rank said so."""
        finished, failed = set(), set()
        for rank, (results, _) in step.finished.items():
            assert results.failed_recving <= results.finished_recving, "failed is also finished"
            for name in results.finished_recving:
                ranks, bad = self._receiving.setdefault(name, (set(), False))
                assert rank not in ranks, f"rank {rank} reports the load of {name} twice"
                ranks.add(rank)
                self._receiving[name] = (ranks, bad or name in results.failed_recving)
        for name, (ranks, bad) in list(self._receiving.items()):
            if len(ranks) == len(self.ranks):
                del self._receiving[name]
                finished.add(name)
                if bad:
                    failed.add(name)
        return finished, failed

    def _load_ended(self, name: str, *, ok: bool) -> None:
        request = self.requests.get(name) or self.leaving.pop(name, None)
        assert request is not None, f"the load of {name}, which nobody waits for, has ended"
        assert request.state == "loading", f"{name} is reported while it is {request.state}"
        if name not in self.requests:
            self._free(request)
            return
        if not ok:
            self.loads_failed += 1
            request.failures += 1
            assert request.failures <= 2, f"{name} fails again and again"
            self._free(request)
            request.state, request.num_computed_tokens = "waiting", 0
            return
        self._check_loaded(request)
        request.state, request.num_computed_tokens = "loaded", request.load[1]

    def _check_loaded(self, request: SimRequest) -> None:
        self.loaded += 1
        local, total, version = request.load
        for prompt, chunk, blocks in self._computed(request, local, total - local):
            for rank in self.ranks:
                for group, block in enumerate(blocks):
                    wanted = self.value(version, prompt, chunk, rank.rank, group)
                    found = rank.layouts[group].values.get(block.block_id)
                    assert found == wanted, f"wrong bytes in block {block.block_id}"

    def _sampled(self, request: SimRequest) -> None:
        request.decode_tokens -= 1
        if request.decode_tokens and request.num_tokens + 1 < len(hashes_of(0)) * BLOCK:
            request.num_tokens += 1
        elif request.in_flight == 0:
            self.abort(request)

    def _free(self, request: SimRequest) -> None:
        self.pool.free_blocks(request.all_blocks())
        request.blocks = []

    def _scribble(self, block_id: int) -> None:
        """Nobody holds the block: something else is in it at once."""
        for rank in self.ranks:
            for layout in rank.layouts:
                layout.values[block_id] = -self.rng.randrange(1, 10**9)
