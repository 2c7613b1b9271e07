"""Simulated engines: a scheduler half and worker halves that behave, over a network that does not.

They keep the promises of the connector: one outcome per rank ends a job there, blocks are reused
the moment every rank has ended, a heartbeat names every lease that is still counted on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from kvferry_connector.wire.attach import Heartbeat
from kvferry_connector.wire.codec import encode_job
from kvferry_connector.wire.hot import (
    Answer,
    Ask,
    Cancel,
    FromHalf,
    FromSidecar,
    Job,
    JobState,
    JobStatus,
    LoadJob,
    NeedFull,
    Outcome,
    OutcomeAck,
    Probe,
    Release,
    SaveJob,
    Submit,
    TableSlice,
)
from kvferry_sidecar.sessions.model import Peer
from support.fake_copies import FakeCopies
from support.pipeline_bed import (
    BLOCK,
    HASH_BYTES,
    Engine,
    chain,
    make_engine,
    table,
    value_of,
)

PROMPTS = 3
ASK_AFTER_S = 0.3  # job_ask_ms of these halves
SendUp = Callable[[Peer, FromHalf, list[bytes]], None]


@dataclass(eq=False)
class SimRequest:
    number: int
    prompt: int
    chunks: int
    version: bytes
    local: int = 0
    seq: int = 0
    leased: int = 0
    state: str = "probed"  # probed, asked, leased, loading


@dataclass(eq=False)
class SimJob:
    job: Job
    raw: list[bytes]
    blocks: list[int]
    prompt: int
    salt: int
    request: SimRequest | None
    asked_s: dict[int, float]  # by rank that has not ended
    ends: dict[int, str] = field(default_factory=dict)


@dataclass(eq=False)
class SimEngine:
    """One life of an engine."""

    name: str
    model: int
    ranks: int
    groups: int
    generation: int
    rng: random.Random
    send_up: SendUp
    copies: FakeCopies
    alive: bool = True

    def __post_init__(self) -> None:
        life = self.rng.randbytes(16)
        self.engine: Engine = make_engine(
            self.name,
            ranks=self.ranks,
            groups=self.groups,
            first_generation=self.generation,
            life=life,
        )
        self.session = self.engine.session
        self.scheduler = self.engine.scheduler
        self.salts = {self.session.version: self.model * 100}
        self.session.namespaces = {self.session.version: bytes([self.model]) * 16}
        self.free = list(range(1, 64))
        self.jobs: dict[int, SimJob] = {}
        self.requests: dict[int, SimRequest] = {}
        self.step = 1
        self.seq = 0
        self.numbers = 0
        self.loaded = 0

    def peers(self) -> list[Peer]:
        return [self.scheduler, *self.engine.workers]

    # --- what the engine does ---------------------------------------------------------------

    def rotate(self) -> None:
        version = self.rng.randbytes(16)
        self.session.version = version
        self.session.namespaces[version] = self.rng.randbytes(16)
        self.salts[version] = self.rng.randrange(1000, 10**6)

    def advance(self) -> None:
        self.step += 1
        for rank in range(self.ranks):
            self.engine.fence(rank).reach(self.step)

    def new_request(self) -> None:
        self.numbers += 1
        request = SimRequest(
            self.numbers,
            self.rng.randrange(PROMPTS),
            self.rng.randrange(1, 7),
            self.session.version,
            BLOCK * max(0, self.rng.randrange(4) - 2),
        )
        self.requests[request.number] = request
        self.probe(request, 0)

    def probe(self, request: SimRequest, start: int) -> None:
        total = request.chunks
        before = chain(request.prompt, start, start - 1) if start else b""
        message = Probe(
            "r",
            request.number,
            request.version,
            start,
            total,
            total * BLOCK + 1,
            HASH_BYTES,
            before,
        )
        self.send_up(self.scheduler, message, [chain(request.prompt, total, start)])

    def grow(self, request: SimRequest) -> None:
        start, request.chunks = request.chunks, request.chunks + 1
        self.probe(request, start)

    def ask(self, request: SimRequest) -> None:
        self.seq += 1
        request.seq, request.state = self.seq, "asked"
        most = request.chunks * BLOCK
        self.send_up(self.scheduler, Ask(request.number, self.seq, request.local, most), [])

    def drop(self, request: SimRequest, *, tell: bool) -> None:
        self.requests.pop(request.number, None)
        if tell:
            self.send_up(self.scheduler, Release([request.number]), [])

    def load(self, request: SimRequest, now_s: float) -> None:
        count = (request.leased - request.local) // BLOCK
        if count > len(self.free):
            return
        request.state = "loading"
        first = request.local // BLOCK
        blocks = self._allocate(count)
        self._start(
            LoadJob(
                self._next(),
                self.session.life,
                request.version,
                "r",
                request.number,
                self.step + self.rng.randrange(3),
                request.local,
                request.leased,
                [TableSlice(g, first, count) for g in range(self.groups)],
            ),
            [table(blocks) * self.groups],
            blocks,
            request.prompt,
            request,
            now_s,
        )

    def save(self, now_s: float) -> None:
        prompt, first = self.rng.randrange(PROMPTS), max(0, self.rng.randrange(6) - 3)
        count = self.rng.randrange(1, 4)
        if count > len(self.free):
            return
        version = self.session.version
        blocks = self._allocate(count)
        for (rank, group), layout in self.engine.layouts.items():
            for index, block in enumerate(blocks):
                layout.values[block] = self.value(version, prompt, first + index, rank, group)
        self._start(
            SaveJob(
                self._next(),
                self.session.life,
                version,
                "r",
                0,
                self.step + self.rng.randrange(3),
                first * BLOCK,
                (first + count) * BLOCK,
                first,
                HASH_BYTES,
                [TableSlice(g, first, count) for g in range(self.groups)],
            ),
            [table(blocks) * self.groups, chain(prompt, first + count, first)],
            blocks,
            prompt,
            None,
            now_s,
        )

    def cancel(self) -> None:
        if self.jobs:
            self.send_up(self.scheduler, Cancel(self.rng.choice(list(self.jobs))), [])

    def beat(self) -> Heartbeat:
        counted = [r.number for r in self.requests.values() if r.state != "probed"]
        loading = [j.request.number for j in self.jobs.values() if j.request is not None]
        return Heartbeat(0, self.seq, counted + loading)

    def ask_for_jobs(self, now_s: float) -> None:
        for number, sim in self.jobs.items():
            for rank, asked_s in sim.asked_s.items():
                if now_s - asked_s > ASK_AFTER_S:
                    sim.asked_s[rank] = now_s
                    self.send_up(self.engine.workers[rank], JobStatus(number), [])

    # --- what it hears ----------------------------------------------------------------------

    def on_message(self, peer: Peer, message: FromSidecar, now_s: float) -> None:
        match message:
            case Outcome():
                self.send_up(peer, OutcomeAck([message.job]), [])
                self._end(message.job, peer.rank, message.status)
            case JobState(state="unknown"):
                self._end(message.job, peer.rank, "failed")
            case Answer():
                self._answered(message)
            case NeedFull():
                request = self.requests.get(message.admission)
                if request is not None and request.state in {"probed", "asked"}:
                    request.state = "probed"
                    self.probe(request, 0)

    def _answered(self, answer: Answer) -> None:
        request = self.requests.get(answer.admission)
        if request is None or request.state != "asked" or request.seq != answer.seq:
            return
        if answer.hit_tokens > request.local:
            request.state, request.leased = "leased", answer.hit_tokens
        else:
            assert not answer.sources
            request.state = "probed"

    def _end(self, number: int, rank: int, status: str) -> None:
        sim = self.jobs.get(number)
        if sim is None or rank not in sim.asked_s:
            return
        del sim.asked_s[rank]
        sim.ends[rank] = status
        self.check_untouched(sim, rank)
        if sim.asked_s:
            return
        del self.jobs[number]
        if isinstance(sim.job, LoadJob) and set(sim.ends.values()) == {"done"}:
            self._check_loaded(sim)
        for layout in self.engine.layouts.values():
            for block in sim.blocks:
                layout.values[block] = -self.rng.randrange(1, 10**9)  # reused at once
        self.free += sim.blocks
        if sim.request is not None:
            self.drop(sim.request, tell=self.rng.random() < 0.7)

    def check_untouched(self, sim: SimJob, rank: int) -> None:
        """Invariant 1: after its end on a rank, no copy touches the job's blocks there."""
        mine = {layout for (r, _), layout in self.engine.layouts.items() if r == rank}
        for copy in self.copies.running.values():
            if copy.extents.layout in mine:
                touched = np.intersect1d(copy.extents.blocks, sim.blocks)
                assert not len(touched), f"job {sim.job.job} ended, blocks {touched} are copied"

    def _check_loaded(self, sim: SimJob) -> None:
        self.loaded += 1
        first = sim.job.local_tokens // BLOCK
        for (rank, group), layout in self.engine.layouts.items():
            for index, block in enumerate(sim.blocks):
                wanted = value_of(sim.salt + sim.prompt, first + index, rank, group)
                assert layout.values[block] == wanted, f"wrong bytes in block {block}"

    def value(self, version: bytes, prompt: int, chunk: int, rank: int, group: int) -> int:
        return value_of(self.salts[version] + prompt, chunk, rank, group)

    # --- helpers ----------------------------------------------------------------------------

    def _start(
        self,
        job: Job,
        raw: list[bytes],
        blocks: list[int],
        prompt: int,
        request: SimRequest | None,
        now_s: float,
    ) -> None:
        salt = self.salts[job.version]
        asked = dict.fromkeys(range(self.ranks), now_s)
        self.jobs[job.job] = SimJob(job, raw, blocks, prompt, salt, request, asked)
        encoded = encode_job(job)
        for worker in self.engine.workers:
            self.send_up(worker, Submit(encoded), raw)

    def _allocate(self, count: int) -> list[int]:
        self.rng.shuffle(self.free)
        blocks, self.free = self.free[:count], self.free[count:]
        return blocks

    def _next(self) -> int:
        self.numbers += 1
        return self.numbers
