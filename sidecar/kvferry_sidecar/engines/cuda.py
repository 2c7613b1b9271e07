"""The copy engine for engines whose KV memory is a GPU's.

One thread and one stream per GPU and direction: a link serves one copy at a time anyway, and loads
never queue behind saves, which also stand back between slices while there are loads. How a slice
moves is chosen by cuda_choice.py, and checksums are computed meanwhile (cuda_lane.py). Only the
host waits: for fences (stages/copying.py) and for its own streams, never for an engine's.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from ctypes import c_void_p
from dataclasses import dataclass
from pathlib import Path

from kvferry_connector.wire.attach import Memory
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
from kvferry_sidecar.engines.cuda_lane import Job, Lane, Link
from kvferry_sidecar.engines.cuda_memory import CudaMemories, PinnedPool
from kvferry_sidecar.engines.cuda_parts import check_extents
from kvferry_sidecar.engines.cuda_stored import StoredWays
from kvferry_sidecar.geometry.device import CudaLayout, DeviceMemory

yield_ms_max = 50  # a save waits so long for loads between two slices


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """``mode``: "auto" or one of cuda_modes.MODES; ``share_percent`` of the time copies run;
    ``threads`` map the pool's pages before the driver pins them, and as many compute the checksums
    of each GPU and direction; ``folder`` keeps what comparing the ways found.
    """

    mode: str = "auto"
    share_percent: int = 100
    threads: int = 4
    folder: Path | None = None


class CudaCopyEngine:
    """Implements `engines.base.CopyEngine`; also opens the memory it copies from and to.

    A GPU is used from the first memory on it: a node without GPUs has nothing of the driver. Wrong
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
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)  # a job ended, or is to end
        self._loads: Counter[int] = Counter()  # open ones by GPU
        self._pending: dict[int, Job] = {}
        self._finished: list[CopyResult] = []
        self._lanes: dict[tuple[int, Direction], Lane] = {}
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def begin(self) -> None:
        """Load the driver before anybody waits: with GPUs that are cold it takes seconds."""
        try:
            self._driver = self._driver or Driver()
        except CudaError as error:
            self._log.warning("no GPU is served so far", reason=str(error))

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
            options = self._options
            self._log.info("a GPU is used", mode=options.mode, share_percent=options.share_percent)
            self._pinned = PinnedPool(
                driver, self._pool, self._log, options.threads, self._pool_moved
            )
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
        job = Job(
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
                self._pool_moved()

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

    def _pool_moved(self) -> None:
        """A job may wait for its part of the pool no more."""
        for lane in list(self._lanes.values()):
            lane.look()

    def _lane(self, ordinal: int, direction: Direction) -> Lane:
        lane = self._lanes.get((ordinal, direction))
        if lane is None:
            assert self._driver is not None, "a layout on a GPU comes from this driver"
            assert self._pinned is not None, "memory on a GPU was opened here"
            link = Link(self._driver, ordinal, direction, self._pool.address, self._pinned)
            lane = Lane(self, link, self._options.threads, self._log)
            self._lanes[ordinal, direction] = lane
        return lane

    def ways(self, ordinal: int, direction: Direction, stream: c_void_p) -> Ways:
        """Return the ways to copy on the current GPU."""
        assert self._driver is not None, "a lane has a driver"
        mode, log = self._options.mode, self._log
        stored = StoredWays(self._options.folder, log)
        return find_ways(
            self._driver, ordinal, direction, stream, mode=mode, stored=stored, log=log
        )

    def publish(self, job: Job) -> None:
        """Take a job of which nothing is under way any more."""
        status = job.status if job.bad_index < 0 else CopyStatus.CHECKSUM
        gathered = job.crc and job.direction is Direction.GATHER
        result = CopyResult(
            ticket=job.ticket,
            status=status,
            moved_bytes=int(job.good.sum()) * job.layout.payload_bytes,
            seconds=time.monotonic() - job.started_s,
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

    def gives_way(self, job: Job, first: int) -> bool:
        """Whether the link is to be left alone before a job's slice from chunk ``first`` on.

        Loads are waited for inside of a save only, or many small saves would never end.
        """
        with self._lock:
            return self._options.share_percent < 100 or (first > 0 and self._has_to_wait(job))

    def stand_back(self, job: Job, slice_s: float, idle_s: float) -> None:
        """Leave the link to loads, and to others what is not our share of the time."""
        rest_s = slice_s * (100 / self._options.share_percent - 1) - idle_s
        with self._moved:
            if rest_s > 0:
                self._moved.wait_for(lambda: job.cancelled, rest_s)
            self._moved.wait_for(
                lambda: job.cancelled or not self._has_to_wait(job), yield_ms_max / 1000
            )

    def _has_to_wait(self, job: Job) -> bool:
        save = job.direction is Direction.GATHER
        return save and self._loads[job.layout.memory.ordinal] > 0
