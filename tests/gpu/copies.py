"""The copy engine on a GPU: exact in every shape, and how fast."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from ctypes import c_size_t, c_uint64, c_void_p
from itertools import product
from typing import Any

import numpy as np
import structlog
from gpu import device
from gpu.runner import TESTS, Sizes
from kvferry_native import Checksums
from kvferry_sidecar.engines.base import CopyResult, CopyStatus, Direction, Extents, PoolSpan
from kvferry_sidecar.engines.cuda import CudaCopyEngine, GpuOptions
from kvferry_sidecar.engines.cuda_driver import Driver
from kvferry_sidecar.engines.cuda_modes import MODES, movers_of
from kvferry_sidecar.geometry.device import CudaLayout, DeviceMemory
from numpy.typing import NDArray
from support.copying import Pool

from bench.common import at_least

LAYERS = 32
PAGES = (4096, 8192, 16384, 28672, 32768, 65536, 131072, 262144, 1 << 20)
COUNTS = (16, 64, 256, 1024)
NAMES = {Direction.GATHER: "save", Direction.SCATTER: "load"}
bytes_max = 1 << 30  # of one job


def conformance(_sizes: Sizes) -> dict[str, Any]:
    """The suite of copy engines, on this GPU."""
    figures = ways_here()
    suite = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_timeout",
        "-k",
        "cuda",
        "tests/conformance/test_copy_engine.py",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *suite], cwd=TESTS.parent, capture_output=True, text=True,
        env=os.environ | {"TEST_ON_GPU": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return figures | {"pytest": done.stdout.strip().splitlines()[-1]}


def ways_here() -> dict[str, Any]:
    """Return the ways of copying that this GPU has, and why it lacks others. Raises CudaError."""
    movers, reasons = movers_of(device.driver(), 0, "auto")
    return {"ways": [one.name for one in movers], "without": reasons}


class Bench:
    """An engine, a pool, and pages on the GPU. ``mode`` as of copy.gpu_mode."""

    def __init__(
        self, pool_bytes: int, device_bytes: int, mode: str = "auto", driver: Driver | None = None
    ) -> None:
        self.pool = Pool(pool_bytes)
        span = PoolSpan(self.pool.address, pool_bytes, pool_bytes, 1 << 20, None)
        driver = driver or device.driver()
        self.engine = CudaCopyEngine(span, structlog.get_logger(), driver, GpuOptions(mode))
        self.engine.pin(driver, 0)
        assert self.engine._pinned is not None, "it has begun"
        self.engine._pinned.wait(pool_bytes)  # what the driver says where it may not be
        self.buffer = device.DeviceBuffer(device_bytes)
        self.crcs: NDArray[np.uint32] | None = None  # of the last save with checksums
        self._tickets = 0

    def layout(self, page_bytes: int, blocks: int, layers: int) -> CudaLayout:
        """Return layer-outermost pages: one run per layer and block."""
        memory = DeviceMemory(0, self.buffer.address, self.buffer.total_bytes)
        offsets = np.arange(layers, dtype=np.int64) * blocks * page_bytes
        same = np.full(layers, page_bytes, np.int64)
        return CudaLayout(memory, offsets, same, same, blocks)

    def seconds(
        self, direction: Direction, layout: CudaLayout, count: int, *, crc: bool = False
    ) -> float:
        """Copy so many blocks and return how long it took; a load compares ``crcs`` of a save."""
        extents = self._extents(direction, layout, count, crc=crc)
        started_s = time.perf_counter()
        self._submit(direction, extents)
        (result,) = self._collect()
        taken_s = time.perf_counter() - started_s
        assert result.moved_bytes == count * layout.payload_bytes, result
        self.crcs = result.crcs if result.crcs is not None else self.crcs
        return taken_s

    def link_gb_per_s(self, direction: Direction) -> float:
        """Return what one plain copy of 64 MiB between pool and GPU does, at best."""
        driver, stream = device.driver(), device.driver().stream()
        size = min(64 << 20, self.pool.total_bytes, self.buffer.total_bytes)
        host, gpu, count = (
            c_void_p(self.pool.address),
            c_uint64(self.buffer.address),
            c_size_t(size),
        )
        times = []
        for _ in range(5):
            started_s = time.perf_counter()
            if direction is Direction.GATHER:
                driver("cuMemcpyDtoHAsync_v2", host, gpu, count, stream)
            else:
                driver("cuMemcpyHtoDAsync_v2", gpu, host, count, stream)
            driver("cuStreamSynchronize", stream)
            times.append(time.perf_counter() - started_s)
        driver("cuStreamDestroy_v2", stream)
        return size / min(times) / 1e9

    def keep_busy(
        self, direction: Direction, layout: CudaLayout, count: int, seconds: float
    ) -> float:
        """Keep two jobs of so many blocks under way for so long; return GB/s."""
        extents = self._extents(direction, layout, count)
        open_jobs, moved_bytes, started_s = 0, 0, time.monotonic()
        while (going := time.monotonic() - started_s < seconds) or open_jobs:
            while going and open_jobs < 2:
                self._submit(direction, extents)
                open_jobs += 1
            for result in self._collect():
                moved_bytes += result.moved_bytes
                open_jobs -= 1
        return moved_bytes / (time.monotonic() - started_s) / 1e9

    def _extents(
        self, direction: Direction, layout: CudaLayout, count: int, *, crc: bool = False
    ) -> Extents:
        blocks = np.random.default_rng(count).permutation(np.arange(1, count + 1, dtype=np.int32))
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(layout.payload_bytes)
        expected = self.crcs if crc and direction is Direction.SCATTER else None
        return Extents(layout, blocks, offsets, np.zeros(count, np.uint32), expected, crc)

    def _submit(self, direction: Direction, extents: Extents) -> None:
        self._tickets += 1
        self.engine.submit(self._tickets, direction, extents)

    def _collect(self) -> list[CopyResult]:
        """Wait for results. Raises AssertionError for one that is not well."""
        select.select([self.engine.wake_fd()], [], [])
        results = self.engine.collect()
        assert all(result.status is CopyStatus.DONE for result in results), results
        return results

    def close(self) -> None:
        """Give everything back."""
        self.engine.close()
        self.buffer.free()


def checksummed(sizes: Sizes) -> dict[str, Any]:
    """GB/s as sidecars copy, in the way they choose and with checksums, and the same without.

    The goals are shares of what one copy of 64 MiB of pinned memory does on the same GPU.
    """
    limit = 4 << 20 if sizes.small else bytes_max
    layers = 2 if sizes.small else LAYERS
    bench = Bench(limit, limit + layers * (1 << 20))
    figures: dict[str, Any] = {"checksums alone": round(limit / alone_s(bench.pool) / 1e9, 2)}
    link = {direction: bench.link_gb_per_s(direction) for direction in Direction}
    shares: dict[tuple[str, int], float] = {}
    for crc, page_bytes, direction in product((False, True), (4096, 65536, 1 << 20), Direction):
        count = min(1024, limit // (page_bytes * layers))
        layout = bench.layout(page_bytes, count + 1, layers)
        taken_s = min(bench.seconds(direction, layout, count, crc=crc) for _ in range(3))
        rate = count * layout.payload_bytes / taken_s / 1e9
        name = f"{NAMES[direction]} {'with' if crc else 'without'} checksums"
        figures[f"{name}, {page_bytes} x {count}"] = round(rate, 2)
        shares[name, page_bytes] = rate / link[direction]
    bench.close()
    goals = []
    for name in sorted({name for name, _ in shares}):
        large, small = min(shares[name, 65536], shares[name, 1 << 20]), shares[name, 4096]
        goals += [
            at_least(f"{name}: runs of 64 KiB and more, over 64 MiB at once", large, "x", 0.9),
            at_least(f"{name}: 4 KiB x 1,024, over 64 MiB at once", small, "x", 0.6),
        ]
    whole = {f"64 MiB at once, {NAMES[one]}": round(rate, 2) for one, rate in link.items()}
    return figures | whole | {"goals": goals}


def alone_s(pool: Pool) -> float:
    """Return how long the checksums of a pool take in as many threads as a lane has."""
    checksums = Checksums(GpuOptions().threads)
    piece, step = np.array([pool.address], np.uint64), np.array([pool.total_bytes], np.uint64)
    times = []
    for _ in range(3):
        started_s = time.perf_counter()
        checksums.begin(piece, step, np.zeros(1, np.uint32))
        checksums.end()
        times.append(time.perf_counter() - started_s)
    return min(times)


def bandwidth(sizes: Sizes) -> dict[str, Any]:
    """GB/s by way, page size, number of blocks and direction, against one copy of 64 MiB."""
    limit = 4 << 20 if sizes.small else bytes_max
    layers = 2 if sizes.small else LAYERS
    figures = ways_here()
    for mode in [mode for mode in MODES if mode in figures["ways"]]:
        bench = Bench(limit, limit + layers * (1 << 20), mode)
        try:
            for direction in Direction:
                figures |= rates(bench, direction, mode, limit, layers)
        finally:
            bench.close()
    return figures


def rates(
    bench: Bench, direction: Direction, mode: str, limit: int, layers: int
) -> dict[str, float]:
    """Return GB/s of one way and direction."""
    whole = bench.layout(min(64 << 20, limit // 2), 2, 1)
    best_s = min(bench.seconds(direction, whole, 1) for _ in range(5))
    name = f"{mode} {direction.name.lower()}"
    figures = {f"{name} link": round(whole.payload_bytes / best_s / 1e9, 2)}
    for page_bytes, count in product(PAGES, COUNTS):
        moved = page_bytes * layers * count
        if moved <= limit - layers * page_bytes:
            layout = bench.layout(page_bytes, count + 1, layers)
            taken_s = min(bench.seconds(direction, layout, count) for _ in range(3))
            figures[f"{name} {page_bytes} x {count}"] = round(moved / taken_s / 1e9, 2)
    return figures
