"""The ways of copying on a GPU: which is chosen, what it calls, and the kernel itself.

The kernel's own source runs here, compiled for this processor (support/fake_kernel.h).
"""

from __future__ import annotations

import ctypes
import subprocess
from ctypes import c_void_p
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import structlog
from kvferry_sidecar.engines import cuda_choice, cuda_kernel
from kvferry_sidecar.engines.base import Direction
from kvferry_sidecar.engines.cuda_choice import Ways, find_ways
from kvferry_sidecar.engines.cuda_driver import CudaError, Driver
from kvferry_sidecar.engines.cuda_modes import MODES, RectMover, descriptors_max, movers_of
from kvferry_sidecar.engines.cuda_parts import Part, joined, segments_of
from kvferry_sidecar.engines.cuda_stored import StoredWays
from kvferry_sidecar.geometry.device import CudaLayout, DeviceMemory
from support.copying import SHAPES, Pool, Shape, layer_outermost
from support.fake_cuda import FakeGpu, GpuEngineMemory, driver_with_kernels

LOG = structlog.get_logger()
NOT_STORED = StoredWays(None, LOG)
STREAM = c_void_p(7)  # the fake driver's only one


@pytest.fixture
def driver(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return driver_with_kernels(gpu, monkeypatch)


class Bed:
    """Pages on the fake GPU, and pinned memory that stands for the pool."""

    def __init__(self, driver: Driver, shape: Shape) -> None:
        self.shape, self.driver = shape, driver
        self.memory = GpuEngineMemory(shape.total_bytes)
        self.layout = shape.layout(self.memory)
        self.pool = Pool(4 << 20)
        driver.pin(self.pool.address, self.pool.total_bytes)

    def part(self, direction: Direction, blocks: list[int], gap: int = 64) -> Part:
        payload = self.shape.payload_bytes
        step = (payload + gap + 15) // 16 * 16 if gap else payload
        hosts = self.pool.address + np.arange(len(blocks), dtype=np.int64) * step
        pins = np.zeros(len(blocks), np.int64)
        return Part(self.layout, direction, np.array(blocks, np.int64), hosts, pins)


def mover(driver: Driver, name: str) -> object:
    movers, _ = movers_of(driver, 0, name)
    return next(one for one in movers if one.name == name)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_segments_are_the_runs_of_each_chunk(driver: Driver, shape: Shape) -> None:
    bed = Bed(driver, shape)
    blocks = [3, 1, 2]
    part = bed.part(Direction.GATHER, blocks)
    found = segments_of(part)
    base = bed.layout.memory.address
    got = sorted(
        zip(found.host.tolist(), found.device.tolist(), found.lengths.tolist(), strict=True)
    )
    want = []
    for block, host in zip(blocks, part.hosts.tolist(), strict=True):
        at = 0
        for run in shape.runs(block):
            want.append((host + at, base + run.start, run.stop - run.start))
            at += run.stop - run.start
    assert got == sorted(want)


def test_payloads_that_follow_each_other_are_one_copy() -> None:
    one, blocks = np.array([10], np.int64), np.zeros(6, np.int64)
    layout = CudaLayout(DeviceMemory(0, 0, 20), one * 0, one, one, 2)
    hosts = np.array([100, 110, 120, 200, 50, 60], np.int64)
    part = Part(layout, Direction.GATHER, blocks, hosts, blocks)
    assert joined(part) == [(0, 3, 30), (3, 1, 10), (4, 2, 20)]
    part = replace(part, pins=np.array([0, 0, 1, 1, 0, 1], np.int64))
    assert joined(part) == [(0, 2, 20), (2, 1, 10), (3, 1, 10), (4, 1, 10), (5, 1, 10)]


@pytest.mark.parametrize("direction", list(Direction), ids=lambda one: one.name)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_kernel_stores_each_byte_once(
    gpu: FakeGpu, driver: Driver, shape: Shape, direction: Direction
) -> None:
    bed = Bed(driver, shape)
    part = bed.part(direction, [2, 5, 1])
    before = gpu.stores()
    kept = mover(driver, "kernel").move(part, STREAM)
    del kept
    kinds = {(rect.length, rect.stride) for rect in bed.layout.rects}
    assert len(gpu.calls("cuLaunchKernel")) == len(kinds)
    assert gpu.stores() - before == part.moved_bytes


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_way_moves_the_same_bytes(driver: Driver, shape: Shape, name: str) -> None:
    bed = Bed(driver, shape)
    blocks = [4, 1, 6, 2]
    for gap in (0, 48):
        mover(driver, name).move(part := bed.part(Direction.GATHER, blocks, gap), STREAM)
        for block, host in zip(blocks, part.hosts.tolist(), strict=True):
            got = ctypes.string_at(host, shape.payload_bytes)
            assert got == shape.read(bed.memory.view, block)
        bed.memory.view[:] = 9
        mover(driver, name).move(bed.part(Direction.SCATTER, blocks, gap), STREAM)
        for block, host in zip(blocks, part.hosts.tolist(), strict=True):
            got = ctypes.string_at(host, shape.payload_bytes)
            assert got == shape.read(bed.memory.view, block)


def test_a_batch_has_few_enough_descriptors(gpu: FakeGpu, driver: Driver) -> None:
    shape = layer_outermost(100, 64, 64, 101, start=0)
    bed = Bed(driver, shape)
    part = bed.part(Direction.GATHER, list(range(1, 101)))
    mover(driver, "batch").move(part, STREAM)
    assert len(gpu.calls("cuMemcpyBatchAsync")) == -(-100 * 100 // descriptors_max) == 3


@pytest.mark.parametrize("width", cuda_kernel.VECTORS)
@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100, 103, 120])
def test_every_variant_of_the_kernel_compiles(architecture: int, width: int) -> None:
    image = cuda_kernel.compile_image(architecture, width, 13)
    assert image.startswith(b"\x7fELF"), "machine code, which no driver has to compile"
    assert b"kv_move" in image


