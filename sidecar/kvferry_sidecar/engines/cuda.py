"""The copy engine for engines whose KV memory is a GPU's: copy engines of the GPU, no kernels.

One thread and one stream per GPU and direction: a link serves one copy at a time anyway, and loads
never queue behind saves. A rectangle of a block's runs is one 2-D copy. Checksums are of the pool's
bytes: a load is verified before anything is written to the GPU, a save after it has arrived. Only
the host waits: for fences (stages/copying.py) and for its own streams, never for an engine's.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Sized
from ctypes import byref, c_void_p
from dataclasses import dataclass, field

import numpy as np
from kvferry_connector.wire.attach import Memory
from kvferry_native import crc32c
from numpy.typing import NDArray
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar.engines.base import CopyResult, CopyStatus, Direction, Extents, PoolSpan
from kvferry_sidecar.engines.cuda_driver import (
    MEMORY_DEVICE,
    MEMORY_HOST,
    Copy2D,
    CudaError,
    Driver,
)
from kvferry_sidecar.engines.cuda_memory import CudaMemories, PinnedPool
from kvferry_sidecar.geometry.device import CudaLayout, DeviceMemory, Rect

slice_bytes_max = 16 << 20  # in flight of one job: a cancel waits for no more


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

    def __init__(self, pool: PoolSpan, log: Log, driver: Driver | None = None) -> None:
        self._pool, self._log, self._driver = pool, log, driver
        self._memories: CudaMemories | None = None
        self._pinned: PinnedPool | None = None
        view = (ctypes.c_ubyte * pool.total_bytes).from_address(pool.address)
        self._bytes = memoryview(view).cast("B")
        self._lock = threading.Lock()
        self._pending: dict[int, _Job] = {}
        self._finished: list[CopyResult] = []
        self._lanes: dict[tuple[int, Direction], _Lane] = {}
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def open(self, memory: Memory, life: int) -> DeviceMemory:
        """Map a rank's buffer, and begin to pin the pool. Raises CudaError with the remedy."""
        if self._driver is None:
            self._driver = Driver()
        if self._memories is None:
            self._memories = CudaMemories(self._driver, self._log)
        device = self._memories.open(memory, life)
        self.pin(self._driver, device.ordinal)
        return device

    def pin(self, driver: Driver, ordinal: int) -> None:
        """Begin to pin the pool, once."""
        if self._pinned is None:
            self._pinned = PinnedPool(driver, self._pool, self._log)
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
        _check(extents, layout, self._pool.total_bytes)
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
            self._lane(layout.memory.ordinal, direction).put(job)

    def cancel(self, ticket: int) -> None:
        """Start no further slice; the result still comes, after the last one stopped."""
        with self._lock:
            job = self._pending.get(ticket)
            if job is not None:
                job.cancelled = True

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
            lane = self._lanes[ordinal, direction] = _Lane(self, self._driver, ordinal)
        return lane

    def run(self, job: _Job, stream: c_void_p, driver: Driver) -> None:
        """Copy a job on its lane's thread and publish the result."""
        started_s = time.monotonic()
        status = CopyStatus.DONE
        step = max(1, slice_bytes_max // job.layout.payload_bytes)
        try:
            for first in range(0, len(job.blocks), step):
                if job.cancelled:
                    status = CopyStatus.CANCELLED
                    break
                self._copy(job, slice(first, first + step), stream, driver)
        except CudaError as error:
            status = CopyStatus.FAILED
            self._log.error("a copy on a GPU failed", ticket=job.ticket, error=str(error))
        except Exception:  # noqa: BLE001 - a lane's thread must outlive every job
            status = CopyStatus.FAILED
            self._log.exception("a copy on a GPU failed", ticket=job.ticket)
        self._publish(job, status, started_s)

    def fail(self, job: _Job, error: CudaError) -> None:
        """End a job whose lane has no stream."""
        self._log.error("a copy on a GPU failed", ticket=job.ticket, error=str(error))
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
        with self._lock:
            self._finished.append(result)
            if len(self._finished) == 1:
                os.eventfd_write(self._wake, 1)

    def _copy(self, job: _Job, part: slice, stream: c_void_p, driver: Driver) -> None:
        """Move some chunks; returns when their copies have stopped. Raises CudaError."""
        load = job.direction is Direction.SCATTER
        chunks = range(*part.indices(len(job.blocks)))
        payload = job.layout.payload_bytes
        assert self._pinned is not None, "memory on a GPU was opened here"
        self._pinned.wait(max(int(job.offsets[chunk]) for chunk in chunks) + payload)
        moving = [chunk for chunk in chunks if not load or self._verified(job, chunk)]
        try:
            for chunk in moving:
                for copy in _copies(job, chunk, self._pool.address):
                    driver("cuMemcpy2DAsync_v2", byref(copy), stream)
        finally:
            driver("cuStreamSynchronize", stream)
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

    def __init__(self, engine: CudaCopyEngine, driver: Driver, ordinal: int) -> None:
        self._engine, self._driver, self._ordinal = engine, driver, ordinal
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
        stream: c_void_p | None = None
        while (job := self._jobs.get()) is not None:
            try:
                if stream is None:
                    self._driver.use(self._ordinal)
                    stream = self._driver.stream()
            except CudaError as error:
                self._engine.fail(job, error)
                continue
            self._engine.run(job, stream, self._driver)
            del job  # and with it, maybe, the last hold on an engine's memory
        if stream is not None:
            self._driver("cuStreamDestroy_v2", stream)


def _copies(job: _Job, chunk: int, pool_address: int) -> list[Copy2D]:
    """Return one 2-D copy per rectangle of a chunk."""
    device = job.layout.memory.address
    host = pool_address + int(job.offsets[chunk])
    copies = []
    for rect in job.layout.rects:
        start = device + rect.offset + int(job.blocks[chunk]) * rect.stride
        copies.append(_copy_2d(rect, host, start, job.direction))
        host += rect.length * rect.count
    return copies


def _copy_2d(rect: Rect, host: int, device: int, direction: Direction) -> Copy2D:
    copy = Copy2D(WidthInBytes=rect.length, Height=rect.count)
    if direction is Direction.GATHER:
        copy.srcMemoryType, copy.srcDevice, copy.srcPitch = MEMORY_DEVICE, device, rect.pitch
        copy.dstMemoryType, copy.dstHost, copy.dstPitch = MEMORY_HOST, host, rect.length
    else:
        copy.srcMemoryType, copy.srcHost, copy.srcPitch = MEMORY_HOST, host, rect.length
        copy.dstMemoryType, copy.dstDevice, copy.dstPitch = MEMORY_DEVICE, device, rect.pitch
    return copy


def _check(extents: Extents, layout: CudaLayout, pool_bytes: int) -> None:
    """Raise ValueError with the first wrong number."""
    chunks = len(extents.blocks)
    lengths: dict[str, Sized] = {"pool offsets": extents.pool_offsets, "seeds": extents.seeds}
    if extents.expected is not None:
        lengths["expected checksums"] = extents.expected
    for name, array in lengths.items():
        if len(array) != chunks:
            raise ValueError(f"copy refused: {chunks} blocks but {len(array)} {name}")
    # Block 0 is the engine's null block: many requests share it, none owns it.
    wrong = np.flatnonzero((extents.blocks < 1) | (extents.blocks >= layout.num_blocks))
    if len(wrong):
        index = int(wrong[0])
        raise ValueError(
            f"copy refused: block {extents.blocks[index]} at index {index} is not in 1 .. "
            f"{layout.num_blocks - 1}"
        )
    reach = pool_bytes - layout.payload_bytes
    far = np.flatnonzero(extents.pool_offsets > np.uint64(max(0, reach)))
    if chunks and (reach < 0 or len(far)):
        index = int(far[0]) if len(far) else 0
        raise ValueError(
            f"copy refused: pool offset {extents.pool_offsets[index]} at index {index} with a "
            f"payload of {layout.payload_bytes} bytes leaves the pool of {pool_bytes} bytes"
        )
