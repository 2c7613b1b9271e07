"""Loads, saves and their ends, through the pipeline with symbolic memory."""

from __future__ import annotations

import msgspec
from kvferry_connector.wire.hot import (
    Outcome,
    OutcomeAck,
    Release,
    TableSlice,
)
from kvferry_sidecar.engines.base import CopyStatus
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.outcomes.ledger import PartKey
from support.pipeline_bed import BLOCK, Bed, make_engine, table, value_of


def leased(bed, engine, prompt, chunks, admission=1):
    bed.stored(engine, prompt, chunks)
    bed.probe(engine, admission, prompt, chunks)
    answer = bed.ask(engine, admission)
    assert answer.hit_tokens == chunks * BLOCK
    return answer


def outcome(bed, worker):
    (found,) = bed.take(Outcome, worker)
    return found


# --- the main road ------------------------------------------------------------------------------


def test_saved_chunks_are_hit_and_loaded_by_every_rank():
    bed, engine = Bed(), make_engine(ranks=2, groups=2)
    leased(bed, engine, 7, 4)
    job, raw = bed.load_job(engine, 1, [11, 12, 13, 14])
    for worker in engine.workers:
        bed.submit(worker, job, raw)
    bed.run_copies()
    for worker in engine.workers:
        end = outcome(bed, worker)
        assert (end.status, end.reason, end.moved_bytes) == ("done", "", 2 * 4 * 1024)
        bed.say(worker, OutcomeAck([job.job]))
    for (rank, group), layout in engine.layouts.items():
        assert [layout.values[b] for b in (11, 12, 13, 14)] == [
            value_of(7, i, rank, group) for i in range(4)
        ]
    bed.say(engine.scheduler, Release([1]))
    bed.assert_clean()
    totals = bed.pipeline.snapshot().ledger
    assert (totals.accepted, totals.done) == (4, 4)
    assert totals.loaded_bytes == totals.saved_bytes == 2 * 2 * 4 * 1024


def test_a_key_is_visible_only_when_all_ranks_are_in_place():
    bed, engine = Bed(), make_engine(ranks=2)
    job, raw = bed.save_job(engine, 1, [1, 2])
    bed.submit(engine.workers[0], job, raw)
    bed.run_copies()
    assert outcome(bed, engine.workers[0]).status == "done"
    assert bed.probe(engine, 1, 1, 2)[0].hit_tokens == 0
    bed.submit(engine.workers[1], job, raw)
    assert bed.probe(engine, 2, 1, 2)[0].hit_tokens == 0
    bed.run_copies()
    assert bed.probe(engine, 3, 1, 2)[0].hit_tokens == 2 * BLOCK


def test_an_idle_pipeline_finds_a_part_that_never_ended():
    bed, engine = Bed(), make_engine()
    bed.stored(engine, 1, 2)
    bed.pass_s(1.0)
    assert bed.pipeline.snapshot().violations == []
    bed.pipeline._core.ledger.accept(engine.session.key, PartKey(9, 9), "save")
    bed.pass_s(1.0)
    assert bed.pipeline.snapshot().violations == ["open in the ledger: 1, really open: 0"]


def test_an_answer_goes_out_before_it_is_counted():
    bed, engine = Bed(), make_engine()
    bed.stored(engine, 1, 2)
    bed.probe(engine, 1, 1, 2)
    core, counted = bed.pipeline._core, []
    send = core.send
    counters = bed.pipeline._probes.counters
    core.send = lambda peer, message: (counted.append(counters.hit_requests), send(peer, message))
    assert bed.ask(engine, 1).hit_tokens == 2 * BLOCK
    assert (counted, counters.hit_requests) == ([0], 1)


def test_an_outcome_of_a_save_goes_out_after_its_commit():
    bed, engine = Bed(), make_engine()
    seen = []
    bed.pipeline._core.outbox._send = lambda peer, message: seen.append(
        (type(message).__name__, bed.pool.stats().ready)
    )
    job, raw = bed.save_job(engine, 1, [1, 2])
    bed.submit(engine.workers[0], job, raw)
    bed.run_copies()
    assert seen == [("Outcome", 2)]


