"""The sidecar's side of GPU memory: opening, counting, pinning, errors, layouts."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_void_p
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import structlog
from kvferry_connector.wire.attach import CudaMemory, Memory
from kvferry_sidecar.engines import cuda_memory, pages
from kvferry_sidecar.engines.base import PoolSpan
from kvferry_sidecar.engines.cuda import CudaCopyEngine, GpuOptions
from kvferry_sidecar.engines.cuda_driver import ERRORS, CudaError, Driver, error_of
from kvferry_sidecar.engines.cuda_memory import CudaMemories, PinnedPool, chunk_cuts
from kvferry_sidecar.geometry.device import CudaLayout, DeviceMemory, Rect
from kvferry_sidecar.placement import processors
from support.copying import SHAPES, Shape
from support.fake_cuda import FakeGpu, as_driver, bytes_at, library
from support.waiting import wait_until

LOG = structlog.get_logger()
ALLOCATION_BYTES = 1 << 16
CHILD = f"""
import sys, msgspec
from kvferry_connector.cuda import Driver
from support.fake_cuda import FakeGpu, as_driver, bytes_at, library
gpu, driver = FakeGpu(), Driver(str(library()))
address = gpu.alloc({ALLOCATION_BYTES}, device=1)
bytes_at(address, {ALLOCATION_BYTES})[4096:12288] = 42
with driver.on(1):
    print(msgspec.json.encode(driver.export(address + 4096, 1)).decode(), flush=True)
sys.stdin.read()
gpu.free_all()
"""


@pytest.fixture
def memories(gpu: FakeGpu) -> CudaMemories:
    return CudaMemories(Driver(str(library())), LOG)


@pytest.fixture(scope="module")
def exported() -> Iterator[CudaMemory]:
    """Memory of another process, opened and closed by each test."""
    path = os.pathsep.join(sys.path)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | as_driver() | {"PYTHONPATH": path},
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield msgspec.json.decode(child.stdout.readline(), type=CudaMemory)
    finally:
        child.stdin.close()
        child.stdout.close()
        assert child.wait(90) == 0


def buffer(cuda: CudaMemory, total_bytes: int = 8192) -> Memory:
    return Memory(0, total_bytes, "cuda", cuda)


def test_one_mapping_per_allocation_closed_with_its_last_user(
    gpu: FakeGpu, memories: CudaMemories, exported: CudaMemory
) -> None:
    gpu.forget()
    first = memories.open(buffer(exported), life=5)
    assert first.ordinal == 1, "by UUID, whatever the exporter called it"
    assert (bytes_at(first.address, 8192) == 42).all()
    second = memories.open(buffer(exported), life=5)
    assert (second.address, gpu.mapped(), len(memories)) == (first.address, 1, 1)
    assert len(gpu.calls("cuIpcOpenMemHandle_v2")) == 1
    del first
    assert gpu.mapped() == 1
    del second
    assert (gpu.mapped(), len(memories)) == (0, 0)
    assert memories.open(buffer(exported), life=6).total_bytes == 8192, "and opens again"


def test_closing_leaves_the_threads_own_gpu_current(
    gpu: FakeGpu, memories: CudaMemories, exported: CudaMemory
) -> None:
    """The last reference may fall on the thread of another GPU's copies."""
    opened = memories.open(buffer(exported), life=5)  # on GPU 1
    driver = memories._driver
    driver.use(0)
    del opened
    current = c_void_p()
    driver("cuCtxGetCurrent", byref(current))
    assert current.value == 100, "the context of GPU 0"
    assert gpu.mapped() == 0, "and was closed on its own GPU"


@pytest.mark.parametrize(("life", "more"), [(6, 0), (5, 1)], ids=["process", "allocation"])
def test_equal_handles_of_another_process_or_allocation_are_not_trusted(
    gpu: FakeGpu, memories: CudaMemories, exported: CudaMemory, life: int, more: int
) -> None:
    """The driver returns the mapping that it has, which is of other memory."""
    kept = memories.open(buffer(exported), life=5)
    other = msgspec.structs.replace(exported, buffer_id=exported.buffer_id + more)
    gpu.forget()
    with pytest.raises(CudaError, match=r"the handle of other memory .* asks again"):
        memories.open(buffer(other), life=life)
    assert not gpu.calls("cuIpcOpenMemHandle_v2")
    assert (bytes_at(kept.address, 8192) == 42).all(), "what was open stays open"
    assert len(memories) == 1
    del kept
    again = memories.open(buffer(other), life=life)
    assert len(gpu.calls("cuIpcOpenMemHandle_v2")) == 1, "it is opened anew"
    assert again.total_bytes == 8192


