"""CUDA memory of this process as another process opens it, and words that a stream writes.

The driver API through ctypes. A raw handle of the allocation, never torch's own tuple: that one
needs a common /dev/shm, an equal user and torch at the other end. The pointer is asked what it is;
settings are not believed. Virtual memory (sleep mode) has a descriptor instead; memory with
neither is refused with the setting to change.

Engines with a GPU have the library loaded; nothing is loaded anywhere else.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvferry_connector.wire.attach import CudaMemory
from kvferry_connector.wire.names import FENCE_PAGE_BYTES

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
_UUID_BYTES = 16
_PORTABLE_AND_MAPPED = 3  # of cuMemHostRegister
# CUpointer_attribute; the last two are of CUmemAllocationHandleType
_BUFFER_ID, _LEGACY_CAPABLE, _HANDLE_TYPES, _MEMPOOL, _POSIX_FD, _FABRIC = 7, 10, 14, 17, 1, 8

_VIRTUAL = (
    "virtual memory, of which no descriptor can be had: start the engine without "
    "expandable_segments:True in PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, and without sleep "
    "mode or the cumem allocator"
)
_PIECES = (
    "the {wanted} bytes of a KV buffer lie in pieces, of which this one has {found}: start the "
    "engine without expandable_segments:True in PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
)
_POOLED = (
    "memory of a stream-ordered pool, which has no such handle: start the engine without "
    "backend:cudaMallocAsync in PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
)
# What the driver's codes mean for a call made here, with what to do.
_CODES = {
    1: "an invalid value: this memory is not what the driver takes it for",
    2: "the GPU has no memory left: lower gpu_memory_utilization",
    201: "no context on this thread: a bug of the connector, report it",
    304: "the operating system refused it: the container's sandbox does not allow it",
    **dict.fromkeys((700, 719), "the GPU's context is lost: see the engine's first error"),
    800: "not permitted: confidential computing or a sandbox forbids sharing GPU memory",
    801: "not supported on this device or platform (WSL2, Tegra, some MIG partitions)",
}


class CudaError(Exception):
    """A call of the driver failed, or memory cannot be exported; the text has what to change."""


class Driver:
    """The driver library. It binds no context by itself: calls are made inside ``on``."""

    def __init__(self, library: str = LIBRARY) -> None:
        """Load the library. Raises CudaError where there is none."""
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise CudaError(f"{library} cannot be loaded ({error}): is the driver here?") from error
        self._contexts: dict[int, int | None] = {}

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Have this device's context current in the block, and what was before it after it.

        Raises CudaError.
        """
        before = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(before))
        if device not in self._contexts:
            self._contexts[device] = self._primary(device)
        context = self._contexts[device]
        if before.value == context:
            yield
            return
        self.call("cuCtxSetCurrent", ctypes.c_void_p(context))
        try:
            yield
        finally:
            self.call("cuCtxSetCurrent", before)

    def _primary(self, device: int) -> int | None:
        """Return the context that torch holds: a hold of ours would keep it alive after torch."""
        ordinal, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(ordinal), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self.call("cuDevicePrimaryCtxRelease_v2", ordinal)
        return context.value

    def export(self, address: int, device: int, total_bytes: int = 1) -> CudaMemory:
        """Return how to open the allocation around a buffer on the device of this ordinal.

        Inside ``on`` it. Without a handle in it, ``export_fd`` gives the descriptor that opens it.
        Raises CudaError: there is neither, or a call failed.
        """
        handle, uuid = (ctypes.c_ubyte * HANDLE_BYTES)(), (ctypes.c_ubyte * _UUID_BYTES)()
        ordinal = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(ordinal), device)
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        pointer = ctypes.c_uint64(address)
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        by_handle = self._by_handle(pointer)
        if address + total_bytes > base.value + size.value:
            raise CudaError(_PIECES.format(wanted=total_bytes, found=size.value))
        if by_handle:  # of the base: a pointer into the allocation is refused
            self.call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        self.call("cuDeviceGetUuid_v2", ctypes.byref(uuid), ordinal)
        buffer_id = self._attribute(_BUFFER_ID, pointer)
        return CudaMemory(
            handle=bytes(handle) if by_handle else b"",
            offset=address - base.value,
            allocation_bytes=size.value,
            device=bytes(uuid),
            buffer_id=buffer_id,
            pid=os.getpid(),
        )

    def export_fd(self, address: int) -> int:
        """Return a descriptor of virtual memory, which keeps it until it is closed.

        Inside ``on`` its device. Raises CudaError.
        """
        handle, fd = ctypes.c_uint64(), ctypes.c_int(-1)
        self.call("cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        try:
            name = "cuMemExportToShareableHandle"
            self.call(name, ctypes.byref(fd), handle, _POSIX_FD, ctypes.c_uint64(0))
        finally:
            self.call("cuMemRelease", handle)
        os.set_inheritable(fd.value, False)
        return fd.value

    def _by_handle(self, pointer: ctypes.c_uint64) -> bool:
        """Whether the memory has a handle; False: a descriptor. Raises CudaError for neither."""
        if self._attribute(_LEGACY_CAPABLE, pointer):
            return True
        if self._attribute(_MEMPOOL, pointer):
            raise CudaError(_POOLED)
        types = self._attribute(_HANDLE_TYPES, pointer)
        if types & _POSIX_FD:
            return False
        only = "fabric handles" if types & _FABRIC else "nothing"
        raise CudaError(f"{_VIRTUAL} (its allocator allows it to be shared by: {only})")

    def _attribute(self, attribute: int, pointer: ctypes.c_uint64) -> int:
        value = ctypes.c_uint64()  # larger than the smaller ones: the rest stays zero
        self.call("cuPointerGetAttribute", ctypes.byref(value), attribute, pointer)
        return value.value

    def call(self, name: str, *arguments: Any) -> None:
        """Call one function with arguments of ctypes. Raises CudaError."""
        function: Callable[..., int] = getattr(self._library, name)
        code = function(*arguments)
        if code:
            raise CudaError(f"{name} failed with {code}: {_CODES.get(code, 'see the CUDA driver')}")


class StreamWords:
    """The words of a fence page, written by a GPU when its stream has come so far.

    ``stream`` returns the handle of the stream of ``device`` on which the engine's step runs. A
    default stream has no handle but 0, on any device. Raises CudaError when the driver refuses:
    without these words nothing may be copied.
    """

    def __init__(
        self, driver: Driver, page_address: int, stream: Callable[[], int], device: int
    ) -> None:
        self._driver, self._stream, self._device = driver, stream, device
        self._page = ctypes.c_void_p(page_address)
        page_bytes = ctypes.c_size_t(FENCE_PAGE_BYTES)
        device_page = ctypes.c_uint64()
        with driver.on(device):
            driver.call("cuMemHostRegister_v2", self._page, page_bytes, _PORTABLE_AND_MAPPED)
            try:
                found = ctypes.byref(device_page)
                driver.call("cuMemHostGetDevicePointer_v2", found, self._page, 0)
                self._device_page = device_page.value
                self.write(0, 0)  # attributes of a device do not tell whether this works
            except CudaError:
                self.close()
                raise

    def write(self, offset: int, value: int) -> None:
        """Store ``value`` at a byte offset of the page once all earlier work has ended."""
        stream, word = ctypes.c_void_p(self._stream()), ctypes.c_uint64(self._device_page + offset)
        with self._driver.on(self._device):
            self._driver.call("cuStreamWriteValue64_v2", stream, word, ctypes.c_uint64(value), 0)

    def close(self) -> None:
        """Give the page back to the host. Raises CudaError."""
        with self._driver.on(self._device):
            self._driver.call("cuMemHostUnregister", self._page)
