"""Three ways to move a slice between a GPU's pages and the pool, behind one `move`.

"rect": a 2-D copy of the copy engine per rectangle. "batch": one call for thousands of pieces, of
drivers that have it. "kernel": pages are gathered on the GPU into a staging buffer (scattered from
it) and a copy engine moves the buffer: for pages too small for copy engines. A call only enqueues.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.engines import cuda_kernel
from kvferry_sidecar.engines.base import Direction
from kvferry_sidecar.engines.cuda_driver import (
    MEMORY_DEVICE,
    MEMORY_HOST,
    Copy2D,
    CudaError,
    Driver,
)
from kvferry_sidecar.engines.cuda_parts import Part, joined, segments_of
from kvferry_sidecar.geometry.device import Rect

MODES = ("rect", "batch", "kernel")
descriptors_max = 4096  # of one batch: drivers were seen to crash on tens of thousands
staging_bytes = 16 << 20  # on the GPU, per GPU and direction
tables_bytes = 1 << 20
_BATCH_SINCE = 12080  # the version whose signature is used, also by newer drivers
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BLOCKS_PER_LAUNCH = 64
_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76  # CUdevice_attribute


class Mover(Protocol):
    """One way. What ``move`` returns has to live until the stream is synchronised."""

    name: str

    def serves(self, part: Part) -> bool:
        """Whether it can move this."""

    def move(self, part: Part, stream: c_void_p) -> object:
        """Enqueue it. Raises CudaError."""


class RectMover:
    """2-D copies: every layout, every driver."""

    name = "rect"

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def serves(self, part: Part) -> bool:  # noqa: ARG002 - it serves all
        """Say yes."""
        return True

    def move(self, part: Part, stream: c_void_p) -> object:
        """Enqueue one copy per chunk and rectangle."""
        base = part.layout.memory.address
        for block, host_start in zip(part.blocks.tolist(), part.hosts.tolist(), strict=True):
            host = host_start
            for rect in part.layout.rects:
                start = base + rect.offset + block * rect.stride
                copy = _copy_2d(rect, host, start, part.direction)
                self._driver("cuMemcpy2DAsync_v2", byref(copy), stream)
                host += rect.length * rect.count
        return None


def _copy_2d(rect: Rect, host: int, device: int, direction: Direction) -> Copy2D:
    copy = Copy2D(WidthInBytes=rect.length, Height=rect.count)
    if direction is Direction.GATHER:
        copy.srcMemoryType, copy.srcDevice, copy.srcPitch = MEMORY_DEVICE, device, rect.pitch
        copy.dstMemoryType, copy.dstHost, copy.dstPitch = MEMORY_HOST, host, rect.length
    else:
        copy.srcMemoryType, copy.srcHost, copy.srcPitch = MEMORY_HOST, host, rect.length
        copy.dstMemoryType, copy.dstDevice, copy.dstPitch = MEMORY_DEVICE, device, rect.pitch
    return copy


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes; the places are hints for managed memory only."""

    _fields_ = (
        ("srcAccessOrder", c_int), ("srcType", c_int), ("srcId", c_int),
        ("dstType", c_int), ("dstId", c_int), ("flags", c_uint),
    )  # fmt: skip


class BatchMover:
    """cuMemcpyBatchAsync. Raises CudaError when the driver has none."""

    name = "batch"

    def __init__(self, driver: Driver) -> None:
        self._call = driver.function("cuMemcpyBatchAsync", _BATCH_SINCE)
        self._attributes = _Attributes(srcAccessOrder=_STREAM_ORDER)

    def serves(self, part: Part) -> bool:
        """Say yes where there is a copy at all: an empty batch is an error."""
        return len(part.blocks) > 0

    def move(self, part: Part, stream: c_void_p) -> object:
        """Enqueue all runs, ``descriptors_max`` at a time."""
        found = segments_of(part)
        return self.copy(found.device, found.host, found.lengths, part.direction, stream)

    def copy(
        self,
        device: NDArray[np.int64],
        host: NDArray[np.int64],
        lengths: NDArray[np.int64],
        direction: Direction,
        stream: c_void_p,
    ) -> object:
        """Enqueue pieces of any places."""
        to, of = (host, device) if direction is Direction.GATHER else (device, host)
        indices = np.zeros(min(descriptors_max, len(to)), np.uint64)
        kept = [np.ascontiguousarray(array) for array in (to, of, lengths)]
        for first in range(0, len(to), descriptors_max):
            count = min(descriptors_max, len(to) - first)
            failed = c_size_t()
            self._call(
                *(c_void_p(array.ctypes.data + 8 * first) for array in kept), c_size_t(count),
                byref(self._attributes), c_void_p(indices.ctypes.data), c_size_t(1),
                byref(failed), stream,
            )  # fmt: skip
        return kept, indices


