"""Where the ways of copying reach: any alignment, random shapes, and addresses past 4 GiB.

The kernel is the product's own source, which refuses an address here that a GPU would refuse
(support/fake_kernel.h).
"""

from __future__ import annotations

import ctypes
import mmap
import re
from ctypes import c_void_p
from pathlib import Path

import numpy as np
import pytest
from kvferry_sidecar import engines
from kvferry_sidecar.engines import cuda_kernel
from kvferry_sidecar.engines.base import Direction
from kvferry_sidecar.engines.cuda_driver import Driver
from kvferry_sidecar.engines.cuda_modes import MODES, Mover, movers_of
from kvferry_sidecar.engines.cuda_parts import Part
from kvferry_sidecar.geometry.device import CudaLayout, DeviceMemory
from numpy.typing import NDArray
from support.copying import Pool, Shape
from support.fake_cuda import FakeGpu, bytes_at, driver_with_kernels

_MAP_NORESERVE = 0x4000  # which Python 3.11 does not name
STREAM = c_void_p(7)  # the fake driver's only one
GATHER, SCATTER = Direction.GATHER, Direction.SCATTER


@pytest.fixture
def driver(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return driver_with_kernels(gpu, monkeypatch)


def mover(driver: Driver, name: str) -> Mover:
    movers, _ = movers_of(driver, 0, name)
    return next(one for one in movers if one.name == name)


def random_bytes(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    return rng.integers(0, 256, count, dtype=np.uint8)


def there_and_back(
    gpu: FakeGpu, driver: Driver, shape: Shape, name: str, rng: np.random.Generator, base: int = 0
) -> None:
    """Save every other block, and load it into the others: all bytes, and no others."""
    total_bytes = shape.total_bytes + base
    address = gpu.alloc(total_bytes)
    view = bytes_at(address, total_bytes)
    view[:] = random_bytes(rng, total_bytes)
    memory = DeviceMemory(0, address + base, shape.total_bytes)
    arrays = [np.array(x, np.int64) for x in (shape.offsets, shape.strides, shape.lengths)]
    layout = CudaLayout(memory, *arrays, shape.blocks)
    order = rng.permutation(shape.blocks)
    half = shape.blocks // 2
    pool = Pool((half + 1) * (shape.payload_bytes + 3))
    driver.pin(pool.address, pool.total_bytes)
    starts = rng.permutation(half) * (shape.payload_bytes + 3) + 1  # any place of the pool
    hosts = (starts + pool.address).astype(np.int64)
    pins = np.zeros(half, np.int64)
    way = mover(driver, name)

    payloads = [shape.read(view[base:], block) for block in order[:half].tolist()]
    want = pool.view.copy()
    for start, payload in zip(starts.tolist(), payloads, strict=True):
        want[start : start + len(payload)] = np.frombuffer(payload, np.uint8)
    way.move(Part(layout, GATHER, order[:half], hosts, pins), STREAM)
    assert np.array_equal(pool.view, want)

    after = view.copy()
    for block, payload in zip(order[half : 2 * half].tolist(), payloads, strict=True):
        at = 0
        for run in shape.runs(block):
            part = payload[at : at + run.stop - run.start]
            after[base:][run] = np.frombuffer(part, np.uint8)
            at += run.stop - run.start
    way.move(Part(layout, SCATTER, order[half : 2 * half], hosts, pins), STREAM)
    assert np.array_equal(view, after)
    driver("cuMemHostUnregister", pool.address)
    gpu.free_all()


@pytest.mark.parametrize("grain", [1, 2, 4, 8])
@pytest.mark.parametrize("odd", ["base", "offset", "stride", "length", "another length"])
def test_one_odd_number_makes_the_vectors_narrower(
    gpu: FakeGpu, driver: Driver, odd: str, grain: int
) -> None:
    """All others are multiples of 16."""
    rng = np.random.default_rng(grain)
    shift = {name: grain * (name == odd) for name in ("offset", "stride", "length")}
    offsets = [4096 + shift["offset"], 65536, 131072]
    lengths = [480 + shift["length"]] * 2 + [32 + grain * (odd == "another length")]
    shape = Shape(odd, offsets, [1024 + shift["stride"]] * 3, lengths, 12)
    there_and_back(gpu, driver, shape, "kernel", rng, base=grain * (odd == "base"))


@pytest.mark.parametrize("name", MODES)
def test_random_shapes(gpu: FakeGpu, driver: Driver, name: str) -> None:
    rng = np.random.default_rng(20)
    for number in range(25):
        grain, blocks = int(rng.choice([1, 2, 4, 8, 16])), int(rng.integers(2, 40))
        offsets, strides, lengths, at = [], [], [], 0
        for _ in range(int(rng.integers(1, 5))):  # kinds of rows
            length = grain * int(rng.integers(1, 5000 // grain))
            stride = length + grain * int(rng.integers(0, 20))
            gap = grain * int(rng.integers(0, 9))
            for _ in range(int(rng.integers(1, 9))):  # layers
                offsets.append(at + gap)
                strides.append(stride)
                lengths.append(length)
                at += gap + blocks * stride
        shape = Shape(f"number {number}", offsets, strides, lengths, blocks)
        there_and_back(gpu, driver, shape, name, rng, base=grain * int(rng.integers(0, 3)))


def test_more_tiles_than_a_launch_has_warps(gpu: FakeGpu, driver: Driver) -> None:
    """1,024 warps go over 2,560 tiles, of which every second has one vector."""
    length, blocks = 16 * 129, 20
    offsets = [layer * blocks * length for layer in range(64)]
    shape = Shape("many", offsets, [length] * 64, [length] * 64, 2 * blocks // 2)
    before = gpu.stores()
    there_and_back(gpu, driver, shape, "kernel", np.random.default_rng(3))
    assert gpu.stores() - before == 2 * (blocks // 2) * 64 * length, "each byte once"


@pytest.mark.parametrize("name", MODES)
def test_nothing_counts_in_32_bits(gpu: FakeGpu, driver: Driver, name: str) -> None:
    """Blocks and layers past 4 GiB of the GPU's memory, payloads past 4 GiB of the pool.

    None of it takes room before it is touched.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    far_pool = np.frombuffer(mmap.mmap(-1, 9 << 30, flags=flags), np.uint8)
    page, stride, layers, blocks = 4096, (1 << 31) + 4096, 2, 5
    offsets = [layer * 65536 for layer in range(layers)] + [(9 << 30) + 16]
    shape = Shape("far", offsets, [stride] * 2 + [8192], [page] * 3, blocks)
    address = gpu.alloc(shape.total_bytes)
    view = (ctypes.c_ubyte * shape.total_bytes).from_address(address)
    memory = DeviceMemory(0, address, shape.total_bytes)
    arrays = [np.array(x, np.int64) for x in (shape.offsets, shape.strides, shape.lengths)]
    layout = CudaLayout(memory, *arrays, blocks)
    driver.pin(far_pool.ctypes.data, len(far_pool))
    rng, order = np.random.default_rng(9), np.array([4, 3, 1], np.int64)
    places = np.array([(8 << 30) + 64, (1 << 32) - page, 128], np.int64)
    hosts, pins = places + far_pool.ctypes.data, np.zeros(3, np.int64)
    payloads = [random_bytes(rng, shape.payload_bytes) for _ in order]
    for place, payload in zip(places.tolist(), payloads, strict=True):
        far_pool[place : place + len(payload)] = payload
    mover(driver, name).move(Part(layout, SCATTER, order, hosts, pins), STREAM)
    for block, payload in zip(order.tolist(), payloads, strict=True):
        found = b"".join(bytes(view[run]) for run in shape.runs(block))
        assert found == payload.tobytes()
    mover(driver, name).move(Part(layout, GATHER, order[::-1].copy(), hosts, pins), STREAM)
    for place, payload in zip(places.tolist(), reversed(payloads), strict=True):
        assert np.array_equal(far_pool[place : place + len(payload)], payload)
    driver("cuMemHostUnregister", far_pool.ctypes.data)


def test_a_launch_is_as_large_as_the_kernel_was_compiled_for() -> None:
    assert f"__launch_bounds__({cuda_kernel.THREADS})" in cuda_kernel.SOURCE
    assert cuda_kernel.THREADS % 32 == 0, "whole warps"


def test_no_call_goes_to_the_default_stream() -> None:
    """One without a stream waits for the default one; others are told theirs (on_stream)."""
    folder = Path(engines.__file__).parent
    names = {
        name
        for path in folder.glob("*.py")
        for name in re.findall(r'"(cu(?:Mem(?:cpy|set)|Launch|Ctx)\w+)"', path.read_text())
    }
    assert names == {
        "cuCtxGetCurrent", "cuCtxSetCurrent", "cuLaunchKernel", "cuMemcpy2DAsync_v2",
        "cuMemcpyBatchAsync", "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2",
    }  # fmt: skip
