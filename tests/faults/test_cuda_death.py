"""A proven death gives an engine's GPU memory back; a stopped engine and a lost stream do not.

The engine is a process of its own with memory of the fake GPU. What is asked is the order: whoever
is told that the engine is gone finds its memory closed, in the same turn of the sidecar's loop.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kvferry_connector.wire.attach import Ready
from kvferry_connector.wire.hot import Release
from support.books import read_status, wait_settled
from support.engine_child import WorkerChild
from support.fake_cuda import library
from support.hot_engine import HotEngine
from support.memory import free_fake_gpu
from support.raw_half import KvMemory, RawHalf, engine_registration
from support.sidecar import SidecarUnderTest, running_sidecar
from support.waiting import wait_until


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that holds copies of the sidecar's driver while it is there."""
    return tmp_path_factory.mktemp("copies") / "hold"


@pytest.fixture(scope="module")
def sidecar(hold: Path) -> Iterator[SidecarUnderTest]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", str(library().parent))
        patch.setenv("FAKE_CUDA_HOLD", str(hold))
        with running_sidecar(pool_bytes=16 << 20, flags=("--set", "copy.gpu=true")) as found:
            yield found


@contextmanager
def engine_of_two(
    sidecar: SidecarUnderTest, instance: str
) -> Iterator[tuple[HotEngine, WorkerChild]]:
    """Yield a scheduler half here and its worker half on the fake GPU in a process of its own."""
    life = os.urandom(16)
    scheduler = RawHalf(sidecar.run_dir, instance_id=instance)
    scheduler.attach()
    scheduler.register(engine_registration([0], life))
    child = WorkerChild(sidecar.run_dir, life, instance=instance, gpu=True)
    try:
        assert child.do("") == "registered"
        scheduler.stream.expect(Ready)
        yield HotEngine(scheduler, scheduler, KvMemory(), life), child
    finally:
        child.kill()
        scheduler.close()
        free_fake_gpu(child.process.pid)


def mappings(sidecar: SidecarUnderTest, pid: int) -> int:
    maps = Path(f"/proc/{sidecar.process.pid}/maps").read_text()
    return maps.count(f"kvferry-fake-gpu-{pid}-")


def workers(sidecar: SidecarUnderTest) -> list[dict[str, Any]]:
    sessions = read_status(sidecar.run_dir)["sessions"]
    return [half for s in sessions for half in s["halves"] if half["role"] == "worker"]


@pytest.mark.parametrize("in_flight", [False, True], ids=["idle", "load-waits"])
def test_memory_is_closed_with_the_proof_of_death(
    sidecar: SidecarUnderTest, in_flight: bool
) -> None:
    with engine_of_two(sidecar, f"dies-{in_flight}") as (engine, child):
        pid = child.process.pid
        assert mappings(sidecar, pid) == 1
        if in_flight:
            assert child.do("save prompt") == "saved"
            admission, answer = engine.lease("prompt", 3)
            assert answer.hit_tokens == 48
            assert child.do(f"load {admission}") == "running"
        os.kill(pid, signal.SIGSTOP)
        assert mappings(sidecar, pid) == 1, "a stopped engine keeps what is its own"
        assert len(workers(sidecar)) == 1
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not workers(sidecar), "the worker is proven dead")
        assert mappings(sidecar, pid) == 0, "its whole KV memory would stay allocated"
    wait_settled(sidecar.run_dir)


def test_memory_that_is_copied_is_closed_when_the_copy_has_stopped(
    sidecar: SidecarUnderTest, hold: Path
) -> None:
    """And no sooner: the driver reads and writes it until then."""
    with engine_of_two(sidecar, "dies-copied") as (engine, child):
        pid = child.process.pid
        assert child.do("save copied") == "saved"
        admission, answer = engine.lease("copied", 3)
        assert answer.hit_tokens == 48
        hold.touch()
        try:
            assert child.do(f"copy {admission}") == "running"
            wait_until(hold.with_suffix(".held").exists, "the copy is under way")
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not workers(sidecar), "the worker is proven dead")
            assert mappings(sidecar, pid) == 1
            assert read_status(sidecar.run_dir)["pipeline"]["leases"] == 1
        finally:
            hold.unlink()
        wait_until(lambda: mappings(sidecar, pid) == 0, "its memory is closed")
    wait_settled(sidecar.run_dir)


def test_the_next_engine_maps_its_own_memory(sidecar: SidecarUnderTest) -> None:
    with engine_of_two(sidecar, "first") as (_, child):
        assert child.do("save next") == "saved"
    with engine_of_two(sidecar, "second") as (engine, child):
        assert mappings(sidecar, child.process.pid) == 1
        admission, answer = engine.lease("next", 3)
        assert answer.hit_tokens == 48, "what the first saved outlives its memory"
        engine.scheduler.send(Release([admission]))  # or the drain would wait for it
