"""An engine made of raw halves: one scheduler half and its ranks, in this process, no vLLM.

They speak through the connector's own Client, so sockets, frames and attach are the real ones.
The KV memory is tiny unless ``page_bytes`` says otherwise: chunks are counted here, not bytes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from kvferry_connector.client import Client, Half, Link, MemoryHandle
from kvferry_connector.config import FerryConfig
from kvferry_connector.wire import attach, hot
from kvferry_connector.wire.codec import encode_job
from kvferry_connector.wire.names import (
    BOUND_STEP_OFFSET,
    DONE_STEP_OFFSET,
    FENCE_PAGE_BYTES,
    NO_VERSION,
)

BLOCK_TOKENS = 16
HASH_BYTES = 32
PAGE_BYTES = 64
DEADLINE_S = 60.0

T = TypeVar("T")
M = TypeVar("M")


def hashes(count: int, seed: int) -> bytes:
    """Return ``count`` random prefix hashes, one after the other."""
    return np.random.default_rng(seed).bytes(count * HASH_BYTES)


def wait_until(condition: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Return the first truthy value. Raises TimeoutError naming ``what``."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.002)
    raise TimeoutError(f"after {deadline_s} s still not: {what}")


class RawEngine:
    """``groups`` full-attention groups on ``ranks`` ranks, ``chunks`` chunks per group."""

    def __init__(
        self, run_dir: Path, *, groups: int, ranks: int, chunks: int, page_bytes: int = PAGE_BYTES
    ) -> None:
        self.groups, self.chunks, self.page_bytes = groups, chunks, page_bytes
        self._life = secrets.token_bytes(16)
        self._config = FerryConfig(run_dir=str(run_dir))
        self._fds: list[int] = []
        self._admissions = self._asks = self._jobs = 0
        engine_id = f"bench-{secrets.token_hex(4)}"
        self.scheduler = Client(
            self._config,
            Half("scheduler", engine_id, "one"),
            attach.RegisterEngine(
                life=self._life,
                version=NO_VERSION,
                ranks=list(range(ranks)),
                hash_block_tokens=BLOCK_TOKENS,
                scheduler_block_tokens=BLOCK_TOKENS,
                alignment_tokens=BLOCK_TOKENS,
                load_failure_policy="recompute",
            ),
        )
        self.workers = [self._worker(rank, ranks, engine_id) for rank in range(ranks)]
        for client in (self.scheduler, *self.workers):
            client.start()
        self.link = wait_until(lambda: _ready(self.scheduler), "the scheduler half is ready")
        self._links = [wait_until(lambda c=c: _ready(c), "a rank is ready") for c in self.workers]

    def _worker(self, rank: int, ranks: int, engine_id: str) -> Client:
        num_blocks = 1 + self.groups * self.chunks
        memory_fd = self._memfd(num_blocks * self.page_bytes)
        fence_fd = self._memfd(FENCE_PAGE_BYTES)
        with mmap.mmap(fence_fd, FENCE_PAGE_BYTES) as page:
            # Every step has passed: the figures are of probes and copies, not of fences.
            for offset in (BOUND_STEP_OFFSET, DONE_STEP_OFFSET):
                page[offset : offset + 8] = (1 << 40).to_bytes(8, "little")
        layers = [f"layer.{group}" for group in range(self.groups)]
        registration = attach.RegisterRank(
            serial=1,
            shard=attach.Shard(tp_rank=rank, tp_size=ranks),
            identity={"model": "raw", "life": self._life.hex()},
            num_blocks=num_blocks,
            layout="LBNHC",
            groups=[
                attach.Group(group, "full", BLOCK_TOKENS, {"class": "FullAttentionSpec"}, [layer])
                for group, layer in enumerate(layers)
            ],
            placements=[
                attach.Placement(
                    group=group,
                    layers=[layer],
                    buffer=0,
                    offset=0,
                    layer_stride=0,
                    block_stride=self.page_bytes,
                    page_bytes=self.page_bytes,
                )
                for group, layer in enumerate(layers)
            ],
            hash_block_tokens=BLOCK_TOKENS,
        )
        handle = MemoryHandle(
            attach.Memory(buffer=0, total_bytes=num_blocks * self.page_bytes), memory_fd
        )
        half = Half("worker", engine_id, "one", rank=rank, fence_fd=fence_fd)
        return Client(self._config, half, registration, (handle,))

    def _memfd(self, total_bytes: int) -> int:
        fd = os.memfd_create("kvferry-bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, total_bytes)
        # Written, as an engine's memory is: pages that were only allocated are mapped one by one.
        for at in range(0, total_bytes, 1 << 20):
            os.pwrite(fd, bytes(min(1 << 20, total_bytes - at)), at)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._fds.append(fd)
        return fd

    # --- lookups -----------------------------------------------------------------------------

    def probe(self, raw: bytes) -> tuple[int, hot.Hint]:
        """Send the hashes of a new admission and wait for its hint."""
        self._admissions += 1
        number, total = self._admissions, len(raw) // HASH_BYTES
        message = hot.Probe(
            request=f"request-{number}",
            admission=number,
            version=NO_VERSION,
            start=0,
            total=total,
            num_tokens=total * BLOCK_TOKENS + 1,
            hash_bytes=HASH_BYTES,
            predecessor=b"",
        )
        self._send(self.scheduler, self.link, message, (raw,))
        return number, self._receive(hot.Hint)

    def ask(self, admission: int, max_tokens: int) -> hot.Answer:
        """Ask for the lease and wait for the answer."""
        self._asks += 1
        self._send(self.scheduler, self.link, hot.Ask(admission, self._asks, 0, max_tokens))
        return self._receive(hot.Answer)

    def release(self, *admissions: int) -> None:
        """Forget admissions; nothing answers that."""
        self._send(self.scheduler, self.link, hot.Release(list(admissions)))

    # --- jobs --------------------------------------------------------------------------------

    def save(self, raw: bytes) -> float:
        """Save every chunk of these hashes on every rank; return the seconds until all reported."""
        self._jobs += 1
        chunks = len(raw) // HASH_BYTES
        ids = np.concatenate(
            [np.arange(1, chunks + 1, dtype="<i4") + group * self.chunks
             for group in range(self.groups)]
        )  # fmt: skip
        job = hot.SaveJob(
            job=self._jobs,
            life=self._life,
            version=NO_VERSION,
            request="save",
            admission=0,
            step=1,
            start_tokens=0,
            end_tokens=chunks * BLOCK_TOKENS,
            first_hash=0,
            hash_bytes=HASH_BYTES,
            tables=[hot.TableSlice(group, 0, chunks) for group in range(self.groups)],
        )
        return self._run(job, (ids.tobytes(), raw))

    def save_blocks(self, raw: bytes, admissions: Sequence[int]) -> None:
        """Save one further block of as many requests as there are hashes, all of them at once.

        Memory is taken in turn; every outcome is acknowledged in one message.
        """
        count = len(raw) // HASH_BYTES
        first = self._jobs + 1
        (worker,), (link,) = self.workers, self._links
        for number in range(count):
            self._jobs += 1
            block = 1 + self._jobs % self.chunks
            job = hot.SaveJob(
                job=self._jobs, life=self._life, version=NO_VERSION, request=f"request-{number}",
                admission=admissions[number], step=1, start_tokens=0, end_tokens=BLOCK_TOKENS,
                first_hash=0, hash_bytes=HASH_BYTES, tables=[hot.TableSlice(0, 0, 1)],
                prefill_tokens=BLOCK_TOKENS,
            )  # fmt: skip
            frames = (block.to_bytes(4, "little"), raw[number * HASH_BYTES :][:HASH_BYTES])
            self._send(worker, link, hot.Submit(encode_job(job)), frames)
        open_jobs = set(range(first, first + count))
        end = time.monotonic() + DEADLINE_S
        while open_jobs and time.monotonic() < end:
            for message, _ in worker.receive(link, wait_us=20_000):
                if not isinstance(message, hot.Outcome) or message.status != "done":
                    raise RuntimeError(f"not done: {message}")
                open_jobs.discard(message.job)
        if open_jobs:
            raise TimeoutError(f"no outcome of {len(open_jobs)} jobs")
        worker.send(link, hot.OutcomeAck(list(range(first, first + count))))

    def load(self, admission: int, tokens: int) -> float:
        """Load a leased prefix on every rank; return the seconds until all reported."""
        self._jobs += 1
        chunks = tokens // BLOCK_TOKENS
        ids = np.arange(1, chunks * self.groups + 1, dtype="<i4")
        job = hot.LoadJob(
            job=self._jobs,
            life=self._life,
            version=NO_VERSION,
            request=f"request-{admission}",
            admission=admission,
            step=1,
            local_tokens=0,
            total_tokens=tokens,
            tables=[hot.TableSlice(group, 0, chunks) for group in range(self.groups)],
        )
        return self._run(job, (ids.tobytes(),))

    def _run(self, job: hot.Job, frames: tuple[bytes, ...]) -> float:
        """Submit a job on every rank. Raises RuntimeError when one reports anything but done."""
        body = encode_job(job)
        start = time.perf_counter()
        for worker, link in zip(self.workers, self._links, strict=True):
            self._send(worker, link, hot.Submit(body), frames)
        for worker, link in zip(self.workers, self._links, strict=True):
            outcome = self._outcome(worker, link)
            if outcome.status != "done":
                raise RuntimeError(f"rank {outcome.rank}: {outcome.status} ({outcome.reason})")
            worker.send(link, hot.OutcomeAck([outcome.job]))
        return time.perf_counter() - start

    def _outcome(self, worker: Client, link: Link) -> hot.Outcome:
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            for message, _ in worker.receive(link, wait_us=20_000):
                if isinstance(message, hot.Outcome) and message.job == self._jobs:
                    return message
                if isinstance(message, hot.Error):
                    text = f"{message.message} ({message.remedy})"
                    raise RuntimeError(text)  # noqa: TRY004 - what came is an answer, not a type
        raise TimeoutError("no outcome")

    def _send(
        self, client: Client, link: Link, message: hot.FromHalf, raw: tuple[bytes, ...] = ()
    ) -> None:
        if not client.send(link, message, raw):
            raise RuntimeError(f"{type(message).__name__} was not taken")

    def _receive(self, kind: type[M]) -> M:
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            for message, _ in self.scheduler.receive(self.link, wait_us=100_000):
                if isinstance(message, kind):
                    return message
                raise RuntimeError(f"{kind.__name__} was expected, {message!r} came")
        raise TimeoutError(f"no {kind.__name__}")

    def close(self) -> None:
        """Leave the sidecar."""
        for client in (*self.workers, self.scheduler):
            client.close()
        for fd in self._fds:
            os.close(fd)


def _ready(client: Client) -> Link | None:
    link = client.link()
    if link is not None and link.ready:
        return link
    if client.refusal is not None:
        raise RuntimeError(f"refused: {client.refusal}")
    return None
