"""Repeated, late and cancelled jobs, deaths, byes and the drain."""

from __future__ import annotations

import gc
import math

import msgspec
import pytest
from kvferry_connector.wire.attach import Heartbeat
from kvferry_connector.wire.hot import (
    Cancel,
    Hint,
    JobState,
    JobStatus,
    Outcome,
    OutcomeAck,
)
from kvferry_sidecar.engines.base import CopyStatus
from kvferry_sidecar.limits import DEFAULT_LIMITS, Limits
from kvferry_sidecar.stages.parts import JobRun, Part
from support.pipeline_bed import BLOCK, Bed, make_engine

AGAIN_S = DEFAULT_LIMITS.outcome_resend_ms / 1e3 + 0.05


def leased(bed, engine, prompt, chunks, admission=1):
    bed.stored(engine, prompt, chunks)
    bed.probe(engine, admission, prompt, chunks)
    answer = bed.ask(engine, admission)
    assert answer.hit_tokens == chunks * BLOCK
    return answer


def outcome(bed, worker):
    (found,) = bed.take(Outcome, worker)
    return found


def saved():
    """A save has ended, and its outcome was sent once."""
    bed, engine = Bed(), make_engine()
    worker = engine.workers[0]
    job, raw = bed.save_job(engine, 1, [1])
    bed.submit(worker, job, raw)
    bed.run_copies()
    first = outcome(bed, worker)
    return bed, worker, job, first


def test_a_repeated_submit_changes_nothing_and_a_late_one_is_refused():
    bed, engine = Bed(), make_engine()
    worker = engine.workers[0]
    job, raw = bed.save_job(engine, 1, [1])
    bed.submit(worker, job, raw)
    assert bed.submit(worker, job, raw) == []
    bed.run_copies()
    first = outcome(bed, worker)
    assert bed.submit(worker, job, raw) == [first]  # not acknowledged: the same one again
    bed.take(Outcome)
    bed.say(worker, OutcomeAck([job.job]))
    (late,) = bed.submit(worker, job, raw)
    assert (late.status, late.reason) == ("failed", "tombstone")
    assert bed.pipeline.snapshot().ledger.accepted == 1


def test_outcomes_are_sent_again_until_acknowledged():
    bed, worker, job, first = saved()
    assert bed.pass_s(AGAIN_S) < math.inf
    assert bed.take(Outcome, worker) == [first]
    bed.pass_s(0.1)
    assert bed.take(Outcome, worker) == []
    bed.say(worker, OutcomeAck([job.job]))
    assert bed.pass_s(2 * AGAIN_S) == math.inf
    assert bed.take(Outcome, worker) == []


def test_a_heartbeat_acknowledges_what_no_message_did():
    bed, worker, job, first = saved()
    bed.pipeline.on_beat(worker, Heartbeat(1, 0, [], [job.job + 1]), bed.now_s)
    bed.pass_s(AGAIN_S)
    assert bed.take(Outcome, worker) == [first]
    bed.pipeline.on_beat(worker, Heartbeat(2, 0, [], [job.job]), bed.now_s)
    assert bed.pass_s(2 * AGAIN_S) == math.inf
    assert bed.take(Outcome, worker) == []


def test_cancel_before_the_submit_refuses_it_on_every_rank():
    bed, engine = Bed(), make_engine(ranks=2)
    job, raw = bed.save_job(engine, 1, [1])
    bed.say(engine.scheduler, Cancel(job.job))
    for worker in engine.workers:
        bed.submit(worker, job, raw)
        assert outcome(bed, worker).reason == "tombstone"


def test_cancel_of_a_waiting_job_ends_it_at_once():
    bed, engine = Bed(), make_engine()
    leased(bed, engine, 1, 2)
    job, raw = bed.load_job(engine, 1, [5, 6], step=9)
    bed.submit(engine.workers[0], job, raw)
    bed.say(engine.scheduler, Cancel(job.job))
    assert outcome(bed, engine.workers[0]).status == "cancelled"
    assert bed.pipeline.snapshot().leases == 0


