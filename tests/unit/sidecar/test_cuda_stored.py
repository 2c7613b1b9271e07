"""Which way of copying was the fastest, kept for the next sidecar, and when it is not believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from ctypes import c_void_p
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from kvferry_sidecar.engines import cuda_choice, cuda_kernel, cuda_stored
from kvferry_sidecar.engines.base import Direction
from kvferry_sidecar.engines.cuda_choice import Ways, find_ways
from kvferry_sidecar.engines.cuda_driver import Driver
from kvferry_sidecar.engines.cuda_stored import StoredWays
from support.fake_cuda import FakeGpu, fake_image, library

LOG = structlog.get_logger()
STREAM = c_void_p(7)


@pytest.fixture
def driver(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(cuda_kernel, "compile_image", fake_image)
    monkeypatch.setattr(cuda_choice, "_seconds", lambda *_: 1.0)
    gpu.with_kernels(True)
    found = Driver(str(library()))
    found.use(0)
    return found


def ways_of(driver: Driver, folder: Path, direction: Direction = Direction.GATHER) -> Ways:
    stored = StoredWays(folder, LOG)
    ways = find_ways(driver, 0, direction, STREAM, mode="auto", stored=stored, log=LOG)
    ways.close()
    return ways


def compared(gpu: FakeGpu) -> bool:
    """Whether memory was taken to compare ways on since the last question."""
    calls = gpu.calls("cuMemHostAlloc")
    gpu.forget()
    return bool(calls)


def test_the_next_sidecar_believes_what_was_found(
    gpu: FakeGpu, driver: Driver, tmp_path: Path
) -> None:
    first = ways_of(driver, tmp_path)
    assert compared(gpu)
    assert ways_of(driver, tmp_path).best == first.best
    assert not compared(gpu)
    ways_of(driver, tmp_path, Direction.SCATTER)
    assert compared(gpu), "each direction has its own"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".json"]


def change_fact(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        assert document["facts"][name] != value
        document["facts"][name] = value

    return change


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "another GPU": change_fact("device", "00" * 16),
    "another slot": change_fact("bus_id", "0000:01:00.0"),
    "another boot": change_fact("boot", "0"),
    "another driver": change_fact("driver", 12080),
    "another module": change_fact("module", "NVRM 1"),
    "another version": change_fact("kvferry", "0.0.0"),
    "other ways": change_fact("ways", ["kernel", "rect"]),
    "a shape too few": lambda document: document["best"].pop(),
    "a shape twice": lambda document: document["best"].append(document["best"][0]),
    "a way that is none": lambda document: document["best"][0].__setitem__(2, "magic"),
    "a field too many": lambda document: document.update(more=1),
    "a wrong type": lambda document: document["best"][0].__setitem__(0, "1024"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_found_otherwise_is_found_again(
    gpu: FakeGpu, driver: Driver, tmp_path: Path, name: str
) -> None:
    found = ways_of(driver, tmp_path).best
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_bytes())
    CHANGES[name](document)
    path.write_text(json.dumps(document))
    gpu.forget()
    ways_of(driver, tmp_path)
    assert compared(gpu)
    ways_of(driver, tmp_path)
    assert not compared(gpu), "and kept"
    assert found


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\xfe", b'{"facts":', b"[" * 20_000])
def test_a_damaged_file_is_replaced(
    gpu: FakeGpu, driver: Driver, tmp_path: Path, data: bytes
) -> None:
    ways_of(driver, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(data)
    gpu.forget()
    ways_of(driver, tmp_path)
    assert compared(gpu)
    assert msgspec.json.decode(path.read_bytes())["facts"]["direction"] == "gather"


def test_a_folder_that_takes_no_file_ends_nothing(
    gpu: FakeGpu, driver: Driver, tmp_path: Path
) -> None:
    assert ways_of(driver, tmp_path / "gone").best
    file = tmp_path / "file"
    file.touch()
    assert ways_of(driver, file).best
    assert compared(gpu)


def test_what_failed_is_not_kept(gpu: FakeGpu, driver: Driver, tmp_path: Path) -> None:
    gpu.fail("cuMemHostAlloc", 2)
    assert [mover.name for mover in ways_of(driver, tmp_path).movers] == ["rect"]
    assert not list(tmp_path.iterdir())
    gpu.fail("", 0)
    assert ways_of(driver, tmp_path).best


def test_facts_are_of_this_boot_and_this_version(driver: Driver) -> None:
    facts = cuda_stored.facts_of(driver, 1, Direction.SCATTER, ("rect",))
    assert (facts.device, facts.bus_id) == ("470000000002" + "00" * 9 + "07", "0000:FF:01.0")
    assert facts.boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (facts.driver, facts.direction) == (13000, "scatter")
