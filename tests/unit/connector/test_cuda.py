"""Export of GPU memory and fence words of a stream, over a driver made of host memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kvferry_connector import cuda, export, worker_half
from kvferry_connector.cuda import CudaError, Driver
from kvferry_connector.export import ExportError, FencePage, KvMemory
from kvferry_connector.meta import FerryMetadata
from kvferry_connector.wire.names import BOUND_STEP_OFFSET, DONE_STEP_OFFSET, FENCE_PAGE_BYTES
from support.fake_cuda import FakeGpu, bytes_at, library
from support.scripted_client import ScriptedClient, order, worker_half_over

CALLS = (
    "cuDeviceGet",
    "cuCtxGetCurrent",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuDevicePrimaryCtxRelease_v2",
    "cuMemGetAddressRange_v2",
    "cuPointerGetAttribute",
    "cuIpcGetMemHandle",
    "cuDeviceGetUuid_v2",
)


@pytest.fixture
def driver(gpu: FakeGpu) -> Iterator[Driver]:
    assert gpu.calls() == []
    found = Driver(str(library()))
    with found.on(0):  # as torch's thread is
        FakeGpu().forget()
        yield found


def test_export_names_the_allocation_not_the_buffer(gpu: FakeGpu, driver: Driver) -> None:
    base = gpu.alloc(1 << 20, device=1)
    other = gpu.alloc(1 << 20, device=1)
    with driver.on(1):
        found, whole = driver.export(base + 8192, 1), driver.export(base, 1)
        next_one = driver.export(other, 1)
    assert (found.offset, found.allocation_bytes, found.pid) == (8192, 1 << 20, os.getpid())
    assert len(found.handle) == 64
    assert found.handle == whole.handle
    assert found.device == b"G\0\0\0\0\2" + bytes(9) + b"\7", "a zero byte ends nothing"
    assert found.buffer_id != next_one.buffer_id


@pytest.mark.parametrize(
    ("kind", "types", "words"),
    [
        ("virtual", 8, "expandable_segments.* sleep mode.* by: fabric handles"),
        ("virtual", 0, "by: nothing"),
        ("pool", 0, "backend:cudaMallocAsync"),
    ],
)
def test_memory_without_a_handle_is_refused_with_the_setting(
    gpu: FakeGpu, driver: Driver, kind: str, types: int, words: str
) -> None:
    address = gpu.alloc(1 << 20, kind=kind, types=types)
    with pytest.raises(CudaError, match=words):
        driver.export(address, 0)
    assert not gpu.calls("cuIpcGetMemHandle")


def test_virtual_memory_travels_as_a_descriptor(gpu: FakeGpu, driver: Driver) -> None:
    address = gpu.alloc(1 << 20, kind="virtual", types=9)
    bytes_at(address, 1 << 20)[:] = 42
    found = driver.export(address + 4096, 0, 1 << 16)
    assert (found.handle, found.offset, found.allocation_bytes) == (b"", 4096, 1 << 20)
    fd = driver.export_fd(address + 4096)
    assert not os.get_inheritable(fd)
    with mmap.mmap(fd, 1 << 20) as seen:
        assert seen[4096] == 42
    os.close(fd)
    assert gpu.handles() == 0


def test_a_buffer_in_several_pieces_is_refused(gpu: FakeGpu, driver: Driver) -> None:
    address = gpu.alloc(1 << 20, kind="virtual", types=1)
    driver.export(address + 4096, 0, (1 << 20) - 4096)
    with pytest.raises(CudaError, match=r"lie in pieces.*1048576: .*expandable_segments"):
        driver.export(address + 4096, 0, 1 << 20)


@pytest.mark.parametrize(
    "name", ["cuMemRetainAllocationHandle", "cuMemExportToShareableHandle", "cuMemRelease"]
)
def test_a_descriptor_that_cannot_be_had_leaves_nothing(
    gpu: FakeGpu, driver: Driver, name: str
) -> None:
    address = gpu.alloc(1 << 20, kind="virtual", types=1)
    driver.export(address, 0)
    before = len(list(Path("/proc/self/fd").iterdir()))
    gpu.fail(name, 801)
    with pytest.raises(CudaError, match=f"{name} failed with 801: not supported"):
        driver.export_fd(address)
    gpu.fail("", 0)
    if name != "cuMemRelease":
        assert gpu.handles() == 0
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def in_a_thread(work: Callable[[], None]) -> None:
    """Run it where no context is current, as in the lifeline's thread."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(90)


