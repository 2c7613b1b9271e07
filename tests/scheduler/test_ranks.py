"""Two ranks through vLLM's own aggregator: a late one delays, a failed one fails them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvferry_connector.wire import hot
from support.scheduler_harness import SchedulerUnderTest, loads_of
from vllm.v1.request import RequestStatus

PROMPT = list(range(10, 210))


def make(folder: Path, **options: Any) -> SchedulerUnderTest:
    """Two ranks whose store holds PROMPT's 192 tokens while they have nothing themselves."""
    engine = SchedulerUnderTest(folder, ranks=2, **options)
    engine.warm_up(PROMPT)
    return engine


def test_a_late_rank_delays_and_loses_nothing(tmp_path: Path) -> None:
    engine = make(tmp_path)
    (late,) = engine.further_ranks
    late.lag = 6
    engine.add("b", PROMPT)
    engine.step(6)
    assert engine.requests["b"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.add("c", list(range(300, 330)))
    engine.step()
    assert engine.outputs[-1].num_scheduled_tokens == {"c": 30}, "others go on"
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192)]
    assert engine.counts["loads_failed"] == 0
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle()


@pytest.mark.parametrize("lag", [0, 5])
def test_a_failed_rank_fails_the_load_on_all(tmp_path: Path, lag: int) -> None:
    """The other's success is discarded, and nothing is asked before both have stopped."""
    engine = make(tmp_path)
    (other,) = engine.further_ranks
    other.lag, other.fails, other.shorter = lag, True, 96
    engine.add("b", PROMPT)
    engine.step(2 + lag)
    assert len(engine.node.sent(hot.Ask)) == 1
    while len(loads_of(engine.node)) < 2:
        engine.step()
    other.fails = False
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192), ("b", 0, 96)]
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle()


def test_pins_wait_for_the_late_rank(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, ranks=2, pinned_blocks_max=64)
    engine.further_ranks[0].lag = 8
    engine.add("a", PROMPT, max_tokens=1)
    engine.step(6)
    assert engine.half._jobs.pinned_blocks == 12
    engine.run()
    engine.assert_idle()


def test_policy_fail_with_one_failed_rank(tmp_path: Path) -> None:
    engine = make(tmp_path, policy="fail")
    engine.further_ranks[0].fails = True
    engine.add("b", PROMPT)
    engine.run()
    assert engine.requests["b"].status is RequestStatus.FINISHED_ERROR
    engine.assert_idle()
