"""Hostile frames on the hot channel of a real sidecar: it answers or drops, and serves on.

Each test attacks through an attached half (the offender) or a stranger, and ends with ``intact``:
the process lives, an engine that behaves (the witness) saves, loads and compares, everything
that was open is closed, the books balance, and neither memory nor descriptors grew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvferry_connector.wire import codec
from kvferry_connector.wire.codec import HEADER, MAGIC, encode_job, id_chars_max
from kvferry_connector.wire.hot import (
    Cancel,
    Error,
    Hint,
    JobState,
    JobStatus,
    Outcome,
    OutcomeAck,
    Probe,
    Release,
    Submit,
)
from kvferry_connector.wire.names import NO_VERSION
from support import nonsense
from support.fuzzing import Target, bounded, gates
from support.hot_engine import HASH_BYTES, HotEngine
from support.raw_half import KvMemory, attach_pair
from support.waiting import wait_until

MIB = 1 << 20


class Offender:
    """An engine that was welcomed, and abuses it."""

    def __init__(self, target: Target) -> None:
        self.memory, self.life = KvMemory(), os.urandom(16)
        self.scheduler, self.worker = attach_pair(
            target.run_dir, self.memory, self.life, target.new_name()
        )
        self.engine = HotEngine(self.scheduler, self.worker, self.memory, self.life)
        self._pings = 1 << 40

    def ping(self) -> None:
        """Both halves' frames so far were handled: each gets the answer to its last one."""
        self._pings += 1
        self.scheduler.send(Probe("ping", self._pings, NO_VERSION, 0, 0, 1, HASH_BYTES, b""), b"")
        self.scheduler.receive(
            Hint, lambda hint: hint.admission == self._pings, "after the nonsense"
        )
        self.scheduler.send(Release([self._pings]))
        self.worker.send(JobStatus(-self._pings))
        self.worker.receive(JobState, lambda state: state.job == -self._pings, "after it all")
        self.scheduler.drain()
        self.worker.drain()

    def leave(self) -> None:
        self.scheduler.leave()
        self.worker.leave()
        self.memory.close()


@pytest.fixture
def offender(target: Target) -> Iterator[Offender]:
    found = Offender(target)
    yield found
    found.leave()


# --- random, mutated, nonsense -----------------------------------------------------------------


@pytest.mark.parametrize("examples", gates(120, 5_000))
def test_any_frames_are_answered_or_dropped(offender: Offender, examples: int) -> None:
    halves = (offender.scheduler, offender.worker)
    made = [nonsense.messages(h.welcomed.epoch, h.welcomed.generation) for h in halves]
    batches = st.tuples(*(st.lists(one, min_size=1, max_size=8) for one in made))

    @bounded(examples)
    @given(batches)
    def attack(batch: tuple[list[list[bytes]], ...]) -> None:
        for half, frames in zip(halves, batch, strict=True):
            for one in frames:
                half.send_frames(one)
        offender.ping()

    attack()


@pytest.mark.parametrize("examples", gates(120, 5_000))
def test_hostile_jobs_end_or_are_refused(offender: Offender, examples: int) -> None:
    engine = offender.engine
    engine.put("hostile", (1, 2, 3))

    @bounded(examples)
    @given(st.lists(nonsense.hostile_jobs(offender.life), min_size=1, max_size=8))
    def attack(jobs: list[tuple[bytes, list[bytes]]]) -> None:
        engine.probe(1, "hostile", 3)
        engine.answer(engine.ask(1, 48))
        for body, raw in jobs:
            offender.worker.send(Submit(body), *raw)
        outcomes = offender_outcomes(offender)
        offender.worker.send(OutcomeAck(outcomes))
        offender.scheduler.send(Release([1]))

    attack()


def offender_outcomes(offender: Offender) -> list[int]:
    """Return the jobs whose outcomes have come by the time both halves were answered."""
    mark = -(1 << 41)
    offender.worker.send(JobStatus(mark))
    offender.worker.receive(JobState, lambda state: state.job == mark)
    return [m.job for m in offender.worker.drain() if isinstance(m, Outcome)]