@pytest.mark.parametrize(
    ("changes", "total_bytes", "text"),
    [
        ({"pid": os.getpid()}, 8192, "shareProcessNamespace"),
        ({"device": b"x" * 16}, 8192, "every GPU of the node"),
        ({"handle": b"x" * 63}, 8192, "compatible versions"),
        ({"device": b""}, 8192, "compatible versions"),
        ({}, ALLOCATION_BYTES - 4095, "of an allocation of 65536"),
        ({"offset": -1}, 8192, "of an allocation of 65536"),
        ({"handle": bytes(64)}, 8192, "INVALID_VALUE"),
    ],
)
def test_what_cannot_be_opened_is_refused_with_a_remedy(
    gpu: FakeGpu,
    memories: CudaMemories,
    exported: CudaMemory,
    changes: dict[str, object],
    total_bytes: int,
    text: str,
) -> None:
    with pytest.raises(CudaError, match=text):
        memories.open(buffer(msgspec.structs.replace(exported, **changes), total_bytes), life=5)
    assert len(memories) == gpu.mapped() == 0


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_each_known_error_is_named_with_a_remedy(
    gpu: FakeGpu, memories: CudaMemories, exported: CudaMemory, code: int
) -> None:
    gpu.fail("cuIpcOpenMemHandle_v2", code)
    with pytest.raises(CudaError) as caught:
        memories.open(buffer(exported), life=5)
    name, remedy = ERRORS[code]
    assert str(caught.value) == str(error_of("cuIpcOpenMemHandle_v2", code))
    assert name in str(caught.value)
    assert remedy in str(caught.value)
    assert len(memories) == 0


# What imports fail with in the field, and a word of what to do about it.
@pytest.mark.parametrize(
    ("code", "word"),
    [
        (1, "expandable segments"), (2, "gpu_memory_utilization"), (46, "compute mode"),
        (201, "shareProcessNamespace"), (205, "not by CDI or DRA"), (208, "report it"),
        (217, "the GPU that holds the memory"), (304, "memlock"), (400, "restart the sidecar"),
        (711, "the GPU that holds the memory"), (712, "another library"), (713, "report it"),
        (214, "a new one gets another"), (222, "cuda12"), (719, "Xid"), (802, "fabricmanager"),
        (800, "NVIDIA runtime"), (801, "MIG"), (803, "libcuda"),
        (999, "Xid"), (34, "cuda-compat"), (804, "cuda-compat"), (805, "MPS"), (209, "cuda12"),
        (500, "newer"), (810, "a new one gets another"),
    ],
)  # fmt: skip
def test_what_to_do_about_an_error(code: int, word: str) -> None:
    assert word in ERRORS[code][1]


def test_an_unknown_error_keeps_its_number() -> None:
    assert "CUDA_ERROR_4711" in str(error_of("cuInit", 4711))


@pytest.mark.parametrize(("before", "then"), [(None, "LAZY"), ("EAGER", "EAGER")])
def test_modules_are_loaded_lazily_unless_somebody_said_otherwise(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, before: str | None, then: str
) -> None:
    """Said before the driver begins, which asks only once."""
    monkeypatch.setenv("CUDA_MODULE_LOADING", before or "")
    if before is None:
        monkeypatch.delenv("CUDA_MODULE_LOADING")
    Driver(str(library()))
    assert gpu.loading() == then


# --- pinning ---------------------------------------------------------------------------------


def span(total_bytes: int, arena_bytes: int, slab_bytes: int, address: int = 0) -> PoolSpan:
    return PoolSpan(address, total_bytes, arena_bytes, slab_bytes)


