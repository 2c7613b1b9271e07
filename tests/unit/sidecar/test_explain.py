"""Each request's record says, in words, why it hit what it hit."""

from __future__ import annotations

import dataclasses

import pytest
from kvferry_connector.wire.hot import Release
from kvferry_connector.wire.names import NO_VERSION
from kvferry_native import observer_of
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.observe import verdicts
from kvferry_sidecar.outcomes.histogram import Histogram
from kvferry_sidecar.outcomes.reasons import Reason
from kvferry_sidecar.outcomes.records import JobEnd, Record, Records, hottest, jobs_max
from support import hybrid_bed
from support.pipeline_bed import BLOCK, Bed, make_engine


def told(bed, engine, admission):
    record = bed.pipeline.records.get((engine.session.life, admission))
    return verdicts.view(record, bed.now_s, timeline=True)


def miss(bed, engine, admission, prompt, chunks=4):
    bed.probe(engine, admission, prompt, chunks)
    bed.say(engine.scheduler, Release([admission]))
    return told(bed, engine, admission)


def test_a_prefix_that_was_never_stored():
    bed, engine = Bed(), make_engine()
    view = miss(bed, engine, 1, prompt=1)
    assert view.reason == "absent"
    assert "not even the first chunk" in view.verdict
    journal = bed.pipeline.snapshot().journal
    assert (journal.miss_tokens, journal.miss_requests) == ({"absent": 4 * BLOCK}, {"absent": 1})


def test_a_prompt_that_leaves_what_is_stored():
    bed, engine = Bed(), make_engine()
    bed.stored(engine, 1, 3)
    bed.probe(engine, 1, 1, 5)
    answer = bed.ask(engine, 1, most=5 * BLOCK)
    assert answer.hit_tokens == 3 * BLOCK
    view = told(bed, engine, 1)
    assert (view.hit_tokens, view.sources) == (3 * BLOCK, {"host": 3 * BLOCK})
    assert "Hit 48 tokens (48 from host); the other 32 missed" in view.verdict
    assert "chunk 3 of group 0, after token 48" in view.verdict
    assert bed.pipeline.snapshot().journal.hit_tokens == {"host": 3 * BLOCK}


def test_an_engine_that_left_without_releases_ends_its_records():
    bed, engine = Bed(), make_engine()
    bed.probe(engine, 1, 1, 4)
    assert not told(bed, engine, 1).ended
    bed.now_s += 2.0
    bed.pipeline.on_bye(engine.scheduler, bed.now_s)
    assert told(bed, engine, 1).ended


def test_evicted_and_how_long_ago():
    bed, engine = Bed(slots=4), make_engine()
    bed.stored(engine, 1, 4)
    bed.stored(engine, 2, 4)  # takes all slots
    bed.now_s += 7.0
    view = miss(bed, engine, 1, prompt=1)
    assert (view.reason, view.remedy) == ("evicted", "raise tiers.host.bytes")
    assert "evicted 7.0 s before" in view.verdict


def test_still_being_saved():
    bed, engine = Bed(), make_engine()
    job, raw = bed.save_job(engine, 1, [1, 2])
    bed.submit(engine.workers[0], job, raw)
    assert miss(bed, engine, 1, prompt=1, chunks=2).reason == "being-written"
    bed.run_copies()


def test_kept_for_another_engine_and_which_fact_differs():
    bed = Bed()
    one, two = make_engine("one"), make_engine("two", first_generation=9, life=b"M" * 16)
    for engine, seed, digest in ((one, "0", b"1"), (two, "1", b"2")):
        engine.session.namespaces = {NO_VERSION: digest * 16}
        worker = engine.workers[0]
        worker.geometry = dataclasses.replace(worker.geometry, identity={"hash_seed": seed})
    bed.stored(one, 1, 4)
    view = miss(bed, two, 1, prompt=1)
    assert view.reason == "other-namespace"
    assert "kept for one/i: hash_seed (1 here, 0 there) differ" in view.verdict


def test_kept_from_before_a_reset():
    bed, engine = Bed(), make_engine()
    bed.stored(engine, 1, 4)
    engine.session.version = b"v" * 16
    engine.session.namespaces[engine.session.version] = b"m" * 16
    bed.pipeline.on_session_ready(engine.session, bed.now_s)
    view = miss(bed, engine, 1, prompt=1)
    assert view.reason == "other-namespace"
    assert "another namespace version (a reset)" in view.verdict


