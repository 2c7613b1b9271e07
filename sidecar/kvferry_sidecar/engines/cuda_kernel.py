"""The kernel that gathers pages into a flat buffer and scatters them back, compiled at start.

NVRTC makes machine code of the source for the GPU's own architecture, once per width of a vector in
a process; it is found beside the driver or in NVIDIA's wheels (extras cuda12, cuda13). Without it
copies go by the copy engines alone.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p, create_string_buffer
from pathlib import Path

from kvferry_sidecar.engines.cuda_driver import CudaError

# Bytes of a vector, and its type. The widest that divides every address and length is used.
VECTORS = {16: "uint4", 8: "uint2", 4: "unsigned int", 1: "unsigned char"}
THREADS = 512
# Job j's page of row r lies at row_dev[r] + blk[j] * block_stride, its image at slot_off[j] +
# row_flat[r]. A warp moves tiles of 128 vectors, and strides over all tiles of all rows and jobs.
# No read-only loads: another context may have written the source since the last launch.
SOURCE = r"""
#define TILE 128
extern "C" __global__ void __launch_bounds__(512)
kv_move(unsigned long long dev_base, unsigned long long flat_base,
        const long long* blk, const long long* slot_off,
        const long long* row_dev, const long long* row_flat,
        long long block_stride, int row_bytes, int n_jobs, int n_rows, int to_flat)
{
    const int nvec = row_bytes / (int)sizeof(VEC), tiles = (nvec + TILE - 1) / TILE;
    const long long total = (long long)n_jobs * n_rows * tiles;
    const int lane = threadIdx.x & 31;
    const long long step = (long long)gridDim.x * (blockDim.x >> 5);
    long long w = (long long)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    for (; w < total; w += step) {
        const int t = (int)(w % tiles);
        const long long q = w / tiles, j = q / n_rows;
        const int r = (int)(q % n_rows);
        VEC* page = (VEC*)(dev_base + row_dev[r] + blk[j] * block_stride);
        VEC* image = (VEC*)(flat_base + slot_off[j] + row_flat[r]);
        const VEC* s = to_flat ? page : image;
        VEC* d = to_flat ? image : page;
        const int i0 = t * TILE + lane;
        VEC v[4];
        #pragma unroll
        for (int u = 0; u < 4; ++u) if (i0 + u * 32 < nvec) v[u] = __ldcs(s + i0 + u * 32);
        #pragma unroll
        for (int u = 0; u < 4; ++u) if (i0 + u * 32 < nvec) __stcs(d + i0 + u * 32, v[u]);
    }
}
"""
_MAJORS = (13, 12)  # versions of NVRTC, the newest first


def width_of(*numbers: int) -> int:
    """Return the bytes of the widest vector that divides all of these."""
    return next(width for width in VECTORS if not any(number % width for number in numbers))


@functools.cache
def compile_image(architecture: int, width: int, driver_major: int) -> bytes:
    """Return the kernel for a GPU of compute capability ``architecture`` / 10.

    Machine code, because a driver compiles no PTX of an NVRTC that is newer than itself. Where
    NVRTC is older than the GPU: PTX of the newest one that it knows. Raises CudaError without
    NVRTC or on its error.
    """
    nvrtc = _library(driver_major)
    known = [one for one in _architectures(nvrtc) if one <= architecture]
    if not known:
        raise CudaError(f"NVRTC knows no GPU as old as sm_{architecture}; install kvferry[cuda12]")
    target, exact = max(known), max(known) == architecture
    option = f"--gpu-architecture={'sm' if exact else 'compute'}_{target}"
    program = c_void_p()
    source, name = SOURCE.encode(), b"kv_move.cu"
    _check(nvrtc.nvrtcCreateProgram(byref(program), source, name, 0, None, None))
    try:
        options = [option, f"-DVEC={VECTORS[width]}"]
        texts = (c_char_p * len(options))(*(option.encode() for option in options))
        if code := nvrtc.nvrtcCompileProgram(program, len(options), texts):
            raise CudaError(f"the copy kernel was not compiled: {_log(nvrtc, program)}", code)
        size, kind = c_size_t(), "CUBIN" if exact else "PTX"
        _check(nvrtc[f"nvrtcGet{kind}Size"](program, byref(size)))
        image = create_string_buffer(size.value)
        _check(nvrtc[f"nvrtcGet{kind}"](program, image))
        return image.raw
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def _architectures(nvrtc: ctypes.CDLL) -> list[int]:
    count = c_int()
    _check(nvrtc.nvrtcGetNumSupportedArchs(byref(count)))
    found = (c_int * count.value)()
    _check(nvrtc.nvrtcGetSupportedArchs(found))
    return list(found)


def _check(code: int) -> None:
    if code:
        raise CudaError(f"NVRTC failed with {code}; install another version of it", code)


def _log(nvrtc: ctypes.CDLL, program: c_void_p) -> str:
    size = c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, byref(size))
    text = create_string_buffer(size.value or 1)
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace")


@functools.cache
def _library(driver_major: int) -> ctypes.CDLL:
    """Load NVRTC from the system or from a wheel of NVIDIA's. Raises CudaError.

    None of a later major version than the driver, which does not take what that one makes.
    """
    names = [f"libnvrtc.so.{major}" for major in _MAJORS if major <= driver_major]
    for path in [path for name in names for path in (name, *_in_wheels(name))]:
        try:
            library = _loaded(path)
        except OSError:
            continue
        library.nvrtcCreateProgram.argtypes = (
            c_void_p, c_char_p, c_char_p, c_int, c_void_p, c_void_p
        )  # fmt: skip
        return library
    raise CudaError(
        f"NVRTC of CUDA {driver_major} is not here; install kvferry[cuda13], or kvferry[cuda12]"
    )


def _loaded(path: str) -> ctypes.CDLL:
    """Load NVRTC. Raises OSError."""
    if "/" in path:  # a wheel's: that of 13.0 opens these by their name alone, and finds none
        for beside in Path(path).parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(beside))
    return ctypes.CDLL(path)


def _in_wheels(name: str) -> list[str]:
    return [str(path) for folder in sys.path for path in Path(folder).glob(f"nvidia/*/lib/{name}")]
