"""A real sidecar and memory on a GPU that is made of host memory (support/fake_cuda.py).

The driver's calls are the product's own; what a real GPU adds (streams that run behind, speed) is
not here.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvferry_connector.wire.attach import Memory, Refused
from msgspec.structs import replace
from support.books import wait_settled
from support.fake_cuda import FakeGpu, GpuKvMemory, library
from support.hot_engine import HotEngine, attached
from support.http import Http
from support.raw_half import KvMemory, RawHalf
from support.sidecar import SidecarUnderTest, running_sidecar
from support.waiting import wait_until

GPU = ("--set", "copy.gpu=true", "--set", "copy.gpu_share_percent=50")
PROMPT = "a prompt on a GPU"


@pytest.fixture
def sidecar(monkeypatch: pytest.MonkeyPatch) -> Iterator[SidecarUnderTest]:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library().parent))
    with running_sidecar(pool_bytes=64 << 20, flags=GPU) as found:
        yield found


@contextmanager
def engine_on(sidecar: SidecarUnderTest, memory: KvMemory, engine_id: str) -> Iterator[HotEngine]:
    """Yield an engine over the memory, which is closed when the engine has left."""
    engine, halves = attached(sidecar.run_dir, memory, engine_id)
    yield engine
    for half in halves:
        half.leave()
    memory.close()


def device_mappings(sidecar: SidecarUnderTest) -> int:
    maps = Path(f"/proc/{sidecar.process.pid}/maps").read_text()
    return maps.count(f"kvferry-fake-gpu-{os.getpid()}-")  # not its own, in which it tries copies


def test_the_driver_begins_before_any_engine_and_no_gpu_is_used(sidecar: SidecarUnderTest) -> None:
    """It may take seconds, in which the loop would stand; a context costs memory of the GPU."""
    assert "libcuda.so.1" in Path(f"/proc/{sidecar.process.pid}/maps").read_text()
    assert sidecar.status()["gpus"] == []


def test_what_a_gpu_saved_another_gpu_and_a_host_load_after_a_kill(
    sidecar: SidecarUnderTest, gpu: FakeGpu
) -> None:
    memory = GpuKvMemory(gpu)
    engine, halves = attached(sidecar.run_dir, memory, "first")
    engine.put(PROMPT)
    assert engine.get(PROMPT) == 48
    for half in halves:
        half.close()
    sidecar.kill(signal.SIGKILL)
    sidecar.restart()
    for engine_id, other in (("gpu", GpuKvMemory(gpu, offset=0)), ("host", KvMemory())):
        with engine_on(sidecar, other, engine_id) as engine:
            assert engine.get(PROMPT) == 48, "the pool's bytes are the same wherever they came from"
    wait_settled(sidecar.run_dir)
    memory.close()


def test_a_save_waits_for_the_word_of_the_stream(sidecar: SidecarUnderTest, gpu: FakeGpu) -> None:
    memory = GpuKvMemory(gpu)
    with engine_on(sidecar, memory, "fenced") as engine:
        blocks = (1, 2, 3)
        memory.done(3)
        gpu.lazily(True)
        memory.done(4)  # behind what the stream has to do first
        job = engine.submit(engine.save_job(PROMPT, blocks, step=4))
        engine.put("another, whose word has come", (7, 8))
        assert not [
            message for message in engine.worker.drain() if getattr(message, "job", 0) == job
        ]
        engine.fill(PROMPT, blocks)
        gpu.catch_up()
        assert engine.ended(job).status == "done"
        assert engine.get(PROMPT) == 48


def test_a_word_that_is_lost_fails_its_jobs_and_nothing_is_copied(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library().parent))
    flags = (*GPU, "--set", "limits.fence_ms_max=500")
    memory = GpuKvMemory(gpu)
    with (
        running_sidecar(pool_bytes=16 << 20, flags=flags) as sidecar,
        engine_on(sidecar, memory, "lost") as engine,
    ):
        engine.put(PROMPT)
        gpu.lazily(True)  # the stream never comes so far
        memory.bound(5)
        memory.done(5)
        engine.fill("lost", (7, 8))
        engine.wipe((4, 5, 6))
        wiped = memory.read(5)
        admission, answer = engine.lease(PROMPT, 3)
        assert answer.hit_tokens == 48
        jobs = [
            engine.submit(engine.save_job("lost", (7, 8), step=5)),
            engine.submit(engine.load_job(admission, (4, 5, 6), step=5)),
        ]
        for job in jobs:
            outcome = engine.ended(job)
            assert (outcome.status, outcome.reason) == ("failed", "fence")
        gpu.catch_up()  # the word comes after all: nothing waits for it any more
        assert engine.get("lost") == 0
        assert memory.read(5) == wiped
        assert engine.get(PROMPT) == 48, "what was saved is as it was"
        wait_settled(sidecar.run_dir)


def test_a_damaged_object_never_reaches_the_gpu(sidecar: SidecarUnderTest, gpu: FakeGpu) -> None:
    memory = GpuKvMemory(gpu)
    with engine_on(sidecar, memory, "damaged") as engine:
        engine.put(PROMPT)
        admission, answer = engine.lease(PROMPT, 3)
        assert answer.hit_tokens == 48
        payload = engine.content(PROMPT, 1)
        with Path("/dev/shm", sidecar.pool_name).open("r+b") as pool:
            at = pool.read().index(payload)
            pool.seek(at + 9)
            pool.write(bytes([payload[9] ^ 1]))
        engine.wipe((4, 5, 6))
        before = memory.read(5)
        outcome = engine.ended(engine.submit(engine.load_job(admission, (4, 5, 6))))
        assert (outcome.status, outcome.reason) == ("failed", "checksum")
        assert memory.read(5) == before


def test_memory_is_closed_when_the_engine_leaves(sidecar: SidecarUnderTest, gpu: FakeGpu) -> None:
    memory = GpuKvMemory(gpu)
    engine, halves = attached(sidecar.run_dir, memory, "leaves")
    engine.put(PROMPT)
    assert device_mappings(sidecar) == 1
    (use,) = sidecar.status()["gpus"]
    assert use["mapped_bytes"] == memory.cuda.allocation_bytes
    assert 0 < use["free_bytes"] < use["total_bytes"]
    scraped = Http(sidecar.run_dir / "http.sock").get("/metrics").text
    found = dict(
        re.findall(r'^kvferry_gpu_memory_bytes\{gpu="\w+",what="(\w+)"\} (\S+)$', scraped, re.M)
    )
    assert found.keys() == {"total", "free", "staging", "mapped"}
    assert float(found["mapped"]) == use["mapped_bytes"]
    assert float(found["total"]) == use["total_bytes"]
    wait_until(
        lambda: "pinning" in [work["name"] for work in sidecar.status()["ended"]],
        "the pool is pinned, and told",
    )
    wait_until(
        lambda: len(list(sidecar.run_dir.glob("gpu-*.json"))) == 2, "the ways of copying are kept"
    )
    log = sidecar.log.read_text()
    assert "mode=auto" in log
    assert "share_percent=50" in log
    for half in halves:
        half.leave()
    wait_until(lambda: device_mappings(sidecar) == 0, "the mapping of the engine's memory ends")
    memory.close()


def refusal_of(sidecar: SidecarUnderTest, memory: KvMemory) -> Refused:
    half = RawHalf(sidecar.run_dir, 0, memory=memory)
    pidfd = os.pidfd_open(os.getpid())
    half.stream.send(half.hello(), [pidfd, *memory.fds()])
    os.close(pidfd)
    refused = half.stream.expect(Refused)
    half.close()
    return refused


def test_memory_that_cannot_be_opened_is_refused_with_the_remedy(
    sidecar: SidecarUnderTest, gpu: FakeGpu
) -> None:
    memory = GpuKvMemory(gpu)
    gpu.free_all()  # the handle's memory is gone
    refused = refusal_of(sidecar, memory)
    assert refused.code == "cuda"
    assert "MAP_FAILED" in refused.message
    memory.close()


def test_a_refused_buffer_takes_the_others_along(sidecar: SidecarUnderTest, gpu: FakeGpu) -> None:
    memory = GpuKvMemory(gpu)
    bad = Memory(1, 4096, "cuda", replace(memory.cuda, handle=bytes(64), buffer_id=7))
    half = RawHalf(sidecar.run_dir, 0, memory=memory)
    pidfd = os.pidfd_open(os.getpid())
    half.stream.send(half.hello(memories=[*memory.offered(), bad]), [pidfd, *memory.fds()])
    os.close(pidfd)
    assert half.stream.expect(Refused).code == "cuda"
    wait_until(lambda: device_mappings(sidecar) == 0, "the first buffer is closed")
    half.close()
    memory.close()


@pytest.mark.parametrize(
    ("flags", "text"), [(GPU, "no CUDA driver here"), ((), "set copy.gpu = true")]
)
def test_a_sidecar_that_serves_no_gpu_says_why_and_serves_hosts(
    gpu: FakeGpu, flags: tuple[str, ...], text: str
) -> None:
    memory = GpuKvMemory(gpu)
    with running_sidecar(pool_bytes=64 << 20, flags=flags) as sidecar:
        assert ("no GPU is served so far" in sidecar.log.read_text()) == bool(flags)
        assert text in refusal_of(sidecar, memory).message
        with engine_on(sidecar, KvMemory(), "host") as engine:
            engine.put(PROMPT)
            assert engine.get(PROMPT) == 48
    memory.close()
