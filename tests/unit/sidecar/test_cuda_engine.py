"""The engine of GPU copies: its lanes, what they stand back for, faults, and what is held.

Over a driver made of host memory, whose kernels are the product's own source.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
from kvferry_connector.wire.attach import Memory
from kvferry_sidecar.engines import cuda, cuda_lane, cuda_memory
from kvferry_sidecar.engines.base import CopyStatus, Direction, PoolSpan
from kvferry_sidecar.engines.cuda import CudaCopyEngine, GpuOptions
from kvferry_sidecar.engines.cuda_choice import Ways
from kvferry_sidecar.engines.cuda_driver import ERRORS, LOST, CudaError, Driver
from kvferry_sidecar.engines.cuda_lane import Job, Lane
from kvferry_sidecar.engines.cuda_modes import RectMover
from kvferry_sidecar.geometry.device import CudaLayout, DeviceMemory
from support.copying import SHAPES, Pool, extents_of, layer_outermost
from support.fake_cuda import FakeGpu, GpuEngineMemory, driver_with_kernels
from support.waiting import wait_until

LOG = structlog.get_logger()


@pytest.fixture
def driver(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return driver_with_kernels(gpu, monkeypatch)


@pytest.mark.parametrize("batches", [True, False], ids=["batch", "one-by-one"])
@pytest.mark.parametrize("direction", list(Direction), ids=lambda one: one.name)
def test_no_copy_lies_in_two_registrations(
    gpu: FakeGpu,
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    direction: Direction,
    batches: bool,
) -> None:
    """Payloads that fill their slabs follow each other over the end of a chunk that was pinned."""
    slab_bytes = 1 << 16
    monkeypatch.setattr(cuda_memory, "pin_bytes_max", slab_bytes)
    shape = layer_outermost(2, slab_bytes // 4, slab_bytes // 4, 9, start=0)
    assert 2 * shape.payload_bytes == slab_bytes
    memory = GpuEngineMemory(shape.total_bytes)
    gpu.with_kernels(True)
    gpu.without_batches(not batches)
    pool = Pool(4 * slab_bytes)
    span = PoolSpan(pool.address, pool.total_bytes, pool.total_bytes, slab_bytes, pool)
    engine = CudaCopyEngine(span, LOG, driver, GpuOptions("kernel"))
    engine.pin(driver, 0)
    offsets = [number * shape.payload_bytes for number in range(6)]
    blocks = [3, 1, 6, 2, 5, 4]
    extents = extents_of(shape.layout(memory), blocks, offsets, crc=False)
    engine.submit(1, direction, extents)
    (result,) = wait_until(engine.collect, "the copy ends")
    engine.close()
    assert (result.status, result.moved_bytes) == (CopyStatus.DONE, 6 * shape.payload_bytes)
    assert gpu.calls("cuLaunchKernel")


# --- loads before saves, share of the time ---------------------------------------------------


def two_slices(monkeypatch: pytest.MonkeyPatch, driver: Driver, **options: int) -> CudaCopyEngine:
    monkeypatch.setattr(cuda_lane, "slice_bytes_max", 1)
    pool = Pool(1 << 20)
    span = PoolSpan(pool.address, pool.total_bytes, pool.total_bytes, 1 << 16, pool)
    engine = CudaCopyEngine(span, LOG, driver, GpuOptions("rect", **options))
    engine.pin(driver, 0)
    return engine


def job_of(layout: CudaLayout, direction: Direction) -> Job:
    none = np.zeros(0)
    return Job(
        9, direction, layout, none.astype(np.int32), none.astype(np.uint64),
        none.astype(np.uint32), None, False,
    )  # fmt: skip


def test_a_save_stands_back_between_slices_while_there_are_loads(
    gpu: FakeGpu, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "yield_ms_max", 60_000)
    engine = two_slices(monkeypatch, driver)
    shape = SHAPES[0]
    layout = shape.layout(GpuEngineMemory(shape.total_bytes))
    engine._loads[0] = 1  # a load is open
    gpu.forget()
    engine.submit(1, Direction.GATHER, extents_of(layout, [1, 2], [0, 65536]))
    wait_until(lambda: gpu.calls("cuEventSynchronize"), "the first slice is done")
    assert engine.collect() == []
    with engine._moved:
        engine._loads[0] = 0
        engine._moved.notify_all()
    found = wait_until(engine.collect, "the save goes on")
    assert found[0].moved_bytes == 2 * shape.payload_bytes
    engine.submit(2, Direction.SCATTER, extents_of(layout, [1, 2], [0, 65536], crc=False))
    wait_until(engine.collect, "the load ends")
    assert not engine._loads.total(), "and is open no more"
    engine._loads[1] = 1  # on another GPU
    assert not engine.gives_way(job_of(layout, Direction.GATHER), 1)
    engine._loads[0] = 1
    assert engine.gives_way(job_of(layout, Direction.GATHER), 1)
    assert not engine.gives_way(job_of(layout, Direction.GATHER), 0), "between slices only"
    assert not engine.gives_way(job_of(layout, Direction.SCATTER), 1)
    engine.close()


@pytest.mark.parametrize(
    ("mode", "call"),
    [
        ("rect", "cuStreamCreate"), ("rect", "cuMemcpy2DAsync_v2"), ("rect", "cuEventCreate"),
        ("rect", "cuEventRecord"), ("rect", "cuEventSynchronize"),
        ("batch", "cuMemcpyBatchAsync"), ("kernel", "cuLaunchKernel"),
        ("kernel", "cuMemcpyHtoDAsync_v2"), ("rect", "cuMemHostRegister_v2"),
    ],
)  # fmt: skip
def test_a_lost_context_fails_copies_and_is_told(
    gpu: FakeGpu, driver: Driver, mode: str, call: str
) -> None:
    pool = Pool(1 << 20)
    span = PoolSpan(pool.address, pool.total_bytes, pool.total_bytes, 1 << 16, pool)
    engine = CudaCopyEngine(span, LOG, driver, GpuOptions(mode))
    assert engine.lost() == ""
    shape = SHAPES[0]
    layout = shape.layout(GpuEngineMemory(shape.total_bytes))
    gpu.fail(call, 719)
    engine.pin(driver, 0)
    engine.submit(1, Direction.GATHER, extents_of(layout, [1, 2], [0, 65536]))
    (result,) = wait_until(engine.collect, "the save ends")
    assert (result.status, result.moved_bytes) == (CopyStatus.FAILED, 0)
    assert f"{call} failed: CUDA_ERROR_LAUNCH_FAILED (719)" in engine.lost()
    engine.close()


def test_what_is_no_loss_is_none(gpu: FakeGpu, driver: Driver) -> None:
    for code in set(ERRORS) - set(LOST):
        gpu.fail("cuMemGetInfo_v2", code)
        with pytest.raises(CudaError):
            driver.memory(0)
    assert driver.lost is None


@pytest.mark.parametrize("direction", list(Direction), ids=lambda one: one.name)
def test_a_share_leaves_the_rest_of_the_time_to_others(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    """A quarter of the time copies, three quarters are left alone; nothing is under way then.

    By a clock that goes on by 1 whenever a lane looks at it: at the begin and the end of a slice,
    before a rest, and at the begin of a job.
    """
    ticks = itertools.count(1000.0)
    clock = SimpleNamespace(monotonic=lambda: next(ticks))
    monkeypatch.setattr(cuda_lane, "time", clock)
    engine = two_slices(monkeypatch, driver, share_percent=25)
    shape = SHAPES[0]
    layout = shape.layout(GpuEngineMemory(shape.total_bytes))
    rests: list[float] = []
    stand_back = engine.stand_back

    def noted(job: Job, slice_s: float, idle_s: float) -> None:
        assert job.holds == 1
        stand_back(job, slice_s, idle_s)

    def rested(_until: object, wait_s: float) -> None:
        if wait_s != cuda.yield_ms_max / 1000:
            rests.append(wait_s)

    monkeypatch.setattr(engine, "stand_back", noted)
    monkeypatch.setattr(engine._moved, "wait_for", rested)
    for chunks in (3, 1, 1):  # short jobs one after the other take no more than a long one
        offsets = [65536 * number for number in range(chunks)]
        extents = extents_of(layout, range(1, 1 + chunks), offsets, crc=False)
        engine.submit(1, direction, extents)
        wait_until(engine.collect, "the copy ends")
    assert rests == [2, 2, 1, 1]
    next(ticks)
    engine.submit(1, direction, extents)
    wait_until(engine.collect, "the copy ends")
    assert rests == [2, 2, 1, 1], "the link was idle for long enough"
    engine.close()


def test_a_cancel_ends_the_rest_of_a_share(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = two_slices(monkeypatch, driver, share_percent=1)
    shape = SHAPES[0]
    layout = shape.layout(GpuEngineMemory(shape.total_bytes))
    began = threading.Event()
    stand_back = engine.stand_back

    def long_rest(job: Job, slice_s: float, _idle_s: float) -> None:
        if slice_s:
            began.set()
            stand_back(job, 3600.0, 0.0)

    monkeypatch.setattr(engine, "stand_back", long_rest)
    engine.submit(1, Direction.SCATTER, extents_of(layout, [1, 2], [0, 65536], crc=False))
    assert began.wait(90)
    with ThreadPoolExecutor(1) as closing:
        closing.submit(engine.close).result(90)
    (result,) = engine.collect()
    assert result.moved_bytes == shape.payload_bytes


def test_who_sees_a_result_may_close_the_memory(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread of the engine holds it any more when the result is announced."""
    engine = two_slices(monkeypatch, driver)
    shape = SHAPES[0]
    layout = shape.layout(GpuEngineMemory(shape.total_bytes))
    memory = weakref.ref(layout.memory)
    begin, held_then = threading.Event(), []
    copy, wake = Lane._copy, os.eventfd_write

    def copy_later(lane: Lane, job: Job) -> None:
        assert begin.wait(90)
        copy(lane, job)

    def noted(fd: int, value: int) -> None:
        held_then.append(memory() is not None)
        wake(fd, value)

    monkeypatch.setattr(Lane, "_copy", copy_later)
    monkeypatch.setattr(cuda.os, "eventfd_write", noted)
    engine.submit(1, Direction.GATHER, extents_of(layout, [1, 2], [0, 65536]))
    del layout
    begin.set()
    wait_until(engine.collect, "the save ends")
    assert held_then == [False]
    engine.close()