def test_a_window_is_missing_at_the_boundary():
    kinds = [{"kind": "full"}, {"kind": "swa", "window_tokens": 40, "save_rule": "held"}]
    bed, engine = Bed(slots=256), make_engine(kinds=kinds, num_blocks=1000)
    hybrid_bed.save(bed, engine, 1, 200)
    hybrid_bed.probe(bed, engine, 1, 2, 200, shared=100)
    assert hybrid_bed.hit(bed, engine, 1, 200) == 0
    view = told(bed, engine, 1)
    assert view.reason == "boundary"
    assert "full attention is stored up to token 96" in view.verdict
    assert "with group 1 (swa)" in view.verdict


def test_what_a_hit_needs_of_each_group():
    kinds = [{"kind": "full"}, {"kind": "swa", "window_tokens": 40, "save_rule": "held"}]
    bed, engine = Bed(), make_engine(kinds=kinds)
    full, window = bed.pipeline.groups(engine.session, 128)
    assert (full.kind, full.first, full.chunks) == ("full", 0, 8)
    assert (window.kind, window.first, window.chunks) == ("swa", 5, 8)
    assert (window.window_tokens, window.stripe_bytes) == (40, 1024)
    engine.session.ready = False
    assert bed.pipeline.groups(engine.session, 128) == []


def test_the_drafter_takes_its_chunk():
    bed, engine = Bed(), make_engine()
    engine.session.use_eagle = True
    bed.stored(engine, 1, 4)
    bed.probe(engine, 1, 1, 4)
    assert bed.ask(engine, 1, most=4 * BLOCK).hit_tokens == 3 * BLOCK
    view = told(bed, engine, 1)
    assert view.reason == "eagle"
    assert "the drafter recomputes the last 16 tokens" in view.verdict


def test_a_load_and_its_timeline():
    bed, engine = Bed(), make_engine(ranks=2)
    bed.stored(engine, 1, 4)
    bed.probe(engine, 1, 1, 4)
    bed.ask(engine, 1, most=4 * BLOCK)
    job, raw = bed.load_job(engine, 1, [9, 10, 11, 12], step=3)
    for worker in engine.workers:
        bed.submit(worker, job, raw)
    assert told(bed, engine, 1).verdict.endswith("The load is under way.")
    bed.now_s += 0.25
    for rank in (0, 1):
        engine.fence(rank).reach(3)
    bed.pipeline.on_tick(bed.now_s)
    bed.now_s += 0.5
    bed.run_copies()
    view = told(bed, engine, 1)
    assert view.verdict == "Hit 64 tokens (64 from host). Loaded 64 tokens."
    assert [event.what for event in view.timeline] == [
        "hashes",
        "hint",
        "answer",
        "load",
        "load done",
    ]
    assert view.timeline[-1].seconds == 0.75
    assert view.timeline[-1].detail == "fence 250.00 ms, queue 0.00 ms, copy 500.00 ms"
    snapshot = bed.pipeline.snapshot(bed.now_s)
    assert snapshot.stage_seconds["load/fence"].sum == 0.5
    assert snapshot.stage_seconds["load/copy"].sum == 1.0
    assert snapshot.part_bytes["load"].count == 2
    assert snapshot.ends["load/done/"] == 2
    assert snapshot.journal.load_tokens == {"done": 64}


def test_a_failed_load_names_its_reason():
    bed, engine = Bed(limits=Limits(fence_ms_max=1000)), make_engine()
    bed.stored(engine, 1, 2)
    bed.probe(engine, 1, 1, 2)
    bed.ask(engine, 1, most=2 * BLOCK)
    job, raw = bed.load_job(engine, 1, [9, 10], step=3)
    bed.submit(engine.workers[0], job, raw)
    assert bed.pipeline.snapshot(bed.now_s + 2.0).oldest_job_s == 2.0
    assert bed.pipeline.snapshot().queues == {"fence": 1, "load": 0, "save": 0, "copy": 0}
    bed.pass_s(1.1)
    view = told(bed, engine, 1)
    assert (view.load, view.reason) == ("failed", "fence")
    assert "The load failed: the engine did not reach the job's step in time" in view.verdict
    assert bed.pipeline.snapshot().journal.load_tokens == {"failed": 32}


def test_an_answer_that_came_too_late():
    bed, engine = Bed(), make_engine()
    bed.stored(engine, 1, 2)
    bed.probe(engine, 1, 1, 2)
    bed.ask(engine, 1, most=2 * BLOCK)
    bed.say(engine.scheduler, Release([1]))
    assert "did not take the hit: the answer came after its time" in told(bed, engine, 1).verdict


