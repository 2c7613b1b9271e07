"""A GPU by calls of the driver that the product loads: no torch, so the fake one serves too."""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

from kvferry_sidecar.engines.cuda_driver import CudaError, Driver, IpcHandle

_UNTIMED, _SHARED = 2, 4  # CUevent_flags


@functools.cache
def driver() -> Driver:
    """Return the driver with the first GPU current on this thread. Raises CudaError."""
    found = Driver()
    found.use(0)
    return found


class DeviceBuffer:
    """Memory of cudaMalloc's kind."""

    def __init__(self, total_bytes: int) -> None:
        address = c_uint64()
        driver()("cuMemAlloc_v2", byref(address), c_size_t(total_bytes))
        self.address, self.total_bytes = int(address.value), total_bytes

    def free(self) -> None:
        driver()("cuMemFree_v2", c_uint64(self.address))


_POSIX_FD = 1


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int), ("handle_types", c_int), ("place", c_int), ("device", c_int),
        ("windows", c_void_p), ("flags", c_ubyte * 8),
    )  # fmt: skip


class VirtualBuffer:
    """Memory of cuMemCreate, mapped here, as sleep mode and expandable segments have it."""

    def __init__(self, total_bytes: int, types: int = _POSIX_FD) -> None:
        wanted = _Properties(type=1, handle_types=types, place=1)
        granule, handle, address = c_size_t(), c_uint64(), c_uint64()
        driver()("cuMemGetAllocationGranularity", byref(granule), byref(wanted), c_int(0))
        self.total_bytes = -(-total_bytes // granule.value) * granule.value
        size = c_size_t(self.total_bytes)
        driver()("cuMemCreate", byref(handle), size, byref(wanted), c_uint64(0))
        driver()("cuMemAddressReserve", byref(address), self.total_bytes, 0, 0, 0)
        self.address = int(address.value)
        driver()("cuMemMap", self.address, self.total_bytes, 0, handle.value, 0)
        driver()("cuMemRelease", handle.value)
        driver().allow(0, self.address, self.total_bytes)

    def free(self) -> None:
        driver().unmap(self.address, self.total_bytes)


class Event:
    """An event without timing, of this process or of another one."""

    def __init__(self, handle: bytes | None = None, *, shared: bool = False) -> None:
        self.event = c_void_p()
        if handle is None:
            driver()("cuEventCreate", byref(self.event), c_uint(_UNTIMED | _SHARED * shared))
        else:
            by_value = IpcHandle.from_buffer_copy(handle)
            driver()("cuIpcOpenEventHandle", byref(self.event), by_value)

    def handle(self) -> bytes:
        """Return what another process opens it by."""
        found = IpcHandle()
        driver()("cuIpcGetEventHandle", byref(found), self.event)
        return bytes(found)

    def record(self, stream: c_void_p) -> None:
        driver()("cuEventRecord", self.event, stream)

    def query(self) -> int:
        """Return 0 when what was recorded is over, 600 while it is not."""
        try:
            driver()("cuEventQuery", self.event)
        except CudaError as error:
            return error.code
        return 0

    def close(self) -> None:
        driver()("cuEventDestroy_v2", self.event)


def fill(address: int, value: int, count: int, stream: int = 0) -> None:
    """Set bytes, in the order of a stream."""
    value_arg, stream_arg = c_ubyte(value), c_void_p(stream)
    driver()("cuMemsetD8Async", c_uint64(address), value_arg, c_size_t(count), stream_arg)


def settle() -> None:
    """Wait for everything."""
    driver()("cuCtxSynchronize")


def read(address: int, count: int) -> bytes:
    """Return bytes of a GPU."""
    host = ctypes.create_string_buffer(count)
    driver()("cuMemcpyDtoH_v2", host, c_uint64(address), c_size_t(count))
    return host.raw


def write(address: int, data: bytes) -> None:
    """Write bytes to a GPU."""
    driver()("cuMemcpyHtoD_v2", c_uint64(address), c_char_p(data), c_size_t(len(data)))


def free_bytes() -> int:
    """Return the free memory of the GPU."""
    free, total = c_size_t(), c_size_t()
    driver()("cuMemGetInfo_v2", byref(free), byref(total))
    return free.value