class KernelMover:
    """Gather and scatter on the GPU. Raises CudaError without NVRTC or memory for the staging."""

    name = "kernel"

    def __init__(self, driver: Driver, ordinal: int, batch: BatchMover | None) -> None:
        self._driver, self._batch = driver, batch
        major, minor, device, memory = c_int(), c_int(), c_int(), c_uint64()
        driver("cuDeviceGet", byref(device), ordinal)
        driver("cuDeviceGetAttribute", byref(major), _COMPUTE_MAJOR, device)
        driver("cuDeviceGetAttribute", byref(minor), _COMPUTE_MINOR, device)
        architecture, version = major.value * 10 + minor.value, driver.version() // 1000
        self._functions = {
            width: _load(driver, cuda_kernel.compile_image(architecture, width, version))
            for width in cuda_kernel.VECTORS
        }
        driver("cuMemAlloc_v2", byref(memory), c_size_t(staging_bytes + tables_bytes))
        self._staging = memory.value

    held_bytes = staging_bytes + tables_bytes

    def close(self) -> None:
        """Free the staging; the modules fall with the context."""
        self._driver("cuMemFree_v2", c_uint64(self._staging))

    def serves(self, part: Part) -> bool:
        """Say whether images and tables fit into the staging."""
        rows = sum(rect.count for rect in part.layout.rects)
        tables = 8 * (2 * len(part.blocks) + 2 * rows)
        return part.moved_bytes <= staging_bytes and 0 < tables <= tables_bytes

    def move(self, part: Part, stream: c_void_p) -> object:
        """Enqueue launches and copies of the staging, in the order of the direction."""
        if part.direction is Direction.GATHER:
            return self._launch(part, stream), self._pool(part, stream)
        return self._pool(part, stream), self._launch(part, stream)

    def _pool(self, part: Part, stream: c_void_p) -> object:
        """Copy between the staging and the pool, joined where payloads follow each other."""
        payload = part.layout.payload_bytes
        runs = joined(part)
        device = np.array([self._staging + first * payload for first, _, _ in runs], np.int64)
        host = np.array([part.hosts[first] for first, _, _ in runs], np.int64)
        lengths = np.array([count for _, _, count in runs], np.int64)
        if self._batch is not None:
            return self._batch.copy(device, host, lengths, part.direction, stream)
        for at, there, count in zip(device.tolist(), host.tolist(), lengths.tolist(), strict=True):
            if part.direction is Direction.GATHER:
                call, to, of = "cuMemcpyDtoHAsync_v2", c_void_p(there), c_uint64(at)
                self._driver(call, to, of, c_size_t(count), stream)
            else:
                call, onto, out = "cuMemcpyHtoDAsync_v2", c_uint64(at), c_void_p(there)
                self._driver(call, onto, out, c_size_t(count), stream)
        return None

    def _launch(self, part: Part, stream: c_void_p) -> object:
        """Enqueue one launch per length and stride of rows."""
        payload, base = part.layout.payload_bytes, part.layout.memory.address
        slots = np.arange(len(part.blocks), dtype=np.int64) * payload
        kinds: dict[tuple[int, int], list[tuple[int, int]]] = {}
        flat = 0
        for rect in part.layout.rects:
            rows = kinds.setdefault((rect.length, rect.stride), [])
            for number in range(rect.count):
                rows.append((rect.offset + number * rect.pitch, flat))
                flat += rect.length
        kept: list[object] = []
        tables = [part.blocks, slots]
        for rows in kinds.values():
            tables += [np.array(column, np.int64) for column in zip(*rows, strict=True)]
        table = np.concatenate(tables)
        at = self._staging + staging_bytes
        self._driver(
            "cuMemcpyHtoDAsync_v2", c_uint64(at), c_void_p(table.ctypes.data),
            c_size_t(table.nbytes), stream,
        )  # fmt: skip
        kept.append(table)
        chunks, row_at = len(part.blocks), at + 16 * len(part.blocks)
        for (length, stride), rows in kinds.items():
            numbers = [number for row in rows for number in row]
            width = cuda_kernel.width_of(base, stride, length, payload, *numbers)
            arguments = (
                c_uint64(base), c_uint64(self._staging), c_uint64(at), c_uint64(at + 8 * chunks),
                c_uint64(row_at), c_uint64(row_at + 8 * len(rows)), ctypes.c_longlong(stride),
                c_int(length), c_int(chunks), c_int(len(rows)),
                c_int(part.direction is Direction.GATHER),
            )  # fmt: skip
            kept.append(self._run(self._functions[width], arguments, stream))
            row_at += 16 * len(rows)
        return kept

    def _run(
        self, function: c_void_p, arguments: tuple[ctypes._SimpleCData[Any], ...], stream: c_void_p
    ) -> object:
        places = [ctypes.addressof(argument) for argument in arguments]
        pointers = (c_void_p * len(places))(*places)
        self._driver(
            "cuLaunchKernel", function, _BLOCKS_PER_LAUNCH, 1, 1, cuda_kernel.THREADS, 1, 1, 0,
            stream, pointers, None,
        )  # fmt: skip
        return arguments, pointers


def _load(driver: Driver, image: bytes) -> c_void_p:
    module, function = c_void_p(), c_void_p()
    driver("cuModuleLoadDataEx", byref(module), image, 0, None, None)
    driver("cuModuleGetFunction", byref(function), module, b"kv_move")
    return function


def movers_of(driver: Driver, ordinal: int, only: str) -> tuple[list[Mover], list[str]]:
    """Return the ways there are on the current GPU, and why others are not; "rect" comes last.

    ``only``: "auto", or the one way that is wanted beside "rect".
    """
    movers: list[Mover] = []
    reasons: list[str] = []
    batch: BatchMover | None = None
    if only in ("auto", "batch", "kernel"):
        try:
            batch = BatchMover(driver)
        except CudaError as error:
            reasons.append(str(error))
    if only in ("auto", "kernel"):
        try:
            movers.append(KernelMover(driver, ordinal, batch))
        except CudaError as error:
            reasons.append(str(error))
    if batch is not None and only in ("auto", "batch"):
        movers.append(batch)
    return [*movers, RectMover(driver)], reasons
