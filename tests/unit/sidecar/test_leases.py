"""Probes, hints, asks and every way a lease ends."""

from __future__ import annotations

import math

import pytest
from kvferry_connector.wire.attach import Heartbeat
from kvferry_connector.wire.hot import Answer, Ask, Error, Hint, NeedFull, Probe, Release
from kvferry_sidecar.limits import Limits
from support.pipeline_bed import BLOCK, HASH_BYTES, Bed, chain, make_engine


@pytest.fixture
def bed() -> Bed:
    return Bed()


@pytest.fixture
def engine():
    return make_engine()


def stored_and_probed(bed, engine, chunks=4, admission=1):
    bed.stored(engine, 1, chunks)
    bed.probe(engine, admission, 1, chunks)


def leases(bed):
    return bed.pipeline.snapshot().leases


# --- probes -------------------------------------------------------------------------------------


def test_hint_is_the_leading_run_and_leases_nothing(bed, engine):
    bed.stored(engine, 1, 3)
    assert bed.probe(engine, 1, 1, 5) == [Hint(1, 3 * BLOCK, 5)]
    assert bed.pool.stats().leased == 0


def test_a_request_that_starts_anew_sends_only_its_new_hashes(bed, engine):
    bed.stored(engine, 1, 6)
    assert bed.probe(engine, 1, 1, 2) == [Hint(1, 2 * BLOCK, 2)]
    bed.ask(engine, 1)
    assert bed.probe(engine, 2, 1, 5, start=2, former=1) == [Hint(2, 5 * BLOCK, 5)]
    assert leases(bed) == 1, "the former's"
    bed.say(engine.scheduler, Release([1]))
    assert leases(bed) == 0
    assert bed.ask(engine, 2).hit_tokens == 5 * BLOCK
    assert bed.probe(engine, 3, 1, 5, start=5, former=2) == [Hint(3, 5 * BLOCK, 5)], "none is new"
    bed.say(engine.scheduler, Release([2]))
    assert bed.ask(engine, 3).hit_tokens == 5 * BLOCK
    assert bed.pipeline.check() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"former": 0},
        {"former": 3},
        {"former": 9},
        {"start": 3, "predecessor": chain(1, 3, 2)},
        {"start": 3},
        {"predecessor": b"x" * HASH_BYTES},
        {"version": b"v" * 16},
    ],
)
def test_what_does_not_continue_the_former_is_answered_need_full(bed, engine, changes):
    """The former stays as it is, with its lease: its own release ends it."""
    stored_and_probed(bed, engine)
    bed.ask(engine, 1)
    engine.session.namespaces[b"v" * 16] = b"m" * 16
    engine.session.version = changes.get("version", engine.session.version)
    fields = {
        "version": engine.session.version, "start": 4, "predecessor": chain(1, 4, 3), "former": 1
    }  # fmt: skip
    fields |= changes
    start = fields["start"]
    probe = Probe(
        request="r", admission=3, total=6, num_tokens=7 * BLOCK, hash_bytes=HASH_BYTES, **fields
    )
    assert bed.say(engine.scheduler, probe, [chain(1, 6, start)]) == [NeedFull(3)]
    assert leases(bed) == 1
    assert bed.say(engine.scheduler, Ask(3, 2, 0, 99)) == [NeedFull(3)]


def test_more_hashes_than_tokens_are_no_request(bed, engine):
    probe = Probe("r", 1, engine.session.version, 0, 4, 4 * BLOCK - 1, HASH_BYTES, b"")
    assert bed.say(engine.scheduler, probe, [chain(1, 4)]) == [NeedFull(1)]


@pytest.mark.parametrize(
    ("changes", "raw"),
    [
        ({}, [b""]),
        ({}, []),
        ({}, [b"x" * 65]),
        ({"hash_bytes": 0}, [b""]),
        ({"hash_bytes": 1 << 40}, [b""]),
        ({"start": -1}, [bytes(96)]),
        ({"start": 3}, [b""]),
    ],
)
def test_frames_that_do_not_fit_are_an_error(bed, engine, changes, raw):
    fields = {"start": 0, "total": 2, "hash_bytes": 32} | changes
    probe = Probe(
        request="r",
        admission=3,
        version=engine.session.version,
        num_tokens=99,
        predecessor=b"",
        **fields,
    )
    (error,) = bed.say(engine.scheduler, probe, raw)
    assert isinstance(error, Error)
    assert (error.code, error.admission) == ("frames", 3)


def test_a_full_probe_again_keeps_a_lease_on_the_same_keys_only(bed, engine):
    stored_and_probed(bed, engine)
    bed.ask(engine, 1)
    bed.probe(engine, 1, 1, 4)
    assert leases(bed) == 1
    bed.probe(engine, 1, 2, 4)
    assert leases(bed) == 0


