"""Caches that several ranks hold the same bytes of: stored once, loaded into every rank."""

from __future__ import annotations

import pytest
from kvferry_connector.wire.hot import Outcome, OutcomeAck, Release
from kvferry_sidecar.engines.base import CopyStatus, Direction
from support.pipeline_bed import BLOCK, Bed, make_engine, value_of

CHUNKS = 11
RANKS = 4


def content(chunk, rank, replicas):
    """What a rank's block of this chunk holds: the same on ranks that are replicas."""
    return value_of(1, chunk, rank // replicas, 0)


def bed_and_engine(replicas, **kind):
    bed = Bed(slots=256)
    kinds = [{"kind": "mla", "tp_replicas": replicas, **kind}]
    engine = make_engine(kinds=kinds, ranks=RANKS, num_blocks=100)
    for (rank, _), layout in engine.layouts.items():
        for chunk in range(CHUNKS):
            layout.values[chunk + 1] = content(chunk, rank, replicas)
    return bed, engine


def submit_save(bed, engine):
    job, raw = bed.save_job(engine, 1, list(range(1, CHUNKS + 1)))
    for worker in engine.workers:
        bed.submit(worker, job, raw)
    return job


def finish_save(bed, engine, job):
    bed.run_copies()
    for worker in engine.workers:
        (outcome,) = bed.take(Outcome, worker)
        assert outcome.status == "done", outcome
        bed.say(worker, OutcomeAck([job.job]))


@pytest.mark.parametrize(("replicas", "objects"), [(1, 44), (2, 22), (4, 11)])
def test_eleven_chunks_at_tp4(replicas, objects):
    """Objects of bytes that are stored and read; each rank loads all its chunks whatever."""
    bed, engine = bed_and_engine(replicas)
    job = submit_save(bed, engine)
    gathered = [len(copy.extents.blocks) for copy in bed.copies.running.values()]
    assert sum(gathered) == objects
    assert len(gathered) == RANKS, "replicas save by turns"
    assert max(gathered) - min(gathered) <= 1
    finish_save(bed, engine, job)
    assert len(bed.copies.memory) == objects

    bed.probe(engine, 1, 1, CHUNKS)
    assert bed.ask(engine, 1).hit_tokens == CHUNKS * BLOCK
    job, raw = bed.load_job(engine, 1, list(range(50, 50 + CHUNKS)))
    for worker in engine.workers:
        bed.submit(worker, job, raw)
    running = list(bed.copies.running.values())
    assert {copy.direction for copy in running} == {Direction.SCATTER}
    read = [int(offset) for copy in running for offset in copy.extents.pool_offsets]
    assert (len(read), len(set(read))) == (RANKS * CHUNKS, objects)
    assert all(copy.extents.expected is not None for copy in running), "verified"
    bed.run_copies()
    for worker in engine.workers:
        (outcome,) = bed.take(Outcome, worker)
        assert outcome.status == "done", outcome
        bed.say(worker, OutcomeAck([job.job]))
    for (rank, _), layout in engine.layouts.items():
        for chunk in range(CHUNKS):
            assert layout.values[50 + chunk] == content(chunk, rank, replicas)
    bed.say(engine.scheduler, Release([1]))
    bed.assert_clean()


@pytest.mark.parametrize("failing", range(RANKS))
def test_one_replica_that_fails_leaves_nothing_behind(failing):
    """It saved chunks that no other replica saved: none of the stripes is whole."""
    bed, engine = bed_and_engine(4)
    job = submit_save(bed, engine)
    for index, ticket in enumerate(list(bed.copies.running)):
        bed.copies.finish(ticket, CopyStatus.FAILED if index == failing else None)
    bed.pipeline.on_copies(bed.now_s)
    ends = [outcome.status for outcome in bed.take(Outcome)]
    assert sorted(ends) == ["done", "done", "done", "failed"]
    assert bed.pool.stats().ready == 0
    for worker in engine.workers:
        bed.say(worker, OutcomeAck([job.job]))
    bed.assert_clean()


def test_fewer_chunks_than_replicas():
    bed, engine = bed_and_engine(4)
    job, raw = bed.save_job(engine, 1, [1])
    for worker in engine.workers:
        bed.submit(worker, job, raw)
    finish_save(bed, engine, job)
    assert bed.pool.stats().ready == 1
    bed.assert_clean()
