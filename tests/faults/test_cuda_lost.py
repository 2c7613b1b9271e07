"""The context of a GPU is lost: the sidecar fails what is open, drains and ends, the pool stays.

Every later call of the fake driver fails then, as the real one's do (fake_libcuda.c: lost_by).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvferry_connector.wire.attach import Refused
from kvferry_sidecar.errors import ExitCode
from support.fake_cuda import FakeGpu, GpuKvMemory, library
from support.hot_engine import attached
from support.raw_half import KvMemory, RawHalf
from support.sidecar import SidecarUnderTest, running_sidecar, set_flags
from support.waiting import wait_until

GPU = set_flags(
    {"copy.gpu": "true", "copy.gpu_mode": "rect", "limits.drain_ms_max": 600_000}  # none is cut off
)
PROMPT = "saved before"


@pytest.fixture
def lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that tells the sidecar's driver with which call the context is lost."""
    path = tmp_path / "lost"
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library().parent))
    monkeypatch.setenv("FAKE_CUDA_LOST", str(path))
    return path


@pytest.fixture
def sidecar(lost: Path) -> Iterator[SidecarUnderTest]:
    assert not lost.exists()
    with running_sidecar(pool_bytes=64 << 20, flags=GPU) as found:
        yield found


def lose(lost: Path, call: str, code: int = 719) -> None:
    whole = lost.with_suffix(".new")
    whole.write_text(f"{call} {code}")
    whole.rename(lost)


def offered(sidecar: SidecarUnderTest, memory: KvMemory) -> RawHalf:
    """Return a half that has offered its memory, whatever is answered."""
    half = RawHalf(sidecar.run_dir, 0, memory=memory)
    pidfd = os.pidfd_open(os.getpid())
    half.stream.send(half.hello(), [pidfd, *memory.fds()])
    os.close(pidfd)
    return half


def wait_ended(sidecar: SidecarUnderTest, error: str) -> None:
    """Wait for the end by itself, with its own code and the error in the log."""
    code = wait_until(sidecar.process.process.poll, "the sidecar ends")
    assert code == ExitCode.GPU
    assert "a GPU is lost; draining to end" in sidecar.log.read_text()
    assert error in sidecar.log.read_text()


@pytest.mark.parametrize("kind", ["save", "load"])
def test_a_copy_that_loses_the_gpu_fails_and_the_next_sidecar_hits(
    sidecar: SidecarUnderTest, gpu: FakeGpu, lost: Path, kind: str
) -> None:
    memory = GpuKvMemory(gpu)
    engine, halves = attached(sidecar.run_dir, memory, "before")
    engine.put(PROMPT)
    if kind == "save":
        lose(lost, "cuEventSynchronize")
        job = engine.submit(engine.save_job("another", (4, 5, 6)))
    else:
        admission, answer = engine.lease(PROMPT, 3)
        assert answer.hit_tokens == 48
        lose(lost, "cuMemcpy2DAsync_v2", 700)
        job = engine.submit(engine.load_job(admission, (4, 5, 6)))
    outcome = engine.ended(job)
    assert (outcome.status, outcome.reason) == ("failed", "copy-failed")
    wait_ended(sidecar, "LAUNCH_FAILED" if kind == "save" else "ILLEGAL_ADDRESS")
    for half in halves:
        half.close()
    lost.unlink()
    sidecar.restart()
    again = GpuKvMemory(gpu)
    engine, halves = attached(sidecar.run_dir, again, "after")
    assert engine.get(PROMPT) == 48, "the pool outlives the process"
    for half in halves:
        half.close()
    memory.close()
    again.close()


def test_a_gpu_lost_while_it_is_opened_or_idle_is_noticed_too(
    sidecar: SidecarUnderTest, gpu: FakeGpu, lost: Path
) -> None:
    memory = GpuKvMemory(gpu)
    lose(lost, "cuIpcOpenMemHandle_v2", 214)
    half = offered(sidecar, memory)
    assert half.stream.expect(Refused).code == "cuda"
    wait_ended(sidecar, "ECC_UNCORRECTABLE")
    half.close()
    lose(lost, "cuMemHostRegister_v2", 719)
    sidecar.restart()
    half = offered(sidecar, memory)  # nothing is copied: the pool is pinned
    wait_ended(sidecar, "the pool cannot be pinned")
    half.close()
    memory.close()


def test_an_engine_on_the_host_is_served_until_the_drain_is_over(
    sidecar: SidecarUnderTest, gpu: FakeGpu, lost: Path
) -> None:
    """Its load waits for its step when the GPU of another is lost."""
    on_host = KvMemory()
    host, host_halves = attached(sidecar.run_dir, on_host, "host")
    host.put(PROMPT)
    admission, answer = host.lease(PROMPT, 3)
    assert answer.hit_tokens == 48
    job = host.submit(host.load_job(admission, (4, 5, 6), step=2))
    memory = GpuKvMemory(gpu)
    engine, halves = attached(sidecar.run_dir, memory, "gpu")
    lose(lost, "cuEventSynchronize")
    engine.ended(engine.submit(engine.save_job("another", (4, 5, 6))))
    wait_until(lambda: sidecar.status()["state"] == "draining", "it drains")
    on_host.bound(2)
    assert host.ended(job).status == "done"
    wait_ended(sidecar, "LAUNCH_FAILED")
    for half in (*halves, *host_halves):
        half.close()
    memory.close()
    on_host.close()
