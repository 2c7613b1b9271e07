"""The copy engine for engines whose KV memory is a GPU's.

One thread and one stream per GPU and direction: a link serves one copy at a time anyway, and loads
never queue behind saves, which also stand back between slices while there are loads. How a slice
moves is chosen by cuda_choice.py. Checksums are of the pool's bytes: a load is verified before
anything is written to the GPU, a save after it has arrived. Only the host waits: for fences
(stages/copying.py) and for its own streams, never for an engine's.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections import Counter
from contextlib import suppress
from ctypes import c_void_p
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from kvferry_connector.wire.attach import Memory
from kvferry_native import crc32c
from numpy.typing import NDArray
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar.engines.base import (
    CopyResult,
    CopyStatus,
    Direction,
    Extents,
    GpuUse,
    PoolSpan,
)
from kvferry_sidecar.engines.cuda_choice import Ways, find_ways
from kvferry_sidecar.engines.cuda_driver import CudaError, Driver
from kvferry_sidecar.engines.cuda_memory import CudaMemories, PinnedPool
from kvferry_sidecar.engines.cuda_parts import Part, check_extents
from kvferry_sidecar.engines.cuda_stored import StoredWays
from kvferry_sidecar.engines.pages import bind_near
from kvferry_sidecar.geometry.device import CudaLayout, DeviceMemory

slice_bytes_max = 16 << 20  # in flight of one job: a cancel waits for no more
yield_ms_max = 50  # a save waits so long for loads between two slices


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """``mode``: "auto" or one of cuda_modes.MODES; ``share_percent`` of the time copies run;
    ``touch_threads`` map the pool's pages before the driver pins them; ``folder`` keeps what
    comparing the ways found.
    """

    mode: str = "auto"
    share_percent: int = 100
    touch_threads: int = 4
    folder: Path | None = None


@dataclass(slots=True)
class _Job:
    ticket: int
    direction: Direction
    layout: CudaLayout
    blocks: NDArray[np.int32]
    offsets: NDArray[np.uint64]
    seeds: NDArray[np.uint32]
    expected: NDArray[np.uint32] | None
    crc: bool
    cancelled: bool = False
    good: NDArray[np.bool_] = field(init=False)  # copied and, where asked for, verified
    crcs: NDArray[np.uint32] = field(init=False)
    bad_index: int = -1

    def __post_init__(self) -> None:
        self.good = np.zeros(len(self.blocks), dtype=np.bool_)
        self.crcs = np.zeros(len(self.blocks), dtype=np.uint32)


class CudaCopyEngine:
    """Implements `engines.base.CopyEngine`; also opens the memory it copies from and to.

    The driver is loaded with the first memory: a node without GPUs has nothing of it. Wrong
    extents raise ValueError and start nothing.
    """

    def __init__(
        self,
        pool: PoolSpan,
        log: Log,
        driver: Driver | None = None,
        options: GpuOptions | None = None,
    ) -> None:
        self._pool, self._log, self._driver = pool, log, driver
        self._options = options or GpuOptions()
        self._memories: CudaMemories | None = None
        self._pinned: PinnedPool | None = None
        view = (ctypes.c_ubyte * pool.total_bytes).from_address(pool.address)
        self._bytes = memoryview(view).cast("B")
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)  # a job ended, or is to end
        self._loads: Counter[int] = Counter()  # open ones by GPU
        self._pending: dict[int, _Job] = {}
        self._finished: list[CopyResult] = []
        self._lanes: dict[tuple[int, Direction], _Lane] = {}
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def open(self, memory: Memory, life: int, fd: int | None = None) -> DeviceMemory:
        """Map a rank's buffer, and begin to pin the pool and to compare ways of copying.

        Raises CudaError with the remedy.
        """
        if self._driver is None:
            self._driver = Driver()
        if self._memories is None:
            self._memories = CudaMemories(self._driver, self._log)
        device = self._memories.open(memory, life, fd)
        self.pin(self._driver, device.ordinal)
        for direction in Direction:
            self._lane(device.ordinal, direction)
        return device

    def gpus(self) -> list[GpuUse]:
        """Return what is used of each GPU; the calling thread gets a current one. Never raises."""
        driver, memories = self._driver, self._memories
        if driver is None or memories is None:
            return []
        found = []
        for ordinal in driver.used:
            held = sum(lane.held_bytes for (on, _), lane in self._lanes.items() if on == ordinal)
            try:
                free, total = driver.memory(ordinal)
            except CudaError as error:
                self._log.error("a GPU does not say how much is free", error=str(error))
                continue
            uuid, mapped = driver.uuid_of(ordinal).hex(), memories.mapped_bytes(ordinal)
            found.append(GpuUse(uuid, total, free, held, mapped))
        return found

    def lost(self) -> str:
        """Return what lost a GPU to this process, if one is: no copy of it ends well any more."""
        error = None if self._driver is None else self._driver.lost
        return "" if error is None else str(error)

    def pin(self, driver: Driver, ordinal: int) -> None:
        """Begin to pin the pool, once."""
        if self._pinned is None:
            threads = self._options.touch_threads
            self._pinned = PinnedPool(driver, self._pool, self._log, threads)
            self._pinned.start(ordinal)

    def pinning(self) -> tuple[int, int]:
        """Return the bytes of the pool that are pinned, and that will be. Any thread may ask."""
        return self._pinned.progress() if self._pinned is not None else (0, 0)

    # --- engines.base.CopyEngine -------------------------------------------------------------

    def wake_fd(self) -> int:
        """Descriptor that is readable exactly while results wait."""
        return self._wake

    def submit(self, ticket: int, direction: Direction, extents: Extents) -> None:
        """Start a copy; its memory belongs to it until its result was collected."""
        layout = extents.layout
        if not isinstance(layout, CudaLayout):
            raise TypeError(f"the CUDA engine copies by no {type(layout).__name__}")
        check_extents(extents, layout, self._pool.total_bytes)
        job = _Job(
            ticket,
            direction,
            layout,
            extents.blocks.copy(),
            extents.pool_offsets.copy(),
            extents.seeds.copy(),
            None if extents.expected is None else extents.expected.copy(),
            extents.crc and (direction is Direction.GATHER or extents.expected is not None),
        )
        with self._lock:
            if self._closed:
                raise ValueError("copy refused: the engine is closed")
            if ticket in self._pending:
                raise ValueError(f"copy refused: ticket {ticket} is still pending")
            self._pending[ticket] = job
            if direction is Direction.SCATTER:
                self._loads[layout.memory.ordinal] += 1
            self._lane(layout.memory.ordinal, direction).put(job)

    def cancel(self, ticket: int) -> None:
        """Start no further slice; the result still comes, after the last one stopped."""
        with self._lock:
            job = self._pending.get(ticket)
            if job is not None:
                job.cancelled = True
                self._moved.notify_all()

    def collect(self) -> list[CopyResult]:
        """Results since the last call; clears wake_fd."""
        with self._lock:
            results, self._finished = self._finished, []
            for result in results:
                del self._pending[result.ticket]
            if results:
                os.eventfd_read(self._wake)
        return results

    def close(self) -> None:
        """Cancel what has not started, wait for what runs, give the pool back."""
        with self._lock:
            self._closed = True
            for job in self._pending.values():
                job.cancelled = True
            self._moved.notify_all()
        if self._pinned is not None:
            self._pinned.stop()  # what waits for it need not
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    # --- lanes -------------------------------------------------------------------------------

    def _lane(self, ordinal: int, direction: Direction) -> _Lane:
        lane = self._lanes.get((ordinal, direction))
        if lane is None:
            assert self._driver is not None, "a layout on a GPU comes from this driver"
            lane = self._lanes[ordinal, direction] = _Lane(self, self._driver, ordinal, direction)
        return lane

    def ways(self, ordinal: int, direction: Direction, stream: c_void_p, driver: Driver) -> Ways:
        """Return the ways to copy on the current GPU, for a lane."""
        mode, log = self._options.mode, self._log
        stored = StoredWays(self._options.folder, log)
        return find_ways(driver, ordinal, direction, stream, mode=mode, stored=stored, log=log)

    def run(self, job: _Job, stream: c_void_p, driver: Driver, ways: Ways) -> None:
        """Copy a job on its lane's thread and publish the result."""
        started_s = time.monotonic()
        status = CopyStatus.DONE
        step = max(1, slice_bytes_max // job.layout.payload_bytes)
        try:
            for first in range(0, len(job.blocks), step):
                if job.cancelled:
                    status = CopyStatus.CANCELLED
                    break
                began_s = time.monotonic()
                self._copy(job, slice(first, first + step), stream, driver, ways)
                if first + step < len(job.blocks):
                    self._stand_back(job, time.monotonic() - began_s)
        except CudaError as error:
            status = CopyStatus.FAILED
            self._log.error("a copy on a GPU failed", ticket=job.ticket, error=str(error))
        except Exception:  # noqa: BLE001 - a lane's thread must outlive every job
            status = CopyStatus.FAILED
            self._log.exception("a copy on a GPU failed", ticket=job.ticket)
        self._publish(job, status, started_s)

    def fail(self, job: _Job, error: str) -> None:
        """End a job whose lane has no stream."""
        self._log.error("a copy on a GPU failed", ticket=job.ticket, error=error)
        self._publish(job, CopyStatus.FAILED, time.monotonic())

    def _publish(self, job: _Job, status: CopyStatus, started_s: float) -> None:
        if job.bad_index >= 0:
            status = CopyStatus.CHECKSUM
        gathered = job.crc and job.direction is Direction.GATHER
        result = CopyResult(
            ticket=job.ticket,
            status=status,
            moved_bytes=int(job.good.sum()) * job.layout.payload_bytes,
            seconds=time.monotonic() - started_s,
            bad_index=job.bad_index,
            crcs=job.crcs if gathered else None,
        )
        ordinal = job.layout.memory.ordinal
        del job.layout  # whoever has the result may close the memory: no thread here holds it then
        with self._lock:
            if job.direction is Direction.SCATTER:
                self._loads[ordinal] -= 1
                self._moved.notify_all()
            self._finished.append(result)
            if len(self._finished) == 1:
                os.eventfd_write(self._wake, 1)

    def _stand_back(self, job: _Job, slice_s: float) -> None:
        """Leave the link to loads, and to others what is not our share of the time."""
        ordinal, rest_s = (
            job.layout.memory.ordinal,
            slice_s * (100 / self._options.share_percent - 1),
        )
        with self._moved:
            if rest_s:
                self._moved.wait_for(lambda: job.cancelled, rest_s)
            if job.direction is Direction.GATHER:
                self._moved.wait_for(
                    lambda: job.cancelled or not self._loads[ordinal], yield_ms_max / 1000
                )

    def _copy(self, job: _Job, part: slice, stream: c_void_p, driver: Driver, ways: Ways) -> None:
        """Move some chunks; returns when their copies have stopped. Raises CudaError."""
        load = job.direction is Direction.SCATTER
        chunks = range(*part.indices(len(job.blocks)))
        payload = job.layout.payload_bytes
        assert self._pinned is not None, "memory on a GPU was opened here"
        self._pinned.wait(max(int(job.offsets[chunk]) for chunk in chunks) + payload)
        moving = [chunk for chunk in chunks if not load or self._verified(job, chunk)]
        if not moving:
            return
        hosts = job.offsets[moving].astype(np.int64) + self._pool.address
        blocks = job.blocks[moving].astype(np.int64)
        piece = Part(job.layout, job.direction, blocks, hosts, self._pinned.chunks_of(hosts))
        kept = None
        try:
            kept = ways.choose(piece).move(piece, stream)
        finally:
            driver("cuStreamSynchronize", stream)
            del kept
        if not load and job.crc:
            for chunk in moving:
                job.crcs[chunk] = self._checksum(job, chunk)
        job.good[moving] = True

    def _verified(self, job: _Job, chunk: int) -> bool:
        if not job.crc or job.expected is None:
            return True
        if self._checksum(job, chunk) == int(job.expected[chunk]):
            return True
        if job.bad_index < 0:
            job.bad_index = chunk
        return False

    def _checksum(self, job: _Job, chunk: int) -> int:
        at = int(job.offsets[chunk])
        return crc32c(self._bytes[at : at + job.layout.payload_bytes], int(job.seeds[chunk]))


class _Lane:
    """The thread and the stream of one GPU and direction."""

    def __init__(
        self, engine: CudaCopyEngine, driver: Driver, ordinal: int, direction: Direction
    ) -> None:
        self._engine, self._driver, self._ordinal = engine, driver, ordinal
        self._direction = direction
        self.held_bytes = 0  # of the GPU's memory
        self._stream: c_void_p | None = None
        self._ways: Ways | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kvferry-gpu", daemon=True)
        self._thread.start()

    def put(self, job: _Job) -> None:
        """Queue a job behind the others."""
        self._jobs.put(job)

    def close(self) -> None:
        """Wait for what was queued, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        self._prepare()  # again with a copy, if it fails: that one is told why
        while (job := self._jobs.get()) is not None:
            error = self._prepare()
            if self._stream is None or self._ways is None:
                self._engine.fail(job, error)
            else:
                self._engine.run(job, self._stream, self._driver, self._ways)
            del job
        if self._ways is not None:
            self._ways.close()
        if self._stream is not None:
            with suppress(CudaError):  # of a lost context: it falls with this process
                self._driver("cuStreamDestroy_v2", self._stream)

    def _prepare(self) -> str:
        """Make the stream and the ways, once; returns why they cannot be made."""
        driver, ordinal = self._driver, self._ordinal
        try:
            if self._stream is None:
                driver.use(ordinal)
                bind_near(driver.bus_id(ordinal))
                self._stream = driver.stream()
            if self._ways is None:
                self._ways = self._engine.ways(ordinal, self._direction, self._stream, driver)
                self.held_bytes = self._ways.held_bytes
        except Exception as error:  # noqa: BLE001 - a lane's thread must outlive every fault
            return f"{type(error).__name__}: {error}"
        return ""
