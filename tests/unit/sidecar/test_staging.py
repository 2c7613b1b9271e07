"""Staging from slower tiers into the pool while an ask waits: who waits for what, and how long."""

from __future__ import annotations

import pytest
from kvferry_connector.wire.hot import Answer, Ask, Hint, OutcomeAck, Release
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.observe import verdicts
from kvferry_sidecar.plan.shards import stripe_shape
from kvferry_sidecar.stages import looks
from kvferry_sidecar.stages.shape import form_of
from kvferry_sidecar.tiers.runner import Find, Get
from support.pipeline_bed import BLOCK, Bed, make_engine, value_of

STAGE_S = Limits().stage_ms_max / 1e3


def bed_with(chunks: int = 4, *, sources=("disk",), **fields) -> tuple[Bed, object]:
    """A pool without the prompt that its first slower tier has."""
    bed, engine = Bed(sources=sources, **fields), make_engine(ranks=2)
    bed.pipeline.on_session_ready(engine.session, bed.now_s)
    bed.stored(engine, 1, chunks)
    bed.pass_s(0)
    bed.run_stores()
    assert len(bed.slow[0].stored) == chunks
    bed.pool.clear()
    return bed, engine


def reading(chunks: int = 4, **fields) -> tuple[Bed, object]:
    """A request waits for the prompt: its tier has found it, and reads of it are out."""
    bed, engine = bed_with(chunks, **fields)
    bed.probe(engine, 1, 1, chunks)
    ask(bed, engine)
    bed.slow[0].finish_all()
    bed.pipeline.on_stores(bed.now_s)
    return bed, engine


def ask(bed, engine, admission=1, local=0, most=1 << 20, seq=1) -> list[Answer]:
    """Ask; returns the answer, if it came at once."""
    return bed.say(engine.scheduler, Ask(admission, seq, local, most))


def answers(bed) -> list[Answer]:
    return bed.take(Answer)


def test_the_hint_counts_what_slower_tiers_have():
    bed, engine = bed_with()
    assert bed.probe(engine, 1, 1, 4) == []  # not known yet
    bed.run_stores()
    assert [hint.hit_tokens for hint in bed.take(Hint)] == [4 * BLOCK]
    bed.probe(engine, 2, 7, 4)  # a prompt that nobody has
    bed.run_stores()
    assert [hint.hit_tokens for hint in bed.take(Hint)] == [0]


def test_an_ask_waits_until_all_is_in_the_pool():
    bed, engine = bed_with()
    bed.probe(engine, 1, 1, 4)
    assert ask(bed, engine) == []
    bed.run_stores()
    (answer,) = answers(bed)
    assert (answer.hit_tokens, answer.sources) == (4 * BLOCK, {"disk": 4 * BLOCK})
    job, raw = bed.load_job(engine, 1, [11, 12, 13, 14])
    for worker in engine.workers:
        bed.submit(worker, job, raw)
    bed.run_copies()
    for (rank, group), layout in engine.layouts.items():
        got = [layout.values[block] for block in (11, 12, 13, 14)]
        assert got == [value_of(1, chunk, rank, group) for chunk in range(4)]
    for worker in engine.workers:
        bed.say(worker, OutcomeAck([job.job]))
    bed.say(engine.scheduler, Release([1]))
    bed.assert_clean()


def test_sources_are_split_by_tier():
    bed, engine = bed_with(6, sources=("disk", "external"))
    disk, remote = bed.slow
    keys = list(remote.stored)
    for key in keys[:4]:
        del remote.stored[key]
    for key in keys[4:]:
        del disk.stored[key]
    bed.stored(engine, 1, 2)  # the head is in the pool
    bed.run_stores()
    bed.probe(engine, 1, 1, 6)
    assert ask(bed, engine, local=BLOCK) == []
    bed.run_stores()
    (answer,) = answers(bed)
    assert answer.hit_tokens == 6 * BLOCK
    assert answer.sources == {"host": BLOCK, "disk": 2 * BLOCK, "external": 2 * BLOCK}
    (again,) = ask(bed, engine, local=BLOCK, seq=2)
    assert again.sources == answer.sources


def test_the_answer_comes_in_time_with_what_is_complete():
    bed, engine = reading(12)
    slow = bed.slow[0]
    first, *_ = slow.of_kind(Get)
    slow.finish(first)
    bed.pipeline.on_stores(bed.now_s)
    assert bed.pass_s(STAGE_S / 2) <= STAGE_S * 0.51  # wanted again by its deadline
    assert answers(bed) == []
    bed.pass_s(STAGE_S * 0.51)
    (answer,) = answers(bed)
    assert (answer.hit_tokens, answer.reason) == (slow.batch_max * BLOCK, "staging")
    record = bed.pipeline.records.get((engine.session.life, 1))
    told = verdicts.view(record, bed.now_s, timeline=False).verdict
    assert "the rest of the prefix is in a slower tier and did not reach the pool in time" in told
    snapshot = bed.pipeline.snapshot(bed.now_s)
    assert snapshot.staging["asks_out_of_time"] == 1
    assert snapshot.stage_in_seconds.sum == pytest.approx(STAGE_S * 1.01)
    # What comes later serves the next request.
    bed.run_stores()
    bed.say(engine.scheduler, Release([1]))
    bed.probe(engine, 2, 1, 12)
    (answer,) = ask(bed, engine, 2)
    assert (answer.hit_tokens, answer.sources) == (12 * BLOCK, {"host": 12 * BLOCK})
    bed.say(engine.scheduler, Release([2]))
    bed.run_stores()
    bed.assert_clean()


