"""Engines' GPU memory in this process, and the host pool as GPUs reach it.

One mapping per allocation: how often the driver counts opens differs by its version, so the count
is ours. A mapping is closed with its last user (a rank's registration, a layout, a copy), which is
how an engine's memory is given back as soon as its copies have stopped: until then an engine that
died keeps all of it.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic

import numpy as np
from kvferry_connector.wire.attach import CudaMemory, Memory
from numpy.typing import NDArray
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar.engines import pages
from kvferry_sidecar.engines.base import PoolSpan
from kvferry_sidecar.engines.cuda_driver import HANDLE_BYTES, UUID_BYTES, CudaError, Driver
from kvferry_sidecar.geometry.device import DeviceMemory

pin_bytes_max = 8 << 30  # in one call: from 512 GiB on the driver refuses; copies wait for each


@dataclass(slots=True)
class _Open:
    ordinal: int
    address: int
    total_bytes: int
    by_fd: bool
    users: int = 0


class CudaMemories:
    """The allocations of engines that are mapped here. Used by the control loop's thread.

    Copies may drop the last reference to a memory on their own threads, so the table has a lock.
    """

    def __init__(self, driver: Driver, log: Log) -> None:
        self._driver, self._log = driver, log
        self._lock = threading.RLock()
        self._open: dict[tuple[int, int, bytes], _Open] = {}
        self._imports = itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    def mapped_bytes(self, ordinal: int) -> int:
        """Return the bytes of engines on a GPU that are open here."""
        with self._lock:
            opened = list(self._open.values())  # one may be closed at any point, by this thread
            return sum(one.total_bytes for one in opened if one.ordinal == ordinal)

    def open(self, memory: Memory, life: int, fd: int | None = None) -> DeviceMemory:
        """Map a rank's buffer; ``life`` tells processes apart. Raises CudaError with the remedy.

        Equal handles of another life or of another allocation are other memory, and so is what
        each descriptor opens. ``fd`` stays the caller's.
        """
        cuda, handle_bytes = memory.cuda, HANDLE_BYTES if fd is None else 0
        if cuda is None or len(cuda.handle) != handle_bytes or len(cuda.device) != UUID_BYTES:
            raise CudaError(
                f"buffer {memory.buffer} has no handle of {handle_bytes} and UUID of {UUID_BYTES} "
                "bytes; install compatible versions of kvferry"
            )
        if not 0 <= cuda.offset <= cuda.allocation_bytes - memory.total_bytes:
            raise CudaError(
                f"buffer {memory.buffer} has {memory.total_bytes} bytes at {cuda.offset} of an "
                f"allocation of {cuda.allocation_bytes}; report it with this text"
            )
        if fd is None and cuda.pid == os.getpid():
            raise CudaError(
                f"the engine's process id is {cuda.pid} as the sidecar's own is, in another PID "
                "namespace: the driver takes them for one process; share the namespace "
                "(shareProcessNamespace, hostPID)",
                201,
            )
        ordinal = self._driver.ordinal_of(cuda.device)
        number = cuda.buffer_id if fd is None else next(self._imports)
        key = (life, number, cuda.handle)
        with self._lock:
            mapped = self._open.get(key)
            if mapped is None:
                self._check_handle(memory)
                address = self._map(ordinal, cuda, fd)
                mapped = _Open(ordinal, address, cuda.allocation_bytes, fd is not None)
                self._open[key] = mapped
            mapped.users += 1
        device = DeviceMemory(ordinal, mapped.address + cuda.offset, memory.total_bytes)
        weakref.finalize(device, self._drop, key).atexit = False
        return device

    def _check_handle(self, memory: Memory) -> None:
        """Opened a second time, it would be the memory that is mapped already, or end with that."""
        handle = memory.cuda.handle if memory.cuda is not None else b""
        if handle and any(other == handle for _, _, other in self._open):
            raise CudaError(
                f"buffer {memory.buffer} has the handle of other memory that is still open here, "
                "and the driver takes both for one; the engine asks again until that is closed",
                208,
            )

    def _map(self, ordinal: int, cuda: CudaMemory, fd: int | None) -> int:
        self._driver.use(ordinal)
        if fd is None:
            return self._driver.open(cuda.handle)
        return self._driver.map_fd(ordinal, fd, cuda.allocation_bytes)

    def _drop(self, key: tuple[int, int, bytes]) -> None:
        with self._lock:
            mapped = self._open[key]
            mapped.users -= 1
            if mapped.users:
                return
            del self._open[key]
            try:
                with self._driver.on(mapped.ordinal):  # the thread may work for another GPU
                    if mapped.by_fd:
                        self._driver.unmap(mapped.address, mapped.total_bytes)
                    else:
                        self._driver("cuIpcCloseMemHandle", mapped.address)
            except CudaError as error:  # the engine's memory stays until we end
                self._log.error("an engine's GPU memory was not closed", error=str(error))


class PinnedPool:
    """The host pool, registered with the driver chunk by chunk behind the sidecar's back.

    Copies wait for the chunk they touch (``settled``, ``wait``); chunks end at slabs, so none
    touches two. After a failure what is pinned goes on serving.
    """

    def __init__(
        self,
        driver: Driver,
        pool: PoolSpan,
        log: Log,
        threads: int = 4,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """``threads`` map the pages ahead of the driver, which does it in one.

        ``moved`` is called, by any thread, when ``settled`` may say yes to more than before.
        """
        self._driver, self._address, self._log = driver, pool.address, log
        self._threads, self._tell = threads, moved
        self.cuts = chunk_cuts(pool)
        self.failure: Exception | None = None
        self._pinned_to = self.cuts[0]
        self._stopping = False
        self._moved = threading.Condition()
        self._ordinal = 0
        self._thread: threading.Thread | None = None

    def start(self, ordinal: int) -> None:
        """Begin, once: registering creates a context, so on a GPU that is used anyway."""
        if self._thread is None:
            self._ordinal = ordinal
            self._thread = threading.Thread(target=self._pin, name="kvferry-pin", daemon=True)
            self._thread.start()

    def settled(self, end: int) -> bool:
        """Whether ``wait`` needs no time: the pool is pinned up to byte ``end``, or never will."""
        return self._pinned_to >= end or self._ended()

    def wait(self, end: int) -> None:
        """Return once the pool is pinned up to byte ``end``. Raises CudaError when it never is."""
        with self._moved:
            self._moved.wait_for(lambda: self.settled(end))
            if self._pinned_to < end:
                raise CudaError(str(self.failure or "the pool is being closed"))

    def chunks_of(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which chunk each address of the pool lies in: no copy may lie in two."""
        return np.searchsorted(self.cuts, addresses - self._address, side="right")

    def progress(self) -> tuple[int, int]:
        """Return the bytes pinned so far, and those to be; equal when no more will be."""
        done = self._pinned_to - self.cuts[0]
        return done, done if self._ended() else self.cuts[-1] - self.cuts[0]

    def stop(self) -> None:
        """Pin no further; whoever waits for that is told."""
        self._stopping = True
        self._move_on()

    def close(self) -> None:
        """Give the pool back; no copy runs any more."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
            self._give_back()

    def _ended(self) -> bool:
        return self._stopping or self.failure is not None

    def _move_on(self) -> None:
        with self._moved:
            self._moved.notify_all()
        self._tell()

    def _pin(self) -> None:
        try:
            self._driver.use(self._ordinal)
            for start, end in pairwise(self.cuts):
                if self._stopping:
                    return
                began_s = monotonic()
                pages.populate(self._address + start, end - start, self._threads)
                self._driver.pin(self._address + start, end - start)
                self._pinned_to = end
                self._move_on()
                gib = (end - start) / (1 << 30)
                self._log.info(
                    "pool pinned", gib=end >> 30, of_gib=self.cuts[-1] >> 30,
                    gib_per_s=round(gib / max(1e-9, monotonic() - began_s), 1),
                )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - copies wait for this thread
            self._log.error("the pool cannot be pinned", error=str(error))
            self.failure = error
            self._move_on()

    def _give_back(self) -> None:
        for start in reversed([cut for cut in self.cuts[:-1] if cut < self._pinned_to]):
            try:
                with self._driver.on(self._ordinal):  # whichever thread ends the engine
                    self._driver("cuMemHostUnregister", self._address + start)
            except CudaError as error:
                self._log.error("a part of the pool stays pinned", error=str(error))
                if self._driver.lost is not None:
                    return  # nor does the rest come back: all of it falls with this process


def chunk_cuts(pool: PoolSpan) -> list[int]:
    """Return the ends of chunks, ascending: the arena's start, then whole slabs of it."""
    chunk_bytes = max(pool.slab_bytes, pin_bytes_max // pool.slab_bytes * pool.slab_bytes)
    arena_at = pool.total_bytes - pool.arena_bytes
    return [*range(arena_at, pool.total_bytes, chunk_bytes), pool.total_bytes]