def test_cancel_of_a_queued_save_leaves_the_queue():
    bed, engine = Bed(Limits(save_copies_max=1)), make_engine()
    worker = engine.workers[0]
    for prompt in (1, 2):
        job, raw = bed.save_job(engine, prompt, [prompt])
        bed.submit(worker, job, raw)
    bed.say(engine.scheduler, Cancel(job.job))
    assert outcome(bed, worker).status == "cancelled"
    bed.run_copies()
    assert not bed.copies.running
    assert outcome(bed, worker).status == "done"


@pytest.mark.parametrize(("late", "status"), [(False, "cancelled"), (True, "done")])
def test_cancel_while_copying_waits_for_the_copy(late, status):
    bed, engine = Bed(), make_engine()
    leased(bed, engine, 1, 2)
    job, raw = bed.load_job(engine, 1, [5, 6])
    bed.submit(engine.workers[0], job, raw)
    bed.say(engine.scheduler, Cancel(job.job))
    assert not bed.take(Outcome)
    assert bed.pipeline.snapshot().leases == 1
    (ticket,) = bed.copies.running
    bed.copies.finish(ticket, CopyStatus.DONE if late else None)
    bed.pipeline.on_copies(bed.now_s)
    assert outcome(bed, engine.workers[0]).status == status
    assert bed.pipeline.snapshot().leases == 0


def test_cancel_of_a_job_whose_first_rank_had_nothing_to_copy():
    bed, engine = Bed(), make_engine(ranks=2)
    bed.stored(engine, 1, 1)
    job, raw = bed.save_job(engine, 1, [1])
    bed.submit(engine.workers[0], job, raw)
    assert outcome(bed, engine.workers[0]).status == "done"
    bed.say(engine.scheduler, Cancel(job.job))
    bed.say(engine.workers[0], OutcomeAck([job.job]))
    bed.assert_clean()


def test_cancel_decides_a_job_without_the_ranks_that_did_not_come():
    bed, engine = Bed(), make_engine(ranks=2)
    job, raw = bed.save_job(engine, 1, [1], step=9)
    bed.submit(engine.workers[0], job, raw)
    bed.say(engine.scheduler, Cancel(job.job))
    assert bed.pool.stats().writing == 0
    bed.submit(engine.workers[1], job, raw)
    assert outcome(bed, engine.workers[1]).reason == "tombstone"


def test_job_status_says_running_repeats_an_outcome_or_leaves_a_tombstone():
    bed, engine = Bed(), make_engine()
    worker = engine.workers[0]
    job, raw = bed.save_job(engine, 1, [1])
    bed.submit(worker, job, raw)
    assert bed.say(worker, JobStatus(job.job)) == [JobState(job.job, "running")]
    bed.run_copies()
    end = outcome(bed, worker)
    assert bed.say(worker, JobStatus(job.job)) == [end]
    bed.take(Outcome)
    other, raw = bed.save_job(engine, 2, [1])
    assert bed.say(worker, JobStatus(other.job)) == [JobState(other.job, "unknown")]
    bed.submit(worker, other, raw)
    assert outcome(bed, worker).reason == "tombstone"


def test_job_status_of_a_rank_that_did_not_come_decides_the_job():
    bed, engine = Bed(), make_engine(ranks=2)
    leased(bed, engine, 1, 1)
    job, raw = bed.load_job(engine, 1, [5])
    bed.submit(engine.workers[0], job, raw)
    bed.run_copies()
    assert bed.pipeline.snapshot().leases == 1
    bed.say(engine.workers[1], JobStatus(job.job))
    assert bed.pipeline.snapshot().leases == 0


def test_a_half_that_never_acknowledges_is_refused_and_nothing_grows():
    bed, engine = Bed(Limits(outcomes_unacked_max=3)), make_engine()
    worker = engine.workers[0]
    for prompt in range(10):
        job, raw = bed.save_job(engine, prompt, [1])
        bed.submit(worker, job, raw)
        bed.run_copies()
    assert [o.reason for o in bed.take(Outcome, worker)] == [""] * 3 + ["outcomes-max"] * 7
    assert bed.pipeline.snapshot().outcomes_unacked == 3
    for _ in range(5):
        bed.submit(worker, msgspec.structs.replace(job, life=b"z" * 16, job=99 + _), raw)
    assert bed.pipeline.snapshot().outcomes_unacked == 3


