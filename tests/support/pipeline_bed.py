"""A pipeline between fake halves: sessions, peers, fences, and messages as halves make them."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kvferry_connector.wire.codec import encode_job
from kvferry_connector.wire.hot import (
    Answer,
    Ask,
    FromSidecar,
    Job,
    LoadJob,
    Outcome,
    OutcomeAck,
    Probe,
    SaveJob,
    Submit,
    TableSlice,
)
from kvferry_connector.wire.names import BOUND_STEP_OFFSET, DONE_STEP_OFFSET, NO_VERSION
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.pipeline import Pipeline
from kvferry_sidecar.sessions.model import Peer, RankGeometry, RankGroup, Session, SessionKey
from kvferry_sidecar.slow_tiers import Policy
from kvferry_sidecar.stages.modes import DEFAULT_MODES, LoadModes
from kvferry_sidecar.stages.stores import Tier
from kvferry_sidecar.tiers.host import HostTier
from support.fake_copies import FakeCopies, FakeLayout
from support.fake_pool import FakePool
from support.fake_tier import FakeTier

BLOCK = 16
HASH_BYTES = 32


class FakeFence:
    """The two words of an engine's fence page."""

    def __init__(self) -> None:
        self.words = {BOUND_STEP_OFFSET: 0, DONE_STEP_OFFSET: 0}

    def load_u64(self, offset: int) -> int:
        return self.words[offset]

    def reach(self, step: int) -> None:
        self.words = dict.fromkeys(self.words, step)


class NullLog:
    """Swallows what the pipeline logs, keeping errors: each of them is a bug."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def debug(self, event: str, **facts: object) -> None: ...
    def info(self, event: str, **facts: object) -> None: ...

    def warning(self, event: str, **facts: object) -> None:
        logging.getLogger("pipeline").debug("%s %s", event, facts)

    def error(self, event: str, **facts: object) -> None:
        self.errors.append(f"{event} {facts}")


def chain(prompt: int, chunks: int, first: int = 0) -> bytes:
    """Hashes number ``first`` .. ``chunks - 1`` of an endless prompt with this number."""
    return b"".join(
        hashlib.blake2b(b"%d/%d" % (prompt, i), digest_size=HASH_BYTES).digest()
        for i in range(first, chunks)
    )


def table(ids: list[int]) -> bytes:
    return np.array(ids, dtype="<i4").tobytes()


@dataclass
class Engine:
    """A session with its halves, as registration would have made it."""

    session: Session
    scheduler: Peer
    workers: list[Peer]
    layouts: dict[tuple[int, int], FakeLayout]  # (rank, group)

    def fence(self, rank: int = 0) -> FakeFence:
        fence = self.workers[rank].fence
        assert isinstance(fence, FakeFence)
        return fence


def make_engine(
    name: str = "e",
    *,
    ranks: int = 1,
    groups: int = 1,
    num_blocks: int = 64,
    first_generation: int = 1,
    life: bytes = b"L" * 16,
    save_rule: str = "all",
    kinds: Sequence[dict[str, Any]] = (),
    retention: int | None = 0,
    alignment: int = 0,
) -> Engine:
    """``kinds``: fields of each group's RankGroup; without them, ``groups`` of full attention."""
    kinds = kinds or [{"save_rule": save_rule}] * groups
    blocks = [kind.get("block_tokens", BLOCK) for kind in kinds]
    step = math.lcm(*blocks)
    session = Session(
        SessionKey(name, "i"),
        life=life,
        version=NO_VERSION,
        ranks=tuple(range(ranks)),
        scheduler_block_tokens=step,
        alignment_tokens=alignment or step,
        retention_tokens=retention,
        ready=True,
        namespaces={NO_VERSION: b"n" * 16},
    )
    scheduler = Peer(session, "scheduler", -1, first_generation, b"", 1, 0, 0)
    session.scheduler = scheduler
    layouts = {(r, g): FakeLayout(num_blocks) for r in range(ranks) for g in range(len(kinds))}
    for rank in range(ranks):
        rank_groups = tuple(
            _rank_group(g, layouts[rank, g], num_blocks, kind) for g, kind in enumerate(kinds)
        )
        session.workers[rank] = Peer(
            session,
            "worker",
            rank,
            first_generation + 1 + rank,
            b"",
            1,
            0,
            0,
            fence=FakeFence(),
            geometry=RankGeometry(1, rank_groups, {}, b"d", BLOCK, position=(rank, 0, 0)),
        )
    return Engine(session, scheduler, list(session.workers.values()), layouts)


def _rank_group(group: int, layout: FakeLayout, num_blocks: int, kind: dict[str, Any]) -> RankGroup:
    fields = {"kind": "full", "block_tokens": BLOCK, "save_rule": "all"} | kind
    return RankGroup(
        group=group,
        layout=layout,
        payload_bytes=1024,
        num_blocks=num_blocks,
        **fields,
    )