def test_what_the_engine_has_itself():
    bed, engine = Bed(), make_engine()
    bed.stored(engine, 1, 2)
    bed.probe(engine, 1, 1, 2)
    bed.say(engine.scheduler, Release([1]))
    assert "The engine did not ask" in told(bed, engine, 1).verdict


def test_a_sidecar_that_drains():
    bed, engine = Bed(), make_engine()
    bed.pipeline.drain(bed.now_s)
    view = miss(bed, engine, 1, prompt=1)
    assert view.verdict == "Not looked up: the sidecar is shutting down."


def job_end(kind, opened_s, end_tokens=0, **further):
    none, stages = Reason.NONE, (0.0, 0.0, 0.0)
    return JobEnd(kind, "done", none, end_tokens, 0, opened_s, opened_s, stages, **further)


def test_everything_remembered_is_bounded():
    records = Records(2)
    for number in range(3):
        records.open(Record(("e", "i"), f"r{number}", (b"l", number), 0.0, 1))
    assert [record.request for record in records.all()] == ["r1", "r2"]
    assert records.dropped == 1
    record = records.all()[0]
    for at in range(jobs_max + 2):
        record.settled(job_end("save", at, objects=2))
    record.load_s = 90.0
    record.settled(job_end("load", 90.0, end_tokens=64, start_tokens=16))
    assert (len(record.jobs), record.jobs_lost) == (jobs_max, 3)
    assert (record.saved_objects, record.load, record.loaded_tokens) == (2 * 34, "done", 48)


def test_hashes_that_come_again_begin_their_record_anew():
    records = Records(2)
    for number, request in ((0, "a"), (1, "b"), (0, "c")):
        records.open(Record(("e", "i"), request, (b"l", number), 0.0, 1))
    assert [record.request for record in records.all()] == ["b", "c"]
    assert (records.get((b"l", 0)), records.dropped) == (records.all()[1], 0)
    records.open(Record(("e", "i"), "d", (b"l", 2), 0.0, 1))
    assert [record.request for record in records.all()] == ["c", "d"]
    assert records.get((b"l", 1)) is None


def test_the_hottest_prefixes_are_those_of_most_tokens():
    asked = (
        (b"a", 4, 9, 1.0),
        (b"b", 0, 1, 2.0),
        (b"c", 0, 3, 3.0),
        (b"", 0, 0, 4.0),
        (b"a", 1, 6, 5.0),
    )
    found = []
    for number, (prefix, local_tokens, hit_tokens, at_s) in enumerate(asked):
        record = Record(("e", "i"), "r", (b"l", number), 0.0, 1, prefix=prefix)
        record.answered = (local_tokens, 16, hit_tokens, {}, at_s)
        found.append(record)
    first, second = hottest(found, 2)
    assert (first.key, first.hits, first.hit_tokens) == (b"a", 2, 10)
    assert (first.longest_tokens, first.last_use_s) == (9, 5.0)
    assert (second.key, second.hit_tokens) == (b"c", 3)


def test_a_histogram_counts_up_to_its_bounds():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    reading = histogram.reading()
    assert (reading.counts, reading.sum, reading.count) == ([2, 1, 1], 12.0, 4)
    assert (reading.quantile(0.5), reading.quantile(0.99)) == (1.0, 2.0)
    assert Histogram((1.0,)).reading().quantile(0.5) == 0.0
    with pytest.raises(ValueError, match="ascend"):
        Histogram((2.0, 1.0))
    with pytest.raises(TypeError, match="real number"):
        histogram.observe("much")


def test_a_histogram_measures_times_and_counts_beside_others():
    times, sizes = Histogram((60.0,)), Histogram((10.0,))
    times.begin()
    times.end()
    count_both = observer_of(times, sizes)
    count_both(70.0, 5)
    with pytest.raises(TypeError, match="as many values"):
        count_both(70.0)
    with pytest.raises(TypeError, match="takes histograms"):
        observer_of(times, 5.0)
    assert (times.counts, sizes.counts) == ([1, 1], [1, 0])
    assert 70.0 < times.sum < 130.0


def test_every_reason_of_a_miss_is_one_that_is_explained():
    from kvferry_sidecar.outcomes.reasons import EXPLANATIONS

    assert set(EXPLANATIONS) == set(Reason)