# --- deaths, byes, drain ------------------------------------------------------------------------


def test_a_dead_rank_keeps_its_memory_until_its_copies_stopped():
    bed, engine = Bed(), make_engine(ranks=2)
    job, raw = bed.save_job(engine, 1, [1])
    for worker in engine.workers:
        bed.submit(worker, job, raw)
    first, second = bed.copies.running
    bed.copies.finish(first)
    bed.pipeline.on_copies(bed.now_s)
    bed.pipeline.on_peer_dead(engine.workers[1], bed.now_s)
    assert bed.pipeline.busy(engine.session)
    assert bed.pool.stats().writing == 1
    bed.copies.finish(second)
    bed.pipeline.on_copies(bed.now_s)
    assert not bed.pipeline.busy(engine.session)
    assert bed.pool.stats().writing == bed.pool.stats().ready == 0
    assert bed.take(Outcome, engine.workers[1]) == []
    totals = bed.pipeline.snapshot().ledger
    assert (totals.done, totals.cancelled) == (1, 1)


def test_a_rank_dead_before_its_submit_decides_the_job():
    bed, engine = Bed(), make_engine(ranks=2)
    leased(bed, engine, 1, 1)
    job, raw = bed.load_job(engine, 1, [5])
    bed.submit(engine.workers[0], job, raw)
    bed.pipeline.on_peer_dead(engine.workers[1], bed.now_s)
    bed.run_copies()
    assert outcome(bed, engine.workers[0]).status == "done"
    bed.say(engine.workers[0], OutcomeAck([job.job]))
    bed.assert_clean()


def test_a_dead_scheduler_frees_what_no_job_owns():
    bed, engine = Bed(), make_engine()
    leased(bed, engine, 1, 2, admission=1)
    bed.probe(engine, 2, 1, 2)
    bed.ask(engine, 2)
    job, raw = bed.load_job(engine, 1, [5, 6])
    bed.submit(engine.workers[0], job, raw)
    bed.pipeline.on_peer_dead(engine.scheduler, bed.now_s)
    snapshot = bed.pipeline.snapshot()
    assert (snapshot.leases, snapshot.admissions, snapshot.key_bytes) == (1, 0, 0)
    bed.run_copies()
    assert outcome(bed, engine.workers[0]).status == "done"
    assert bed.pipeline.snapshot().leases == 0


def test_outcomes_die_with_their_half():
    bed, engine = Bed(), make_engine()
    job, raw = bed.save_job(engine, 1, [1])
    bed.submit(engine.workers[0], job, raw)
    bed.run_copies()
    assert not bed.pipeline.drained()
    bed.pipeline.on_bye(engine.workers[0], bed.now_s)
    assert bed.pipeline.drained()
    assert bed.pipeline.snapshot().tombstones == 0


def test_drain_lets_promised_loads_end_and_starts_nothing_new():
    bed, engine = Bed(), make_engine()
    leased(bed, engine, 1, 2)
    bed.pipeline.drain(bed.now_s)
    assert not bed.pipeline.drained()
    worker = engine.workers[0]
    save, save_raw = bed.save_job(engine, 2, [1])
    bed.submit(worker, save, save_raw)
    assert outcome(bed, worker).reason == "draining"
    job, raw = bed.load_job(engine, 1, [5, 6])
    bed.submit(worker, job, raw)
    bed.run_copies()
    assert outcome(bed, worker).status == "done"
    assert bed.probe(engine, 2, 1, 2) == [Hint(2, 0, 2)]
    answer = bed.ask(engine, 2)
    assert (answer.hit_tokens, answer.reason) == (0, "draining")
    bed.say(worker, OutcomeAck([save.job, job.job]))
    assert bed.pipeline.drained()


def test_drain_ends_what_hangs_at_its_deadline():
    bed, engine = Bed(Limits(fence_ms_max=1 << 30)), make_engine()
    job, raw = bed.save_job(engine, 1, [1], step=9)
    bed.submit(engine.workers[0], job, raw)
    bed.pipeline.drain(bed.now_s)
    bed.pass_s(31)
    end = outcome(bed, engine.workers[0])
    assert (end.status, end.reason) == ("failed", "drained")


