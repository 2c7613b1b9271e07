"""The copy engine on a GPU: exact in every shape, and how fast."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from itertools import product
from typing import Any

import numpy as np
import structlog
from gpu import device
from gpu.runner import TESTS, Sizes
from kvferry_native import Checksums
from kvferry_sidecar.engines.base import Direction, Extents, PoolSpan
from kvferry_sidecar.engines.cuda import CudaCopyEngine, GpuOptions
from kvferry_sidecar.engines.cuda_modes import MODES
from kvferry_sidecar.geometry.device import CudaLayout, DeviceMemory
from numpy.typing import NDArray
from support.copying import Pool

LAYERS = 32
PAGES = (4096, 8192, 16384, 28672, 32768, 65536, 131072, 262144, 1 << 20)
COUNTS = (16, 64, 256, 1024)
bytes_max = 1 << 30  # of one job


def conformance(_sizes: Sizes) -> dict[str, Any]:
    """The suite of copy engines, on this GPU."""
    suite = ["-q", "-p", "no:cacheprovider", "-k", "cuda", "tests/conformance/test_copy_engine.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *suite], cwd=TESTS.parent, capture_output=True, text=True,
        env=os.environ | {"TEST_ON_GPU": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return {"pytest": done.stdout.strip().splitlines()[-1]}


class Bench:
    """An engine, a pool, and pages on the GPU. ``mode`` as of copy.gpu_mode."""

    def __init__(self, pool_bytes: int, device_bytes: int, mode: str = "auto") -> None:
        self.pool = Pool(pool_bytes)
        span = PoolSpan(self.pool.address, pool_bytes, pool_bytes, 1 << 20, None)
        options, log = GpuOptions(mode), structlog.get_logger()
        self.engine = CudaCopyEngine(span, log, device.driver(), options)
        self.engine.pin(device.driver(), 0)
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
        blocks = np.random.default_rng(count).permutation(np.arange(1, count + 1, dtype=np.int32))
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(layout.payload_bytes)
        seeds = np.zeros(count, np.uint32)
        expected = self.crcs if crc and direction is Direction.SCATTER else None
        extents = Extents(layout, blocks, offsets, seeds, expected, crc)
        self._tickets += 1
        started_s = time.perf_counter()
        self.engine.submit(self._tickets, direction, extents)
        select.select([self.engine.wake_fd()], [], [])
        (result,) = self.engine.collect()
        taken_s = time.perf_counter() - started_s
        assert result.moved_bytes == count * layout.payload_bytes, result
        self.crcs = result.crcs if result.crcs is not None else self.crcs
        return taken_s

    def close(self) -> None:
        """Give everything back."""
        self.engine.close()
        self.buffer.free()


def checksummed(sizes: Sizes) -> dict[str, Any]:
    """GB/s as sidecars copy, in the way they choose and with checksums, and the same without."""
    limit = 4 << 20 if sizes.small else bytes_max
    layers = 2 if sizes.small else LAYERS
    bench = Bench(limit, limit + layers * (1 << 20))
    figures: dict[str, Any] = {"checksums alone": round(limit / alone_s(bench.pool) / 1e9, 2)}
    try:
        for page_bytes, direction in product((4096, 65536, 1 << 20), Direction):
            count = min(1024, limit // (page_bytes * layers))
            layout = bench.layout(page_bytes, count + 1, layers)
            for name, crc in (("plain", False), ("with checksums", True)):
                taken_s = min(bench.seconds(direction, layout, count, crc=crc) for _ in range(3))
                rate = round(count * layout.payload_bytes / taken_s / 1e9, 2)
                figures[f"{direction.name.lower()} {page_bytes} x {count} {name}"] = rate
    finally:
        bench.close()
    return figures


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
    """GB/s by way, page size, number of blocks and direction, against one copy of 64 MiB.

    A way that this driver lacks shows the rates of 2-D copies; the log line of it says so.
    """
    limit = 4 << 20 if sizes.small else bytes_max
    layers = 2 if sizes.small else LAYERS
    figures: dict[str, Any] = {}
    for mode in MODES:
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
