"""A rank of a simulated engine: the real worker half over memory that is a dict."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvferry_connector.config import FerryConfig
from kvferry_connector.meta import FerryMetadata
from kvferry_connector.wire.attach import Group, Shard
from kvferry_connector.wire.names import BOUND_STEP_OFFSET, DONE_STEP_OFFSET
from kvferry_connector.worker_half import WorkerHalf
from kvferry_sidecar.sessions.model import RankGeometry, RankGroup
from kvferry_sidecar.sessions.registry import Offer
from support.fake_copies import FakeLayout
from support.node_messages import rank_registration
from support.parallel import parallel_config
from support.pipeline_bed import BLOCK
from support.sim_blocks import SimBlock, SimRequest
from support.sim_client import SimClient, make_hello
from support.sim_sidecar import SimProcess

if TYPE_CHECKING:
    from support.sim_engine import SimEngine

BLOCKS = 48
CONFIG = FerryConfig(
    run_dir="/simulated",
    lookup_wait_us_max=0,
    probe_ms_max=60,
    job_ask_ms=100,
    pinned_blocks_max=16,
    awake_ms_max=1500,
)


@dataclass(frozen=True)
class Shape:
    """What kind of engine: those of one ``model`` share a cache."""

    name: str
    model: int
    ranks: int
    groups: int


@dataclass(eq=False)
class Step:
    """One step in flight. ``writes``: (request's prompt, chunk, blocks by group) it computes."""

    meta: FerryMetadata
    output: SimpleNamespace
    version: bytes
    writes: list[tuple[int, int, list[SimBlock]]]
    requests: list[SimRequest]
    finished: dict[int, Any] = field(default_factory=dict)  # by rank


class SimFence:
    """A fence page: the worker half writes it, the sidecar reads it."""

    def __init__(self) -> None:
        self.words = {BOUND_STEP_OFFSET: 0, DONE_STEP_OFFSET: 0}

    def bound(self, step: int) -> None:
        self.words[BOUND_STEP_OFFSET] = step

    def done(self, step: int) -> None:
        self.words[DONE_STEP_OFFSET] = step

    def load_u64(self, offset: int) -> int:
        return self.words[offset]

    def close(self) -> None: ...


class SimRank:
    """One rank: its worker half, its memory, and the steps it has still to run."""

    def __init__(self, engine: SimEngine, rank: int, process: SimProcess) -> None:
        self.engine, self.rank, self.process = engine, rank, process
        shape = engine.shape
        self.layouts = [FakeLayout(BLOCKS) for _ in range(shape.groups)]
        self.fence = SimFence()
        self.ahead: deque[Step] = deque()
        self.bound = False
        self.stopped_until_s = 0.0
        self.half = WorkerHalf(
            SimpleNamespace(parallel_config=parallel_config(rank, tp_size=shape.ranks)),
            None,
            CONFIG,
        )
        self.half._fence = self.fence
        geometry = RankGeometry(
            1,
            tuple(
                RankGroup(g, "full", BLOCK, layout, 1024, BLOCKS, "all")
                for g, layout in enumerate(self.layouts)
            ),
            {"model": str(shape.model)},
            bytes([shape.model]) * 16,
            BLOCK,
            (rank, 0, 0),
        )
        registration = rank_registration(
            rank,
            shard=Shard(tp_rank=rank, tp_size=shape.ranks),
            identity={"model": str(shape.model)},
            num_blocks=BLOCKS,
            groups=[Group(g, "full", BLOCK, {}, [f"l{g}"]) for g in range(shape.groups)],
        )
        self.client = SimClient(
            engine.world,
            process,
            make_hello(shape.name, engine.instance, rank, process.inode),
            registration,
            Offer(self.fence, {0: geometry}),
        )
        self.half._client = self.client
        self.client.set_acks(self.half._acks)
        self.half._acks_max = 0  # by messages of their own, so that their loss is met

    def runs(self, now_s: float) -> bool:
        """Whether it has something to do and gets to do it."""
        return bool(self.ahead) and self.process.alive and now_s >= self.stopped_until_s

    def run(self) -> None:
        """Half a step: bind, or the forward pass and its end."""
        step = self.ahead[0]
        if not self.bound:
            self.half.bind(step.meta)
            self.bound = True
            return
        self.bound = False
        self.ahead.popleft()
        for prompt, chunk, blocks in step.writes:
            for group, block in enumerate(blocks):
                value = self.engine.value(step.version, prompt, chunk, self.rank, group)
                self.layouts[group].values[block.block_id] = value
        self.half.end_forward()
        results = self.half.results()
        step.finished[self.rank] = (results, self.half.worker_metadata())