def test_a_load_takes_only_the_chunks_that_are_not_local():
    bed, engine = Bed(), make_engine()
    bed.stored(engine, 3, 5)
    bed.probe(engine, 1, 3, 5)
    answer = bed.ask(engine, 1, local=2 * BLOCK, most=4 * BLOCK)
    assert (answer.hit_tokens, answer.sources) == (4 * BLOCK, {"host": 2 * BLOCK})
    job, raw = bed.load_job(engine, 1, [21, 22], local=2 * BLOCK)
    bed.submit(engine.workers[0], job, raw)
    bed.run_copies()
    assert outcome(bed, engine.workers[0]).moved_bytes == 2 * 1024
    assert engine.layouts[0, 0].values[21] == value_of(3, 2, 0, 0)


def test_a_full_table_serves_a_load_of_its_tail():
    bed, engine = Bed(), make_engine()
    bed.stored(engine, 3, 4)
    bed.probe(engine, 1, 3, 4)
    bed.ask(engine, 1, local=2 * BLOCK)
    job, _ = bed.load_job(engine, 1, [23, 24], local=2 * BLOCK)
    job = msgspec.structs.replace(job, tables=[TableSlice(0, 0, 5)])
    bed.submit(engine.workers[0], job, [table([9, 8, 23, 24, 0])])
    bed.run_copies()
    assert outcome(bed, engine.workers[0]).status == "done"
    assert engine.layouts[0, 0].values[24] == value_of(3, 3, 0, 0)


# --- fences, order, deadlines -------------------------------------------------------------------


def test_a_job_waits_for_its_fence_word():
    bed, engine = Bed(), make_engine()
    job, raw = bed.save_job(engine, 1, [1], step=5)
    bed.submit(engine.workers[0], job, raw)
    engine.fence().reach(4)
    assert bed.pass_s(0.001) <= 0.001
    assert not bed.copies.running
    engine.fence().reach(5)
    bed.pass_s(0.001)
    assert len(bed.copies.running) == 1


def test_a_fence_that_never_comes_fails_the_job_and_frees_its_slots():
    bed, engine = Bed(), make_engine()
    job, raw = bed.save_job(engine, 1, [1, 2], step=5)
    bed.submit(engine.workers[0], job, raw)
    bed.pass_s(30.1)
    end = outcome(bed, engine.workers[0])
    assert (end.status, end.reason) == ("failed", "fence")
    assert bed.pool.stats().writing == 0


def test_a_slow_copy_fails_only_after_it_stopped():
    bed, engine = Bed(), make_engine()
    leased(bed, engine, 1, 2)
    job, raw = bed.load_job(engine, 1, [5, 6])
    bed.submit(engine.workers[0], job, raw)
    bed.pass_s(61.0)
    (copy,) = bed.copies.running.values()
    assert copy.cancelled
    assert not bed.take(Outcome)
    assert bed.pipeline.busy(engine.session)
    bed.run_copies()
    end = outcome(bed, engine.workers[0])
    assert (end.status, end.reason) == ("failed", "copy-deadline")
    assert not bed.pipeline.busy(engine.session)


def test_loads_pass_a_flood_of_saves():
    bed, engine = Bed(Limits(save_copies_max=2), slots=200), make_engine(num_blocks=200)
    leased(bed, engine, 1, 1)
    for prompt in range(10, 20):
        job, raw = bed.save_job(engine, prompt, [prompt])
        bed.submit(engine.workers[0], job, raw)
    assert len(bed.copies.running) == 2
    job, raw = bed.load_job(engine, 1, [5])
    bed.submit(engine.workers[0], job, raw)
    assert len(bed.copies.running) == 3
    while bed.copies.running:
        bed.run_copies()
    assert bed.pipeline.snapshot().ledger.done == 12


# --- failures -----------------------------------------------------------------------------------


