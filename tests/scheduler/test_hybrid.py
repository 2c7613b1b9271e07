"""FerryConnector in vLLM's real Scheduler with sliding windows and chunked local attention.

The harness holds every block's content against the (group, prefix hash) it should have, before
each forward and for each job; what must be there and is null fails at once.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.scheduler_configs import WINDOWS, full, swa
from support.scheduler_harness import SchedulerUnderTest, loads_of, saves_of
from vllm.v1.core.kv_cache_manager import KVCacheBlocks

PROMPT = list(range(10, 210))  # 200 tokens


@pytest.mark.parametrize("retention", [None, 48])
def test_denser_retention_of_the_engine_hits_inside_a_prompt(
    tmp_path: Path, retention: int | None
) -> None:
    engine = SchedulerUnderTest(
        tmp_path, specs=WINDOWS["full and window"], num_blocks=128, retention=retention
    )
    engine.warm_up(PROMPT)
    engine.add("b", [*PROMPT[:104], *range(300, 390)])
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 96)]
    engine.assert_idle()


def test_pins_of_a_window_are_those_near_its_boundary(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, specs=WINDOWS["window alone"], num_blocks=128)
    engine.node.save_steps = 100
    engine.add("a", PROMPT, max_tokens=40)
    engine.step(30)
    assert engine.half._jobs.pinned_blocks == 3
    engine.run()
    engine.assert_idle()


def test_groups_are_loaded_whole_unless_more_is_allocated(tmp_path: Path) -> None:
    specs = [full(16), swa(16, 40), swa(16, 40, extra_retained_tokens=20)]
    engine = SchedulerUnderTest(tmp_path, specs=specs, num_blocks=128)
    engine.warm_up(PROMPT)
    request = engine.add("b", PROMPT)
    engine.schedule()
    assert engine.connector.get_loaded_kv_cache_group_ids(request) == (0, 1)


def test_preempted_requests_start_anew(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(
        tmp_path, specs=WINDOWS["full and window"], num_blocks=30, pinned_blocks_max=24
    )
    for name in ("a", "b", "c"):
        engine.add(name, [ord(name), *PROMPT[:120]], max_tokens=60)
    engine.run(2000)
    assert sum(request.num_preemptions for request in engine.requests.values()) > 0
    assert not engine.node.lost
    engine.assert_idle()


def test_blocks_that_could_not_be_pinned_in_time_are_a_miss_and_no_fault(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(
        tmp_path, specs=WINDOWS["full and window"], num_blocks=128, pinned_blocks_max=12
    )
    engine.node.save_steps = 25
    engine.add("warm", PROMPT, max_tokens=60)
    engine.run()
    engine.forget_local()
    engine.node.jobs.clear()
    assert engine.node.lost
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == []
    engine.assert_idle()


def test_generated_tokens_behind_a_reference_window_were_saved_while_they_were_held(
    tmp_path: Path,
) -> None:
    """The table has a hole between the prompt and the last window of what was generated."""
    engine = SchedulerUnderTest(tmp_path, specs=WINDOWS["reference window"], num_blocks=128)
    warm = engine.add("warm", PROMPT[:100], max_tokens=150)
    engine.step(100)
    assert 0 in engine.scheduler.kv_cache_manager.get_block_ids("warm")[0]
    engine.run()
    engine.forget_local()
    engine.node.jobs.clear()
    turn = [*PROMPT[:100], *warm.output_token_ids, 7, 8, 9]
    engine.add("turn", turn)
    engine.run()
    assert loads_of(engine.node) == [("turn", 0, 240)]
    assert not engine.node.lost
    engine.assert_idle()


def compact(blocks: KVCacheBlocks) -> KVCacheBlocks:
    """Tables as forks of vLLM have them that strip the null blocks."""
    return KVCacheBlocks(tuple([one for one in row if not one.is_null] for row in blocks.blocks))


@pytest.mark.parametrize("model", ["full and window", "wide window", "two windows"])
@pytest.mark.parametrize("local", [0, 96])
def test_tables_without_nulls_are_loaded(model: str, local: int, tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, specs=WINDOWS[model], num_blocks=128)
    engine.warm_up(PROMPT)
    allocated = engine.connector.update_state_after_alloc
    engine.connector.update_state_after_alloc = lambda request, blocks, tokens: allocated(
        request, compact(blocks), tokens
    )
    if local:
        engine.add("head", PROMPT[: local + 5])
        engine.run()
        engine.node.jobs.clear()
    engine.add("b", PROMPT)
    engine.run()
    (found,) = loads_of(engine.node)
    assert found == ("b", local, engine.replay_boundary(PROMPT))
    tables = {table.group: table for table in engine.node.jobs[0].tables}
    assert tables[1].start == 0
    assert tables[1].count < found[2] // engine.blocks[1]
    engine.assert_idle()


def test_a_request_whose_tables_have_no_nulls_is_not_saved(tmp_path: Path) -> None:
    """Others are: which chunk a block is cannot be told of this one."""
    engine = SchedulerUnderTest(tmp_path, specs=WINDOWS["full and window"], num_blocks=128)
    blocks_of = engine.scheduler.kv_cache_manager.get_blocks
    engine.half._saver.manager = SimpleNamespace(get_blocks=lambda name: compact(blocks_of(name)))
    engine.add("a", PROMPT)
    engine.add("short", PROMPT[:40])
    engine.run()
    assert engine.counts["saves_compact"] == 1
    assert {name for name, _, _ in saves_of(engine.node)} == {"a", "short"}, "while none is null"
    engine.assert_idle()
