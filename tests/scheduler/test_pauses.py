"""A pause or a shutdown while the sidecar hangs: what ends it, and what it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from support.scheduler_harness import SchedulerUnderTest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

PROMPT = list(range(10, 210))


def make(folder: Path, **options: Any) -> SchedulerUnderTest:
    """An engine whose store holds PROMPT's 192 tokens; the sidecar hangs from now on."""
    engine = SchedulerUnderTest(folder, **options)
    engine.warm_up(PROMPT)
    engine.node.load_steps = engine.node.save_steps = 1_000_000
    engine.node.hears = False
    awake(engine, 0)
    return engine


def awake(engine: SchedulerUnderTest, ms_max: int) -> None:
    engine.half._config = msgspec.structs.replace(engine.half._config, awake_ms_max=ms_max)


def die(engine: SchedulerUnderTest) -> None:
    """The sidecar's end is proven: every rank reports its open jobs as failed."""
    for running in engine.node.running:
        running.cancelled = True
    engine.node.restart()
    engine.node.load_steps = engine.node.save_steps = 1
    awake(engine, 60_000)


def test_a_pause_with_saves_in_flight_ends_at_the_bound(tmp_path: Path) -> None:
    engine = make(tmp_path)
    engine.add("b", [*PROMPT[:3], *range(300, 400)])
    engine.step(4)
    assert engine.half._jobs.pinned_blocks
    engine.abort("b")
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.step()  # tells the workers of the aborted request
    assert not engine.scheduler.has_requests(), "the engine is idle: the pause is complete"
    engine._count()
    assert engine.counts["awake_ms_max"] == 1
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    die(engine)
    engine.add("c", list(range(300, 420)))
    engine.run()
    engine.assert_idle()


def test_a_pause_with_a_load_in_flight_ends_with_the_sidecar(tmp_path: Path) -> None:
    engine = make(tmp_path)
    engine.add("b", PROMPT)
    engine.step(2)
    assert engine.requests["b"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    held = engine.pool.get_num_free_blocks()
    engine.abort("b")
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(30):
        assert engine.scheduler.has_requests(), "its blocks may still be written"
        engine.step()
    assert engine.pool.get_num_free_blocks() == held
    die(engine)
    engine.step(3)
    assert not engine.scheduler.has_requests()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    engine.assert_idle()


def test_a_cold_prefill_goes_on_beside_a_load_that_hangs(tmp_path: Path) -> None:
    engine = make(tmp_path)
    engine.add("b", PROMPT)
    engine.step(2)
    engine.add("c", list(range(300, 460)))
    while not engine.requests["c"].is_finished():
        engine.step()
    assert engine.requests["b"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    die(engine)
    engine.run()
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle()
