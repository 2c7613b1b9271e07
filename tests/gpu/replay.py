"""What a scheduler said on CPU, played to a sidecar by a worker half whose memory lies elsewhere.

The recording (recording.json, made by record.py with vLLM's real Scheduler) holds registrations,
the scheduler half's messages and each step's jobs. Played, every block that is saved is filled
with bytes of its own, and every block that was loaded is compared: no vLLM is needed for it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from kvferry_connector.jobs import JobOrder
from kvferry_connector.meta import FerryMetadata
from kvferry_connector.wire import attach, codec, hot
from support.raw_half import RawHalf
from support.waiting import wait_until

RECORDING = Path(__file__).with_name("recording.json")
WIPED = 0xEE


class Order(msgspec.Struct, frozen=True):
    """A job of a step, as jobs.JobOrder without the epoch."""

    job: int
    request: str
    body: bytes
    frames: list[bytes]


class Event(msgspec.Struct, frozen=True):
    """A message of the scheduler half (``body``, ``frames``), or a step of the ranks."""

    body: bytes = b""
    frames: list[bytes] = []
    step: int = 0
    loads: list[Order] = []
    saves: list[Order] = []


class Recording(msgspec.Struct, frozen=True):
    """``first``: what an engine does that saves; ``second``: one that loads. ``hits`` by ask."""

    engine: attach.RegisterEngine
    rank: attach.RegisterRank
    total_bytes: int
    first: list[Event]
    second: list[Event]
    hits: dict[str, int]


class Memory(Protocol):
    """KV memory of one rank."""

    def read(self, at: int, count: int) -> bytes: ...
    def write(self, at: int, data: bytes) -> None: ...


class Worker(Protocol):
    """What is played of kvferry_connector.worker_half.WorkerHalf."""

    def bind(self, metadata: FerryMetadata) -> None: ...
    def end_forward(self) -> None: ...
    def results(self) -> object: ...
    def worker_metadata(self) -> object: ...


def read_recording(path: Path = RECORDING) -> Recording:
    """Return the recording."""
    return msgspec.json.decode(path.read_bytes(), type=Recording)


class Pages:
    """Blocks by group, in memory that a registration describes."""

    def __init__(self, rank: attach.RegisterRank, memory: Memory) -> None:
        self._rank, self._memory = rank, memory

    def fill(self, group: int, block: int, name: bytes) -> None:
        """Write the bytes that belong to a prefix hash."""
        for at, data in self._runs(group, block, name):
            self._memory.write(at, data)

    def wipe(self, group: int, block: int) -> None:
        """Write bytes that belong to nothing."""
        for at, data in self._runs(group, block, b""):
            self._memory.write(at, bytes([WIPED]) * len(data))

    def holds(self, group: int, block: int, name: bytes) -> str:
        """Return "right", "untouched" or "wrong"."""
        found = [
            (self._memory.read(at, len(data)), data) for at, data in self._runs(group, block, name)
        ]
        if all(have == want for have, want in found):
            return "right"
        untouched = all(have == bytes([WIPED]) * len(want) for have, want in found)
        return "untouched" if untouched else "wrong"

    def _runs(self, group: int, block: int, name: bytes) -> Iterator[tuple[int, bytes]]:
        for place in self._rank.placements:
            if place.group != group:
                continue
            for number, layer in enumerate(place.layers):
                start = place.offset + number * place.layer_stride + block * place.block_stride
                seed = hashlib.blake2b(name + f"{group}/{layer}".encode(), digest_size=8).digest()
                data = np.random.default_rng(int.from_bytes(seed, "little")).bytes(place.page_bytes)
                size = place.run_bytes or place.page_bytes
                for run in range(place.runs):
                    yield start + run * place.run_stride, data[run * size : (run + 1) * size]


class Player:
    """Plays one engine. ``counts`` says per group how many loaded blocks were what."""

    def __init__(
        self,
        recording: Recording,
        scheduler: RawHalf,
        worker: Worker,
        memory: Memory,
        *,
        life: bytes,
        epoch: Callable[[], int],
    ) -> None:
        self._recording, self._scheduler, self._worker = recording, scheduler, worker
        self._life, self._epoch = life, epoch
        self._pages = Pages(recording.rank, memory)
        self._kinds = {group.group: group for group in recording.rank.groups}
        self._hashes: dict[int, bytes] = {}
        self._hash_tokens = recording.rank.hash_block_tokens
        self.hits: dict[str, int] = {}
        self.counts: Counter[str] = Counter()

    def play(self, events: Sequence[Event]) -> None:
        """Play some events to their end. Raises AssertionError when a job failed."""
        for event in events:
            if event.body:
                self._say(event)
            else:
                self._step(event)

    def _say(self, event: Event) -> None:
        message = codec.read_from_half(event.body)
        self._scheduler.send(message, *event.frames)
        if isinstance(message, hot.Probe):
            known = self._hashes.get(message.admission, b"")[: message.start * message.hash_bytes]
            self._hashes[message.admission] = known + event.frames[0]
        elif isinstance(message, hot.Ask):
            answer = self._scheduler.receive(hot.Answer, lambda found: found.seq == message.seq)
            self.hits[str(message.seq)] = answer.hit_tokens

    def _step(self, event: Event) -> None:
        loads, saves = [self._job(o) for o in event.loads], [self._job(o) for o in event.saves]
        for job, order in (*loads, *saves):
            for group, block, _ in self._cells(job, order.frames):
                self._pages.wipe(group, block)
        metadata = FerryMetadata(
            event.step, tuple(order for _, order in loads), tuple(order for _, order in saves)
        )
        self._worker.bind(metadata)
        for job, order in saves:
            for group, block, name in self._cells(job, order.frames):
                self._pages.fill(group, block, name)
        self._worker.end_forward()
        self._wait({order.job for _, order in (*loads, *saves)})
        for job, order in loads:
            for group, block, name in self._cells(job, order.frames):
                found = self._pages.holds(group, block, name)
                self.counts[f"{self._kinds[group].kind} {found}"] += 1

    def _wait(self, jobs: set[int]) -> None:
        """Poll as an engine does, until each job is reported as done."""

        def reported() -> bool:
            self._worker.results()
            reports = getattr(self._worker.worker_metadata(), "reports", {})
            for job, (report,) in reports.items():
                assert report.status == "done", report
                jobs.discard(job)
            return not jobs

        wait_until(reported, f"jobs {jobs} end", every_s=0.001)

    def _job(self, order: Order) -> tuple[hot.Job, JobOrder]:
        job = msgspec.structs.replace(codec.read_job(order.body), life=self._life)
        body, frames = codec.encode_job(job), tuple(order.frames)
        return job, JobOrder(order.job, order.request, self._epoch(), body, frames)

    def _cells(self, job: hot.Job, frames: Sequence[bytes]) -> Iterator[tuple[int, int, bytes]]:
        """Yield (group, block, prefix hash) of each block a job names; states of loads last."""
        if isinstance(job, hot.SaveJob):
            hashes, first, size = frames[1], job.first_hash, job.hash_bytes
            span = range(job.start_tokens, job.end_tokens)
            handed = job.hand_offs
        else:
            hashes, first = self._hashes[job.admission], 0
            size, span, handed = 32, range(job.local_tokens, job.total_tokens), []

        def name(end_tokens: int) -> bytes:
            at = (end_tokens // self._hash_tokens - 1 - first) * size
            return hashes[at : at + size]

        for state in handed:
            yield state.group, state.block, name(state.end_tokens)
        ids = iter(np.frombuffer(frames[0], "<i4").tolist())
        for part in job.tables:
            group = self._kinds[part.group]
            for chunk in range(part.start, part.start + part.count):
                block, end = next(ids), (chunk + 1) * group.block_tokens
                last = group.kind == "mamba" and end != span.stop  # of states only that one
                if block and not last and span.start < end <= span.stop:
                    yield part.group, block, name(end)
