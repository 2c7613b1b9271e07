"""What an engine that publishes KV events is told of its saves and of the pool."""

from __future__ import annotations

from kvferry_connector.wire.hot import Answer, Ask, Outcome, OutcomeAck, Removed, Stored
from kvferry_sidecar.engines.base import CopyStatus
from kvferry_sidecar.limits import Limits
from support.pipeline_bed import BLOCK, HASH_BYTES, Bed, chain, make_engine


def names(prompt, chunks):
    hashes = chain(prompt, chunks)
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def bed_and_engine(told=True, slots=64, **limits):
    bed, engine = Bed(Limits(**limits), slots=slots), make_engine(groups=2)
    engine.session.kv_events = told
    return bed, engine


def save(bed, engine, prompt, blocks, status=None, first=0):
    job, raw = bed.save_job(engine, prompt, blocks, first=first)
    bed.submit(engine.workers[0], job, raw)
    for ticket in list(bed.copies.running):
        bed.copies.finish(ticket, status)
    bed.pipeline.on_copies(bed.now_s)
    bed.take(Outcome)
    bed.say(engine.workers[0], OutcomeAck([job.job]))
    return job.job


def test_a_committed_save_is_told_object_by_object():
    bed, engine = bed_and_engine()
    job = save(bed, engine, 1, [1, 2, 3])
    ends = [BLOCK, 2 * BLOCK, 3 * BLOCK]
    assert bed.take(Stored, engine.scheduler) == [Stored(job, {0: ends, 1: ends})]
    later = save(bed, engine, 1, [4, 5], first=2)  # chunk 2 is stored already
    assert bed.take(Stored, engine.scheduler) == [Stored(later, {0: [4 * BLOCK], 1: [4 * BLOCK]})]


def test_a_failed_save_is_not_told_and_one_of_what_is_stored_names_nothing():
    bed, engine = bed_and_engine()
    save(bed, engine, 1, [1, 2, 3], CopyStatus.FAILED)
    assert bed.take(Stored) == []
    save(bed, engine, 1, [1, 2, 3])
    assert len(bed.take(Stored)) == 1
    job = save(bed, engine, 1, [1, 2, 3])
    assert bed.take(Stored, engine.scheduler) == [Stored(job, {})]


def test_an_engine_that_does_not_ask_is_not_told():
    bed, engine = bed_and_engine(told=False, slots=4)
    save(bed, engine, 1, [1, 2])
    save(bed, engine, 2, [1, 2])
    bed.submit(engine.workers[0], *bed.save_job(engine, 3, [1]))
    assert bed.take(Stored) == bed.take(Removed) == []


def test_what_makes_room_is_told_as_removed():
    bed, engine = bed_and_engine(slots=4)
    save(bed, engine, 1, [1, 2])
    save(bed, engine, 2, [1, 2])
    gone = [message.hashes for message in bed.take(Removed, engine.scheduler)]
    assert gone == [{0: names(1, 2), 1: names(1, 2)}]


def test_room_for_what_a_slower_tier_has_is_told_too():
    bed, engine = Bed(slots=4, sources=("disk",)), make_engine(groups=2)
    engine.session.kv_events = True
    for prompt in (1, 2):
        save(bed, engine, prompt, [1, 2])
        bed.pass_s(0)
        bed.run_stores()
    bed.take(Removed)
    bed.probe(engine, 1, 1, 2)
    bed.run_stores()
    bed.say(engine.scheduler, Ask(1, 1, 0, 2 * BLOCK))
    assert not bed.take(Answer), "it waits for the disk"
    gone = [message.hashes for message in bed.take(Removed, engine.scheduler)]
    assert gone == [{0: names(2, 2), 1: names(2, 2)}]
    bed.run_stores()


def test_clearing_the_pool_removes_all_that_was_told():
    bed, engine = bed_and_engine()
    save(bed, engine, 1, [1, 2])
    assert bed.pipeline.clear_pool() == 4
    (gone,) = bed.take(Removed, engine.scheduler)
    assert gone.hashes == {0: names(1, 2), 1: names(1, 2)}
    bed.pipeline.clear_pool()
    assert bed.take(Removed) == []


def test_names_are_bounded_and_the_oldest_are_withdrawn():
    bed, engine = bed_and_engine(announced_keys_max=4)
    save(bed, engine, 1, [1, 2, 3])
    (gone,) = bed.take(Removed, engine.scheduler)
    assert gone.hashes == {0: names(1, 2)}
    assert bed.pipeline._core.announcer.counts["announced_keys_max"] == 2


def test_nobody_is_told_after_the_scheduler_half_is_gone():
    bed, engine = bed_and_engine()
    save(bed, engine, 1, [1, 2])
    bed.take(Stored)
    bed.pipeline.on_peer_dead(engine.scheduler, bed.now_s)
    bed.pipeline.clear_pool()
    assert bed.take(Removed) == []


def test_what_a_load_finds_damaged_is_told_as_removed_once():
    bed, engine = bed_and_engine()
    save(bed, engine, 1, [1, 2, 3, 4])
    bed.take(Stored)
    bed.probe(engine, 1, prompt=1, chunks=4)
    assert bed.ask(engine, 1).hit_tokens == 4 * BLOCK
    job, raw = bed.load_job(engine, 1, [5, 6, 7, 8])
    bed.submit(engine.workers[0], job, raw)
    of_first_group = min(bed.copies.running.items())[1].extents
    bed.copies.memory[int(of_first_group.pool_offsets[2])] += 1
    bed.run_copies()
    assert [message.hashes for message in bed.take(Removed, engine.scheduler)] == [
        {0: names(1, 4)[2:]}  # what lies behind the damage goes with it
    ]
    bed.pipeline.clear_pool()
    (gone,) = bed.take(Removed, engine.scheduler)
    assert gone.hashes == {0: names(1, 2), 1: names(1, 4)}
