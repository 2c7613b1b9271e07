"""What the pipeline refuses, by name, and that a refusal leaves nothing behind."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from kvferry_connector.wire.codec import ids_max
from kvferry_connector.wire.hot import (
    Error,
    Outcome,
    OutcomeAck,
    Probe,
    Release,
    Submit,
    TableSlice,
)
from kvferry_sidecar.limits import Limits
from support.pipeline_bed import BLOCK, Bed, make_engine


def leased(bed, engine, prompt, chunks, admission=1):
    bed.stored(engine, prompt, chunks)
    bed.probe(engine, admission, prompt, chunks)
    answer = bed.ask(engine, admission)
    assert answer.hit_tokens == chunks * BLOCK
    return answer


def outcome(bed, worker):
    (found,) = bed.take(Outcome, worker)
    return found


def spoil(**changes):
    return lambda job, raw: (msgspec.structs.replace(job, **changes), raw)


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (spoil(life=b"x" * 16), "life"),
        (spoil(version=b"v" * 16), "version"),
        (spoil(tables=[]), "tables"),
        (spoil(tables=[TableSlice(9, 0, 2)]), "tables"),
        (spoil(tables=[TableSlice(0, 0, 1 << 60)]), "tables"),
        (spoil(tables=[TableSlice(0, 1, 2)]), "tables"),
        (spoil(end_tokens=1 << 60), "hashes"),
        (spoil(first_hash=1 << 60), "hashes-max"),
        (spoil(start_tokens=-16), "tables"),
        (spoil(hash_bytes=0), "hashes"),
        (lambda job, raw: (job, [raw[0][:4] + bytes(4), raw[1]]), "tables"),
        (lambda job, raw: (job, [raw[0][:4] + b"\x40\0\0\0", raw[1]]), "tables"),
        (lambda job, raw: (job, [raw[0], raw[1][:-32]]), "hashes"),
        (lambda job, raw: (job, raw[:1]), "frames"),
    ],
)
def test_a_save_that_does_not_fit_is_refused_by_name(break_it, reason):
    bed, engine = Bed(), make_engine()
    job, raw = break_it(*bed.save_job(engine, 1, [1, 2]))
    bed.submit(engine.workers[0], job, raw)
    end = outcome(bed, engine.workers[0])
    assert (end.status, end.reason) == ("failed", reason)
    assert bed.pipeline.snapshot().ledger.accepted == 0
    bed.say(engine.workers[0], OutcomeAck([job.job]))
    bed.assert_clean()


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (spoil(admission=9), "lease"),
        (spoil(total_tokens=3 * BLOCK), "lease"),
        (spoil(total_tokens=1 << 60), "lease"),
        (spoil(local_tokens=-16), "lease"),
        (spoil(version=b"v" * 16), "version"),
        (lambda job, raw: (job, [raw[0][:4] + bytes(4)]), "tables"),
        (lambda job, raw: (job, []), "frames"),
    ],
)
def test_a_load_that_does_not_fit_is_refused_by_name(break_it, reason):
    bed, engine = Bed(), make_engine()
    leased(bed, engine, 1, 2)
    job, raw = break_it(*bed.load_job(engine, 1, [5, 6]))
    bed.submit(engine.workers[0], job, raw)
    assert outcome(bed, engine.workers[0]).reason == reason
    assert bed.pipeline.snapshot().leases == 1  # a refused job never owned it


def test_refusals_by_the_state_of_the_sidecar():
    bed, engine = Bed(Limits(jobs_max=1)), make_engine()
    worker = engine.workers[0]
    job, raw = bed.save_job(engine, 1, [1], step=9)
    bed.submit(worker, job, raw)
    second, raw2 = bed.save_job(engine, 2, [1])
    bed.submit(worker, second, raw2)
    assert outcome(bed, worker).reason == "jobs-max"
    engine.session.ready = False
    third, raw3 = bed.save_job(engine, 3, [1])
    bed.submit(worker, third, raw3)
    assert outcome(bed, worker).reason == "not-ready"
    worker.fence = None
    engine.session.ready = True
    fourth, raw4 = bed.save_job(engine, 4, [1])
    bed.submit(worker, fourth, raw4)
    assert outcome(bed, worker).reason == "no-fence"


def test_a_stripe_larger_than_a_slab_is_refused_and_no_group_stays_reserved():
    bed, engine = Bed(), make_engine(ranks=2, groups=2)
    large = engine.workers[0].geometry.groups[1]
    for worker in engine.workers:
        groups = (worker.geometry.groups[0], dataclasses.replace(large, payload_bytes=1 << 20))
        worker.geometry = dataclasses.replace(worker.geometry, groups=groups)
    job, raw = bed.save_job(engine, 1, [1])
    bed.submit(engine.workers[0], job, raw)
    assert outcome(bed, engine.workers[0]).reason == "stripe-bytes"
    bed.say(engine.workers[0], OutcomeAck([job.job]))
    bed.assert_clean()


def test_messages_of_the_wrong_half_and_garbage_are_answered_by_an_error():
    bed, engine = Bed(), make_engine()
    probe = Probe("r", 1, b"", 0, 0, 0, 32, b"")
    assert isinstance(bed.say(engine.workers[0], probe, [b""])[0], Error)
    assert isinstance(bed.say(engine.scheduler, Submit(b"\xc1"), [])[0], Error)
    (error,) = bed.say(engine.workers[0], Submit(b"\xc1"), [])
    assert isinstance(error, Error)
    assert error.code == "frames"
    assert error.remedy


def test_lists_of_ids_have_a_bound():
    bed, engine = Bed(limits=Limits(admissions_max=4, outcomes_unacked_max=3)), make_engine()
    for peer, kind in ((engine.scheduler, Release), (engine.workers[0], OutcomeAck)):
        assert bed.say(peer, kind([1] * ids_max)) == [], "the connector may list so many"
        message = kind([1] * (ids_max + 1))
        (refusal,) = bed.say(peer, message)
        assert isinstance(refusal, Error)
        assert "ids in one" in refusal.message
