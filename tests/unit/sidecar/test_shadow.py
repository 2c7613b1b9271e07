"""Shadow verification: what is watched, what counts as a difference, and the quarantine."""

from __future__ import annotations

import resource
from pathlib import Path

import msgspec
import numpy as np
import pytest
import structlog
from kvferry_connector.wire.attach import Group, RegisterRank, Shard
from kvferry_connector.wire.hot import Outcome, OutcomeAck, Release
from kvferry_sidecar.quarantine import FILE, Quarantine
from kvferry_sidecar.sessions.leases import LeaseKey
from kvferry_sidecar.stages.modes import LoadModes
from kvferry_sidecar.stages.shadow import differs
from support.pipeline_bed import BLOCK, Bed, Engine, make_engine

RANDOM = np.random.default_rng(7)


def start(percent: int = 100, ranks: int = 1, slots: int = 64) -> tuple[Bed, Engine]:
    """Prompt 1 is stored; payloads are made of the symbolic values of the fake copies."""
    bed = Bed(modes=LoadModes(shadow_percent=percent), slots=slots)
    engine = make_engine(ranks=ranks)
    pool = bed.pipeline._core.pool

    def payload(entries: np.ndarray, count: int) -> np.ndarray:
        at = int(pool.payload_offsets(entries)[0])
        values = [bed.copies.memory[at + 1024 * shard] for shard in range(count // 1024)]
        return np.array(values, np.int64).view(np.uint8)

    pool.payload = payload  # type: ignore[method-assign]  # there are no real bytes here
    bed.stored(engine, 1, 4)
    return bed, engine


def ask(bed: Bed, engine: Engine, admission: int) -> tuple[int, str]:
    bed.probe(engine, admission, 1, 4)
    answer = bed.ask(engine, admission, seq=admission)
    return answer.hit_tokens, answer.reason


def save(bed: Bed, engine: Engine, admission: int, blocks: list[int]) -> str:
    """The request computes prompt 1 into these blocks, and saves it."""
    job, raw = bed.save_job(engine, 1, blocks)
    job = msgspec.structs.replace(job, admission=admission)
    for worker in engine.workers:
        bed.submit(worker, job, raw)
    bed.run_copies()
    ends = [bed.take(Outcome, worker)[0] for worker in engine.workers]
    for worker in engine.workers:
        bed.say(worker, OutcomeAck([job.job]))
    return str(ends[0].reason or ends[0].status)


def register(engine: Engine, facts: dict[str, str]) -> None:
    """Of the engine's only group, as its rank has described it."""
    group = Group(0, "full", BLOCK, facts, [], cacheable=True)
    shard = Shard(0, 1, 0, 1, 0, 1)
    engine.workers[0].registration = RegisterRank(1, shard, {}, 64, "NHD", [group], [], BLOCK)


def reading(bed: Bed):
    return bed.pipeline.snapshot().shadow


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_computed_again_and_equal_stays_a_hit(ranks: int) -> None:
    bed, engine = start(ranks=ranks)
    for admission in (1, 2, 3):
        assert ask(bed, engine, admission) == (0, "shadow")
        assert ask(bed, engine, admission) == (0, "shadow"), "asking again changes nothing"
        assert save(bed, engine, admission, [1, 2, 3, 4]) == "done"
        bed.say(engine.scheduler, Release([admission]))
    found = reading(bed)
    assert (found.watched, found.compared, found.differed, found.open) == (3, 3, 0, 0)
    assert bed.pool.stats().ready == 4, "nothing was added"
    bed.assert_clean()


def test_a_difference_quarantines_the_namespace() -> None:
    bed, engine = start()
    namespace = engine.session.namespaces[engine.session.version]
    assert ask(bed, engine, 1) == (0, "shadow")
    engine.layouts[0, 0].values.update(dict.fromkeys(range(10, 14), 0x5A5A5A5A5A5A5A5A))
    assert save(bed, engine, 1, [10, 11, 12, 13]) == "done"
    assert reading(bed).quarantined == [namespace.hex()]
    bed.say(engine.scheduler, Release([1]))
    assert ask_quarantined(bed, engine, 2) == "quarantined"
    assert save(bed, engine, 2, [1, 2, 3, 4]) == "quarantined"
    engine.session.version = b"v" * 16
    engine.session.namespaces[engine.session.version] = b"m" * 16
    bed.probe(engine, 3, 1, 4)
    assert bed.ask(engine, 3, seq=9).reason == "absent", "another version is believed"
    bed.assert_clean()


def ask_quarantined(bed: Bed, engine: Engine, admission: int) -> str:
    bed.probe(engine, admission, 1, 4)
    return bed.ask(engine, admission, seq=admission).reason


def test_a_load_that_was_promised_before_the_quarantine_fails() -> None:
    bed, engine = start(percent=50)
    assert ask(bed, engine, 1)[0] == 4 * BLOCK
    assert ask(bed, engine, 2) == (0, "shadow")
    engine.layouts[0, 0].values.update(dict.fromkeys(range(10, 14), 0x5A5A5A5A5A5A5A5A))
    save(bed, engine, 2, [10, 11, 12, 13])
    job, raw = bed.load_job(engine, 1, [20, 21, 22, 23])
    bed.submit(engine.workers[0], job, raw)
    (end,) = bed.take(Outcome, engine.workers[0])
    assert (end.status, end.reason) == ("failed", "quarantined")


def test_a_watched_request_that_saves_nothing_gives_its_lease_back() -> None:
    bed, engine = start()
    ask(bed, engine, 1)
    assert bed.pool.stats().leased == 1
    bed.say(engine.scheduler, Release([1]))
    ask(bed, engine, 2)
    bed.pipeline.on_peer_dead(engine.scheduler, bed.now_s)
    assert (reading(bed).dropped, reading(bed).compared) == (2, 0)
    bed.assert_clean()


def test_a_request_that_ends_before_its_save_is_compared_all_the_same() -> None:
    bed, engine = start()
    ask(bed, engine, 1)
    job, raw = bed.save_job(engine, 1, [1, 2, 3, 4])
    bed.submit(engine.workers[0], msgspec.structs.replace(job, admission=1), raw)
    bed.say(engine.scheduler, Release([1]))
    bed.run_copies()
    assert (reading(bed).compared, reading(bed).dropped) == (1, 0)
    bed.say(engine.workers[0], OutcomeAck([job.job]))
    bed.assert_clean()


@pytest.mark.parametrize(
    ("facts", "dtype"),
    [
        ({"dtype": "torch.bfloat16"}, "torch.bfloat16"),
        ({"dtype": "torch.uint8"}, "torch.uint8"),  # an indexer's, whatever the model's is
        ({"dtype": "torch.bfloat16", "members": "pages of two kinds"}, ""),
    ],
)
def test_a_page_is_read_as_its_group_has_it(facts: dict[str, str], dtype: str) -> None:
    bed, engine = start()
    register(engine, facts)
    ask(bed, engine, 1)
    check = bed.pipeline._core.shadows.find(LeaseKey(engine.session.life, 1))
    assert check is not None
    assert check.dtype == dtype


def test_a_comparison_that_fails_keeps_nothing() -> None:
    bed, engine = start()
    register(engine, {"dtype": "torch.float32"})
    bed.pipeline._core.pool.payload = lambda entries, _: np.full(3, entries[0], np.uint8)
    ask(bed, engine, 1)
    assert save(bed, engine, 1, [1, 2, 3, 4]) == "done"
    bed.say(engine.scheduler, Release([1]))
    assert "job not settled" in bed.log.errors.pop(), "3 bytes are no floats"
    bed.assert_clean()


def test_a_full_pool_drops_the_comparison_and_not_the_save() -> None:
    bed, engine = start(slots=4)
    for admission in (2, 3):  # watched too: two more objects are leased
        ask(bed, engine, admission)
    pool = bed.pool
    held = pool.lease(np.array([list(e.key) for e in pool._entries.values()], np.uint8))
    ask(bed, engine, 1)
    assert save(bed, engine, 1, [1, 2, 3, 4]) == "done"
    assert (reading(bed).compared, reading(bed).dropped) == (0, 1)
    pool.release(held)


def test_the_share_is_what_was_asked_for() -> None:
    bed, engine = start(percent=25)
    found = []
    for admission in range(1, 41):
        found.append(ask(bed, engine, admission)[1])
        bed.say(engine.scheduler, Release([admission]))
    assert found.count("shadow") == 10


# --- what is a difference -----------------------------------------------------------------------


def payload(numbers: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "torch.bfloat16":
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return numbers.astype(dtype.removeprefix("torch.")).view(np.uint8)


@pytest.mark.parametrize("dtype", ["torch.float16", "torch.bfloat16", "torch.float32"])
def test_rounding_is_no_difference_and_another_prompt_is(dtype: str) -> None:
    numbers = RANDOM.standard_normal(4096)
    noisy = numbers * (1 + 0.02 * RANDOM.standard_normal(4096))
    other = RANDOM.standard_normal(4096)
    assert differs(payload(numbers, dtype), payload(noisy, dtype), dtype) == ""
    assert "relative error 1." in differs(payload(numbers, dtype), payload(other, dtype), dtype)
    broken = numbers.copy()
    broken[7] = np.nan
    assert "finite" in differs(payload(numbers, dtype), payload(broken, dtype), dtype)
    assert differs(payload(broken, dtype), payload(broken * 1.0, dtype), dtype) == ""


def test_packed_formats_are_compared_by_their_bytes() -> None:
    stored = RANDOM.integers(0, 256, 4096, dtype=np.uint8)
    near = stored.copy()
    near[::3] += 1
    assert differs(stored, near, "fp8_ds_mla") == ""
    other = RANDOM.integers(0, 256, 4096, dtype=np.uint8)
    assert "bytes are equal" in differs(stored, other, "fp8_ds_mla")


# --- over restarts ------------------------------------------------------------------------------


def test_the_quarantine_outlives_the_process(tmp_path: Path) -> None:
    degraded: dict[str, str] = {}
    first = Quarantine(tmp_path, degraded, structlog.get_logger())
    assert (first.namespaces, degraded) == ([], {})
    first.add(b"n" * 16, "seen")
    first.add(b"n" * 16, "seen again")
    assert degraded
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text() + "no digest\n")
    assert Quarantine(tmp_path, {}, structlog.get_logger()).namespaces == [b"n" * 16]


def test_a_quarantine_that_cannot_be_written_keeps_what_it_had(tmp_path: Path) -> None:
    first = Quarantine(tmp_path, {}, structlog.get_logger())
    first.add(b"n" * 16, "seen")
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, former[1]))  # as where no space is left
    try:
        with structlog.testing.capture_logs() as lines:
            first.add(b"m" * 16, "seen")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert "not kept over a restart" in lines[-1]["event"]
    assert first.namespaces == [b"n" * 16, b"m" * 16]
    assert Quarantine(tmp_path, {}, structlog.get_logger()).namespaces == [b"n" * 16]
