"""Every kind of frame lost, late, repeated, overtaken and garbled, on real sockets.

Each case runs a whole life through a sidecar that does this to one kind: a save, a lookup, a load
whose bytes are compared, a cancelled job, an unknown one, garbage. Everything must end, once, and
nothing may be left.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from kvferry_connector.wire.hot import JobState, JobStatus, NeedFull, Outcome
from kvferry_sidecar.cli.api import Api
from kvferry_sidecar.faults.rules import DOWN, UP
from support.books import read_status, wait_settled
from support.client_half import client_engine
from support.kit import ENABLED, Kit
from support.patient_engine import TRIES_MAX, PatientEngine
from support.sidecar import SidecarUnderTest, running_sidecar, set_flags
from support.waiting import wait_until

FAULTS = (
    "drop {} times=2",
    "delay {} ms=250 times=2",
    "repeat {} times=2",
    "overtake {} times=2",
    "garble {} times=2",
)


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarUnderTest]:
    flags = set_flags({"limits.outcome_resend_ms": 50, "limits.lease_idle_ms_max": 2000})
    with running_sidecar(pool_bytes=32 << 20, flags=(*flags, *ENABLED)) as found:
        yield found


@pytest.fixture(scope="module")
def engine(sidecar: SidecarUnderTest) -> Iterator[PatientEngine]:
    with client_engine(sidecar.run_dir, heartbeat_ms=50, kv_events=True) as found:
        yield PatientEngine(found)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda text: text.split()[0])
@pytest.mark.parametrize("kind", sorted(UP | DOWN))
def test_whatever_happens_to_a_kind_of_frame(
    sidecar: SidecarUnderTest, engine: PatientEngine, kind: str, fault: str
) -> None:
    kit, name = Kit(sidecar.run_dir), f"{kind} {fault}"
    kit.rules(fault.format(kind))
    engine.save(name, (1, 2, 3))
    assert engine.load(name, (4, 5, 6)) == 48
    admission, _ = engine.lease(name, 3)
    waits = engine.engine.load_job(admission, (7, 8, 9), step=1 << 40)
    assert engine.cancelled(waits) in ("cancelled", "failed", "unknown")
    engine.release(admission)
    assert engine.refused().remedy
    assert _unknown(engine) == "unknown"
    _ask_for_nothing(engine)
    Api(sidecar.run_dir).act("clear-pool")  # what publishes events is told
    kit.wait_fired()
    kit.rules()
    wait_until(lambda: engine.tend() or _unacked(sidecar) == 0, "every outcome is acknowledged")
    wait_settled(sidecar.run_dir)
    for outcomes in engine.outcomes.values():
        _check_ends(outcomes)


def _unknown(engine: PatientEngine) -> str:
    number = engine.engine.next_job()
    engine.engine.worker.send(JobStatus(number))
    assert isinstance(engine.end_of(number), str)
    late = engine.engine.save_job(os.urandom(8).hex(), (1, 2), job=number)
    assert engine.end_of(engine.engine.submit(late)) in ("unknown", "failed"), "it is refused"
    return "unknown"


def _ask_for_nothing(engine: PatientEngine) -> None:
    """An ask without hashes is told to bring them, however often that gets lost."""
    half, admission = engine.engine.scheduler_half, engine.engine.next_admission()
    for _ in range(TRIES_MAX):
        engine.engine.ask(admission, 48)
        if engine.hear(half, NeedFull, lambda found: found.admission == admission) is not None:
            return
    raise AssertionError("NeedFull never came")


def _check_ends(outcomes: list[Outcome]) -> None:
    """However often it came, it is one end; a late submit may only be told that it is refused."""
    for outcome in outcomes[1:]:
        assert outcome == outcomes[0] or outcome.reason == "tombstone"


def _unacked(sidecar: SidecarUnderTest) -> int:
    return int(read_status(sidecar.run_dir)["pipeline"]["outcomes_unacked"])


def test_the_watermark_refuses_what_the_tombstones_no_longer_name() -> None:
    limits = set_flags({"limits.tombstones_max": 8, "limits.outcome_resend_ms": 50})
    flags = (*limits, *ENABLED)
    with (
        running_sidecar(pool_bytes=8 << 20, flags=flags) as sidecar,
        client_engine(sidecar.run_dir) as client,
    ):
        kit, engine = Kit(sidecar.run_dir), PatientEngine(client)
        kit.rules("hold Submit times=1")
        client.fill("late", (1, 2, 3))
        job = client.submit(client.save_job("late", (1, 2, 3)))
        kit.wait_fired()
        for _ in range(30):  # enough to bury its number
            number = client.next_job()
            client.worker.send(JobStatus(number))
            state = client.worker.receive(JobState, lambda m, n=number: m.job == n)
            assert state.state == "unknown"
        assert read_status(sidecar.run_dir)["pipeline"]["tombstone_collapses"] > 0
        kit.rules()
        assert engine.end_of(job) == "failed"
        assert engine.outcomes[job][0].reason == "tombstone"
        assert engine.lease("late", 3)[1].hit_tokens == 0
        wait_settled(sidecar.run_dir)
