"""The engines of a sidecar behind one: each copy goes to the engine of its layout."""

from __future__ import annotations

import select

from kvferry_connector.wire.attach import Memory
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar.engines.base import CopyResult, Direction, Extents, GpuUse, PoolSpan
from kvferry_sidecar.engines.cuda import CudaCopyEngine, GpuOptions
from kvferry_sidecar.engines.cuda_driver import CudaError
from kvferry_sidecar.engines.host import HostCopyEngine
from kvferry_sidecar.geometry.device import CudaLayout, DeviceMemory


class SeveralCopyEngines:
    """Implements `engines.base.CopyEngine` over one for host memory and one for GPUs."""

    def __init__(
        self, threads: int, pool: PoolSpan, log: Log, *, gpu: bool, options: GpuOptions
    ) -> None:
        """Start ``threads`` copy threads for host memory; those for a GPU start with its use."""
        self._gpu = gpu
        self._host = HostCopyEngine(
            threads=threads,
            pool_address=pool.address,
            pool_bytes=pool.total_bytes,
            pool_owner=pool.owner,
        )
        self._cuda = CudaCopyEngine(pool, log, options=options)
        if gpu:
            self._cuda.begin()
        self._epoll = select.epoll()
        for engine in (self._host, self._cuda):
            self._epoll.register(engine.wake_fd(), select.EPOLLIN)

    def open_device(self, memory: Memory, life: int, fd: int | None) -> DeviceMemory:
        """Map a rank's buffer on a GPU, by its descriptor if it has one. Raises CudaError."""
        if not self._gpu:
            raise CudaError(
                "this sidecar serves no GPU; set copy.gpu = true after reading docs/gpu.md"
            )
        return self._cuda.open(memory, life, fd)

    def gpus(self) -> list[GpuUse]:
        """Return what is used of each GPU."""
        return self._cuda.gpus()

    def lost(self) -> str:
        """Return the error, if there was one, after which only another process reaches a GPU."""
        return self._cuda.lost()

    def pinning(self) -> tuple[int, int]:
        """Return the bytes of the pool that are pinned for a GPU, and that will be."""
        return self._cuda.pinning()

    def wake_fd(self) -> int:
        """Descriptor that is readable exactly while results of either wait."""
        return self._epoll.fileno()

    def submit(self, ticket: int, direction: Direction, extents: Extents) -> None:
        """Start a copy with the engine of its layout. Raises as that one does."""
        if isinstance(extents.layout, CudaLayout):
            self._cuda.submit(ticket, direction, extents)
        else:
            self._host.submit(ticket, direction, extents)

    def cancel(self, ticket: int) -> None:
        """Stop early; the engine that does not know the ticket ignores it."""
        self._host.cancel(ticket)
        self._cuda.cancel(ticket)

    def collect(self) -> list[CopyResult]:
        """Results of both since the last call."""
        return self._host.collect() + self._cuda.collect()

    def close(self) -> None:
        """Drain both."""
        self._host.close()
        self._cuda.close()
        self._epoll.close()