def test_chunks_end_at_slabs_and_stay_under_the_drivers_bound() -> None:
    gib, slab_bytes = 1 << 30, 48 << 20
    slabs = 200 * gib // slab_bytes
    arena_at = 5 << 20
    cuts = chunk_cuts(span(arena_at + slabs * slab_bytes, slabs * slab_bytes, slab_bytes))
    assert (cuts[0], cuts[-1]) == (arena_at, arena_at + slabs * slab_bytes)
    for start, end in pairwise(cuts):
        assert (start - arena_at) % slab_bytes == 0
        assert 0 < end - start <= 64 * gib
    assert chunk_cuts(span(3 * gib, 2 * gib, gib)) == [gib, 3 * gib]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "pin_bytes_max", 8192)


@pytest.fixture
def pool() -> Iterator[PoolSpan]:
    memory = mmap.mmap(-1, 5 * 8192)
    view = np.frombuffer(memory, dtype=np.uint8)
    yield span(5 * 8192, 4 * 8192, 4096, view.ctypes.data)
    del view
    memory.close()


@pytest.mark.usefixtures("small_chunks")
def test_the_arena_is_pinned_chunk_by_chunk_and_given_back_in_reverse(
    gpu: FakeGpu, pool: PoolSpan
) -> None:
    pinned = PinnedPool(Driver(str(library())), pool, LOG)
    pinned.start(0)
    assert pinned.progress()[1] == 4 * 8192
    pinned.wait(pool.total_bytes)
    assert pinned.progress() == (4 * 8192, 4 * 8192)
    assert len(gpu.calls("cuMemHostRegister_v2")) == 4
    assert not gpu.pinned(pool.address), "the index is no GPU's business"
    assert all(gpu.pinned(pool.address + at) for at in range(8192, 5 * 8192, 4096))
    with ThreadPoolExecutor(1) as other:  # that uses no GPU
        other.submit(pinned.close).result(90)
    assert not gpu.pinned(pool.address + 8192)
    assert len(gpu.calls("cuMemHostUnregister")) == 4


@pytest.mark.usefixtures("small_chunks")
def test_what_is_pinned_serves_when_the_rest_cannot_be(gpu: FakeGpu, pool: PoolSpan) -> None:
    gpu.fail("cuMemHostRegister_v2", 304, after=2)
    pinned = PinnedPool(Driver(str(library())), pool, LOG)
    pinned.start(0)
    pinned.wait(3 * 8192)
    with pytest.raises(CudaError, match="memlock"):
        pinned.wait(3 * 8192 + 1)
    assert pinned.progress() == (2 * 8192, 2 * 8192), "no more will be"
    pinned.close()
    assert len(gpu.calls("cuMemHostUnregister")) == 2
    assert not gpu.pinned(pool.address + 8192)


def test_whoever_waits_is_told_of_the_end(gpu: FakeGpu, pool: PoolSpan) -> None:
    pinned = PinnedPool(Driver(str(library())), pool, LOG)
    pinned.stop()
    pinned.start(0)
    with pytest.raises(CudaError, match="closed"):
        pinned.wait(pool.total_bytes)
    pinned.close()
    wait_until(lambda: not gpu.calls("cuMemHostRegister_v2"), "nothing was pinned")


# --- layouts ---------------------------------------------------------------------------------


def layout_of(shape: Shape, total_bytes: int) -> CudaLayout:
    arrays = [np.array(x, np.int64) for x in (shape.offsets, shape.strides, shape.lengths)]
    return CudaLayout(DeviceMemory(0, 4096, total_bytes), *arrays, shape.blocks)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_rectangles_hold_each_run_once_in_order(shape: Shape) -> None:
    layout = layout_of(shape, shape.total_bytes)
    runs = [
        (rect.offset + number * rect.pitch, rect.stride, rect.length)
        for rect in layout.rects
        for number in range(rect.count)
    ]
    assert runs == list(zip(shape.offsets, shape.strides, shape.lengths, strict=True))
    assert all(rect.length <= rect.pitch for rect in layout.rects)


