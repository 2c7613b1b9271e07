"""A GPU made of host memory: fake_libcuda.c, built once per test process, and memory on it."""

from __future__ import annotations

import atexit
import ctypes
import functools
import mmap
import os
import shutil
import subprocess
import tempfile
import weakref
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from kvferry_connector.cuda import Driver as EngineDriver
from kvferry_connector.cuda import StreamWords
from kvferry_connector.wire.attach import Memory
from kvferry_connector.wire.names import BOUND_STEP_OFFSET, DONE_STEP_OFFSET
from kvferry_sidecar.engines import cuda_kernel
from kvferry_sidecar.engines.cuda_driver import CudaError, Driver
from kvferry_sidecar.geometry.device import CudaLayout, DeviceMemory
from numpy.typing import NDArray
from support.raw_half import KvMemory

if TYPE_CHECKING:
    import pytest

SOURCE = Path(__file__).with_name("fake_libcuda.c")
_BUILT = "FAKE_CUDA_LIBRARY"


@functools.cache
def library() -> Path:
    """Build the fake driver as libcuda.so.1 in a folder of its own and return its path.

    A child process that is to take it for the driver (``as_driver``) uses its parent's.
    """
    if built := os.environ.get(_BUILT):
        return Path(built)
    folder = Path(tempfile.mkdtemp(prefix="kvf-cuda-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "libcuda.so.1"
    flags = ["-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    objects = _kernels(folder, flags)
    cc = os.environ.get("CC", "cc")
    subprocess.run([cc, "-shared", *flags, "-o", path, SOURCE, *objects], check=True)
    return path


def _kernels(folder: Path, flags: list[str]) -> list[Path]:
    """Compile the copy kernel for this processor, once per width, and what launches them."""
    before, after = SOURCE.with_name("fake_kernel.h"), SOURCE.with_name("fake_launch.cpp")
    text = 'extern "C" {\nunsigned long long fake_stores;\nint fake_misaligned;\n'
    cases = ""
    objects = []
    for width, vector in cuda_kernel.VECTORS.items():
        unit = folder / f"kernel_{width}.cpp"
        unit.write_text(before.read_text() + cuda_kernel.SOURCE + after.read_text())
        objects.append(unit.with_suffix(".o"))
        defines = [f"-DVEC={vector}", f"-DWIDTH={width}", "-Wno-unknown-pragmas"]
        cxx = [os.environ.get("CXX", "c++"), "-std=c++17", "-c", *flags, *defines]
        subprocess.run([*cxx, "-o", objects[-1], unit], check=True)
        text += f"int fake_launch_{width}(unsigned, unsigned, void**);\n"
        cases += f"    if (width == {width}) return fake_launch_{width}(b, t, a);\n"
    unit = folder / "kernels.cpp"
    unit.write_text(
        f"{text}int fake_kernel(int width, unsigned b, unsigned t, void** a) {{\n{cases}"
        "    return 1;\n}\n}\n"
    )
    objects.append(unit.with_suffix(".o"))
    subprocess.run([*cxx, "-o", objects[-1], unit], check=True)
    return objects


def fake_image(_architecture: int, width: int, _driver_major: int) -> bytes:
    """Stand for the compiler: the fake driver has the kernel in every width."""
    return b"for vectors of %d\0" % width


def driver_with_kernels(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Return the sidecar's driver over the fake one, which has the kernel."""
    monkeypatch.setattr(cuda_kernel, "compile_image", fake_image)
    gpu.with_kernels(True)
    found = Driver(str(library()))
    found.use(0)
    return found


def as_driver() -> dict[str, str]:
    """Return the environment in which child processes take the fake for the driver."""
    return {"LD_LIBRARY_PATH": str(library().parent), _BUILT: str(library())}


class FakeGpu:
    """The state of the fake driver in this process."""

    def __init__(self) -> None:
        self._fake = ctypes.CDLL(str(library()))
        self._fake.fake_calls.restype = self._fake.fake_loading.restype = c_char_p
        self._fake.fake_alloc.argtypes = (
            ctypes.POINTER(c_uint64), c_size_t, c_int, c_int, c_uint64
        )  # fmt: skip
        self._fake.fake_pinned.argtypes = (c_uint64,)
        self.forget()
        self.fail("", 0)

    def alloc(
        self, total_bytes: int, device: int = 0, *, kind: str = "cudaMalloc", types: int = 0
    ) -> int:
        """Return the address of new device memory; only that of cudaMalloc has an IPC handle."""
        address = c_uint64()
        number = ("virtual", "cudaMalloc", "pool").index(kind)
        assert self._fake.fake_alloc(byref(address), total_bytes, device, number, types) == 0
        return int(address.value)

    def fail(self, name: str, code: int, after: int = 0) -> None:
        """Let a call fail from the ``after``-th on."""
        self._fake.fake_fail(name.encode(), code, after)

    def calls(self, name: str = "") -> list[str]:
        """Return the calls so far, in order; all of them, or those of one name."""
        return [call for call in self._fake.fake_calls().decode().split() if name in ("", call)]

    def forget(self) -> None:
        """Forget the calls so far."""
        self._fake.fake_forget()

    def pinned(self, address: int) -> bool:
        """Whether host memory is registered."""
        return bool(self._fake.fake_pinned(address))

    def loading(self) -> str:
        """How modules were to be loaded when the driver began."""
        return bytes(self._fake.fake_loading()).decode()

    def words_on(self) -> int:
        """On which device's stream the last word was written."""
        return int(self._fake.fake_words_on())

    def mapped(self) -> int:
        """How many allocations of other processes are open here."""
        return int(self._fake.fake_mapped())

    def handles(self) -> int:
        """How many handles of virtual memory are held here."""
        return int(self._fake.fake_handles())

    def stores(self) -> int:
        """How many bytes kernels have stored so far."""
        return int(ctypes.c_ulonglong.in_dll(self._fake, "fake_stores").value)

    def with_kernels(self, there: bool) -> None:
        """Run kernels, which a test has "compiled" by ``fake_image``; else they are refused."""
        self._fake.fake_with_kernels(int(there))

    def without_batches(self, missing: bool) -> None:
        """Have a driver that is older than batches of copies."""
        self._fake.fake_without_batches(int(missing))

    def lazily(self, wanted: bool) -> None:
        """Have what is put on a stream run when somebody waits for it, and not before."""
        self._fake.fake_lazily(int(wanted))

    def waiting(self) -> int:
        """How many copies and launches on a stream have not run yet."""
        return int(self._fake.fake_waiting())

    def catch_up(self) -> None:
        """Run what is on the stream."""
        assert self._fake.cuStreamSynchronize(ctypes.c_void_p(7)) == 0

    def unpin_all(self) -> None:
        """Forget registrations of memory that is gone: its addresses come again."""
        self._fake.fake_unpin_all()

    def free_all(self) -> None:
        """Free what was allocated here, and drop what was opened."""
        self._fake.fake_free_all()


def bytes_at(address: int, total_bytes: int) -> NDArray[np.uint8]:
    """Return fake device memory as an array."""
    memory = (ctypes.c_ubyte * total_bytes).from_address(address)
    return np.frombuffer(memory, dtype=np.uint8)


class GpuEngineMemory:
    """support.copying.EngineMemory on a fake GPU."""

    def __init__(self, total_bytes: int, seed: int = 1, device: int = 0) -> None:
        address = FakeGpu().alloc(total_bytes, device)
        self._memory = DeviceMemory(device, address, total_bytes)
        self.view = bytes_at(address, total_bytes)
        self.view[:] = np.random.default_rng(seed).integers(0, 256, total_bytes, dtype=np.uint8)

    def layout(self, *arrays: NDArray[np.int64], blocks: int) -> CudaLayout:
        """Return a layout over this memory."""
        offsets, strides, lengths = arrays
        return CudaLayout(self._memory, offsets, strides, lengths, blocks)


class RealGpuMemory:
    """support.copying.EngineMemory on a real GPU; ``view`` is a copy of what it holds now."""

    def __init__(self, total_bytes: int, seed: int = 1) -> None:
        from gpu import device  # only where there is one

        self._device, buffer = device, device.DeviceBuffer(total_bytes)
        self._memory = DeviceMemory(0, buffer.address, total_bytes)
        device.write(buffer.address, np.random.default_rng(seed).bytes(total_bytes))
        weakref.finalize(self._memory, buffer.free)  # with the last layout of it

    @property
    def view(self) -> NDArray[np.uint8]:
        data = self._device.read(self._memory.address, self._memory.total_bytes)
        return np.frombuffer(bytearray(data), dtype=np.uint8)

    layout = GpuEngineMemory.layout


class GpuKvMemory(KvMemory):
    """One rank's KV memory on the fake GPU, exported and fenced by the connector's own code."""

    def __init__(self, gpu: FakeGpu, blocks: int = 64, *, offset: int = 4096) -> None:
        super().__init__(blocks)
        driver = EngineDriver(str(library()))
        address = gpu.alloc(offset + self.total_bytes) + offset
        with driver.on(0):
            self.cuda = driver.export(address, 0)
        self._pages.close()
        self._device = bytes_at(address, self.total_bytes)
        page = ctypes.addressof(ctypes.c_char.from_buffer(self._fence))
        self._words = StreamWords(driver, page, lambda: 0, 0)

    def offered(self) -> list[Memory]:
        return [Memory(0, self.total_bytes, "cuda", self.cuda)]

    def fds(self) -> list[int]:
        return [self.fence_fd]

    def bound(self, step: int) -> None:
        self._words.write(BOUND_STEP_OFFSET, step)

    def done(self, step: int) -> None:
        self._words.write(DONE_STEP_OFFSET, step)

    def read(self, block: int) -> bytes:
        starts = (self._start(layer, block) for layer in range(self.layers))
        return b"".join(self._device[at : at + self.page_bytes].tobytes() for at in starts)

    def write(self, block: int, data: bytes) -> None:
        for layer in range(self.layers):
            page = data[layer * self.page_bytes : (layer + 1) * self.page_bytes]
            at = self._start(layer, block)
            self._device[at : at + self.page_bytes] = np.frombuffer(page, dtype=np.uint8)

    def close(self) -> None:
        self._words.close()
        self._pages = mmap.mmap(-1, 4096)
        super().close()


def no_device(memory: Memory, life: int, fd: int | None) -> NoReturn:
    """Stand for a sidecar without GPUs."""
    raise CudaError("there is no GPU in this test")