def export_on(driver: Driver, address: int, device: int) -> None:
    with driver.on(device):
        driver.export(address, device)


def test_each_thread_works_in_the_devices_own_context_and_keeps_no_hold(
    gpu: FakeGpu, driver: Driver
) -> None:
    address = gpu.alloc(1 << 20, device=1)

    def work() -> None:
        export_on(driver, address, 1)
        assert current(driver) is None
        with driver.on(1):
            assert current(driver) == 101
            gpu.forget()
            export_on(driver, address, 1)
            assert not gpu.calls("cuCtxSetCurrent"), "a context that is there is left alone"
            with pytest.raises(CudaError):
                export_on(driver, 1, 0)  # no memory lies there
            assert current(driver) == 101

    in_a_thread(work)
    retained = len(gpu.calls("cuDevicePrimaryCtxRetain"))
    assert retained == len(gpu.calls("cuDevicePrimaryCtxRelease_v2"))


def current(driver: Driver) -> int | None:
    found = ctypes.c_void_p()
    driver.call("cuCtxGetCurrent", ctypes.byref(found))
    return found.value


def test_words_are_of_the_memorys_device_whatever_the_thread_uses(
    gpu: FakeGpu, driver: Driver
) -> None:
    """A default stream is 0 on every device."""
    fence = FencePage()
    fence.follow(driver, lambda: 0, 1)
    assert gpu.words_on() == 1
    in_a_thread(lambda: fence.bound(3))
    with driver.on(0):
        fence.done(3)
        assert current(driver) == 100
    assert (gpu.words_on(), words(fence)) == (1, (3, 3))
    fence.close()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("code", [1, 201, 304, 800, 801, 999])
def test_every_call_may_fail_and_says_which(gpu: FakeGpu, name: str, code: int) -> None:
    address = gpu.alloc(1 << 20)
    driver = Driver(str(library()))  # of which nothing was asked yet
    gpu.fail(name, code)

    def work() -> None:
        with pytest.raises(CudaError, match=f"{name} failed with {code}: ."):
            export_on(driver, address, 0)

    in_a_thread(work)


def test_no_call_is_left_out_of_that(gpu: FakeGpu, driver: Driver) -> None:
    address = gpu.alloc(1 << 20)
    driver = Driver(str(library()))
    in_a_thread(lambda: export_on(driver, address, 0))
    assert set(gpu.calls()) == set(CALLS)


def test_a_machine_without_a_driver_says_so() -> None:
    with pytest.raises(CudaError, match="is the driver here"):
        Driver("libcuda-of-another-world.so.1")


# --- the engine's memory -------------------------------------------------------------------


def tensor(address: int, total_bytes: int) -> SimpleNamespace:
    storage = SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: total_bytes)
    device = SimpleNamespace(type="cuda", index=1)
    return SimpleNamespace(untyped_storage=lambda: storage, device=device)


def test_kv_memory_on_a_gpu_is_exported_once(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "Driver", lambda: Driver(str(library())))
    memory = KvMemory()
    address = gpu.alloc(1 << 20, device=1)
    gpu.forget()
    first = memory.find(tensor(address + 512, 4096))
    assert memory.find(tensor(address + 1024, 64)) is first
    assert len(gpu.calls("cuIpcGetMemHandle")) == 1
    (handle,) = memory.handles()
    assert handle.fd is None
    assert (handle.memory.kind, handle.memory.total_bytes) == ("cuda", 4096)
    assert handle.memory.cuda is not None
    assert handle.memory.cuda.offset == 512
    assert memory.driver is not None
    assert memory.device == 1
    memory.close()


