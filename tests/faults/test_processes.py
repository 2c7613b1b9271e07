"""Processes that die or are told to end: engines, and the sidecar itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from kvferry_connector.wire.attach import Ready
from support.books import descriptors, read_status, wait_settled
from support.client_half import client_engine
from support.engine_child import WorkerChild
from support.hot_engine import HotEngine
from support.memory import mapped_files
from support.raw_half import KvMemory, RawHalf, attach_pair, engine_registration
from support.sidecar import SidecarUnderTest, running_sidecar
from support.waiting import wait_until


@pytest.fixture
def sidecar() -> Iterator[SidecarUnderTest]:
    with running_sidecar(pool_bytes=16 << 20) as found:
        yield found


def test_a_killed_worker_with_a_load_in_flight_leaves_nothing(sidecar: SidecarUnderTest) -> None:
    pid, life = sidecar.process.pid, os.urandom(16)
    fds, memory = descriptors(pid), KvMemory()
    scheduler = RawHalf(sidecar.run_dir)
    scheduler.attach()
    scheduler.register(engine_registration([0], life))
    child = WorkerChild(sidecar.run_dir, life)
    assert child.do("") == "registered"
    scheduler.stream.expect(Ready)
    assert child.do("save in flight") == "saved"
    engine = HotEngine(scheduler, scheduler, memory, life)
    admission, answer = engine.lease("in flight", 3)
    assert answer.hit_tokens == 48
    assert child.do(f"load {admission}") == "running"
    status = read_status(sidecar.run_dir)
    assert (status["pipeline"]["leases"], status["pool"]["leased"]) == (1, 3)
    assert len(mapped_files(pid)) == 2, "fence page and KV memory"
    child.kill()
    status = wait_settled(sidecar.run_dir)
    assert status["pool"]["leased"] == 0
    assert status["pipeline"]["ledger"]["reasons"]["cancelled/peer-dead"] == 1
    wait_until(lambda: not mapped_files(pid), "its memory is unmapped")
    (session,) = status["sessions"]
    assert [half["role"] for half in session["halves"]] == ["scheduler"]
    assert not session["ready"]
    assert engine.lease("in flight", 3)[1].reason == "not-ready", "and not a hit for nobody"
    scheduler.leave()
    wait_until(lambda: descriptors(pid) <= fds, "every descriptor is closed")
    assert read_status(sidecar.run_dir)["sessions"] == []
    life = os.urandom(16)
    scheduler, worker = attach_pair(sidecar.run_dir, memory, life, "next")
    following = HotEngine(scheduler, worker, memory, life)
    assert following.get("in flight") == 48, "what was saved outlives its engine"
    scheduler.leave()
    worker.leave()
    memory.close()


def test_sigterm_lets_a_client_finish_and_second_sigterm_does_not(
    sidecar: SidecarUnderTest,
) -> None:
    with client_engine(sidecar.run_dir) as engine:
        epoch = engine.wait_ready()
        engine.put("leased")
        admission, _ = engine.lease("leased", 3)
        engine.wipe((4, 5, 6))
        load = engine.submit(engine.load_job(admission, (4, 5, 6), step=1))
        wait_until(lambda: _open(sidecar)["load"] == 1, "the load is open")
        os.kill(sidecar.process.pid, signal.SIGTERM)
        wait_until(lambda: read_status(sidecar.run_dir)["pipeline"]["draining"], "it drains")
        refused = engine.ended(engine.submit(engine.save_job("too late", (1, 2, 3))))
        assert refused.reason == "draining"
        assert engine.lease("leased", 3)[1].reason == "draining"
        assert _open(sidecar)["load"] == 1, "what was promised is not given up"
        engine.memory.bound(1)
        assert engine.ended(load).status == "done"
        assert engine.holds("leased", (4, 5, 6))
        assert sidecar.process.process.wait(60) == 0
        assert sorted(path.name for path in sidecar.run_dir.iterdir()) == ["sidecar.lock"]
        sidecar.restart()
        epoch = engine.wait_ready(beyond_epoch=epoch)
        assert engine.get("leased") == 48
        engine.submit(engine.save_job("stuck", (1, 2, 3), step=1))
        wait_until(lambda: _open(sidecar)["save"] == 1, "the save is open")
        os.kill(sidecar.process.pid, signal.SIGTERM)
        wait_until(lambda: read_status(sidecar.run_dir)["pipeline"]["draining"], "it drains")
        os.kill(sidecar.process.pid, signal.SIGTERM)
        assert sidecar.process.process.wait(90) == 128 + signal.SIGTERM
        sidecar.restart()
        engine.wait_ready(beyond_epoch=epoch)
        assert engine.get("leased") == 48
        assert engine.get("stuck") == 0


def test_serialized_loads_bring_the_right_bytes() -> None:
    flags = ["--set", "loads.mode=serialized"]
    with (
        running_sidecar(pool_bytes=16 << 20, flags=flags) as sidecar,
        client_engine(sidecar.run_dir) as engine,
    ):
        prompts = {f"prompt {number}": (number * 3 + 7, number * 3 + 8) for number in range(6)}
        jobs = {}
        for prompt, blocks in prompts.items():
            engine.put(prompt, (1, 2))
            admission, _ = engine.lease(prompt, 2)
            engine.wipe(blocks)
            jobs[prompt] = engine.load_job(admission, blocks, step=1)
        numbers = [engine.submit(job) for job in jobs.values()]
        wait_until(lambda: _open(sidecar)["load"] == 6, "all are open")
        engine.memory.bound(1)
        assert [engine.ended(number).status for number in numbers] == ["done"] * 6
        assert all(engine.holds(prompt, blocks) for prompt, blocks in prompts.items())
        wait_settled(sidecar.run_dir)


def test_shadow_verification_quarantines_over_a_restart() -> None:
    flags = ["--set", "loads.shadow_percent=100"]
    with (
        running_sidecar(pool_bytes=16 << 20, flags=flags) as sidecar,
        client_engine(sidecar.run_dir) as engine,
    ):
        epoch = engine.wait_ready()
        engine.put("prompt")
        admission, answer = engine.lease("prompt", 3)
        assert (answer.hit_tokens, answer.reason) == (0, "shadow")
        engine.fill("prompt", (4, 5, 6))
        engine.ended(engine.submit(engine.save_job("prompt", (4, 5, 6), admission=admission)))
        assert _shadow(sidecar)["compared"] == 1
        assert _shadow(sidecar)["differed"] == 0
        admission, _ = engine.lease("prompt", 3)
        engine.fill("other", (4, 5, 6))
        engine.ended(engine.submit(engine.save_job("prompt", (4, 5, 6), admission=admission)))
        assert _shadow(sidecar)["differed"] == 1
        engine.probe(90, "prompt", 3)
        assert engine.hint(90, 3).hit_tokens == 0
        assert (
            engine.ended(engine.submit(engine.save_job("new", (1, 2, 3)))).reason == "quarantined"
        )
        sidecar.kill()
        sidecar.restart()
        epoch = engine.wait_ready(beyond_epoch=epoch)
        assert len(_shadow(sidecar)["quarantined"]) == 1
        assert engine.get("prompt") == 0
        (sidecar.run_dir / "quarantine").unlink()
        sidecar.kill()
        sidecar.restart()
        engine.wait_ready(beyond_epoch=epoch)
        assert engine.lease("prompt", 3)[1].reason == "shadow", "it is believed again"


def _shadow(sidecar: SidecarUnderTest) -> dict[str, Any]:
    found: dict[str, Any] = read_status(sidecar.run_dir)["pipeline"]["shadow"]
    return found


def _open(sidecar: SidecarUnderTest) -> dict[str, int]:
    found: dict[str, int] = read_status(sidecar.run_dir)["pipeline"]["jobs_open"]
    return found
