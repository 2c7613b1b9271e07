"""A GPU by calls of the driver that the product loads: no torch, so the fake one serves too."""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_char_p, c_size_t, c_ubyte, c_uint64, c_void_p

from kvferry_sidecar.engines.cuda_driver import Driver


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
