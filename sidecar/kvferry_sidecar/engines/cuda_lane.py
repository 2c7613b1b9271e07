"""The thread and the stream of one GPU and direction.

A job is cut into slices. Three are under way at a time, of one job or of several: two that the link
has to move, so that it never waits for this thread, and one whose checksums native threads compute
meanwhile. Checksums are of the pool's bytes. A save's slice is moved, then summed; a load's is
summed, and what is right of it is moved: wrong bytes never reach a GPU. No job ends before all of
its checksums are known and its last copy has stopped.

A job whose part of the pool is not pinned yet lets those behind it pass.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from collections import deque
from contextlib import suppress
from ctypes import c_void_p
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from kvferry_native import Checksums
from numpy.typing import NDArray
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar.engines.base import CopyStatus, Direction
from kvferry_sidecar.engines.cuda_choice import Ways
from kvferry_sidecar.engines.cuda_driver import CudaError, Driver
from kvferry_sidecar.engines.cuda_memory import PinnedPool
from kvferry_sidecar.engines.cuda_parts import Part
from kvferry_sidecar.engines.pages import bind_near
from kvferry_sidecar.geometry.device import CudaLayout

slice_bytes_max = 16 << 20  # a cancel waits for no more than three of them
flying_max = 2


@dataclass(slots=True)
class Job:
    """A copy; arrays as of `engines.base.Extents`."""

    ticket: int
    direction: Direction
    layout: CudaLayout
    blocks: NDArray[np.int32]
    offsets: NDArray[np.uint64]
    seeds: NDArray[np.uint32]
    expected: NDArray[np.uint32] | None
    crc: bool  # what is copied is summed, and compared if it is a load
    cancelled: bool = False
    status: CopyStatus = CopyStatus.DONE
    started_s: float = 0.0
    holds: int = 1  # one for each slice under way, and one until the last was started
    good: NDArray[np.bool_] = field(init=False)  # copied and, where asked for, verified
    crcs: NDArray[np.uint32] = field(init=False)
    bad_index: int = -1
    end: int = field(init=False)  # of the pool's bytes that it touches

    def __post_init__(self) -> None:
        last = int(self.offsets.max(initial=0))
        self.end = last + self.layout.payload_bytes if len(self.offsets) else 0
        self.good = np.zeros(len(self.blocks), dtype=np.bool_)
        self.crcs = np.zeros(len(self.blocks), dtype=np.uint32)


@dataclass(slots=True)
class _Slice:
    """Chunks of a job, int64 (n,). ``kept`` has to live until ``event`` has come."""

    job: Job
    chunks: NDArray[np.int64]
    summing: bool = False
    event: c_void_p | None = None
    kept: object = None
    began_s: float = 0.0
    arrived: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """What a lane copies over: a GPU in one direction, and the pool that is pinned for it."""

    driver: Driver
    ordinal: int
    direction: Direction
    pool_address: int
    pinned: PinnedPool


class _Word(enum.Enum):
    """What is put between jobs: look at those set aside; the end."""

    LOOK = 0
    END = 1


class Desk(Protocol):
    """What a lane asks of its engine."""

    def ways(self, ordinal: int, direction: Direction, stream: c_void_p) -> Ways:
        """Return the ways to copy on the current GPU."""

    def gives_way(self, job: Job, first: int) -> bool:
        """Whether the link is to be left alone before a job's slice from chunk ``first`` on."""

    def stand_back(self, job: Job, slice_s: float, idle_s: float) -> None:
        """Leave it alone after a slice that took so long, and ended so long ago."""

    def publish(self, job: Job) -> None:
        """Take a job of which nothing is under way any more."""


