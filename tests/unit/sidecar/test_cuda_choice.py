"""Which way is taken for what, and how ways are timed."""

from __future__ import annotations

from ctypes import c_void_p
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
from kvferry_sidecar.engines import cuda_choice
from kvferry_sidecar.engines.base import Direction
from kvferry_sidecar.engines.cuda_choice import CHUNKS, PAGES, find_ways
from kvferry_sidecar.engines.cuda_driver import Driver
from kvferry_sidecar.engines.cuda_modes import MODES, Mover, RectMover, movers_of
from kvferry_sidecar.engines.cuda_parts import Part
from kvferry_sidecar.engines.cuda_stored import StoredWays
from kvferry_sidecar.geometry.device import CudaLayout, DeviceMemory
from support.copying import SHAPES, Pool
from support.fake_cuda import FakeGpu, GpuEngineMemory, driver_with_kernels

LOG = structlog.get_logger()
NOT_STORED = StoredWays(None, LOG)
STREAM = c_void_p(7)


@pytest.fixture
def driver(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return driver_with_kernels(gpu, monkeypatch)


def part_of(direction: Direction, page_bytes: int, chunks: int, layers: int) -> Part:
    """Return a slice that nobody moves."""
    memory = DeviceMemory(0, 4096, layers * chunks * page_bytes)
    offsets = np.arange(layers, dtype=np.int64) * chunks * page_bytes
    same = np.full(layers, page_bytes, np.int64)
    layout = CudaLayout(memory, offsets, same, same, chunks)
    blocks = np.arange(chunks, dtype=np.int64)
    return Part(layout, direction, blocks, blocks, blocks * 0)


def test_each_length_number_and_direction_has_its_own_way(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = list(product(PAGES, CHUNKS))
    names = {
        direction: {shape: MODES[(at + at // 3 + direction) % 3] for at, shape in enumerate(shapes)}
        for direction in Direction
    }

    def seconds(_driver: Driver, way: Mover, part: Part, _stream: object) -> float:
        assert cuda_choice._comparing.locked(), "others that compare wait"
        page_bytes = part.layout.rects[0].length
        return 0.1 if names[part.direction][page_bytes, len(part.blocks)] == way.name else 1.0

    monkeypatch.setattr(cuda_choice, "_seconds", seconds)
    near = {700: 1024, 3000: 4096, 20_000: 16384, 1 << 20: 65536}
    for direction, best in names.items():
        ways = find_ways(driver, 0, direction, STREAM, mode="auto", stored=NOT_STORED, log=LOG)
        assert ways.best == best
        for (page_bytes, chunks), layers in product(shapes, (1, 8)):
            part = part_of(direction, page_bytes, chunks, layers)
            assert ways.choose(part).name == best[page_bytes, chunks]
        for (page_bytes, known), (chunks, few) in product(near.items(), ((2, 4), (100, 32))):
            part = part_of(direction, page_bytes, chunks, layers=1)
            wanted = best[known, few]
            if wanted != "kernel" or part.moved_bytes <= 16 << 20:
                assert ways.choose(part).name == wanted
        ways.close()


def test_a_time_is_the_best_of_those_after_the_first_and_of_all_of_the_copy(
    gpu: FakeGpu, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.lazily(True)
    shape = SHAPES[0]
    layout, pool = shape.layout(GpuEngineMemory(shape.total_bytes)), Pool(1 << 20)
    driver.pin(pool.address, pool.total_bytes)
    hosts = np.array([0, 65536], np.int64) + pool.address
    part = Part(layout, Direction.GATHER, np.array([1, 2], np.int64), hosts, hosts * 0)
    times, waiting = iter([0, 1, 10, 15, 20, 23, 30, 34]), []

    def clock() -> float:
        waiting.append(gpu.waiting())
        return float(next(times))

    monkeypatch.setattr(cuda_choice, "time", SimpleNamespace(perf_counter=clock))
    assert cuda_choice._seconds(driver, RectMover(driver), part, STREAM) == 3
    assert waiting == [0] * 8


def test_tables_stay_within_their_memory(driver: Driver) -> None:
    kernel = movers_of(driver, 0, "kernel")[0][0]
    assert kernel.name == "kernel"
    assert kernel.serves(part_of(Direction.GATHER, 16, 1, layers=65_000))
    assert not kernel.serves(part_of(Direction.GATHER, 16, 1, layers=66_000))