def test_nvrtc_finds_the_rest_of_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the wheel of 13.0, whose library is told no place: all it has of the rest is a name."""
    folder = tmp_path / "nvidia" / "cu99" / "lib"
    folder.mkdir(parents=True)
    rest = "libnvrtc-builtins.so.99.0"
    main = f'#include <dlfcn.h>\nint nvrtcCreateProgram(void) {{ return !dlopen("{rest}", 1); }}'
    for name, text in ((rest, "int there(void) { return 0; }"), ("libnvrtc.so.99", main)):
        source = tmp_path / "part.c"
        source.write_text(text)
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name, source]
        subprocess.run(command, check=True)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr(cuda_kernel, "_MAJORS", (99,))
    library = cuda_kernel._library.__wrapped__(99)
    assert library.nvrtcCreateProgram(None, None, None, 0, None, None) == 0


@pytest.mark.parametrize("width", cuda_kernel.VECTORS)
@pytest.mark.parametrize(("architecture", "target"), [(93, 90), (129, 121)])
def test_a_gpu_newer_than_nvrtc_compiles_for_itself(
    architecture: int, target: int, width: int
) -> None:
    text = cuda_kernel.compile_image(architecture, width, 13).decode()
    assert f".target sm_{target}" in text
    assert ".entry kv_move(" in text
    wanted = {16: "ld.global.cs.v4.u32", 8: "ld.global.cs.v2.u32", 4: "ld.global.cs.u32",
              1: "ld.global.cs.u8"}[width]  # fmt: skip
    assert any(
        variant in text
        for variant in (wanted, wanted.replace(".u", ".b"), wanted.replace(".u", ".s"))
    )


def test_an_error_of_the_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernel, "SOURCE", 'extern "C" __global__ void kv_move() { nonsense }')
    try:
        with pytest.raises(CudaError, match="nonsense"):
            cuda_kernel.compile_image.__wrapped__(90, 16, 13)
    finally:
        cuda_kernel.compile_image.cache_clear()


def test_the_widest_vector_divides_everything() -> None:
    assert cuda_kernel.width_of(32, 48, 4096) == 16
    assert cuda_kernel.width_of(32, 4680) == 8
    assert cuda_kernel.width_of(32, 4680, 12) == 4
    assert cuda_kernel.width_of(32, 6) == 1


# --- choosing ---------------------------------------------------------------------------------


def test_what_a_driver_lacks_is_done_without(
    gpu: FakeGpu, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [one.name for one in movers_of(driver, 0, "auto")[0]] == ["kernel", "batch", "rect"]
    shape = SHAPES[0]
    bed = Bed(driver, shape)
    gpu.without_batches(True)
    movers, reasons = movers_of(driver, 0, "auto")
    assert [one.name for one in movers] == ["kernel", "rect"]
    assert "driver is too old" in reasons[0]
    movers[0].move(part := bed.part(Direction.GATHER, [1, 2]), STREAM)  # copies one by one
    assert ctypes.string_at(int(part.hosts[1]), 64) == shape.read(bed.memory.view, 2)[:64]

    def no_compiler(_architecture: int, _width: int, _driver_major: int) -> bytes:
        raise CudaError("NVRTC is not here")

    monkeypatch.setattr(cuda_kernel, "compile_image", no_compiler)
    assert [one.name for one in movers_of(driver, 0, "auto")[0]] == ["rect"]


@pytest.mark.parametrize("direction", list(Direction), ids=lambda one: one.name)
def test_ways_are_compared_on_memory_of_our_own(
    gpu: FakeGpu, driver: Driver, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Bed(driver, SHAPES[0]).part(direction, [1, 2])
    times = {"kernel": 1.0, "batch": 0.9, "rect": 2.0}
    monkeypatch.setattr(cuda_choice, "_seconds", lambda _d, one, _p, _s: times[one.name])
    ways = find_ways(driver, 0, direction, STREAM, mode="auto", stored=NOT_STORED, log=LOG)
    assert set(ways.best.values()) == {"batch"}
    times["kernel"] = 0.59  # by enough that its share of the engine's time is worth it
    ways.close()
    ways = find_ways(driver, 0, direction, STREAM, mode="auto", stored=NOT_STORED, log=LOG)
    assert set(ways.best.values()) == {"kernel"}
    assert ways.choose(part).name == "kernel"
    ways.close()
    allocated = len(gpu.calls("cuMemAlloc_v2"))
    assert len(gpu.calls("cuMemFree_v2")) == allocated, "nothing stays on the GPU"
    assert len(gpu.calls("cuMemFreeHost")) == len(gpu.calls("cuMemHostAlloc")) == 2
    assert allocated == 4


@pytest.mark.parametrize("mode", MODES)
def test_a_way_that_is_asked_for_is_taken(gpu: FakeGpu, driver: Driver, mode: str) -> None:
    part = Bed(driver, SHAPES[0]).part(Direction.GATHER, [1, 2])
    ways = find_ways(driver, 0, Direction.GATHER, STREAM, mode=mode, stored=NOT_STORED, log=LOG)
    assert ways.choose(part).name == mode
    assert not gpu.calls("cuMemHostAlloc"), "nothing is compared"
    ways.close()


def test_comparing_runs_every_way(gpu: FakeGpu, driver: Driver) -> None:
    ways = find_ways(driver, 0, Direction.SCATTER, STREAM, mode="auto", stored=NOT_STORED, log=LOG)
    assert len(ways.best) == len(cuda_choice.PAGES) * len(cuda_choice.CHUNKS)
    for call in ("cuLaunchKernel", "cuMemcpyBatchAsync", "cuMemcpy2DAsync_v2"):
        assert gpu.calls(call), call
    ways.close()


def test_a_full_gpu_is_left_with_2d_copies(gpu: FakeGpu, driver: Driver) -> None:
    gpu.fail("cuMemAlloc_v2", 2, after=1)  # the staging fits, the comparison does not
    ways = find_ways(driver, 0, Direction.GATHER, STREAM, mode="auto", stored=NOT_STORED, log=LOG)
    assert [one.name for one in ways.movers] == ["rect"]
    assert gpu.calls("cuMemFree_v2"), "the staging was given back"


def test_what_does_not_fit_into_the_staging_goes_another_way(driver: Driver) -> None:
    movers, _ = movers_of(driver, 0, "kernel")
    shape = layer_outermost(2, 9 << 20, 9 << 20, 3)
    part = Bed(driver, shape).part(Direction.GATHER, [1])
    ways = Ways(movers, dict.fromkeys(((65536, 4),), "kernel"))
    assert isinstance(ways.choose(part), RectMover)
