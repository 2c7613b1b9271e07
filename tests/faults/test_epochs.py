"""A sidecar that is killed, stopped and started again, and what its engines find afterwards."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest
from kvferry_connector import half as connector_half
from kvferry_connector.wire.codec import encode_job
from kvferry_connector.wire.hot import Error, Submit
from kvferry_connector.wire.version import PROTOCOL_MAX
from support.books import read_status, wait_settled
from support.client_half import ClientEngine, client_engine
from support.hot_engine import HotEngine
from support.raw_half import KvMemory, attach_pair
from support.serving import COMMAND, servings
from support.sidecar import SidecarUnderTest, make_sidecar, running_sidecar
from support.waiting import wait_until

LONG_STOP = pytest.param(30.0, marks=pytest.mark.long)
NEWER = f"from kvferry_connector.wire import version; version.PROTOCOL_MAX += 1; {COMMAND}"


@pytest.fixture
def sidecar() -> Iterator[SidecarUnderTest]:
    with running_sidecar(pool_bytes=64 << 20) as found:
        yield found


def test_a_submit_for_a_killed_sidecar_is_refused_by_its_successor(
    sidecar: SidecarUnderTest,
) -> None:
    """The worst case: the very frames, on a live connection, with numbers that exist again."""
    memory, life = KvMemory(), os.urandom(16)
    scheduler, worker = attach_pair(sidecar.run_dir, memory, life)
    engine = HotEngine(scheduler, worker, memory, life)
    save = engine.save_job("queued", (1, 2, 3))
    queued = worker.frames(Submit(encode_job(save.job)), save.raw)
    former = worker.welcomed
    sidecar.kill()
    scheduler.close()
    worker.close()
    sidecar.restart()
    scheduler, worker = attach_pair(sidecar.run_dir, memory, life)
    assert worker.welcomed.epoch != former.epoch
    assert worker.welcomed.generation == former.generation, "only the epoch tells them apart"
    worker.send_frames(queued)
    error = worker.receive(Error)
    assert error.code == "stale"
    assert error.remedy
    status = wait_settled(sidecar.run_dir)
    assert status["pipeline"]["ledger"]["accepted"] == 0
    engine = HotEngine(scheduler, worker, memory, life)
    assert engine.get("queued") == 0
    engine.put("queued")
    assert engine.get("queued") == 48
    for half in (scheduler, worker):
        half.close()
    memory.close()


def test_what_a_client_had_queued_dies_with_the_sidecar(sidecar: SidecarUnderTest) -> None:
    with client_engine(sidecar.run_dir) as engine:
        epoch = engine.wait_ready()
        os.kill(sidecar.process.pid, signal.SIGSTOP)
        for number in range(20):
            engine.submit(engine.save_job(f"queued {number}", (1, 2, 3)))
        sidecar.kill()
        sidecar.restart()
        engine.wait_ready(beyond_epoch=epoch)
        assert engine.worker_half.client.is_dead(epoch), "proven, so the jobs can be reported"
        engine.put("afterwards")
        status = wait_settled(sidecar.run_dir)
        assert status["pipeline"]["ledger"]["accepted"] == 1
        assert status["loop"]["frames_refused"].get("stale", 0) == 0, "nothing old was even sent"
        assert [engine.get(f"queued {number}") for number in range(20)] == [0] * 20


def test_an_engine_that_left_its_version_never_hits_it_again(sidecar: SidecarUnderTest) -> None:
    """Nor what is saved under it later, nor after a restart; others keep theirs."""
    with (
        client_engine(sidecar.run_dir, engine_id="a") as leaver,
        client_engine(sidecar.run_dir, engine_id="b") as stayer,
    ):
        epoch = leaver.wait_ready()
        leaver.put("before")
        leaver.fill("meanwhile", (1, 2, 3))
        late = leaver.submit(leaver.save_job("meanwhile", (1, 2, 3), step=1))
        wait_until(lambda: read_status(sidecar.run_dir)["pipeline"]["jobs_open"]["save"], "open")
        admission, answer = leaver.lease("before", 3)
        assert answer.hit_tokens == 48
        leaver.version, old = os.urandom(16), leaver.version
        leaver.scheduler_half.client.rotate(leaver.version)
        wait_until(lambda: _namespace(sidecar, "a") != _namespace(sidecar, "b"), "it has left")
        again = leaver.answer(leaver.ask(admission, 48))
        assert (again.hit_tokens, again.reason) == (0, "version"), "asked under the old stamp"
        leaver.memory.done(1)
        assert leaver.ended(late).status == "done", "it drains under its own version"
        for prompt in ("before", "meanwhile"):
            assert (leaver.get(prompt), stayer.get(prompt)) == (0, 48)
        leaver.put("after")
        assert (leaver.get("after"), stayer.get("after")) == (48, 0)
        sidecar.kill()
        sidecar.restart()
        for engine in (leaver, stayer):
            engine.wait_ready(beyond_epoch=epoch)
        for prompt in ("before", "meanwhile"):
            assert (leaver.get(prompt), stayer.get(prompt)) == (0, 48)
        assert (leaver.get("after"), stayer.get("after")) == (48, 0)
        leaver.version = old
        leaver.probe(99, "before", 3)
        assert leaver.hint(99, 3).hit_tokens == 0, "under the old stamp"


def _namespace(sidecar: SidecarUnderTest, engine_id: str) -> str:
    sessions = read_status(sidecar.run_dir)["sessions"]
    (found,) = (one["namespace"] for one in sessions if one["engine_id"] == engine_id)
    return str(found)


def test_committed_objects_are_hits_after_sigkill(sidecar: SidecarUnderTest) -> None:
    with client_engine(sidecar.run_dir) as engine:
        prompts = [f"kept {number}" for number in range(12)]
        for prompt in prompts:
            engine.put(prompt)
        admission, _ = engine.lease(prompts[0], 3)
        engine.submit(engine.load_job(admission, (4, 5, 6), step=99))  # in flight at its death
        epoch = engine.wait_ready()
        sidecar.kill()
        sidecar.restart()
        engine.wait_ready(beyond_epoch=epoch)
        assert [engine.get(prompt) for prompt in prompts] == [48] * 12
        wait_settled(sidecar.run_dir)


def test_a_save_cut_off_by_sigkill_is_no_hit_or_right() -> None:
    """Killed at another moment of a save each time; ``get`` compares every byte that hits."""
    moments, blocks = random.Random(7), range(1, 121)
    with (
        running_sidecar(pool_bytes=64 << 20) as sidecar,
        client_engine(sidecar.run_dir, blocks=250, page_bytes=128 << 10) as engine,
    ):
        epoch = engine.wait_ready()
        for number in range(4):
            prompt = f"cut off {number}"
            engine.fill(prompt, blocks)
            job = engine.save_job(prompt, blocks, step=number + 1)
            engine.submit(job)
            wait_until(lambda: _open_saves(sidecar) == 1, "the save waits for its step")
            engine.memory.done(number + 1)
            moment_s = time.monotonic() + moments.uniform(0.0, 0.012)
            wait_until(partial(_reached, moment_s), "the moment", every_s=0.0002)
            sidecar.kill()
            sidecar.restart()
            epoch = engine.wait_ready(beyond_epoch=epoch)
            hit = engine.get(prompt, range(121, 241))
            status = wait_settled(sidecar.run_dir)
            assert hit in (0, 120 * 16), "one commit: all chunks of a job or none"
            assert status["pool"]["writing"] == status["pool"]["doomed"] == 0
            engine.put(f"whole {number}", blocks)
            assert engine.get(f"whole {number}", range(121, 241)) == 120 * 16


def _reached(moment_s: float) -> bool:
    return time.monotonic() >= moment_s


def _open_saves(sidecar: SidecarUnderTest) -> int:
    return int(read_status(sidecar.run_dir)["pipeline"]["jobs_open"]["save"])


@pytest.mark.parametrize("stopped_s", [5.0, LONG_STOP])
def test_a_stopped_sidecar_goes_on_where_it_was(
    sidecar: SidecarUnderTest, stopped_s: float
) -> None:
    with client_engine(sidecar.run_dir) as engine:
        link = engine.worker_half.ready_link()
        engine.put("before")
        admission, _ = engine.lease("before", 3)
        engine.scheduler_half.client.set_live(1, [admission])
        os.kill(sidecar.process.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        engine.fill("meanwhile", (1, 2, 3))
        save = engine.submit(engine.save_job("meanwhile", (1, 2, 3)))
        wait_until(engine.worker_half.client.silent, "it is noticed")
        wait_until(lambda: time.monotonic() - stopped >= stopped_s, "long enough", 60, 0.05)
        assert not engine.worker_half.client.is_dead(link.epoch), "silence is no death"
        assert engine.worker_half.client.link() == link
        os.kill(sidecar.process.pid, signal.SIGCONT)
        assert engine.ended(save).status == "done", "what was queued is not lost"
        wait_until(lambda: not engine.worker_half.client.silent(), "it is heard again")
        assert engine.worker_half.ready_link() == link, "the same session, epoch and generation"
        engine.wipe((4, 5, 6))
        load = engine.submit(engine.load_job(admission, (4, 5, 6)))
        assert engine.ended(load).status == "done", "the lease was not lost either"
        assert engine.holds("before", (4, 5, 6))
        assert engine.get("meanwhile") == 48
        status = wait_settled(sidecar.run_dir)
        assert len(status["sessions"]) == 1


def test_an_upgrade_to_a_newer_protocol_brings_the_hits_back() -> None:
    """The new sidecar speaks one protocol more; a half is served in its own."""
    with servings(1) as (one,):
        former = one.start_ready()
        with client_engine(one.run_dir) as engine:  # idle all the while
            engine.put("before the upgrade")
            epoch = engine.wait_ready()
            former.send_signal(signal.SIGTERM)
            assert one.ended()[0] == 0
            one.command = NEWER
            one.start_ready()
            engine.wait_ready(beyond_epoch=epoch)
            assert engine.worker_half.ready_link().protocol == PROTOCOL_MAX
            assert engine.get("before the upgrade") == 48
            wait_settled(one.run_dir)


def test_a_newer_half_speaks_the_protocol_of_an_older_sidecar(
    sidecar: SidecarUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector_half, "PROTOCOL_MAX", PROTOCOL_MAX + 1)
    with client_engine(sidecar.run_dir) as engine:
        assert engine.worker_half.ready_link().protocol == PROTOCOL_MAX
        engine.put("newer")
        assert engine.get("newer") == 48
        wait_settled(sidecar.run_dir)


def test_an_engine_that_was_there_first_is_attached_without_doing_anything() -> None:
    with make_sidecar(pool_bytes=8 << 20) as sidecar:
        memory = KvMemory()
        engine = ClientEngine(sidecar.run_dir, memory, "early", 100, wait=False)
        wait_until(lambda: engine.worker_half.client.state == "away", "nobody is there")
        assert engine.worker_half.client.link() is None
        sidecar.start()
        engine.wait_ready()
        engine.put("at last")
        assert engine.get("at last") == 48
        engine.close()
        memory.close()
