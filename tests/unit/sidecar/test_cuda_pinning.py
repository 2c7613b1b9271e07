"""How the pool is pinned: touched by several threads, told with its rate, given back in reverse."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
from kvferry_sidecar.engines import cuda_lane, cuda_memory, pages
from kvferry_sidecar.engines.base import Direction, PoolSpan
from kvferry_sidecar.engines.cuda import CudaCopyEngine, GpuOptions
from kvferry_sidecar.engines.cuda_driver import Driver
from kvferry_sidecar.engines.cuda_memory import PinnedPool
from structlog.testing import capture_logs
from support.copying import SHAPES, Pool, extents_of
from support.fake_cuda import FakeGpu, GpuEngineMemory, library
from support.waiting import wait_until

GIB = 1 << 30


@pytest.fixture
def driver(gpu: FakeGpu) -> Driver:
    return Driver(str(library()))


def test_pages_are_touched_by_several_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)
    touched: list[tuple[int, int]] = []

    def madvise(address: int, count: int, advice: int) -> int:
        assert advice == 23
        together.wait(90)
        touched.append((address, count))
        return 0

    monkeypatch.setattr(pages, "_piece_bytes", 4096)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(madvise=madvise))
    assert pages.populate(8192, 6 * 4096 - 1000, 3)
    assert sorted(touched) == [(8192 + at * 4096, 4096 - 1000 * (at == 5)) for at in range(6)]


def test_pinning_is_told_with_its_rate_and_given_back_in_reverse(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a chunk of two GiB takes half a second."""
    clock = iter(range(100))
    monkeypatch.setattr(cuda_memory, "monotonic", lambda: next(clock) / 2)
    monkeypatch.setattr(cuda_memory, "pin_bytes_max", 2 * GIB)
    monkeypatch.setattr(pages, "populate", lambda *_: True)
    taken: list[tuple[str, int]] = []

    def noted(_self: Driver, name: str, address: int, *_: object) -> None:
        if "MemHost" in name:
            taken.append((name.removeprefix("cuMemHost"), address))

    monkeypatch.setattr(Driver, "__call__", noted)
    monkeypatch.setattr(Driver, "use", lambda *_: None)
    with capture_logs() as lines:
        pinned = PinnedPool(driver, PoolSpan(0, 5 * GIB, 4 * GIB, GIB), structlog.get_logger())
        pinned.start(0)
        pinned.wait(5 * GIB)
        wait_until(lambda: len(lines) == 2, "both chunks are told")
        pinned.close()
    assert [(line["event"], line["gib"], line["of_gib"], line["gib_per_s"]) for line in lines] == [
        ("pool pinned", 3, 5, 4.0), ("pool pinned", 5, 5, 4.0),
    ]  # fmt: skip
    assert taken == [
        ("Register_v2", GIB), ("Register_v2", 3 * GIB),
        ("Unregister", 3 * GIB), ("Unregister", GIB),
    ]  # fmt: skip


def threads_named(name: str) -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # it has ended meanwhile
            if (task / "comm").read_text().strip() == name:
                found.append(int(task.name))
    return found


def test_the_threads_of_a_lane_run_near_its_gpu(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, asked = {max(os.sched_getaffinity(0))}, []

    def bind_near(bus_id: str) -> None:
        asked.append(bus_id)
        os.sched_setaffinity(0, near)

    monkeypatch.setattr(cuda_lane, "bind_near", bind_near)
    before = set(threads_named("kvferry-sum"))
    pool, shape = Pool(1 << 20), SHAPES[0]
    span = PoolSpan(pool.address, pool.total_bytes, pool.total_bytes, 1 << 16, pool)
    engine = CudaCopyEngine(span, structlog.get_logger(), driver, GpuOptions("rect", threads=2))
    engine.pin(driver, 1)
    layout = shape.layout(GpuEngineMemory(shape.total_bytes, device=1))
    engine.submit(1, Direction.GATHER, extents_of(layout, [1], [0]))
    wait_until(engine.collect, "the copy ends")
    assert asked == ["0000:FF:01.0"]
    summing = set(threads_named("kvferry-sum")) - before
    assert [os.sched_getaffinity(thread) for thread in summing] == [near] * 2
    engine.close()
