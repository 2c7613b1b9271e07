"""The engine's side of jobs, by hand: prompts with known bytes, saved and loaded and compared.

Works over any two halves that can ``send`` and ``receive``: raw ones, or the connector's client.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from kvferry_connector.wire import hot
from kvferry_connector.wire.codec import encode_job
from kvferry_connector.wire.hot import (
    Answer,
    Ask,
    Hint,
    LoadJob,
    Outcome,
    OutcomeAck,
    Probe,
    SaveJob,
    Submit,
    TableSlice,
)
from kvferry_connector.wire.names import NO_VERSION
from support.raw_half import BLOCK_TOKENS, KvMemory, RawHalf, attach_pair

HASH_BYTES = 32
M = TypeVar("M")


class HotHalf(Protocol):
    """One half's hot channel."""

    def send(self, message: hot.FromHalf, *raw: bytes) -> None:
        """Send one message."""

    def receive(self, kind: type[M], which: Callable[[M], bool] = ..., what: str = "") -> M:
        """Wait for a message of this kind."""


class HotEngine:
    """An engine of one rank: job and admission numbers, prompts, and what their blocks hold."""

    def __init__(self, scheduler: HotHalf, worker: HotHalf, memory: KvMemory, life: bytes) -> None:
        self.scheduler, self.worker, self.memory, self.life = scheduler, worker, memory, life
        self.version = NO_VERSION
        self.trace = ""  # a traceparent for the probes that follow
        self._jobs = self._admissions = self._asks = 0

    def next_job(self) -> int:
        """Return a new job id."""
        self._jobs += 1
        return self._jobs

    def next_admission(self) -> int:
        """Return a new admission number."""
        self._admissions += 1
        return self._admissions

    @property
    def asked(self) -> int:
        """The number of the last ask."""
        return self._asks

    # --- jobs --------------------------------------------------------------------------------

    def save_job(self, prompt: str, blocks: Sequence[int], *, step: int = 0, **changes: Any) -> Job:
        """Return a save of a whole prompt out of these blocks, with fields changed."""
        count = len(blocks)
        fields: dict[str, Any] = {
            "job": self.next_job(),
            "life": self.life,
            "version": self.version,
            "request": prompt[:64],
            "admission": 1,
            "step": step,
            "start_tokens": 0,
            "end_tokens": count * BLOCK_TOKENS,
            "first_hash": 0,
            "hash_bytes": HASH_BYTES,
            "tables": [TableSlice(0, 0, count)],
        }
        return Job(SaveJob(**(fields | changes)), (ids(blocks), b"".join(hashes(prompt, count))))

    def load_job(
        self, admission: int, blocks: Sequence[int], *, step: int = 0, **changes: Any
    ) -> Job:
        """Return a load of a whole leased prefix into these blocks, with fields changed."""
        count = len(blocks)
        fields: dict[str, Any] = {
            "job": self.next_job(),
            "life": self.life,
            "version": self.version,
            "request": "load",
            "admission": admission,
            "step": step,
            "local_tokens": 0,
            "total_tokens": count * BLOCK_TOKENS,
            "tables": [TableSlice(0, 0, count)],
        }
        return Job(LoadJob(**(fields | changes)), (ids(blocks),))

    def submit(self, job: Job) -> int:
        """Submit a job and return its id."""
        self.worker.send(Submit(encode_job(job.job)), *job.raw)
        return job.job.job

    def outcome(self, job: int) -> Outcome:
        """Wait for a job's outcome; it stays unacknowledged."""
        return self.worker.receive(Outcome, lambda found: found.job == job, f"of job {job}")

    def acknowledge(self, *jobs: int) -> None:
        """Acknowledge outcomes."""
        self.worker.send(OutcomeAck(list(jobs)))

    def ended(self, job: int) -> Outcome:
        """Wait for a job's outcome and acknowledge it."""
        outcome = self.outcome(job)
        self.acknowledge(job)
        return outcome

    # --- lookups -----------------------------------------------------------------------------

    def probe(
        self, admission: int, prompt: str, total: int, start: int = 0, former: int = 0
    ) -> None:
        """Send the hashes ``[start, total)`` of a prompt, those before as admission ``former``."""
        known = hashes(prompt, total)
        message = Probe(
            request=prompt[:64],
            admission=admission,
            version=self.version,
            start=start,
            total=total,
            num_tokens=total * BLOCK_TOKENS + 1,
            hash_bytes=HASH_BYTES,
            predecessor=known[start - 1] if start else b"",
            trace=self.trace,
            former=former,
        )
        self.scheduler.send(message, b"".join(known[start:]))

    def hint(self, admission: int, total: int) -> Hint:
        """Wait for the hint over ``total`` hashes of an admission."""
        return self.scheduler.receive(
            Hint, lambda found: (found.admission, found.total) == (admission, total)
        )

    def ask(self, admission: int, tokens: int, local_tokens: int = 0) -> int:
        """Ask for a lease and return the ask's number."""
        self._asks += 1
        self.scheduler.send(Ask(admission, self._asks, local_tokens, tokens))
        return self._asks

    def answer(self, seq: int) -> Answer:
        """Wait for the answer to an ask."""
        return self.scheduler.receive(Answer, lambda found: found.seq == seq, f"to ask {seq}")

    def lease(self, prompt: str, count: int) -> tuple[int, Answer]:
        """Probe and ask for a prompt of ``count`` blocks; return (admission, answer)."""
        admission = self.next_admission()
        self.probe(admission, prompt, count)
        return admission, self.answer(self.ask(admission, count * BLOCK_TOKENS))

    # --- whole lives -------------------------------------------------------------------------

    def fill(self, prompt: str, blocks: Sequence[int]) -> None:
        """Write a prompt's bytes into these blocks."""
        for chunk, block in enumerate(blocks):
            self.memory.write(block, self.content(prompt, chunk))

    def wipe(self, blocks: Sequence[int]) -> None:
        """Write other bytes into these blocks."""
        for block in blocks:
            self.memory.write(block, b"\xee" * (self.memory.page_bytes * self.memory.layers))

    def holds(self, prompt: str, blocks: Sequence[int]) -> bool:
        """Whether these blocks hold exactly the prompt's bytes."""
        return all(
            self.memory.read(block) == self.content(prompt, chunk)
            for chunk, block in enumerate(blocks)
        )

    def content(self, prompt: str, chunk: int) -> bytes:
        """Return the bytes that one chunk of a prompt must have everywhere."""
        source = random.Random(f"{prompt}/{chunk}")
        return source.randbytes(self.memory.page_bytes * self.memory.layers)

    def put(self, prompt: str, blocks: Sequence[int] = (1, 2, 3)) -> None:
        """Save a prompt; it must be done."""
        self.fill(prompt, blocks)
        outcome = self.ended(self.submit(self.save_job(prompt, blocks)))
        assert outcome.status == "done", outcome

    def get(self, prompt: str, blocks: Sequence[int] = (4, 5, 6)) -> int:
        """Look a prompt up, load what hits, compare the bytes; return the tokens that hit."""
        admission, answer = self.lease(prompt, len(blocks))
        used = blocks[: answer.hit_tokens // BLOCK_TOKENS]
        self.wipe(used)
        if used:
            outcome = self.ended(self.submit(self.load_job(admission, used)))
            assert outcome.status == "done", outcome
        assert self.holds(prompt, used), f"{prompt}: other bytes than were saved"
        self.scheduler.send(hot.Release([admission]))
        return answer.hit_tokens


class Job:
    """A job and its raw frames."""

    def __init__(self, job: hot.Job, raw: tuple[bytes, ...]) -> None:
        self.job, self.raw = job, raw


def hashes(prompt: str, count: int) -> list[bytes]:
    """Return the chained prefix hashes of a prompt's first ``count`` hash blocks."""
    found, last = [], b""
    for number in range(count):
        last = hashlib.blake2b(
            last + f"{prompt}/{number}".encode(), digest_size=HASH_BYTES
        ).digest()
        found.append(last)
    return found


def ids(blocks: Sequence[int]) -> bytes:
    """Return a raw table frame."""
    return np.array(blocks, dtype="<i4").tobytes()


def attached(run_dir: Path, memory: KvMemory, engine_id: str) -> tuple[HotEngine, list[RawHalf]]:
    """Attach an engine of two raw halves with a life of its own."""
    life = os.urandom(16)
    halves = attach_pair(run_dir, memory, life, engine_id)
    return HotEngine(*halves, memory, life), list(halves)


@contextmanager
def raw_engine(run_dir: Path, life: bytes) -> Iterator[HotEngine]:
    """Yield an engine of two raw halves, which leave in the end."""
    memory = KvMemory()
    halves = attach_pair(run_dir, memory, life)
    yield HotEngine(*halves, memory, life)
    for half in halves:
        half.leave()
    memory.close()
