"""Failed loads in vLLM's real Scheduler: one shorter load at most, then the rest is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvferry_connector.wire import hot
from support.scheduler_configs import full, mamba, swa
from support.scheduler_harness import SchedulerUnderTest, loads_of, saves_of
from vllm.v1.request import RequestStatus

PROMPT = list(range(10, 210))  # 200 tokens: a hit of 192


def make(folder: Path, **options: Any) -> SchedulerUnderTest:
    """An engine whose store holds PROMPT's 192 tokens while it has nothing itself."""
    engine = SchedulerUnderTest(folder, num_blocks=128, **options)
    engine.warm_up(PROMPT)
    return engine


def damage(engine: SchedulerUnderTest, group: int, chunk: int) -> None:
    """The object of one chunk of PROMPT does not verify any more."""
    size = engine.blocks[group]
    name = engine.requests["warm"].block_hashes[(chunk + 1) * size // engine.hash_tokens - 1]
    (key,) = (key for key in engine.node.store if key[1:] == (group, name))
    engine.node.damaged.add(key)


def test_the_longest_whole_prefix_is_loaded_once(tmp_path: Path) -> None:
    engine = make(tmp_path)
    damage(engine, 0, 7)
    engine.node.saved.clear()
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192), ("b", 0, 112)]
    assert [ask.max_tokens for ask in engine.node.sent(hot.Ask)] == [192, 112]
    assert (engine.counts["loads"], engine.counts["loads_again"]) == (1, 1)
    assert min(start for _, start, _ in saves_of(engine.node)) == 112, "the rest is saved anew"
    engine.forget_local()
    engine.node.damaged.clear()
    engine.add("c", PROMPT)
    engine.run()
    assert loads_of(engine.node)[-1] == ("c", 0, 192)
    engine.assert_idle()


def test_a_second_failure_is_the_last(tmp_path: Path) -> None:
    engine = make(tmp_path)
    damage(engine, 0, 7)
    engine.add("b", PROMPT)
    while len(loads_of(engine.node)) < 2:
        engine.step()
    damage(engine, 0, 2)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192), ("b", 0, 112)]
    assert len(engine.node.sent(hot.Ask)) == 2
    assert engine.counts["loads_failed"] == 2
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle()


@pytest.mark.parametrize(
    ("specs", "num_blocks"),
    [([full(16), swa(16, 40)], 34), ([full(16), mamba(16, scratch=2), swa(16, 40)], 41)],
    ids=["window", "states"],
)
def test_who_failed_lets_pass_who_still_holds_blocks(
    tmp_path: Path, specs: list[Any], num_blocks: int
) -> None:
    """Both loads fail; computing needs more than loading did, and does not fit beside the other.

    vLLM keeps the first at the head of those that hold blocks, and would admit nobody any more.
    """
    engine = SchedulerUnderTest(tmp_path, specs=specs, num_blocks=num_blocks)
    engine.warm_up(PROMPT)
    engine.node.load_fails, engine.node.load_steps = True, 3
    engine.add("a", PROMPT)
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == [("a", 0, 192), ("b", 0, 192)]
    assert [engine.requests[name].num_output_tokens for name in "ab"] == [4, 4]
    engine.assert_idle()


@pytest.mark.parametrize(
    ("retention", "group", "chunk", "offered"),
    [
        (0, 0, 5, []),  # full attention would be whole to 80, but no window ends there
        (0, 1, 11, []),  # the only window
        (None, 0, 5, [80]),
        (None, 1, 11, [176]),
        (None, 1, 9, [144]),
    ],
)
def test_each_group_in_turn_falls_back_to_what_all_have(
    tmp_path: Path, retention: int | None, group: int, chunk: int, offered: list[int]
) -> None:
    engine = make(tmp_path, specs=[full(16), swa(16, 40)], retention=retention)
    damage(engine, group, chunk)
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192), *(("b", 0, total) for total in offered)]
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle()


@pytest.mark.parametrize(
    ("retention", "group", "chunk", "offered"),
    [
        (0, 2, 11, []),  # the only state
        (None, 2, 11, [176]),
        (None, 1, 10, [160]),
        (None, 0, 5, [80]),
    ],
    ids=["the only state", "state", "window", "full"],
)
def test_a_state_a_window_and_full_attention_fail_in_turn(
    tmp_path: Path, retention: int | None, group: int, chunk: int, offered: list[int]
) -> None:
    engine = make(tmp_path, specs=[full(16), swa(16, 40), mamba(16)], retention=retention, batch=16)
    damage(engine, group, chunk)
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192), *(("b", 0, total) for total in offered)]
    assert engine.counts["loads_again"] == len(offered)
    assert engine.counts["loads_failed"] == 1
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle()


def test_a_state_that_fails_again_is_the_last_load(tmp_path: Path) -> None:
    engine = make(tmp_path, specs=[full(16), mamba(16)], retention=None, batch=16)
    damage(engine, 1, 11)
    engine.add("b", PROMPT)
    while len(loads_of(engine.node)) < 2:
        engine.step()
    damage(engine, 1, 10)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192), ("b", 0, 176)]
    assert (engine.counts["loads_failed"], engine.counts["loads_again"]) == (2, 1)
    engine.assert_idle()


@pytest.mark.parametrize(
    ("group", "chunk", "shorter"), [(0, 7, 112), (1, 10, 160), (2, 11, 176)],
    ids=["full", "window", "state"],
)  # fmt: skip
def test_two_requests_that_share_the_damaged_object_recover_once_each(
    tmp_path: Path, group: int, chunk: int, shorter: int
) -> None:
    engine = make(tmp_path, specs=[full(16), swa(16, 40), mamba(16)], retention=None, batch=16)
    damage(engine, group, chunk)
    engine.add("b", PROMPT)
    engine.add("c", PROMPT)
    engine.run()
    loads = loads_of(engine.node)
    assert sorted(loads[:2]) == [("b", 0, 192), ("c", 0, 192)]
    assert sorted(loads[2:]) == [("b", 0, shorter), ("c", 0, shorter)]
    assert engine.counts["loads_again"] == 2
    assert all(engine.requests[name].num_output_tokens == 4 for name in "bc")
    engine.assert_idle()


def test_policy_fail_ends_the_request_and_offers_nothing_more(tmp_path: Path) -> None:
    engine = make(tmp_path, policy="fail")
    damage(engine, 0, 7)
    engine.add("b", PROMPT)
    engine.run()
    assert engine.requests["b"].status is RequestStatus.FINISHED_ERROR
    assert loads_of(engine.node) == [("b", 0, 192)]
    engine.add("c", PROMPT)
    engine.run()
    assert loads_of(engine.node)[1:] == [("c", 0, 112)]
    assert engine.requests["c"].num_output_tokens == 4
    engine.assert_idle()
