"""The sidecar's pipeline in this process, between engines made of nothing: what it costs itself.

The pool and its index are real, sessions are as registration would have made them, fences have
passed, and every copy ends at once without moving a byte.
"""

from __future__ import annotations

import os
from typing import cast

import kvferry_native as native
import numpy as np
from kvferry_connector.wire.codec import encode_job
from kvferry_connector.wire.hot import (
    Answer,
    Ask,
    FromHalf,
    FromSidecar,
    Job,
    LoadJob,
    Outcome,
    OutcomeAck,
    Probe,
    Release,
    SaveJob,
    Submit,
    TableSlice,
)
from kvferry_connector.wire.names import NO_VERSION
from kvferry_sidecar.engines.base import CopyResult, CopyStatus, Direction, Extents
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.pipeline import Pipeline
from kvferry_sidecar.sessions.model import Peer, RankGeometry, RankGroup, Session, SessionKey
from kvferry_sidecar.tiers.host import HostTier

BLOCK_TOKENS = 16
HASH_BYTES = 32
SHARD_BYTES = 32
NUM_BLOCKS = 1 << 17
SLAB_BYTES = 1 << 20
SLOT_BYTES = 512  # holds the stripe of eight such shards
NOW_S = 100.0


class _Passed:
    """A fence page whose steps have all passed."""

    def load_u64(self, _offset: int) -> int:
        return 1 << 60