def test_every_wrong_label_is_told_or_dropped(offender: Offender) -> None:
    worker = offender.worker
    epoch, generation = worker.welcomed.epoch, worker.welcomed.generation
    cases: tuple[tuple[dict[str, int], str], ...] = (
        ({"epoch": epoch ^ 1}, "stale"),
        ({"generation": generation + 1}, "stale"),
        ({"generation": offender.scheduler.welcomed.generation}, "stale"),
        ({"protocol": 2}, "protocol"),
    )
    for changes, code in cases:
        worker.send_frames(worker.frames(Cancel(1), (), **changes))
        assert worker.receive(Error).code == code, changes
    for count in (1, 3, 5, 9):
        worker.send_frames([b"x" * HEADER.size] * count)
        assert worker.receive(Error).code == "malformed"
    worker.send_frames([HEADER.pack(MAGIC, 1, 2, epoch, generation), b"\x91\xa1c", b""])
    assert "raw frames" in worker.receive(Error).message
    too_long = bytes(codec.body_bytes_max + 1)
    worker.send_frames([HEADER.pack(MAGIC, 1, 0, epoch, generation), too_long])
    assert str(codec.body_bytes_max) in worker.receive(Error).message


def test_a_message_of_very_many_frames_is_one_refusal(offender: Offender) -> None:
    offender.worker.send_frames([b"x"] * 20_000)
    assert "20000 frames" in offender.worker.receive(Error).message


# --- strangers ---------------------------------------------------------------------------------


def test_strangers_are_not_heard(target: Target, offender: Offender) -> None:
    before = target.refused_frames("foreign")
    engine = offender.engine
    save = engine.save_job("stranger", (1, 2, 3))
    frames = offender.worker.frames(Submit(encode_job(save.job)), save.raw)
    strangers = [offender.worker.dealer(name) for name in (b"x", b"K", b"K" + bytes(8), b"z" * 255)]
    for stranger in strangers:
        for _ in range(50):
            stranger.send_multipart(frames)
    wait_until(lambda: target.has_refused("foreign", before + 200), "all are counted and dropped")
    for stranger in strangers:
        stranger.close()
    assert engine.get("stranger") == 0


def test_a_thief_of_a_routing_id_gets_nothing_done_without_its_numbers(offender: Offender) -> None:
    """Who takes a live half's routing id over must also know epoch and generation."""
    worker = offender.worker
    thief = worker.dealer(worker.welcomed.identity)
    thief.send_multipart(worker.frames(Cancel(1), generation=worker.welcomed.generation + 1))
    assert thief.poll(90_000), "the refusal goes to who now has the id"
    assert isinstance(codec.read_from_sidecar(thief.recv_multipart()[1]), Error)
    thief.close()
    worker.reconnect()  # as a half does that attaches again: the newest connection has the id
    engine = offender.engine
    engine.put("after the thief")
    assert engine.get("after the thief") == 48


# --- floods and bounds -------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", gates(3_000, 100_000))
def test_floods_leave_nothing_behind(target: Target, offender: Offender, rounds: int) -> None:
    engine, worker, scheduler = offender.engine, offender.worker, offender.scheduler
    save = engine.save_job("flood", (1, 2, 3), job=1)
    engine.fill("flood", (1, 2, 3))
    submit = worker.frames(Submit(encode_job(save.job)), save.raw)
    for number in range(rounds):
        worker.send_frames(submit)
        scheduler.send(Cancel(10 + 2 * number))
        worker.send(JobStatus(11 + 2 * number))
        worker.send(OutcomeAck([number, -number, 2**63]))
        if number % 250 == 0:
            offender.ping()
    offender.ping()
    status = target.status()
    assert status["pipeline"]["tombstones"] <= 2 * target.limits["tombstones_max"]
    assert status["pipeline"]["tombstone_collapses"] > 0
    assert status["pipeline"]["ledger"]["accepted"] == target.accepted + 1, "one job, once"
    scheduler.send(Release([*range(-5_000, 5_000), 2**64 - 1]))


