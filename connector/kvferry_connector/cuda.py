"""CUDA memory of this process, as another process could open it: the driver API through ctypes.

A raw handle of the allocation, never torch's own tuple: that one needs a common /dev/shm, an equal
user and torch at the other end. The pointer is asked what it is; settings are not believed. Memory
without such a handle is refused with the setting to change.

Engines with a GPU have the library loaded; nothing is loaded anywhere else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
_UUID_BYTES = 16
# CUpointer_attribute
_BUFFER_ID, _LEGACY_CAPABLE, _HANDLE_TYPES, _MEMPOOL = 7, 10, 14, 17
_POSIX_FD, _FABRIC = 1, 8  # CUmemAllocationHandleType

_VIRTUAL = (
    "virtual memory, which has no handle that another process could open: start the engine without "
    "expandable_segments:True in PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, and without sleep "
    "mode or the cumem allocator"
)
_POOLED = (
    "memory of a stream-ordered pool, which has no such handle: start the engine without "
    "backend:cudaMallocAsync in PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
)
# What the driver's codes mean for a call made here, with what to do.
_CODES = {
    1: "an invalid value: this memory is not what the driver takes it for",
    201: "no context on this thread: a bug of the connector, report it",
    304: "the operating system refused it: the container's sandbox does not allow it",
    800: "not permitted: confidential computing or a sandbox forbids sharing GPU memory",
    801: "not supported on this device or platform (WSL2, Tegra, some MIG partitions)",
}


class CudaError(Exception):
    """A call of the driver failed, or memory cannot be exported; the text has what to change."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of the driver. ``handle`` opens all of it, from ``address`` on.

    ``buffer_id`` is never given twice in a process; addresses, and even handles, may be. ``gpu`` is
    the device's UUID in hex, since ordinals differ between processes.
    """

    address: int
    total_bytes: int
    handle: bytes
    buffer_id: int
    gpu: str


class Driver:
    """The driver library. Every method makes its calls with a context bound on this thread."""

    def __init__(self, library: str = LIBRARY) -> None:
        """Load the library. Raises CudaError where there is none."""
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise CudaError(f"{library} cannot be loaded ({error}): is the driver here?") from error

    def export(self, address: int, device: int) -> Allocation:
        """Return the allocation that ``address`` lies in, on the device of this ordinal.

        Raises CudaError: it has no handle, or a call failed.
        """
        handle, uuid = (ctypes.c_ubyte * HANDLE_BYTES)(), (ctypes.c_ubyte * _UUID_BYTES)()
        ordinal = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(ordinal), device)
        self._bind(ordinal)
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        pointer = ctypes.c_uint64(address)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        self._check_kind(pointer)
        # Of the base: a pointer into the allocation is refused.
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), ordinal)
        buffer_id = self._attribute(_BUFFER_ID, pointer)
        return Allocation(base.value, size.value, bytes(handle), buffer_id, bytes(uuid).hex())

    def _bind(self, ordinal: ctypes.c_int) -> None:
        """Bind the primary context if this thread has none: the driver never does it by itself."""
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
            # torch holds it anyway: ours would keep it alive after torch lets go.
            try:
                self._call("cuCtxSetCurrent", context)
            finally:
                self._call("cuDevicePrimaryCtxRelease_v2", ordinal)

    def _check_kind(self, pointer: ctypes.c_uint64) -> None:
        if self._attribute(_LEGACY_CAPABLE, pointer):
            return
        if self._attribute(_MEMPOOL, pointer):
            raise CudaError(_POOLED)
        types = self._attribute(_HANDLE_TYPES, pointer)
        names = [name for bit, name in ((_POSIX_FD, "fd"), (_FABRIC, "fabric")) if types & bit]
        raise CudaError(f"{_VIRTUAL} (it could be shared by: {', '.join(names) or 'nothing'})")

    def _attribute(self, attribute: int, pointer: ctypes.c_uint64) -> int:
        value = ctypes.c_uint64()  # larger than the smaller ones: the rest stays zero
        self._call("cuPointerGetAttribute", ctypes.byref(value), attribute, pointer)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        function: Callable[..., int] = getattr(self._library, name)
        code = function(*arguments)
        if code:
            raise CudaError(f"{name} failed with {code}: {_CODES.get(code, 'see the CUDA driver')}")