class _Instant:
    """A copy engine that moves nothing."""

    def __init__(self) -> None:
        self._done: list[CopyResult] = []

    def wake_fd(self) -> int:
        return -1

    def submit(self, ticket: int, direction: Direction, extents: Extents) -> None:
        crcs = np.zeros(len(extents.blocks), np.uint32) if direction is Direction.GATHER else None
        self._done.append(CopyResult(ticket, CopyStatus.DONE, 0, 0.0, -1, crcs))

    def cancel(self, _ticket: int) -> None:
        """Nothing runs."""

    def collect(self) -> list[CopyResult]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Nothing is held."""


class _Silent:
    def debug(self, event: str, **facts: object) -> None: ...
    def info(self, event: str, **facts: object) -> None: ...
    def warning(self, event: str, **facts: object) -> None:
        raise RuntimeError(f"{event} {facts}")

    error = warning


def pool_of(keys_max: int) -> native.Pool:
    """Return a pool with room for so many objects."""
    arena_bytes = keys_max * SLOT_BYTES + 2 * SLAB_BYTES
    total = native.Pool.segment_bytes_for(arena_bytes, SLAB_BYTES, keys_max)
    fd = os.memfd_create("kvferry-bench")
    os.ftruncate(fd, total)
    pool = native.Pool.create(fd, total, SLAB_BYTES, keys_max, 1, 1)
    os.close(fd)
    return pool


def fill(pool: native.Pool, count: int) -> None:
    """Store so many objects that nobody asks for."""
    random = np.random.default_rng(1)
    for start in range(0, count, 8192):
        rows = min(8192, count - start)
        keys = random.integers(0, 256, (rows, native.KEY_BYTES), dtype=np.uint8)
        entries = pool.reserve(keys, 8 * SHARD_BYTES, 1)
        pool.commit(entries[entries >= 0].astype(np.uint32))


class Engine:
    """A session of ``ranks`` ranks with one group of full attention."""

    def __init__(self, number: int, ranks: int) -> None:
        name = number.to_bytes(16, "little")
        self.session = Session(
            SessionKey(f"engine-{number}", "one"),
            life=name,
            version=NO_VERSION,
            ranks=tuple(range(ranks)),
            scheduler_block_tokens=BLOCK_TOKENS,
            alignment_tokens=BLOCK_TOKENS,
            ready=True,
            namespaces={NO_VERSION: name},
        )
        first = 1 + 100 * number
        self.scheduler = Peer(self.session, "scheduler", -1, first, b"", 1, 0, 0)
        self.session.scheduler = self.scheduler
        for rank in range(ranks):
            group = RankGroup(
                group=0, kind="full", block_tokens=BLOCK_TOKENS, layout=cast(native.Layout, self),
                payload_bytes=SHARD_BYTES, num_blocks=NUM_BLOCKS, save_rule="all",
            )  # fmt: skip
            self.session.workers[rank] = Peer(
                self.session, "worker", rank, first + 1 + rank, b"", 1, 0, 0,
                fence=cast(native.Mapping, _Passed()),
                geometry=RankGeometry(
                    1, (group,), {}, b"d", BLOCK_TOKENS, position=(rank, 0, 0)
                ),
            )  # fmt: skip


class Bed:
    """A pipeline over a pool, and what engines say to it."""

    def __init__(self, pool: native.Pool, limits: Limits | None = None) -> None:
        self._sent: list[FromSidecar] = []
        self._numbers = 0
        self.pipeline = Pipeline(
            pool=HostTier(pool),
            copies=_Instant(),
            send=lambda _peer, message: self._sent.append(message),
            limits=limits or Limits(),
            log=_Silent(),
        )

    def _say(self, peer: Peer, message: FromHalf, raw: list[bytes] | None = None) -> None:
        self.pipeline.on_message(peer, message, raw or [], NOW_S)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def probe(self, engine: Engine, hashes: bytes) -> int:
        """Send the hashes of a request; return its admission."""
        number, total = self._number(), len(hashes) // HASH_BYTES
        self._sent.clear()
        tokens = total * BLOCK_TOKENS + 1
        request = f"request-{number}"
        message = Probe(request, number, NO_VERSION, 0, total, tokens, HASH_BYTES, b"")
        self._say(engine.scheduler, message, [hashes])
        return number

    def ask(self, engine: Engine, admission: int, most: int = 1 << 30) -> int:
        """Take the lease; return the tokens of the hit."""
        self._say(engine.scheduler, Ask(admission, 1, 0, most))
        answer = self._sent[-1]
        assert isinstance(answer, Answer)
        return answer.hit_tokens

    def release(self, engine: Engine, admission: int) -> None:
        """The request has ended."""
        self._say(engine.scheduler, Release([admission]))

    def save(self, engine: Engine, hashes: bytes, admission: int = 0) -> None:
        """Save all chunks on every rank."""
        chunks = len(hashes) // HASH_BYTES
        job = SaveJob(
            self._number(), engine.session.life, NO_VERSION, "request", admission, 1,
            0, chunks * BLOCK_TOKENS, 0, HASH_BYTES, [TableSlice(0, 0, chunks)],
        )  # fmt: skip
        self._run(engine, job, [_blocks(chunks), hashes])

    def save_blocks(self, engine: Engine, hashes: bytes) -> None:
        """Save one further block of as many requests as there are hashes, on the first rank."""
        self._sent.clear()
        worker, jobs = engine.session.workers[0], []
        for at in range(0, len(hashes), HASH_BYTES):
            jobs.append(self._number())
            job = SaveJob(
                jobs[-1], engine.session.life, NO_VERSION, "request", 0, 1,
                0, BLOCK_TOKENS, 0, HASH_BYTES, [TableSlice(0, 0, 1)],
            )  # fmt: skip
            frames = [_blocks(1), hashes[at : at + HASH_BYTES]]
            self._say(worker, Submit(encode_job(job)), frames)
        self.pipeline.on_tick(NOW_S)
        self.pipeline.on_copies(NOW_S)
        if [one.status for one in self._sent if isinstance(one, Outcome)] != ["done"] * len(jobs):
            raise RuntimeError(f"not done: {self._sent}")
        self._say(worker, OutcomeAck(jobs))

    def load(self, engine: Engine, admission: int, tokens: int) -> None:
        """Load a leased prefix on every rank."""
        chunks = tokens // BLOCK_TOKENS
        job = LoadJob(
            self._number(), engine.session.life, NO_VERSION, f"request-{admission}", admission, 1,
            0, tokens, [TableSlice(0, 0, chunks)],
        )  # fmt: skip
        self._run(engine, job, [_blocks(chunks)])

    def _run(self, engine: Engine, job: Job, raw: list[bytes]) -> None:
        self._sent.clear()
        body = encode_job(job)
        for worker in engine.session.workers.values():
            self._say(worker, Submit(body), raw)
        self.pipeline.on_tick(NOW_S)
        self.pipeline.on_copies(NOW_S)
        ended = [message for message in self._sent if isinstance(message, Outcome)]
        if [one.status for one in ended] != ["done"] * len(engine.session.workers):
            raise RuntimeError(f"not done: {self._sent}")
        for worker in engine.session.workers.values():
            self._say(worker, OutcomeAck([job.job]))


def _blocks(count: int) -> bytes:
    return np.arange(1, count + 1, dtype="<i4").tobytes()
