"""Loads overlapped and serialized: turns, fences, bugs at the end, late ranks, stuck copies."""

from __future__ import annotations

import pytest
from kvferry_connector.wire.hot import Cancel, Outcome, OutcomeAck
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.stages.loads import LoadWork
from kvferry_sidecar.stages.modes import LoadModes
from support.pipeline_bed import BLOCK, Bed, Engine, make_engine

SERIALIZED = LoadModes(mode="serialized")
MODES = pytest.mark.parametrize("modes", [LoadModes(), SERIALIZED], ids=lambda m: m.mode)


def leased(bed: Bed, engine: Engine, admissions: list[int]) -> None:
    """Prompt 1 is stored, and leased once for each admission."""
    bed.stored(engine, 1, 2)
    for admission in admissions:
        bed.probe(engine, admission, 1, 2)
        assert bed.ask(engine, admission, seq=admission).hit_tokens == 2 * BLOCK


def submit(bed: Bed, engine: Engine, admission: int, *, step: int = 0, rank: int = 0) -> int:
    job, raw = bed.load_job(engine, admission, [admission * 3, admission * 3 + 1], step=step)
    bed.submit(engine.workers[rank], job, raw)
    return job.job


def ends(bed: Bed, engine: Engine, rank: int = 0) -> list[tuple[str, str]]:
    found = bed.take(Outcome, engine.workers[rank])
    bed.say(engine.workers[rank], OutcomeAck([end.job for end in found]))
    return [(end.status, end.reason) for end in found]


def test_serialized_copies_one_load_of_a_rank_at_a_time() -> None:
    bed, engine = Bed(modes=SERIALIZED), make_engine()
    other = make_engine("other", first_generation=10, life=b"O" * 16)
    leased(bed, engine, [1, 2, 3])
    bed.probe(other, 1, 1, 2)
    assert bed.ask(other, 1).hit_tokens == 2 * BLOCK
    for admission in (1, 2, 3):
        submit(bed, engine, admission)
        assert len(bed.copies.running) == 1
    submit(bed, other, 1)
    assert len(bed.copies.running) == 2, "another rank is not held up"
    for done in (1, 2, 3):
        own = engine.layouts.values()
        (ticket,) = (t for t, copy in bed.copies.running.items() if copy.extents.layout in own)
        bed.copies.finish(ticket)
        bed.pipeline.on_copies(bed.now_s)
        assert len(ends(bed, engine)) == 1, done
    bed.run_copies()
    assert ends(bed, other) == [("done", "")]
    bed.assert_clean()


def test_a_save_holds_no_serialized_load_of_its_rank_up() -> None:
    bed, engine = Bed(modes=SERIALIZED), make_engine()
    leased(bed, engine, [1])
    save, raw = bed.save_job(engine, 7, [20, 21])
    bed.submit(engine.workers[0], save, raw)
    submit(bed, engine, 1)
    assert len(bed.copies.running) == 2
    bed.run_copies()
    assert ends(bed, engine) == [("done", "")] * 2
    bed.assert_clean()


def test_overlapped_copies_all_at_once() -> None:
    bed, engine = Bed(), make_engine()
    leased(bed, engine, [1, 2, 3])
    for admission in (1, 2, 3):
        submit(bed, engine, admission)
    assert len(bed.copies.running) == 3
    bed.run_copies()
    assert ends(bed, engine) == [("done", "")] * 3
    bed.assert_clean()


@MODES
def test_no_copy_starts_before_its_fence(modes: LoadModes) -> None:
    bed, engine = Bed(modes=modes), make_engine()
    leased(bed, engine, [1, 2])
    submit(bed, engine, 1, step=5)
    submit(bed, engine, 2, step=4)
    engine.fence().reach(4)
    bed.pass_s(0.001)
    assert len(bed.copies.running) == 1
    bed.run_copies()
    engine.fence().reach(5)
    bed.pass_s(0.001)
    bed.run_copies()
    assert ends(bed, engine) == [("done", "")] * 2
    bed.assert_clean()