def test_what_was_brought_is_kept_until_the_answer():
    """Other saves fill the pool meanwhile: they must not evict what the ask waits for."""
    bed, engine = reading(8, slots=12)
    slow = bed.slow[0]
    first, *_ = slow.of_kind(Get)
    slow.finish(first)
    bed.pipeline.on_stores(bed.now_s)
    for prompt in (5, 6, 7):
        bed.stored(engine, prompt, 4)
    bed.run_stores()
    (answer,) = answers(bed)
    assert answer.hit_tokens >= slow.batch_max * BLOCK


def test_two_requests_for_the_same_prefix_fetch_it_once():
    bed, engine = bed_with()
    bed.probe(engine, 1, 1, 4)
    bed.probe(engine, 2, 1, 4)
    ask(bed, engine, 1)
    ask(bed, engine, 2)
    slow = bed.slow[0]
    slow.finish_all()
    bed.pipeline.on_stores(bed.now_s)
    assert len(slow.of_kind(Get)) == 1
    bed.run_stores()
    assert [(a.admission, a.hit_tokens) for a in answers(bed)] == [(1, 64), (2, 64)]


def test_a_long_prompt_is_planned_once_while_what_was_found_comes(monkeypatch):
    bed, engine = reading(12)
    tickets = bed.slow[0].of_kind(Get)
    assert len(tickets) == 3
    search, planned = looks.find_hit, []

    def find_hit(*args, **kwargs):
        planned.append(args)
        return search(*args, **kwargs)

    monkeypatch.setattr(looks, "find_hit", find_hit)
    for ticket in tickets[:-1]:
        bed.slow[0].finish(ticket)
        bed.pipeline.on_stores(bed.now_s)
    ask(bed, engine)
    assert not planned
    bed.slow[0].stored.clear()
    bed.slow[0].finish(tickets[-1])
    bed.pipeline.on_stores(bed.now_s)
    assert len(planned) == 1, "what was found is not there"
    (answer,) = answers(bed)
    assert answer.hit_tokens == 8 * BLOCK


def test_a_miss_of_what_was_found_shortens_the_answer():
    bed, engine = reading()
    slow = bed.slow[0]
    del slow.stored[list(slow.stored)[2]]
    bed.run_stores()
    (answer,) = answers(bed)
    assert (answer.hit_tokens, answer.reason) == (2 * BLOCK, "absent")
    bed.say(engine.scheduler, Release([1]))
    bed.assert_clean()


def test_a_released_request_waits_for_nothing_and_its_slots_stay_its_calls():
    bed, engine = reading()
    bed.say(engine.scheduler, Release([1]))
    bed.pass_s(10 * STAGE_S)
    assert answers(bed) == []
    assert bed.pool.stats().writing == 4  # the call has not returned
    bed.run_stores()
    assert bed.pool.stats().writing == 0
    bed.assert_clean()


@pytest.mark.parametrize("gone", ["bye", "dead"])
def test_an_engine_that_goes_leaves_nothing(gone):
    bed, engine = reading()
    for peer in (engine.scheduler, *engine.workers):
        leave = bed.pipeline.on_bye if gone == "bye" else bed.pipeline.on_peer_dead
        leave(peer, bed.now_s)
    bed.run_stores()
    assert answers(bed) == []
    bed.assert_clean()


def test_a_drain_answers_at_once_and_flushes():
    bed, engine = bed_with()
    bed.stored(engine, 2, 3)
    bed.probe(engine, 1, 1, 4)
    ask(bed, engine)
    bed.pipeline.drain(bed.now_s)
    bed.pass_s(0)
    (answer,) = answers(bed)
    assert (answer.hit_tokens, answer.reason) == (0, "draining")
    assert not bed.pipeline.drained()
    bed.run_stores()
    assert len(bed.slow[0].stored) == 7
    bed.say(engine.scheduler, Release([1]))
    assert bed.pipeline.drained()


def test_the_bytes_being_staged_are_bounded():
    bed, engine = reading(12, limits=Limits(stage_bytes_max=8 * 2048))
    assert len(bed.slow[0].of_kind(Get)) == 2  # of 4 chunks of 2 KiB each
    bed.run_stores()
    (answer,) = answers(bed)
    assert answer.hit_tokens == 8 * BLOCK  # what fits is kept, and all of it is there
    assert bed.pipeline.snapshot(bed.now_s).staging["stage_bytes_max"] > 0
    bed.run_stores()
    bed.say(engine.scheduler, Release([1]))
    bed.assert_clean()