def test_an_old_version_hits_nothing_and_says_so(bed, engine):
    stored_and_probed(bed, engine)
    engine.session.version = b"v" * 16
    engine.session.namespaces[b"v" * 16] = b"m" * 16
    bed.pipeline.on_version(engine.session, bed.now_s)
    answer = bed.ask(engine, 1)
    assert (answer.hit_tokens, answer.reason) == (0, "version")
    probe = Probe("r", 2, bytes(16), 0, 4, 99, HASH_BYTES, b"")
    assert bed.say(engine.scheduler, probe, [chain(1, 4)]) == [Hint(2, 0, 4)]
    assert bed.pipeline.snapshot().declines == {"version": 2}
    assert bed.probe(engine, 3, 1, 4) == [Hint(3, 0, 4)]  # the new namespace is another one


def test_before_ready_everything_is_a_miss_with_its_reason(bed, engine):
    stored_and_probed(bed, engine)
    bed.ask(engine, 1)
    engine.session.ready = False
    answer = bed.ask(engine, 1)
    assert (answer.hit_tokens, answer.reason) == (0, "not-ready")
    assert leases(bed) == 0
    assert bed.probe(engine, 2, 1, 4) == [Hint(2, 0, 4)]


# --- bounds -------------------------------------------------------------------------------------


def test_the_oldest_admission_without_a_lease_makes_room(engine):
    bed = Bed(Limits(admissions_max=2))
    stored_and_probed(bed, engine, admission=1)
    bed.ask(engine, 1)
    bed.probe(engine, 2, 1, 4)
    bed.probe(engine, 3, 1, 4)
    assert bed.say(engine.scheduler, Ask(2, 2, 0, 99)) == [NeedFull(2)]
    bed.ask(engine, 3, seq=3)
    assert bed.probe(engine, 4, 1, 4) == [Hint(4, 0, 4)]
    snapshot = bed.pipeline.snapshot()
    assert snapshot.declines["admissions-max"] == 1
    assert (snapshot.admissions, snapshot.admissions_dropped) == (2, 1)


def test_key_bytes_are_bounded(engine):
    bed = Bed(Limits(key_bytes_max=10 * 16))
    for admission in range(1, 5):
        bed.probe(engine, admission, admission, 4)
    assert bed.pipeline.snapshot().key_bytes <= 10 * 16
    bed.probe(engine, 9, 9, 11)
    assert bed.pipeline.snapshot().declines["key-bytes-max"] == 1
    assert bed.pipeline.check() == []


def test_a_prompt_over_hashes_max_is_declined(engine):
    bed = Bed(Limits(hashes_max=3))
    assert bed.probe(engine, 1, 1, 4) == [Hint(1, 0, 4)]
    assert bed.pipeline.snapshot().declines == {"hashes-max": 1}


def test_leases_max_counts_pool_entries(engine):
    bed = Bed(Limits(leases_max=5))
    stored_and_probed(bed, engine)
    bed.ask(engine, 1)
    bed.probe(engine, 2, 1, 4)
    answer = bed.ask(engine, 2, local=BLOCK)
    assert (answer.hit_tokens, answer.reason) == (BLOCK, "leases-max")
    assert leases(bed) == 1


# --- asks ---------------------------------------------------------------------------------------


def test_the_hit_is_capped_and_aligned(bed, engine):
    engine = make_engine(groups=2)  # a single group is aligned to its own blocks
    engine.session.alignment_tokens = engine.session.scheduler_block_tokens = 2 * BLOCK
    stored_and_probed(bed, engine)
    answer = bed.ask(engine, 1, most=4 * BLOCK - 1)
    assert (answer.hit_tokens, answer.sources) == (2 * BLOCK, {"host": 2 * BLOCK})


def test_a_hit_within_the_local_tokens_is_unleased_information(bed, engine):
    stored_and_probed(bed, engine)
    answer = bed.ask(engine, 1, local=5 * BLOCK)
    assert (answer.hit_tokens, answer.sources) == (4 * BLOCK, {})
    assert leases(bed) == 0


def test_asking_again_never_doubles_a_lease(bed, engine):
    stored_and_probed(bed, engine)
    first = bed.ask(engine, 1, local=BLOCK, seq=1)
    again = bed.ask(engine, 1, local=BLOCK, seq=2)
    assert (again.hit_tokens, again.sources) == (first.hit_tokens, first.sources)
    assert bed.pipeline.snapshot().leased_entries == 3
    bed.ask(engine, 1, local=2 * BLOCK, seq=3)
    assert bed.pipeline.snapshot().leased_entries == 2
    bed.say(engine.scheduler, Release([1]))
    bed.assert_clean()


def test_hits_and_misses_are_counted_once_per_admission(bed, engine):
    stored_and_probed(bed, engine)
    for seq in range(1, 4):
        bed.ask(engine, 1, local=BLOCK, most=6 * BLOCK, seq=seq)
    bed.probe(engine, 2, 9, 4)
    bed.ask(engine, 2, most=4 * BLOCK)
    snapshot = bed.pipeline.snapshot()
    assert (snapshot.hit_requests, snapshot.missed_requests) == (1, 1)
    assert (snapshot.hit_tokens, snapshot.missed_tokens) == (3 * BLOCK, 6 * BLOCK)