def test_virtual_kv_memory_goes_with_its_descriptor_and_anew_after_a_sleep(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "Driver", lambda: Driver(str(library())))
    memory = KvMemory()
    address = gpu.alloc(1 << 20, kind="virtual", types=1)
    kv = tensor(address, 1 << 20)
    first = memory.find(kv)
    (handle,) = memory.handles()
    assert (handle.memory.kind, handle.fd) == ("cuda-fd", first.fd)
    assert first.fd is not None
    memory.forget(closed=True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first.fd)
    second = memory.find(kv)
    memory.forget(closed=False)
    assert second.fd is not None
    os.fstat(second.fd)  # a sidecar may still be told of it
    third = memory.find(kv)
    memory.forget(closed=True)  # all that was lent is back, or the sidecar has ended
    for fd in (second.fd, third.fd):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    memory.find(kv)
    memory.forget(closed=False)
    last = memory.find(kv)
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(last.fd)


def test_other_memory_is_refused() -> None:
    strange = tensor(4096, 4096)
    strange.device.type = "xpu"
    with pytest.raises(ExportError, match="CPU and CUDA engines"):
        KvMemory().find(strange)


# --- fences ---------------------------------------------------------------------------------


def words(fence: FencePage) -> tuple[int, int]:
    with mmap.mmap(fence.fd, FENCE_PAGE_BYTES, access=mmap.ACCESS_READ) as page:
        (bound,) = struct.unpack_from("<Q", page, BOUND_STEP_OFFSET)
        (done,) = struct.unpack_from("<Q", page, DONE_STEP_OFFSET)
        return bound, done


def test_the_stream_writes_the_words(gpu: FakeGpu, driver: Driver) -> None:
    fence = FencePage()
    fence.bound(1)
    streams = iter([11, 12, 13])
    fence.follow(driver, lambda: next(streams), 0)
    gpu.forget()
    fence.bound(7)
    fence.done(7)
    assert [call for call in gpu.calls() if call != "cuCtxGetCurrent"] == [
        "cuStreamWriteValue64_v2"
    ] * 2
    assert words(fence) == (7, 7)
    fence.close()
    assert gpu.calls("cuMemHostUnregister")


@pytest.mark.parametrize(
    "call",
    ["cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2", "cuStreamWriteValue64_v2"],
)
def test_without_stream_words_nothing_is_registered(
    gpu: FakeGpu, driver: Driver, call: str
) -> None:
    fence = FencePage()
    gpu.forget()
    gpu.fail(call, 801)
    with pytest.raises(CudaError, match=call):
        fence.follow(driver, lambda: 0, 0)
    registered = len(gpu.calls("cuMemHostRegister_v2")) - (call == "cuMemHostRegister_v2")
    assert len(gpu.calls("cuMemHostUnregister")) == registered
    fence.close()


def test_a_word_that_cannot_be_written_raises(gpu: FakeGpu, driver: Driver) -> None:
    fence = FencePage()
    fence.follow(driver, lambda: 0, 0)
    gpu.fail("cuStreamWriteValue64_v2", 719)
    with pytest.raises(CudaError, match="719"):
        fence.done(9)
    assert words(fence) == (0, 0), "nobody is told of a step that may not have come so far"
    fence.close()


def test_the_stream_is_of_the_memorys_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device the thread uses otherwise."""
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=40 + device)
    )
    assert worker_half._current_stream(1) == 41


def test_the_stream_of_the_memorys_device_stores_a_worker_halfs_words(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "Driver", lambda: Driver(str(library())))
    asked: list[int] = []
    monkeypatch.setattr(worker_half, "_current_stream", lambda device: asked.append(device) or 0)
    kv = tensor(gpu.alloc(1 << 16, device=1), 1 << 16)
    half = worker_half_over(ScriptedClient(), monkeypatch, lambda *what, **_: what[3].find(kv))
    gpu.lazily(True)
    half.bind(FerryMetadata(7, (order(1),), (order(2),)))
    half.end_forward()
    assert words(half._fence) == (0, 0), "the stream has not come so far"
    gpu.catch_up()
    assert words(half._fence) == (7, 7)
    assert (set(asked), gpu.words_on()) == ({1}, 1)
    half.shutdown()


def test_the_library_is_the_drivers() -> None:
    assert cuda.LIBRARY == "libcuda.so.1"
