"""A process counts as dead on proof alone: its pidfd, whatever its streams and namespaces say."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvferry_connector.wire.attach import Ready, Refused
from kvferry_connector.wire.hot import Release
from support.books import read_status, wait_settled
from support.client_half import client_engine
from support.engine_child import WorkerChild
from support.hot_engine import HotEngine
from support.raw_half import KvMemory, RawHalf, engine_registration
from support.serving import Serving, servings
from support.sidecar import SidecarUnderTest, running_sidecar
from support.waiting import wait_until

NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child")


@pytest.fixture
def sidecar() -> Iterator[SidecarUnderTest]:
    with running_sidecar(pool_bytes=16 << 20) as found:
        yield found


class Life:
    """An engine of a scheduler half here and a worker half in a process of its own."""

    def __init__(
        self, sidecar: SidecarUnderTest | Serving, *, instance: str = "one", **child: Any
    ) -> None:
        life = os.urandom(16)
        self.sidecar = sidecar
        self.memory = KvMemory()
        self.scheduler = RawHalf(sidecar.run_dir, instance_id=instance)
        self.scheduler.attach()
        self.scheduler.register(engine_registration([0], life))
        self.child = WorkerChild(sidecar.run_dir, life, instance=instance, **child)
        assert self.child.do("") == "registered"
        self.scheduler.stream.expect(Ready)
        self.engine = HotEngine(self.scheduler, self.scheduler, self.memory, life)

    def load_in_flight(self) -> None:
        """Save, lease, and have a load wait for a step that never comes."""
        assert self.child.do("save prompt") == "saved"
        admission, answer = self.engine.lease("prompt", 3)
        assert answer.hit_tokens == 48
        assert self.child.do(f"load {admission}") == "running"

    def close(self) -> None:
        self.child.kill()
        self.scheduler.close()
        self.memory.close()


def workers(sidecar: SidecarUnderTest | Serving) -> list[dict[str, Any]]:
    sessions = read_status(sidecar.run_dir)["sessions"]
    return [half for s in sessions for half in s["halves"] if half["role"] == "worker"]


def reclaimed(sidecar: SidecarUnderTest | Serving) -> None:
    wait_until(lambda: not workers(sidecar), "the worker is proven dead")
    status = wait_settled(sidecar.run_dir)
    assert status["pipeline"]["ledger"]["reasons"]["cancelled/peer-dead"] == 1


def only_child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def can_unshare() -> bool:
    return subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(not can_unshare(), reason="no PID namespaces without root")


@needs_namespaces
def test_a_worker_in_a_pid_namespace_of_its_own(sidecar: SidecarUnderTest) -> None:
    life = Life(sidecar, prefix=NAMESPACE)
    inner = only_child_of(life.child.process.pid)
    (worker,) = workers(sidecar)
    assert worker["pid"] == 1, "what it calls itself says nothing here"
    life.load_in_flight()
    os.kill(inner, signal.SIGSTOP)
    admission, answer = life.engine.lease("prompt", 3)
    assert answer.hit_tokens == 48, "a stopped one is not dead"
    life.scheduler.send(Release([admission]))
    assert len(workers(sidecar)) == 1
    os.kill(inner, signal.SIGKILL)
    reclaimed(sidecar)
    life.close()


@needs_namespaces
def test_sidecar_and_worker_in_sibling_namespaces() -> None:
    with servings(1) as (one,):
        one.prefix = NAMESPACE
        one.start_ready()
        life = Life(one, prefix=NAMESPACE)
        life.load_in_flight()
        life.child.kill()
        reclaimed(one)
        life.close()


def test_a_forked_child_that_outlives_its_parent_keeps_nothing_alive(
    sidecar: SidecarUnderTest,
) -> None:
    life = Life(sidecar)
    life.load_in_flight()
    heir = int(life.child.do("fork"))  # holds the stream, the DEALER and the memory, as forks do
    try:
        os.kill(life.child.process.pid, signal.SIGKILL)
        reclaimed(sidecar)
        assert Path(f"/proc/{heir}").exists()
    finally:
        os.kill(heir, signal.SIGKILL)
    life.close()


def test_a_successor_that_runs_already_is_let_in_at_the_proof(sidecar: SidecarUnderTest) -> None:
    life = Life(sidecar)
    life.load_in_flight()
    (before,) = workers(sidecar)
    early = RawHalf(sidecar.run_dir, 0, memory=life.memory)
    early.stream.send(early.hello(), [os.pidfd_open(os.getpid()), *early_fds(life.memory)])
    refused = early.stream.receive()
    assert isinstance(refused, Refused)
    assert refused.code == "taken"
    assert str(before["pid"]) in refused.message
    early.close()
    life.child.kill()
    successor = RawHalf(sidecar.run_dir, 0, memory=life.memory)
    successor.attach()  # its Hello may come before the loop has read the pidfd: proof enough
    successor.register(life.memory.registration(0, 1))
    assert successor.welcomed.generation > before["generation"]
    reasons = read_status(sidecar.run_dir)["pipeline"]["ledger"]["reasons"]
    assert reasons["cancelled/peer-dead"] == 1, "what was the dead one's has ended with it"
    successor.leave()
    life.close()


def test_the_same_process_attaching_again_keeps_generation_and_jobs(
    sidecar: SidecarUnderTest,
) -> None:
    life = Life(sidecar)
    (before,) = workers(sidecar)
    life.load_in_flight()
    assert life.child.do("again") == "registered"
    (after,) = workers(sidecar)
    assert after["generation"] == before["generation"]
    assert read_status(sidecar.run_dir)["pipeline"]["jobs_open"]["load"] == 1
    life.child.kill()
    reclaimed(sidecar)
    life.close()


def test_one_engine_id_on_two_replicas_and_two_lives_never_mixes(sidecar: SidecarUnderTest) -> None:
    """Equal names, equal job and admission numbers: life, instance and generation tell them."""
    with (
        client_engine(sidecar.run_dir, engine_id="fixed", instance_id="one") as one,
        client_engine(sidecar.run_dir, engine_id="fixed", instance_id="two") as two,
    ):
        assert len(read_status(sidecar.run_dir)["sessions"]) == 2
        jobs = []
        for engine, prompt in ((one, "of one"), (two, "of two")):
            engine.fill(prompt, (1, 2, 3))
            jobs.append(engine.submit(engine.save_job(prompt, (1, 2, 3), step=1)))
        assert jobs[0] == jobs[1], "the same number"
        two.memory.done(1)
        assert two.ended(jobs[1]).status == "done"
        status = read_status(sidecar.run_dir)
        assert status["pipeline"]["jobs_open"]["save"] == 1, "the other's is not touched"
        one.memory.done(1)
        assert one.ended(jobs[0]).status == "done"
        assert one.get("of two") == two.get("of one") == 48, "what they saved they share"
        wait_settled(sidecar.run_dir)
    wait_until(lambda: not read_status(sidecar.run_dir)["sessions"], "both have said Bye")
    with client_engine(sidecar.run_dir, engine_id="fixed", instance_id="one") as again:
        stale = again.save_job("of a dead life", (1, 2, 3), life=one.life)
        assert again.ended(again.submit(stale)).reason == "life"
        assert again.get("of one") == 48
        wait_settled(sidecar.run_dir)


def test_other_engines_do_not_notice_a_death(sidecar: SidecarUnderTest) -> None:
    with client_engine(sidecar.run_dir, engine_id="bystander") as bystander:
        link = bystander.worker_half.ready_link()
        life = Life(sidecar)
        life.load_in_flight()
        bystander.put("mine", (1, 2, 3))
        admission, _ = bystander.lease("mine", 3)
        load = bystander.submit(bystander.load_job(admission, (4, 5, 6), step=1))
        life.child.kill()
        wait_until(lambda: len(workers(sidecar)) == 1, "the other is gone")
        bystander.memory.bound(1)
        assert bystander.ended(load).status == "done"
        assert bystander.holds("mine", (4, 5, 6))
        assert bystander.worker_half.ready_link() == link
        life.close()
        wait_settled(sidecar.run_dir)


def early_fds(memory: KvMemory) -> list[int]:
    return [memory.fence_fd, memory.fd]
