"""Frames that are lost, doubled or late between the connector's client and a real sidecar."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from kvferry_connector.wire.codec import encode_job
from kvferry_connector.wire.hot import (
    Answer,
    Cancel,
    Hint,
    JobState,
    JobStatus,
    NeedFull,
    Outcome,
    Release,
    Submit,
)
from support.books import read_status, wait_settled
from support.client_half import ClientEngine, client_engine
from support.kit import ENABLED, Kit
from support.sidecar import SidecarUnderTest, running_sidecar, set_flags
from support.waiting import wait_until

IDLE_MS = 6_000  # a loaded machine may hold heartbeats up for seconds


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarUnderTest]:
    flags = set_flags({"limits.lease_idle_ms_max": IDLE_MS, "limits.outcome_resend_ms": 50})
    with running_sidecar(pool_bytes=16 << 20, flags=(*flags, *ENABLED)) as found:
        yield found


@pytest.fixture
def engine(
    sidecar: SidecarUnderTest, kit: Kit, request: pytest.FixtureRequest
) -> Iterator[ClientEngine]:
    with client_engine(sidecar.run_dir, engine_id=request.node.name) as found:
        yield found
        kit.rules()
        wait_settled(sidecar.run_dir)


def pipeline(sidecar: SidecarUnderTest) -> dict[str, Any]:
    found: dict[str, Any] = read_status(sidecar.run_dir)["pipeline"]
    return found


def accepted(sidecar: SidecarUnderTest) -> int:
    return int(pipeline(sidecar)["ledger"]["accepted"])


def test_a_lost_outcome_is_sent_again_until_acknowledged(
    sidecar: SidecarUnderTest, kit: Kit, engine: ClientEngine
) -> None:
    before = pipeline(sidecar)["outcomes_resent"]
    kit.rules("drop Outcome times=3")
    engine.put("lost outcome")
    assert kit.view().fired == 3
    status = wait_settled(sidecar.run_dir)
    assert status["pipeline"]["outcomes_resent"] >= before + 3
    assert engine.get("lost outcome") == 48


def test_a_lost_acknowledgement_brings_the_outcome_again(
    sidecar: SidecarUnderTest, kit: Kit, engine: ClientEngine
) -> None:
    kit.rules("drop OutcomeAck times=2")
    job = engine.submit(engine.save_job("lost ack", (1, 2, 3)))
    first = engine.ended(job)
    again = [engine.ended(job) for _ in range(2)]
    assert again == [first, first], "the same outcome, not another one"
    kit.wait_fired(times=2)
    wait_settled(sidecar.run_dir)


def test_a_doubled_submit_is_one_job(
    sidecar: SidecarUnderTest, kit: Kit, engine: ClientEngine
) -> None:
    before = accepted(sidecar)
    kit.rules("repeat Submit times=1")
    engine.fill("doubled", (1, 2, 3))
    save = engine.save_job("doubled", (1, 2, 3))
    assert engine.ended(engine.submit(save)).status == "done"
    assert kit.view().fired == 1
    wait_settled(sidecar.run_dir)
    assert accepted(sidecar) == before + 1
    engine.submit(save)  # long after its end, when nothing of it is kept but its tombstone
    number = save.job.job
    engine.worker.receive(Outcome, lambda found: (found.job, found.reason) == (number, "tombstone"))
    engine.acknowledge(number)
    assert accepted(sidecar) == before + 1
    assert engine.get("doubled") == 48


def test_a_submit_after_its_cancel_is_refused(
    sidecar: SidecarUnderTest, kit: Kit, engine: ClientEngine
) -> None:
    before = accepted(sidecar)
    kit.rules("hold Submit times=1")
    job = engine.submit(engine.save_job("cancelled", (1, 2, 3)))
    wait_until(lambda: kit.view().held, "the submit is under way")
    engine.scheduler.send(Cancel(job))
    engine.lease("nothing", 1)  # answered after it: the cancel arrived
    kit.rules()
    outcome = engine.ended(job)
    assert (outcome.status, outcome.reason) == ("failed", "tombstone")
    assert accepted(sidecar) == before
    assert engine.get("cancelled") == 0


def test_a_submit_after_unknown_is_refused(
    sidecar: SidecarUnderTest, kit: Kit, engine: ClientEngine
) -> None:
    before = accepted(sidecar)
    kit.rules("hold Submit times=1")
    job = engine.submit(engine.save_job("unknown", (1, 2, 3)))
    engine.worker.send(JobStatus(job))
    state = engine.worker.receive(JobState, lambda found: found.job == job)
    assert state.state == "unknown"
    kit.rules()
    assert engine.ended(job).reason == "tombstone"
    assert accepted(sidecar) == before
    assert engine.get("unknown") == 0


def test_a_submit_that_is_only_late_runs_once_it_comes(
    sidecar: SidecarUnderTest, kit: Kit, engine: ClientEngine
) -> None:
    kit.rules("hold Submit times=1")
    engine.fill("late", (1, 2, 3))
    job = engine.submit(engine.save_job("late", (1, 2, 3)))
    engine.put("overtakes", (7, 8, 9))
    kit.rules()
    assert engine.ended(job).status == "done"
    assert engine.get("late") == engine.get("overtakes") == 48


def test_a_lost_first_probe_is_a_gap_and_then_the_right_hit(
    sidecar: SidecarUnderTest, kit: Kit, engine: ClientEngine
) -> None:
    engine.put("gap", (1, 2, 3, 4))
    before = pipeline(sidecar)["need_full"]
    kit.rules("drop Probe times=1")
    former, admission = engine.next_admission(), engine.next_admission()
    engine.probe(former, "gap", 2)
    engine.probe(admission, "gap", 4, start=2, former=former)  # continues what never arrived
    assert engine.scheduler.receive(NeedFull).admission == admission
    assert kit.view().fired == 1
    assert pipeline(sidecar)["need_full"] == before + 1
    assert not [m for m in engine.scheduler_half.heard if isinstance(m, Hint | Answer)]
    engine.probe(admission, "gap", 4)
    assert engine.hint(admission, 4).hit_tokens == 64
    answer = engine.answer(engine.ask(admission, 64))
    assert answer.hit_tokens == 64
    engine.wipe((5, 6, 7, 8))
    assert engine.ended(engine.submit(engine.load_job(admission, (5, 6, 7, 8)))).status == "done"
    assert engine.holds("gap", (5, 6, 7, 8))


def test_an_ask_whose_probe_was_lost_is_told_so(kit: Kit, engine: ClientEngine) -> None:
    engine.put("no probe")
    kit.rules("drop Probe times=1")
    admission = engine.next_admission()
    engine.probe(admission, "no probe", 3)
    engine.ask(admission, 48)
    assert engine.scheduler.receive(NeedFull).admission == admission
    engine.probe(admission, "no probe", 3)
    assert engine.answer(engine.ask(admission, 48)).hit_tokens == 48
    engine.scheduler.send(Release([admission]))


def test_a_doubled_ask_is_one_lease(
    sidecar: SidecarUnderTest, kit: Kit, engine: ClientEngine
) -> None:
    engine.put("asked twice")
    kit.rules("repeat Ask times=1")
    admission, answer = engine.lease("asked twice", 3)
    assert engine.answer(answer.seq) == answer
    assert pipeline(sidecar)["leases"] == 1
    assert pipeline(sidecar)["leased_entries"] == 3
    engine.scheduler.send(Release([admission]))


def test_a_lost_release_heals_with_the_next_heartbeat(
    sidecar: SidecarUnderTest, kit: Kit, engine: ClientEngine
) -> None:
    engine.put("lost release")
    admission, answer = engine.lease("lost release", 3)
    falls = pipeline(sidecar)["beat_falls"]
    engine.scheduler_half.client.set_live(answer.seq, [admission])
    until_s = time.monotonic() + 1.5 * IDLE_MS / 1000

    def outlived() -> bool:  # heartbeats that name it keep it, past its idle time
        assert pipeline(sidecar)["leases"] == 1
        return time.monotonic() >= until_s

    wait_until(outlived, "its idle time is over", every_s=0.05)
    kit.rules("drop Release times=1")
    engine.scheduler.send(Release([admission]))
    engine.scheduler_half.client.set_live(answer.seq, [])
    wait_until(lambda: pipeline(sidecar)["leases"] == 0, "the lease falls")
    kit.wait_fired()
    assert pipeline(sidecar)["beat_falls"] == falls + 1


def test_a_lost_release_heals_by_idle_time_without_heartbeats(
    sidecar: SidecarUnderTest, kit: Kit
) -> None:
    with client_engine(sidecar.run_dir, engine_id="idle", heartbeat_ms=60_000) as engine:
        engine.put("idle release")
        falls = pipeline(sidecar)["idle_falls"]
        admission, _ = engine.lease("idle release", 3)
        kit.rules("drop Release times=1")
        engine.scheduler.send(Release([admission]))
        wait_until(lambda: pipeline(sidecar)["leases"] == 0, "the lease falls")
        assert pipeline(sidecar)["idle_falls"] == falls + 1
        late = engine.submit(engine.load_job(admission, (4, 5, 6)))
        assert engine.ended(late).reason == "lease", "what has fallen cannot be loaded"
        wait_settled(sidecar.run_dir)


def test_a_lost_submit_ends_by_asking(kit: Kit, engine: ClientEngine) -> None:
    kit.rules("drop Submit times=1")
    save = engine.save_job("lost submit", (1, 2, 3))
    job = engine.submit(save)
    kit.wait_fired("drop Submit")
    engine.worker.send(JobStatus(job))
    assert engine.worker.receive(JobState, lambda found: found.job == job).state == "unknown"
    engine.worker.send(Submit(encode_job(save.job)), *save.raw)
    assert engine.ended(job).reason == "tombstone"