def test_an_idle_pipeline_wants_no_tick():
    assert Bed().pass_s(2 * AGAIN_S) == math.inf


def test_without_an_open_job_it_wakes_for_what_is_due_next():
    bed, engine = Bed(), make_engine()
    limits = Limits()
    job, raw = bed.save_job(engine, 1, [1])
    bed.submit(engine.workers[0], job, raw)
    bed.run_copies()
    began_s = bed.now_s
    wait_s = bed.pass_s(0.001)
    assert bed.now_s + wait_s == pytest.approx(began_s + limits.outcome_resend_ms / 1e3)
    bed.take(Outcome)
    bed.pass_s(wait_s)
    assert len(bed.take(Outcome)) == 1
    bed.say(engine.workers[0], OutcomeAck([job.job]))
    bed.probe(engine, 1, 1, 1)
    assert bed.ask(engine, 1).hit_tokens == BLOCK
    assert bed.pass_s(0) == pytest.approx(limits.lease_idle_ms_max / 1e3)
    assert bed.pass_s(limits.lease_idle_ms_max / 1e3) == math.inf
    assert bed.pipeline.snapshot().idle_falls == 1


def test_nothing_of_an_ended_job_is_left_to_the_collector():
    """Its parts hold the engine's memory, which must go with the engine, at once."""

    def alive() -> int:
        # By type: isinstance() asks lazy modules of other tests for their class, and they warn.
        return sum(type(found) in (JobRun, Part) for found in gc.get_objects())

    bed, engine = Bed(), make_engine(ranks=2)
    gc.collect()
    gc.disable()
    try:
        before = alive()  # of other tests
        bed.stored(engine, 7, 4)
        assert alive() == before
    finally:
        gc.enable()


def two_loads_at_their_fence():
    bed, engine = Bed(), make_engine()
    for number, blocks in ((1, [5, 6]), (2, [7, 8])):
        leased(bed, engine, number, 2, admission=number)
        job, raw = bed.load_job(engine, number, blocks, step=9)
        bed.submit(engine.workers[0], job, raw)
    engine.fence().reach(9)
    return bed, engine


def test_fences_are_read_most_often_while_a_load_waits():
    bed, engine = Bed(), make_engine()
    leased(bed, engine, 1, 2, admission=1)
    job, raw = bed.save_job(engine, 2, [1], step=9)
    bed.submit(engine.workers[0], job, raw)
    save_s = bed.pass_s(0.0)
    job, raw = bed.load_job(engine, 1, [5, 6], step=9)
    bed.submit(engine.workers[0], job, raw)
    assert bed.pass_s(0.0) * 4 == pytest.approx(save_s)


def test_a_copy_that_cannot_start_ends_its_job_and_no_other(monkeypatch):
    """Of whatever cause: memory, a thread that is not to be had."""
    bed, engine = two_loads_at_their_fence()
    submit = bed.copies.submit

    def fail_once(*copy):
        monkeypatch.setattr(bed.copies, "submit", submit)
        raise MemoryError("no memory for a copy")

    monkeypatch.setattr(bed.copies, "submit", fail_once)
    bed.pass_s(0)
    failed = outcome(bed, engine.workers[0])
    assert (failed.status, failed.reason) == ("failed", "copy-failed")
    bed.run_copies()
    assert outcome(bed, engine.workers[0]).status == "done"
    assert bed.pipeline.snapshot().leases == 0
    (told,) = bed.log.errors
    assert "no memory for a copy" in told


def test_a_job_that_cannot_be_booked_is_reported_like_any_other(monkeypatch):
    bed, _ = two_loads_at_their_fence()
    bed.pass_s(0)

    def fail(run):
        raise RuntimeError("a bug")

    monkeypatch.setattr(bed.pipeline._core.journal, "settled", fail)
    bed.run_copies()
    assert [end.status for end in bed.take(Outcome)] == ["done", "done"]
    assert bed.pipeline.snapshot().leases == 0
    assert len(bed.log.errors) == 2
    assert bed.pipeline.check() == []