def test_layers_become_one_rectangle_unless_the_pitch_is_too_long() -> None:
    near = Shape("near", [0, 1 << 20, 2 << 20], [4096] * 3, [4096] * 3, 9)
    assert layout_of(near, near.total_bytes).rects == [Rect(0, 4096, 4096, 3, 1 << 20)]
    far = Shape("far", [0, 1 << 31, 2 << 31], [4096] * 3, [4096] * 3, 9)
    assert [rect.count for rect in layout_of(far, far.total_bytes).rects] == [1, 1, 1]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_run_outside_the_memory_is_refused(shape: Shape) -> None:
    ends = zip(shape.offsets, shape.strides, shape.lengths, strict=True)
    needed = max(o + max((shape.blocks - 1) * s, 0) + n for o, s, n in ends)
    layout_of(shape, needed)
    with pytest.raises(ValueError, match="leaves the memory"):
        layout_of(shape, needed - 1)


# --- pages, processors, footprint -------------------------------------------------------------


def test_pages_are_mapped_before_they_are_pinned_and_keep_their_bytes(
    gpu: FakeGpu, pool: PoolSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = bytes_at(pool.address, pool.total_bytes)
    view[:] = 7
    told: list[tuple[int, int, int]] = []
    pinned_then: list[int] = []
    populate = pages.populate

    def noted(address: int, total_bytes: int, threads: int) -> bool:
        told.append((address - pool.address, total_bytes, threads))
        pinned_then.append(len(gpu.calls("cuMemHostRegister_v2")))
        return populate(address, total_bytes, threads)

    monkeypatch.setattr(pages, "populate", noted)
    pinned = PinnedPool(Driver(str(library())), pool, LOG, threads=2)
    gpu.forget()
    pinned.start(0)
    pinned.wait(pool.total_bytes)
    assert told == [(8192, 4 * 8192, 2)]
    assert pinned_then == [0]
    pinned.close()
    assert (view == 7).all()


def test_pages_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_piece_bytes", 8192)
    with mmap.mmap(-1, 5 * 8192) as memory:
        place = np.frombuffer(memory, dtype=np.uint8)
        assert pages.populate(place.ctypes.data, 5 * 8192 - 4096, 3)
        assert not pages.populate(place.ctypes.data + 1, 4096, 1), "an odd address is refused"
        del place


def test_without_a_thread_pages_are_left_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with mmap.mmap(-1, 8192) as memory:
        place = np.frombuffer(memory, dtype=np.uint8)
        assert not pages.populate(place.ctypes.data, 8192, 2)
        del place


@pytest.mark.parametrize(
    ("text", "found"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set())]
)
def test_lists_of_processors(text: str, found: set[int]) -> None:
    assert processors(text) == found


@pytest.mark.parametrize(("node", "bound"), [("0", True), ("-1", False), ("1", False)])
def test_a_thread_moves_to_the_node_of_its_gpu(tmp_path: Path, node: str, bound: bool) -> None:
    own = sorted(os.sched_getaffinity(0))
    device = tmp_path / "sys/bus/pci/devices/0000:ff:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    for number, cpus in (("0", f"{own[-1]},4000"), ("1", "4001")):
        place = tmp_path / f"sys/devices/system/node/node{number}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{cpus}\n")

    def work() -> tuple[int | None, set[int]]:
        return pages.bind_near("0000:FF:00.0", tmp_path), os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as thread:
        found, processors = thread.submit(work).result(90)
    assert (found, processors) == ((0, {own[-1]}) if bound else (None, set(own)))
    assert sorted(os.sched_getaffinity(0)) == own, "this thread stays where it was"


def test_what_is_used_of_a_gpu_is_told(gpu: FakeGpu, pool: PoolSpan, exported: CudaMemory) -> None:
    driver = Driver(str(library()))
    engine = CudaCopyEngine(pool, LOG, driver, GpuOptions("rect"))
    assert engine.gpus() == []
    kept = engine.open(buffer(exported), life=5)
    (use,) = engine.gpus()
    assert use.device == exported.device.hex()
    assert (use.mapped_bytes, use.staging_bytes) == (ALLOCATION_BYTES, 0)
    assert use.free_bytes == use.total_bytes - ALLOCATION_BYTES
    gpu.fail("cuMemGetInfo_v2", 719)
    assert engine.gpus() == [], "a lost GPU ends no status"
    gpu.fail("", 0)
    del kept
    assert engine.gpus()[0].mapped_bytes == 0
    engine.close()