def test_a_checksum_mismatch_dooms_the_chunk_and_names_the_shorter_prefix():
    bed, engine = Bed(), make_engine()
    leased(bed, engine, 1, 4)
    offsets = sorted(bed.copies.memory)
    for damaged in offsets[2:]:  # all of it costs one failed load
        bed.copies.memory[damaged] += 1
    job, raw = bed.load_job(engine, 1, [5, 6, 7, 8])
    bed.submit(engine.workers[0], job, raw)
    bed.run_copies()
    end = outcome(bed, engine.workers[0])
    assert (end.status, end.reason, end.shorter_tokens) == ("failed", "checksum", 2 * BLOCK)
    assert bed.ask(engine, 1).hit_tokens == 2 * BLOCK
    assert bed.pool.stats().doomed == 0  # the load's lease was the last one on it
    assert bed.pool.stats().ready == 2


def test_a_copy_that_failed_names_what_is_shorter_than_it():
    bed, engine = Bed(), make_engine()
    leased(bed, engine, 1, 4)
    job, raw = bed.load_job(engine, 1, [5, 6, 7, 8])
    bed.submit(engine.workers[0], job, raw)
    (ticket,) = bed.copies.running
    bed.copies.finish(ticket, CopyStatus.FAILED)
    bed.pipeline.on_copies(bed.now_s)
    end = outcome(bed, engine.workers[0])
    assert (end.status, end.reason, end.shorter_tokens) == ("failed", "copy-failed", 3 * BLOCK)
    assert bed.pool.stats().ready == 4, "the objects are not to blame"


def test_a_stuck_copy_names_nothing_and_keeps_its_memory():
    bed, engine = Bed(), make_engine()
    leased(bed, engine, 1, 4)
    job, raw = bed.load_job(engine, 1, [5, 6, 7, 8])
    bed.submit(engine.workers[0], job, raw)
    bed.pass_s(61)
    assert not bed.take(Outcome), "its blocks are the copy's until it stops"
    bed.run_copies()
    end = outcome(bed, engine.workers[0])
    assert (end.status, end.reason, end.shorter_tokens) == ("failed", "copy-deadline", 0)


def test_loads_that_share_a_damaged_chunk_fail_once_each():
    """One reads it, one was already copying, and one comes later: that one reads nothing."""
    bed, engine = Bed(), make_engine()
    leased(bed, engine, 1, 4)
    for admission in (2, 3):
        bed.probe(engine, admission, 1, 4)
        assert bed.ask(engine, admission, seq=admission).hit_tokens == 4 * BLOCK
    bed.copies.memory[sorted(bed.copies.memory)[2]] += 1
    jobs = [bed.load_job(engine, n, [n * 5 + i for i in range(4)]) for n in (1, 2, 3)]
    for job, raw in jobs[:2]:
        bed.submit(engine.workers[0], job, raw)
    bed.run_copies()
    job, raw = jobs[2]
    bed.submit(engine.workers[0], job, raw)
    assert not bed.copies.running
    ends = bed.take(Outcome, engine.workers[0])
    assert [end.reason for end in ends] == ["checksum", "checksum", "gone"]
    assert {end.shorter_tokens for end in ends} == {2 * BLOCK}
    assert bed.pipeline.snapshot().damaged_chunks == 2
    stats = bed.pool.stats()
    assert (stats.ready, stats.doomed, stats.leased) == (2, 0, 0)


def test_a_spoiled_lease_is_not_confirmed():
    bed, engine = Bed(), make_engine()
    leased(bed, engine, 1, 4)
    bed.probe(engine, 2, 1, 4)
    assert bed.ask(engine, 2).hit_tokens == 4 * BLOCK
    bed.copies.memory[sorted(bed.copies.memory)[2]] += 1
    job, raw = bed.load_job(engine, 1, [5, 6, 7, 8])
    bed.submit(engine.workers[0], job, raw)
    bed.run_copies()
    assert bed.ask(engine, 2, seq=2).hit_tokens == 2 * BLOCK