def test_errors_that_nobody_reads_do_not_pile_up(target: Target, offender: Offender) -> None:
    """What a frame said comes back in its refusal: at most as much as an operator reads."""
    worker = offender.worker
    worker.reconnect(queued_max=1)  # the rest queues up in the sidecar
    head = HEADER.pack(MAGIC, 1, 0, worker.welcomed.epoch, worker.welcomed.generation)
    tag = b"\x91\xda\xff\xff" + b"t" * 0xFFFF
    before = target.refused_frames("malformed")
    with target.growth_below(48 * MIB):
        for sent in range(100, 4_001, 100):
            for _ in range(100):
                worker.send_frames([head, tag])
            wait_until(partial(target.has_refused, "malformed", before + sent), "all answered")
    assert len(worker.receive(Error).message) <= 1_024


def test_what_is_kept_of_a_probe_is_bounded_by_its_hashes(
    target: Target, offender: Offender
) -> None:
    """A predecessor is a hash: nothing longer is kept (16,384 admissions of 1 MiB would be)."""
    engine = offender.engine
    long = bytes(MIB // 2)
    with target.growth_below(16 * MIB):
        for number in range(1, 201):
            message = Probe("p", number, NO_VERSION, 0, 0, 1, HASH_BYTES, long)
            offender.scheduler.send(message, b"")
            assert offender.scheduler.receive(Error).code == "frames"
    engine.probe(500, "chain", 3)
    engine.hint(500, 3)
    delta = Probe("p", 500, NO_VERSION, 3, 3, 64, HASH_BYTES, long)
    offender.scheduler.send(delta, b"")
    assert offender.scheduler.receive(Error).code == "frames"


def test_what_is_kept_of_a_request_id_is_bounded(target: Target, offender: Offender) -> None:
    """Open jobs hold a label, not the half mebibyte of it that a frame may carry."""
    engine, count = offender.engine, target.limits["jobs_max"]
    for chars in (id_chars_max, id_chars_max + 1, MIB // 2):
        offender.memory.done(0)
        with target.growth_below(16 * MIB):
            jobs = [
                engine.save_job(f"{chars}/{n}", (1, 2, 3), step=1, request="r" * chars)
                for n in range(count)
            ]
            for job in jobs:
                offender.worker.send(JobStatus(engine.submit(job)))
                assert offender.worker.receive(JobState).state == "running"
        for job in jobs:  # the same bytes again are the same job, label and all
            engine.submit(job)
        offender.memory.done(1)
        assert {engine.ended(job.job.job).status for job in jobs} == {"done"}


def test_jobs_in_flight_are_bounded(target: Target, offender: Offender) -> None:
    engine = offender.engine
    bound = target.limits["jobs_max"]
    jobs = [engine.submit(engine.save_job(f"j{n}", (1, 2, 3), step=1)) for n in range(bound + 20)]
    refused = [engine.ended(job) for job in jobs[bound:]]
    assert {outcome.reason for outcome in refused} == {"jobs-max"}
    offender.memory.done(1)
    assert {engine.ended(job).status for job in jobs[:bound]} == {"done"}


def test_an_offender_that_vanishes_takes_its_open_jobs_along(
    target: Target, offender: Offender
) -> None:
    """Left in the middle of everything: fixture ``offender`` says Bye, ``intact`` checks."""
    engine = offender.engine
    engine.put("open", (1, 2, 3))
    admission, answer = engine.lease("open", 3)
    assert answer.hit_tokens == 48
    engine.submit(engine.load_job(admission, (4, 5, 6), step=99))
    engine.submit(engine.save_job("never", (7, 8, 9), step=99))
    wait_until(
        lambda: target.status()["pipeline"]["jobs_open"] == {"load": 1, "save": 1}, "both are open"
    )