@dataclass
class Bed:
    """The pipeline under test, its clock, and what it sent."""

    limits: Limits = field(default_factory=Limits)
    slots: int = 64
    modes: LoadModes = DEFAULT_MODES
    now_s: float = 100.0
    sources: Sequence[str] = ()  # of the slower tiers
    policy: Policy = "all"
    sent: list[tuple[Peer, FromSidecar]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = FakePool(self.slots)
        self.pool.clock = lambda: self.now_s
        self.copies = FakeCopies()
        self.log = NullLog()
        self.slow = [
            FakeTier(self.copies, self.pool.address, source=source) for source in self.sources
        ]
        self.tiers = [Tier(slow.name, slow.source, slow, self.policy) for slow in self.slow]
        self.pipeline = Pipeline(
            tiers=self.tiers,
            pool=HostTier(self.pool),
            copies=self.copies,
            send=lambda peer, message: self.sent.append((peer, message)),
            limits=self.limits,
            modes=self.modes,
            log=self.log,
        )
        self._jobs = 0

    def say(self, peer: Peer, message: object, raw: list[bytes] | None = None) -> list[FromSidecar]:
        """Deliver one message; returns what was sent to that peer meanwhile."""
        before = len(self.sent)
        self.pipeline.on_message(peer, message, raw or [], self.now_s)
        return [message for to, message in self.sent[before:] if to is peer]

    def take(self, kind: type, peer: Peer | None = None) -> list:
        """Return and forget the sent messages of one kind."""
        found = [m for p, m in self.sent if isinstance(m, kind) and (peer is None or p is peer)]
        self.sent = [
            (p, m)
            for p, m in self.sent
            if not (isinstance(m, kind) and (peer is None or p is peer))
        ]
        return found

    def pass_s(self, seconds: float) -> float:
        self.now_s += seconds
        return self.pipeline.on_tick(self.now_s)

    def run_stores(self) -> None:
        """Let every call into a slower tier return, and those that follow from it."""
        while any(slow.open for slow in self.slow):
            for slow in self.slow:
                slow.finish_all()
            self.pipeline.on_stores(self.now_s)
            self.pipeline.on_tick(self.now_s)

    def run_copies(self) -> None:
        self.copies.finish_all()
        self.pipeline.on_copies(self.now_s)

    # --- as halves speak --------------------------------------------------------------------

    def next_job(self) -> int:
        self._jobs += 1
        return self._jobs

    def probe(
        self, engine: Engine, admission: int, prompt: int, chunks: int, start: int = 0,
        former: int = 0,
    ) -> list[FromSidecar]:  # fmt: skip
        hashes = chain(prompt, chunks, start)
        before = chain(prompt, start, start - 1) if start else b""
        message = Probe(
            f"r{admission}",
            admission,
            engine.session.version,
            start,
            chunks,
            chunks * BLOCK + 1,
            HASH_BYTES,
            before,
            former=former,
        )
        return self.say(engine.scheduler, message, [hashes])

    def ask(
        self, engine: Engine, admission: int, *, local: int = 0, most: int = 1 << 20, seq: int = 1
    ) -> Answer:
        replies = self.say(engine.scheduler, Ask(admission, seq, local, most))
        assert isinstance(replies[0], Answer), replies
        return replies[0]

    def save_job(
        self, engine: Engine, prompt: int, blocks: list[int], *, first: int = 0, step: int = 0
    ) -> tuple[SaveJob, list[bytes]]:
        groups = len(engine.workers[0].geometry.groups)
        end = first + len(blocks)
        job = SaveJob(
            self.next_job(),
            engine.session.life,
            engine.session.version,
            "r",
            0,
            step,
            first * BLOCK,
            end * BLOCK,
            first,
            HASH_BYTES,
            [TableSlice(g, first, len(blocks)) for g in range(groups)],
        )
        return job, [table(blocks) * groups, chain(prompt, end, first)]

    def load_job(
        self,
        engine: Engine,
        admission: int,
        blocks: list[int],
        *,
        local: int = 0,
        step: int = 0,
    ) -> tuple[LoadJob, list[bytes]]:
        groups = len(engine.workers[0].geometry.groups)
        first = local // BLOCK
        job = LoadJob(
            self.next_job(),
            engine.session.life,
            engine.session.version,
            "r",
            admission,
            step,
            local,
            local + len(blocks) * BLOCK,
            [TableSlice(g, first, len(blocks)) for g in range(groups)],
        )
        return job, [table(blocks) * groups]

    def submit(self, peer: Peer, job: Job, raw: list[bytes]) -> list[FromSidecar]:
        return self.say(peer, Submit(encode_job(job)), raw)

    def stored(self, engine: Engine, prompt: int, chunks: int) -> None:
        """Save a prompt's chunks, all ranks, and acknowledge."""
        blocks = list(range(1, chunks + 1))
        for (rank, group), layout in engine.layouts.items():
            for index, block in enumerate(blocks):
                layout.values[block] = value_of(prompt, index, rank, group)
        job, raw = self.save_job(engine, prompt, blocks)
        for worker in engine.workers:
            self.submit(worker, job, raw)
        self.run_copies()
        for worker in engine.workers:
            (outcome,) = self.take(Outcome, worker)
            assert outcome.status == "done", outcome
            self.say(worker, OutcomeAck([job.job]))

    def assert_clean(self) -> None:
        """Nothing is open, leased or reserved, and every account is right."""
        assert self.pipeline.check() == []
        assert self.log.errors == []
        stats = self.pool.stats()
        assert (stats.writing, stats.leased, stats.doomed) == (0, 0, 0)
        assert self.pipeline.drained()


def value_of(prompt: int, chunk: int, rank: int, group: int) -> int:
    """What the engine's block holds for this chunk: every shard has its own value."""
    return ((prompt * 1000 + chunk) * 100 + rank) * 10 + group + 1
