"""Resets of vLLM's own cache while pins and loads are out: new weights, pauses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvferry_connector.wire import hot
from support.scheduler_harness import SchedulerUnderTest, loads_of, saves_of
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

PROMPT = list(range(10, 210))


def make(folder: Path, **options: Any) -> SchedulerUnderTest:
    """An engine whose store holds PROMPT's 192 tokens while it has nothing itself."""
    engine = SchedulerUnderTest(folder, num_blocks=64, **options)
    engine.warm_up(PROMPT)
    return engine


def test_pins_do_not_stand_in_the_way_of_a_reset(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, pinned_blocks_max=64)
    engine.node.save_steps = 40
    engine.add("a", PROMPT, max_tokens=1)
    engine.step(4)
    assert engine.requests["a"].is_finished()
    held = engine.half._jobs.pinned_blocks
    assert held == 12
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.half._jobs.pinned_blocks == held
    assert engine.pool.get_num_free_blocks() == engine.free_at_start - held
    engine.add("b", [*PROMPT[:100], *range(300, 500)])  # takes what is not pinned
    engine.step()
    assert engine.outputs[-1].scheduled_new_reqs[0].num_computed_tokens == 0, "no local hit"
    engine.run()
    assert engine.counts["saves_failed"] == 0
    engine.assert_idle()


def test_a_last_save_that_no_step_has_told_is_given_up(tmp_path: Path) -> None:
    """An engine in its caller's process takes no step after its last request, and may sleep then:

    what a later step would have saved is other memory, under a version that other engines share.
    """
    engine = SchedulerUnderTest(tmp_path)
    engine.add("a", PROMPT[:16], max_tokens=40)
    while not engine.requests["a"].is_finished():
        engine.step()
    assert engine.half._saver.orders, "it is due with the next step"
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.half._jobs.pinned_blocks == 0
    engine.add("b", PROMPT[:20], max_tokens=20)
    engine.run()
    assert [one[0] for one in saves_of(engine.node)] == ["a", "b", "b"]
    assert engine.counts["saves_given_up"] == 1
    engine.assert_idle()


def test_running_requests_are_reset_too_with_pins_out(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, pinned_blocks_max=64)
    engine.node.save_steps = 10
    engine.add("a", PROMPT, max_tokens=30)
    engine.step(6)
    assert engine.half._jobs.pinned_blocks
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    old = engine.node.jobs[-1].version
    engine.run()
    versions = [job.version for job in engine.node.jobs]
    assert versions.index(versions[-1]) == versions.count(old), "old ones first, then new ones only"
    assert saves_of(engine.node)[versions.count(old)][1] == 0, "saved anew from its start"
    engine.assert_idle()


@pytest.mark.parametrize("hears", [True, False])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_load_that_a_reset_overtakes_is_not_believed(
    tmp_path: Path, hears: bool, policy: str
) -> None:
    """Also of a sidecar that does not hear the cancel and brings everything in order."""
    engine = make(tmp_path, policy=policy)
    engine.node.load_steps, engine.node.hears = 3, hears
    engine.add("b", PROMPT)
    engine.step(2)
    assert engine.requests["b"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert not engine.scheduler.reset_prefix_cache(), "its blocks are the copy's"
    engine.run()
    assert engine.node.sent(hot.Cancel)
    assert loads_of(engine.node) == [("b", 0, 192)]
    if policy == "fail":
        assert engine.requests["b"].status is RequestStatus.FINISHED_ERROR
    else:
        assert engine.requests["b"].num_output_tokens == 4
        assert {job.version for job in engine.node.jobs[1:]} == {engine.node.rotations[-1]}
    engine.assert_idle()


def test_pause_that_keeps_requests_with_a_load_in_flight(tmp_path: Path) -> None:
    """vLLM's reset raises (to its caller, not into the engine); the namespace is left all the same.

    The pause takes no step, so the load's end is only heard of after it: it is of the old weights.
    """
    engine = make(tmp_path)
    engine.node.load_steps, engine.node.hears = 3, False
    engine.add("b", PROMPT)
    engine.step(2)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert len(engine.node.rotations) == 1
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192)]
    assert engine.requests["b"].num_output_tokens == 4
    assert engine.counts["loads_failed"] == 1
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.assert_idle()