def test_requests_that_end_at_their_hint_are_counted_too(bed, engine):
    stored_and_probed(bed, engine)
    bed.probe(engine, 2, 9, 4)
    bed.say(engine.scheduler, Release([1, 2]))
    snapshot = bed.pipeline.snapshot()
    assert (snapshot.hit_requests, snapshot.missed_requests, snapshot.local_requests) == (0, 1, 1)
    assert snapshot.missed_tokens == 4 * BLOCK


def test_an_entry_that_cannot_be_leased_shortens_the_answer(bed, engine):
    stored_and_probed(bed, engine)
    real = bed.pool.lease

    def short_once(keys):
        bed.pool.doom(real(keys)[2:3])  # another owner dooms the third between count and lease
        bed.pool.lease = real
        entries = bed.pool._entries
        for entry in entries.values():
            entry.leases = 0
        return real(keys)

    bed.pool.lease = short_once
    answer = bed.ask(engine, 1)
    assert answer.hit_tokens == 2 * BLOCK
    assert bed.pipeline.snapshot().leased_entries == 2


def test_leased_entries_are_not_evicted(engine):
    bed = Bed(slots=4)
    stored_and_probed(bed, engine)
    bed.ask(engine, 1)
    job, raw = bed.save_job(engine, 2, [1, 2])
    bed.submit(engine.workers[0], job, raw)
    bed.run_copies()
    assert bed.probe(engine, 2, 1, 4) == [Hint(2, 4 * BLOCK, 4)]


def test_an_ask_for_an_admission_whose_lease_a_job_owns_promises_nothing(bed, engine):
    stored_and_probed(bed, engine)
    bed.ask(engine, 1)
    job, raw = bed.load_job(engine, 1, [5, 6, 7, 8])
    bed.submit(engine.workers[0], job, raw)
    answer = bed.ask(engine, 1, local=BLOCK, seq=2)
    assert (answer.hit_tokens, answer.reason) == (BLOCK, "lease-busy")
    bed.run_copies()
    assert bed.ask(engine, 1, local=BLOCK, seq=3).hit_tokens == 4 * BLOCK


# --- the ways out -------------------------------------------------------------------------------


def owned_by_a_job(bed, engine):
    job, raw = bed.load_job(engine, 1, [5, 6, 7, 8], step=9)
    bed.submit(engine.workers[0], job, raw)


WAYS_OUT = {
    "release": lambda bed, engine: bed.say(engine.scheduler, Release([1])),
    "idle": lambda bed, engine: bed.pass_s(30.1),
    "beat": lambda bed, engine: bed.pipeline.on_beat(
        engine.scheduler, Heartbeat(1, 1, []), bed.now_s
    ),
    "death": lambda bed, engine: bed.pipeline.on_peer_dead(engine.scheduler, bed.now_s),
    "bye": lambda bed, engine: bed.pipeline.on_bye(engine.scheduler, bed.now_s),
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_every_way_out_frees_the_lease(bed, engine, way):
    stored_and_probed(bed, engine)
    bed.ask(engine, 1)
    assert bed.pool.stats().leased == 4
    WAYS_OUT[way](bed, engine)
    assert leases(bed) == 0
    bed.assert_clean()


@pytest.mark.parametrize("way", WAYS_OUT)
def test_no_way_out_touches_the_lease_of_a_job(engine, way):
    bed = Bed(Limits(fence_ms_max=1 << 30))
    stored_and_probed(bed, engine)
    bed.ask(engine, 1)
    owned_by_a_job(bed, engine)
    WAYS_OUT[way](bed, engine)
    assert leases(bed) == 1
    engine.fence().reach(9)
    bed.pass_s(0.1)
    bed.run_copies()
    assert leases(bed) == 0


def test_a_heartbeat_frees_only_what_was_asked_before_it(bed, engine):
    stored_and_probed(bed, engine)
    bed.probe(engine, 2, 1, 4)
    bed.probe(engine, 3, 1, 4)
    for admission, seq in ((1, 1), (2, 2), (3, 3)):
        bed.ask(engine, admission, seq=seq)
    bed.pipeline.on_beat(engine.scheduler, Heartbeat(1, 2, [2]), bed.now_s)
    kept = {admission: bed.ask(engine, admission, seq=9) for admission in (2, 3)}
    assert all(isinstance(answer, Answer) for answer in kept.values())
    assert leases(bed) == 2
    assert bed.pipeline.snapshot().beat_falls == 1


def test_a_version_change_takes_no_lease_back(bed, engine):
    stored_and_probed(bed, engine)
    bed.ask(engine, 1)
    engine.session.version = b"v" * 16
    bed.pipeline.on_version(engine.session, bed.now_s)
    assert leases(bed) == 1


def test_asks_and_heartbeats_keep_a_lease_awake(bed, engine):
    stored_and_probed(bed, engine)
    bed.ask(engine, 1, seq=1)
    bed.pass_s(20)
    bed.ask(engine, 1, seq=2)
    bed.pass_s(20)
    bed.pipeline.on_beat(engine.scheduler, Heartbeat(1, 2, [1]), bed.now_s)
    bed.pass_s(20)
    assert leases(bed) == 1
    assert bed.pass_s(11) == math.inf
    assert leases(bed) == 0
    assert bed.pipeline.snapshot().idle_falls == 1