# --- tiers that fail -------------------------------------------------------------------------


def test_a_failing_tier_is_a_miss_and_is_tried_again():
    bed, engine = bed_with()
    slow = bed.slow[0]
    slow.answering = False
    bed.probe(engine, 1, 1, 4)
    ask(bed, engine)
    bed.run_stores()
    (answer,) = answers(bed)
    assert answer.hit_tokens == 0
    (tier,) = bed.pipeline.snapshot(bed.now_s).tiers
    assert (tier.state, tier.reason) == ("paused", "it is away")
    bed.probe(engine, 2, 1, 4)  # nothing is asked of it, and nothing waited for
    assert ask(bed, engine, 2)[0].hit_tokens == 0
    assert not slow.open
    slow.answering = True
    bed.pass_s(Limits().store_retry_ms / 1e3)
    assert len(slow.of_kind(Find)) == 1
    bed.run_stores()
    assert bed.pipeline.snapshot(bed.now_s).tiers[0].state == "on"
    bed.probe(engine, 3, 1, 4)
    ask(bed, engine, 3)
    bed.run_stores()
    assert answers(bed)[-1].hit_tokens == 4 * BLOCK


def test_a_final_failure_switches_off_for_good():
    bed, engine = bed_with()
    bed.probe(engine, 1, 1, 4)
    (find,) = bed.slow[0].of_kind(Find)
    bed.slow[0].finish(find, error="the disk is read-only", final=True)
    bed.pipeline.on_stores(bed.now_s)
    bed.pass_s(100)
    assert not bed.slow[0].open
    (tier,) = bed.pipeline.snapshot(bed.now_s).tiers
    assert (tier.state, tier.reason) == ("off", "the disk is read-only")
    bed.stored(engine, 3, 2)  # the pool serves
    bed.probe(engine, 2, 3, 2)
    assert ask(bed, engine, 2)[0].hit_tokens == 2 * BLOCK


def test_late_calls_keep_their_slots_and_switch_the_tier_off():
    limits = Limits(abandoned_calls_max=2)
    bed, engine = reading(12, limits=limits)
    slow = bed.slow[0]
    assert len(slow.of_kind(Get)) == 3
    bed.pass_s(STAGE_S)
    assert [answer.hit_tokens for answer in answers(bed)] == [0]
    bed.pass_s(limits.store_ms_max / 1e3)
    (tier,) = bed.pipeline.snapshot(bed.now_s).tiers
    assert (tier.state, tier.calls_late) == ("off", 3)
    assert "2000 ms" in tier.reason
    assert bed.pool.stats().writing == 12
    bed.probe(engine, 2, 1, 12)
    assert ask(bed, engine, 2)[0].hit_tokens == 0  # at once
    assert bed.pipeline.drained()  # a call that hangs is not waited for
    slow.finish_all()
    bed.pipeline.on_stores(bed.now_s)
    assert bed.pool.stats().writing == 0
    assert bed.pool.stats().ready == 12  # late, and right
    bed.pass_s(limits.store_retry_ms / 1e3)
    bed.run_stores()
    assert bed.pipeline.snapshot(bed.now_s).tiers[0].state == "on"


def test_what_waits_behind_a_hung_call_is_taken_back():
    bed, engine = bed_with(12)
    slow = bed.slow[0]
    slow._running_max = 1
    bed.probe(engine, 1, 1, 12)
    ask(bed, engine)
    slow.finish_all()
    bed.pipeline.on_stores(bed.now_s)
    bed.pass_s(Limits().store_ms_max / 1e3)
    bed.pipeline.on_stores(bed.now_s)
    assert len(slow.open) == 1
    assert bed.pool.stats().writing == 4


def test_the_form_of_an_object_counts_shared_shards_once():
    shape = stripe_shape([10, 0, 10, 6], ["a", "b", "a", "c"])
    assert form_of(shape).shard_bytes == (10, 6)
    assert form_of(stripe_shape([8, 8], ["a", "a"])).shard_bytes == (8,)


def test_a_result_that_cannot_be_taken_costs_no_other():
    bed = Bed(sources=("disk",))
    desk, (tier,) = bed.pipeline._stores, bed.tiers
    taken = []

    def fail(result, _now_s):
        raise RuntimeError("a bug")

    for done in (fail, lambda result, _now_s: taken.append(result.found)):
        desk.send(tier, Find(((b"k" * 16,),), stop=False), bed.now_s, done)
    bed.slow[0].finish_all()
    desk.collect(bed.now_s)
    assert taken == [((False,),)]
    assert desk.calls_in_time() == 0
    (told,) = bed.log.errors
    assert "a bug" in told
