"""Export of CUDA memory against a driver library that records, and fails what a test names."""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from kvferry_connector import cuda, export
from kvferry_connector.cuda import CudaError, Driver
from support.sources import ROOT

BASE, BYTES = 0x7F00_0020_0000, 3 << 30
CALLS = {
    "cuDeviceGet",
    "cuCtxGetCurrent",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuDevicePrimaryCtxRelease_v2",
    "cuMemGetAddressRange_v2",
    "cuPointerGetAttribute",
    "cuIpcGetMemHandle",
    "cuDeviceGetUuid_v2",
}


class FakeDriver:
    """The library of support/fake_libcuda.c."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.fake_calls.restype = ctypes.c_char_p
        self._library.fake_reset.argtypes = [
            *(ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_uint64)
        ]
        self.reset()

    def reset(self, *, legacy: bool = True, mempool: bool = False, types: int = 0) -> None:
        self._library.fake_reset(BASE, BYTES, legacy, mempool, types)

    def fail(self, name: str, code: int) -> None:
        self._library.fake_fail(name.encode(), code)

    def bind(self) -> None:
        self._library.fake_bind()

    @property
    def bound(self) -> bool:
        return bool(self._library.fake_bound())

    @property
    def calls(self) -> list[str]:
        text: bytes = self._library.fake_calls()
        return text.decode().split()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    source = ROOT / "tests" / "support" / "fake_libcuda.c"
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", path, source]
    subprocess.run(command, check=True, timeout=60)
    return path


@pytest.fixture
def fake(library: Path) -> FakeDriver:
    return FakeDriver(library)


def test_a_handle_opens_the_whole_allocation(fake: FakeDriver) -> None:
    found = Driver(fake.path).export(BASE + 4096, 0)
    assert (found.address, found.total_bytes) == (BASE, BYTES)
    assert found.handle == bytes(range(64))
    assert found.buffer_id == 0x1122334455667788


def test_the_gpu_is_named_whole_though_its_name_has_zero_bytes(fake: FakeDriver) -> None:
    uuid = bytes.fromhex(Driver(fake.path).export(BASE, 0).gpu)
    assert len(uuid) == 16
    assert uuid.count(0) == 4
    assert Driver(fake.path).export(BASE, 1).gpu != uuid.hex()


def test_a_thread_without_a_context_gets_the_primary_one_and_keeps_no_hold(
    fake: FakeDriver,
) -> None:
    """The lifeline's thread made no CUDA call before."""
    bound: list[bool] = []

    def work() -> None:
        Driver(fake.path).export(BASE, 0)
        bound.append(fake.bound)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert bound == [True]
    assert fake.calls.count("cuDevicePrimaryCtxRetain") == 1
    assert fake.calls.count("cuDevicePrimaryCtxRelease_v2") == 1


def test_a_context_that_is_there_is_left_alone(fake: FakeDriver) -> None:
    fake.bind()
    Driver(fake.path).export(BASE, 0)
    assert "cuCtxSetCurrent" not in fake.calls
    assert "cuDevicePrimaryCtxRetain" not in fake.calls


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({"types": 1}, "expandable_segments.* sleep mode.* by: fd"),
        ({"types": 9}, "by: fd, fabric"),
        ({}, "by: nothing"),
        ({"mempool": True}, "backend:cudaMallocAsync"),
    ],
)
def test_memory_without_a_handle_is_refused_with_the_setting(
    fake: FakeDriver, kind: dict[str, int], words: str
) -> None:
    fake.reset(legacy=False, **kind)
    with pytest.raises(CudaError, match=words):
        Driver(fake.path).export(BASE, 0)
    assert "cuIpcGetMemHandle" not in fake.calls


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("code", [1, 201, 304, 800, 801, 999])
def test_every_call_may_fail_and_says_which(fake: FakeDriver, name: str, code: int) -> None:
    fake.fail(name, code)
    with pytest.raises(CudaError, match=f"{name} failed with {code}: ."):
        Driver(fake.path).export(BASE, 0)
    if "cuDevicePrimaryCtxRetain" in fake.calls and name != "cuDevicePrimaryCtxRetain":
        assert "cuDevicePrimaryCtxRelease_v2" in fake.calls


def test_no_call_is_left_out_of_that(fake: FakeDriver) -> None:
    Driver(fake.path).export(BASE, 0)
    assert set(fake.calls) == CALLS


def test_a_machine_without_a_driver_says_so(tmp_path: Path) -> None:
    with pytest.raises(CudaError, match="is the driver here"):
        Driver(str(tmp_path / "libcuda.so.1"))


def test_an_engine_on_a_gpu_is_told_what_stands_in_the_way(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "Driver", lambda: Driver(fake.path))
    refusal: Callable[[int, int], str] = export._on_gpu
    assert "could be shared; this version serves CPU engines only" in refusal(BASE, 0)
    fake.reset(legacy=False, types=1)
    assert "GPU 0 cannot be shared: virtual memory" in refusal(BASE, 0)
    monkeypatch.setattr(export, "Driver", lambda: Driver("/nowhere/libcuda.so.1"))
    assert "is the driver here" in refusal(BASE, 0)


def test_the_library_is_loaded_by_its_own_name_only() -> None:
    assert cuda.LIBRARY == "libcuda.so.1"
