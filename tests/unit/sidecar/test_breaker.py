"""Load or recompute: hits that lose are withheld, tried now and then, and offered again."""

from __future__ import annotations

import pytest
from kvferry_connector.wire.attach import Heartbeat
from kvferry_connector.wire.hot import Outcome, OutcomeAck, Release
from kvferry_sidecar.observe import verdicts
from kvferry_sidecar.stages.breaker import loads_min, trial_every
from kvferry_sidecar.stages.modes import LoadModes
from support.pipeline_bed import BLOCK, Bed, Engine, make_engine

CHUNKS = 4
COMPUTE_NS = 100_000


def start(*, breaker: bool = True) -> tuple[Bed, Engine]:
    bed, engine = Bed(modes=LoadModes(breaker=breaker)), make_engine()
    bed.stored(engine, 1, CHUNKS)
    say_cost(bed, engine)
    return bed, engine


def say_cost(bed: Bed, engine: Engine) -> None:
    beat = Heartbeat(1, 0, [], [], COMPUTE_NS)
    bed.pipeline.on_beat(engine.scheduler, beat, bed.now_s)


def offered(bed: Bed, engine: Engine, admission: int, local: int = 0) -> int:
    bed.probe(engine, admission, 1, CHUNKS)
    answer = bed.ask(engine, admission, seq=admission, local=local)
    if answer.hit_tokens == local:
        assert answer.reason == "slower"
    return answer.hit_tokens - local


def load(bed: Bed, engine: Engine, admission: int, seconds: float) -> None:
    job, raw = bed.load_job(engine, admission, [5, 6, 7, 8])
    bed.submit(engine.workers[0], job, raw)
    bed.now_s += seconds
    bed.run_copies()
    (end,) = bed.take(Outcome, engine.workers[0])
    assert end.status == "done"
    bed.say(engine.workers[0], OutcomeAck([job.job]))


def measured(bed: Bed, engine: Engine, seconds: float) -> int:
    """Load until there are enough measures; returns the last admission."""
    for admission in range(1, loads_min + 1):
        assert offered(bed, engine, admission) == CHUNKS * BLOCK
        load(bed, engine, admission, seconds)
        bed.say(engine.scheduler, Release([admission]))
    return loads_min


def test_hits_that_lose_are_withheld_and_tried_now_and_then() -> None:
    bed, engine = start()
    last = measured(bed, engine, seconds=0.1)
    found = [offered(bed, engine, last + n) for n in range(1, trial_every + 1)]
    assert found == [0] * (trial_every - 1) + [CHUNKS * BLOCK]
    withheld = bed.pipeline.records.get((engine.session.life, last + 1))
    told = verdicts.view(withheld, bed.now_s, timeline=False).verdict
    assert "loading takes this engine longer than computing" in told
    (reading,) = bed.pipeline.snapshot().breaker.values()
    assert (reading.withheld, reading.trials, reading.open) == (trial_every - 1, 1, True)
    assert reading.compute_us == 100.0
    assert reading.load_us == pytest.approx(0.1e6 / (CHUNKS * BLOCK))
    assert bed.pipeline.snapshot().declines["slower"] == trial_every - 1
    assert bed.pool.stats().leased == CHUNKS, "what is withheld is not leased"


def test_trials_that_win_close_it_again() -> None:
    bed, engine = start()
    admission = measured(bed, engine, seconds=0.1)
    for _ in range(200):
        admission += 1
        if offered(bed, engine, admission):
            load(bed, engine, admission, 0.0001)
        bed.say(engine.scheduler, Release([admission]))
    (reading,) = bed.pipeline.snapshot().breaker.values()
    assert not reading.open
    assert offered(bed, engine, admission + 1) == CHUNKS * BLOCK


@pytest.mark.parametrize(
    ("seconds", "local"),
    [
        (0.008, 0),  # slower than the 6.4 ms of computing, but not by much
        (0.0001, 0),
        (0.03, 3 * BLOCK),  # loses in all, but less than 10 ms in one chunk
    ],
)
def test_hits_that_lose_little_or_nothing_are_offered(seconds: float, local: int) -> None:
    bed, engine = start()
    last = measured(bed, engine, seconds)
    assert offered(bed, engine, last + 1, local) == CHUNKS * BLOCK - local


def test_nothing_is_withheld_when_it_is_off_or_the_engine_is_silent() -> None:
    bed, engine = start(breaker=False)
    last = measured(bed, engine, seconds=0.5)
    assert offered(bed, engine, last + 1) == CHUNKS * BLOCK
    bed.pipeline.set_breaker(enabled=True)  # by a reload
    assert offered(bed, engine, last + 2) == 0
    bed, engine = Bed(), make_engine()
    bed.stored(engine, 1, CHUNKS)
    last = measured(bed, engine, seconds=0.5)
    assert offered(bed, engine, last + 1) == CHUNKS * BLOCK
    assert bed.pipeline.snapshot().breaker == {}


def test_an_engine_that_is_gone_leaves_nothing() -> None:
    bed, engine = start()
    measured(bed, engine, seconds=0.1)
    bed.pipeline.on_peer_dead(engine.scheduler, bed.now_s)
    assert bed.pipeline.snapshot().breaker == {}