def test_a_failed_rank_aborts_the_stripe():
    bed, engine = Bed(), make_engine(ranks=2)
    job, raw = bed.save_job(engine, 1, [1, 2])
    for worker in engine.workers:
        bed.submit(worker, job, raw)
    first, second = bed.copies.running
    bed.copies.finish(first)
    bed.copies.finish(second, CopyStatus.FAILED)
    bed.pipeline.on_copies(bed.now_s)
    assert outcome(bed, engine.workers[0]).status == "done"
    end = outcome(bed, engine.workers[1])
    assert (end.status, end.reason) == ("failed", "copy-failed")
    assert bed.probe(engine, 1, 1, 2)[0].hit_tokens == 0
    assert bed.pool.stats().writing == 0


def test_a_rank_with_other_bytes_is_refused_and_the_stripe_aborted():
    bed, engine = Bed(), make_engine(ranks=2)
    job, raw = bed.save_job(engine, 1, [1, 2])
    bed.submit(engine.workers[0], job, raw)
    bed.submit(engine.workers[1], job, [raw[0][::-1], raw[1]])
    bed.run_copies()
    assert outcome(bed, engine.workers[0]).status == "done"
    end = outcome(bed, engine.workers[1])
    assert (end.status, end.reason) == ("failed", "digest")
    assert bed.pool.stats().writing == bed.pool.stats().ready == 0
    totals = bed.pipeline.snapshot().ledger
    assert (totals.accepted, totals.refused) == (1, 1)


def test_a_rank_that_never_submits_does_not_hold_the_slots():
    bed, engine = Bed(), make_engine(ranks=2)
    job, raw = bed.save_job(engine, 1, [1])
    bed.submit(engine.workers[0], job, raw)
    bed.run_copies()
    bed.pass_s(10.1)
    assert bed.pool.stats().writing == 0
    bed.submit(engine.workers[1], job, raw)
    assert outcome(bed, engine.workers[1]).reason == "tombstone"


def test_a_save_skips_what_is_there_and_what_another_job_writes():
    bed, engine = Bed(), make_engine()
    bed.stored(engine, 1, 2)
    worker = engine.workers[0]
    job, raw = bed.save_job(engine, 1, [1, 2, 3])
    bed.submit(worker, job, raw)
    again, raw_again = bed.save_job(engine, 1, [1, 2, 3, 4])
    bed.submit(worker, again, raw_again)
    bed.run_copies()
    moved = {o.job: o.moved_bytes for o in bed.take(Outcome, worker)}
    assert moved == {job.job: 1024, again.job: 1024}
    assert bed.pipeline.snapshot().skips == {"stored": 4, "being-written": 1, "pool-full": 0}


def test_a_save_of_nothing_new_is_done_at_once():
    bed, engine = Bed(), make_engine()
    bed.stored(engine, 1, 2)
    job, raw = bed.save_job(engine, 1, [1, 2], step=99)
    bed.submit(engine.workers[0], job, raw)
    assert outcome(bed, engine.workers[0]).status == "done"


def test_a_full_pool_skips_and_still_ends_done():
    bed, engine = Bed(slots=2), make_engine()
    bed.stored(engine, 1, 2)
    bed.probe(engine, 1, 1, 2)
    bed.ask(engine, 1)
    job, raw = bed.save_job(engine, 2, [1, 2])
    bed.submit(engine.workers[0], job, raw)
    assert outcome(bed, engine.workers[0]).moved_bytes == 0
    assert bed.pipeline.snapshot().skips["pool-full"] == 2


def test_a_shared_head_outlives_the_tails_when_the_pool_is_full():
    bed, engine = Bed(slots=12), make_engine()
    bed.probe(engine, 1, 7, 8)
    for first in (0, 4):  # a prompt saved in two steps of its prefill
        job, raw = bed.save_job(engine, 7, [1, 2, 3, 4], first=first)
        job = msgspec.structs.replace(job, admission=1)
        bed.submit(engine.workers[0], job, raw)
        bed.run_copies()
        assert outcome(bed, engine.workers[0]).status == "done"
    bed.stored(engine, 8, 4)
    bed.stored(engine, 9, 2)
    bed.probe(engine, 2, 7, 8)  # wanted again; the engine has it itself and never asks
    bed.say(engine.scheduler, Release([2]))
    bed.stored(engine, 10, 4)
    bed.probe(engine, 3, 7, 8)
    assert bed.ask(engine, 3).hit_tokens == 6 * BLOCK