@MODES
def test_a_bug_at_the_end_of_one_load_costs_no_other(
    modes: LoadModes, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, engine = Bed(modes=modes), make_engine()
    leased(bed, engine, [1, 2, 3])
    numbers = [submit(bed, engine, admission) for admission in (1, 2, 3)]
    right = LoadWork.conclude

    def conclude(self: LoadWork, part):
        if part.run.job.job == numbers[0]:
            raise RuntimeError("injected")
        return right(self, part)

    monkeypatch.setattr(LoadWork, "conclude", conclude)
    while bed.copies.running:
        bed.run_copies()
    assert ends(bed, engine) == [("failed", "internal"), ("done", ""), ("done", "")]
    assert len(bed.log.errors) == 1
    bed.log.errors.clear()
    bed.assert_clean()


@MODES
def test_a_delayed_rank_ends_by_itself(modes: LoadModes) -> None:
    bed, engine = Bed(modes=modes), make_engine(ranks=2)
    leased(bed, engine, [1, 2])
    raws = [bed.load_job(engine, n, [n * 3, n * 3 + 1]) for n in (1, 2)]
    for job, raw in raws:
        bed.submit(engine.workers[0], job, raw)
    while bed.copies.running:
        bed.run_copies()
    assert ends(bed, engine) == [("done", "")] * 2
    bed.pass_s(5)
    for job, raw in reversed(raws):
        bed.submit(engine.workers[1], job, raw)
    assert bed.pipeline.snapshot().leases == 2, "its lease is not given back before"
    while bed.copies.running:
        bed.run_copies()
    assert ends(bed, engine, rank=1) == [("done", "")] * 2
    bed.assert_clean()


@pytest.mark.parametrize(("modes", "end"), [(LoadModes(), "done"), (SERIALIZED, "failed")])
def test_a_stuck_copy_holds_up_only_what_must_come_after_it(modes: LoadModes, end: str) -> None:
    """Lookups, other engines and saves go on; a serialized load behind it fails at its deadline."""
    bed, engine = Bed(modes=modes), make_engine()
    other = make_engine("other", first_generation=10, life=b"O" * 16)
    leased(bed, engine, [1, 2])
    submit(bed, engine, 1)
    (stuck,) = bed.copies.running
    submit(bed, engine, 2)
    bed.probe(other, 1, 1, 2)
    assert bed.ask(other, 1).hit_tokens == 2 * BLOCK
    submit(bed, other, 1)
    save, raw = bed.save_job(engine, 7, [20, 21])
    bed.submit(engine.workers[0], save, raw)
    for ticket in list(bed.copies.running):
        if ticket != stuck:
            bed.copies.finish(ticket)
    bed.pipeline.on_copies(bed.now_s)
    assert ends(bed, other) == [("done", "")]
    assert ends(bed, engine) == [("done", "")] * (2 if end == "done" else 1), "the save at least"
    bed.pass_s(61)
    assert ends(bed, engine) == ([] if end == "done" else [("failed", "queue")])
    assert bed.pipeline.snapshot().jobs_open["load"] == 1, "the stuck one keeps its blocks"
    bed.run_copies()
    assert ends(bed, engine) == [("failed", "copy-deadline")]
    bed.assert_clean()


def test_saves_behind_stuck_ones_give_their_pins_back() -> None:
    bed, engine = Bed(Limits(save_copies_max=1)), make_engine()
    for prompt in (1, 2):
        job, raw = bed.save_job(engine, prompt, [prompt])
        bed.submit(engine.workers[0], job, raw)
    bed.pass_s(61)
    assert ends(bed, engine) == [("failed", "queue")]
    bed.run_copies()
    assert ends(bed, engine) == [("failed", "copy-deadline")]
    bed.assert_clean()


def test_cancel_of_a_load_that_waits_for_its_turn() -> None:
    bed, engine = Bed(modes=SERIALIZED), make_engine()
    leased(bed, engine, [1, 2])
    submit(bed, engine, 1)
    waiting = submit(bed, engine, 2)
    bed.say(engine.scheduler, Cancel(waiting))
    assert ends(bed, engine) == [("cancelled", "cancelled")]
    bed.run_copies()
    assert ends(bed, engine) == [("done", "")]
    bed.assert_clean()