def test_ways_are_compared_once_per_gpu_and_direction(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever engine comes next."""
    compared: list[tuple[int, Direction]] = []

    def noted(
        driver: Driver, ordinal: int, direction: Direction, *_: object, **how: object
    ) -> Ways:
        compared.append((ordinal, direction))
        return Ways([RectMover(driver)])

    monkeypatch.setattr(cuda, "find_ways", noted)
    engine = two_slices(monkeypatch, driver)
    shape = SHAPES[0]
    for ticket, direction in enumerate([Direction.GATHER, Direction.SCATTER] * 2):
        layout = shape.layout(GpuEngineMemory(shape.total_bytes))
        engine.submit(ticket, direction, extents_of(layout, [1, 2], [0, 65536], crc=False))
        wait_until(engine.collect, "the copy ends")
    assert sorted(compared) == [(0, Direction.GATHER), (0, Direction.SCATTER)]
    engine.close()


def test_ways_are_compared_when_an_engine_attaches(
    gpu: FakeGpu, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy waits for it that comes later."""
    pool = Pool(1 << 20)
    span = PoolSpan(pool.address, pool.total_bytes, pool.total_bytes, 1 << 16, pool)
    engine = CudaCopyEngine(span, LOG, driver)
    opened = DeviceMemory(0, 4096, 4096)
    monkeypatch.setattr(cuda.CudaMemories, "open", lambda *_: opened)
    engine.open(Memory(0, 4096, "cuda", None), life=5)
    lanes = engine._lanes
    wait_until(lambda: all(lane._ways for lane in lanes.values()), "the ways are compared")
    assert sorted(lanes) == [(0, Direction.GATHER), (0, Direction.SCATTER)]
    assert not [lane for lane in lanes.values() if not lane._ways.best]
    engine.close()


def test_a_fault_that_is_none_of_the_drivers_fails_copies_and_ends_no_lane(
    gpu: FakeGpu, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = two_slices(monkeypatch, driver)
    shape = SHAPES[0]
    layout = shape.layout(GpuEngineMemory(shape.total_bytes))
    with monkeypatch.context() as broken:
        broken.setattr(cuda, "find_ways", lambda *_, **__: 1 // 0)
        engine.submit(1, Direction.GATHER, extents_of(layout, [1], [0]))
        (result,) = wait_until(engine.collect, "the save ends")
        assert result.status == CopyStatus.FAILED
    engine.submit(2, Direction.GATHER, extents_of(layout, [1], [0]))
    (result,) = wait_until(engine.collect, "the save ends")
    assert result.status == CopyStatus.DONE
    engine.close()