class Lane:
    """Copies jobs one after the other. ``threads`` compute checksums."""

    def __init__(self, desk: Desk, link: Link, threads: int, log: Log) -> None:
        self._desk, self._link, self._threads, self._log = desk, link, threads, log
        self._driver, self._pinned = link.driver, link.pinned
        self._load = link.direction is Direction.SCATTER
        self.held_bytes = 0  # of the GPU's memory
        self._stream: c_void_p | None = None
        self._ways: Ways | None = None
        self._checksums: Checksums | None = None
        self._events: list[c_void_p] = []  # those that are free
        self._flying: deque[_Slice] = deque()
        self._summed: _Slice | None = None  # whose checksums are computed
        self._slice_s = 0.0  # how long the last slice took
        self._landed_s = 0.0
        self._aside: list[Job] = []  # those whose part of the pool may not be pinned yet
        self._jobs: queue.SimpleQueue[Job | _Word] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kvferry-gpu", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job behind the others."""
        self._jobs.put(job)

    def look(self) -> None:
        """Look at the jobs set aside: more is pinned, or one was cancelled."""
        self._jobs.put(_Word.LOOK)

    def close(self) -> None:
        """Wait for what was queued, and end the thread; the pool is pinned no further then."""
        self._jobs.put(_Word.END)
        self._thread.join()

    def _work(self) -> None:
        with suppress(Exception):  # a job tries it again, and is told why it fails
            self._prepare()
        while (job := self._next()) is not None:
            self._copy(job)
            del job
        self._finish()
        self._checksums = None  # and with it its threads
        if self._ways is not None:
            self._ways.close()
        with suppress(CudaError):  # of a lost context: it falls with this process
            for event in self._events:
                self._driver("cuEventDestroy_v2", event)
            if self._stream is not None:
                self._driver("cuStreamDestroy_v2", self._stream)

    def _prepare(self) -> None:
        """Make what copies need, once. Raises what the driver, or comparing the ways, raises."""
        driver, ordinal = self._driver, self._link.ordinal
        if self._stream is None:
            driver.use(ordinal)
            bind_near(driver.bus_id(ordinal))
            while len(self._events) < flying_max:
                self._events.append(driver.event())
            self._stream = driver.stream()
        if self._checksums is None:
            self._checksums = Checksums(self._threads)
        if self._ways is None:
            self._ways = self._desk.ways(ordinal, self._link.direction, self._stream)
            self.held_bytes = self._ways.held_bytes

    def _next(self) -> Job | None:
        """Return the first job that can be copied or ended, None at the end."""
        while True:
            for index, job in enumerate(self._aside):
                if job.cancelled or self._pinned.settled(job.end):
                    return self._aside.pop(index)
            word = self._take()
            if word is _Word.END:
                return None
            if isinstance(word, Job):
                self._aside.append(word)

    def _take(self) -> Job | _Word:
        """Return what was put next; while this waits nothing is under way."""
        while self._busy():
            with suppress(queue.Empty):
                return self._jobs.get_nowait()
            self._advance()
        return self._jobs.get()

    def _copy(self, job: Job) -> None:
        """Start the slices of a job; those of the one before may still be under way."""
        job.started_s = time.monotonic()
        try:
            self._prepare()
        except Exception as error:  # noqa: BLE001 - a lane's thread must outlive every fault
            self._fail(job, error)
        step = max(1, slice_bytes_max // job.layout.payload_bytes)
        for first in range(0, len(job.blocks), step):
            if self._desk.gives_way(job, first):
                self._finish()
                self._desk.stand_back(job, self._slice_s, time.monotonic() - self._landed_s)
            if self._stopped(job):
                break
            job.holds += 1
            part = _Slice(job, np.arange(first, min(first + step, len(job.blocks))))
            if self._load and job.crc:
                self._sum(part)
            else:
                self._put(part)
        self._leave(job)

    # --- the ways of slices: a save's _put, _land, _sum, _end; a load's _sum, _put, _land, _end ---

    def _busy(self) -> bool:
        return bool(self._flying) or self._summed is not None

    def _finish(self) -> None:
        while self._busy():
            self._advance()

    def _advance(self) -> None:
        """Wait for a slice, and bring it further."""
        if self._flying and not (self._load and self._summed is not None):
            self._land()
        else:
            self._sum(None)

    def _sum(self, part: _Slice | None) -> None:
        """Begin the checksums of a slice, if there is one, and go on with the one before."""
        before, self._summed = self._summed, part
        if before is not None and before.summing:
            self._end_checksums(before)
        if part is not None:
            self._begin_checksums(part)
        if before is not None and self._load:
            self._put(before)
        elif before is not None:
            self._end(before)

    def _put(self, part: _Slice) -> None:
        """Put a slice on the stream, once there is room."""
        while len(self._flying) >= flying_max:
            self._land()
        job = part.job
        if not self._stopped(job) and len(part.chunks):
            try:
                self._move(part)
            except Exception as error:  # noqa: BLE001 - a lane's thread must outlive every fault
                self._drain()
                self._fail(job, error)
        if part.event is None:
            self._end(part)
        else:
            self._flying.append(part)

    def _move(self, part: _Slice) -> None:
        job, chunks = part.job, part.chunks
        assert self._ways is not None, "prepared"
        assert self._stream is not None, "prepared"
        self._pinned.wait(job.end)  # it is, or it raises
        hosts = job.offsets[chunks].astype(np.int64) + self._link.pool_address
        blocks = job.blocks[chunks].astype(np.int64)
        piece = Part(job.layout, job.direction, blocks, hosts, self._pinned.chunks_of(hosts))
        part.began_s = time.monotonic()
        part.kept = self._ways.choose(piece).move(piece, self._stream)
        self._driver("cuEventRecord", self._events[-1], self._stream)
        part.event = self._events.pop()

    def _land(self) -> None:
        """Wait until the oldest slice has been moved, well or not."""
        part = self._flying.popleft()
        event, part.event = part.event, None
        assert event is not None, "it flies"
        self._events.append(event)
        try:
            self._driver("cuEventSynchronize", event)
            part.arrived = True
            self._landed_s = time.monotonic()
            self._slice_s = self._landed_s - part.began_s
        except Exception as error:  # noqa: BLE001 - a lane's thread must outlive every fault
            self._drain()
            self._fail(part.job, error)
        part.kept = None
        if part.job.crc and not self._load and part.arrived:
            self._sum(part)
        else:
            self._end(part)

    def _end(self, part: _Slice) -> None:
        """Nothing of a slice is under way any more."""
        if part.arrived:
            part.job.good[part.chunks] = True
        self._leave(part.job)

    def _begin_checksums(self, part: _Slice) -> None:
        assert self._checksums is not None, "prepared"
        job = part.job
        addresses = job.offsets[part.chunks] + np.uint64(self._link.pool_address)
        sizes = np.full(len(addresses), job.layout.payload_bytes, np.uint64)
        try:
            self._checksums.begin(addresses, sizes, job.seeds[part.chunks])
            part.summing = True
        except Exception as error:  # noqa: BLE001 - a lane's thread must outlive every fault
            self._fail(job, error)

    def _end_checksums(self, part: _Slice) -> None:
        """Of a load only what is right is left to be moved."""
        assert self._checksums is not None, "prepared"
        job, chunks = part.job, part.chunks
        try:
            job.crcs[chunks] = self._checksums.end()
        except Exception as error:  # noqa: BLE001 - a lane's thread must outlive every fault
            self._fail(job, error)
            return
        if job.expected is not None:
            right = job.crcs[chunks] == job.expected[chunks]
            part.chunks = chunks[right]
            if not right.all() and job.bad_index < 0:  # slices come here in their order
                job.bad_index = int(chunks[~right][0])

    def _stopped(self, job: Job) -> bool:
        if job.cancelled and job.status is CopyStatus.DONE:
            job.status = CopyStatus.CANCELLED
        return job.status is not CopyStatus.DONE

    def _drain(self) -> None:
        """After an error nobody knows what of a slice is on the stream: wait for all of it."""
        with suppress(CudaError):
            self._driver("cuStreamSynchronize", self._stream)

    def _fail(self, job: Job, error: Exception) -> None:
        job.status = CopyStatus.FAILED
        text = {"error": str(error)} if isinstance(error, CudaError) else {"exc_info": error}
        self._log.error("a copy on a GPU failed", ticket=job.ticket, **text)

    def _leave(self, job: Job) -> None:
        job.holds -= 1
        if not job.holds:
            self._desk.publish(job)
