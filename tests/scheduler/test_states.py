"""FerryConnector in vLLM's real Scheduler with states (Mamba "align").

The harness follows every state from slot to slot, through copies on write and relocated scratch,
and holds what is handed over and loaded against the boundary it should be the state of.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scheduler_configs import STATES, full, mamba
from support.scheduler_harness import SchedulerUnderTest, loads_of, states_of

PROMPT = list(range(10, 210))  # 200 tokens


def test_only_the_state_at_the_replay_boundary_is_handed_over(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, specs=STATES["full and state"], num_blocks=128)
    engine.add("a", PROMPT, max_tokens=60)
    engine.run()
    assert states_of(engine.node) == [192], (
        "none of the prompt's middle, none of what was generated"
    )


@pytest.mark.parametrize("retention", [None, 48])
def test_denser_retention_of_the_engine_hits_inside_a_prompt(
    tmp_path: Path, retention: int | None
) -> None:
    engine = SchedulerUnderTest(
        tmp_path, specs=STATES["full and state"], num_blocks=128, retention=retention, batch=16
    )
    engine.warm_up(PROMPT)
    engine.add("b", [*PROMPT[:104], *range(300, 390)], max_tokens=40)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 96)]
    assert max(states_of(engine.node)) < 194, "what was generated is not handed over"
    engine.assert_idle()


def test_states_are_loaded_whole_unless_scratch_comes_with_them(tmp_path: Path) -> None:
    specs = [full(16), mamba(16), mamba(16, scratch=1)]
    engine = SchedulerUnderTest(tmp_path, specs=specs, num_blocks=128)
    engine.warm_up(PROMPT)
    request = engine.add("b", PROMPT)
    engine.schedule()
    assert engine.connector.get_loaded_kv_cache_group_ids(request) == (0, 1)


@pytest.mark.parametrize("v2_runner", [False, True])
def test_preempted_requests_start_anew(tmp_path: Path, v2_runner: bool) -> None:
    """Whole tables are replaced, states come back by load, and what resumed hands over anew."""
    engine = SchedulerUnderTest(
        tmp_path, specs=STATES["scratch"], num_blocks=36, pinned_blocks_max=24, v2_runner=v2_runner
    )
    for name in ("a", "b", "c"):
        engine.add(name, [ord(name), *PROMPT[:120]], max_tokens=60)
    engine.run(2000)
    assert sum(request.num_preemptions for request in engine.requests.values()) > 0
    engine.assert_idle()


def test_states_that_could_not_be_pinned_are_a_miss(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(
        tmp_path, specs=STATES["full and state"], num_blocks=128, pinned_blocks_max=1
    )
    engine.node.save_steps = 30
    engine.warm_up(PROMPT)
    assert engine.counts["pinned_blocks_max"] > 0
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == []
    engine.assert_idle()


def test_an_abort_after_the_hand_off_leaves_no_pin(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, specs=STATES["scratch"], num_blocks=128, batch=512)
    engine.node.save_steps = 20
    engine.add("a", PROMPT, max_tokens=60)
    engine.step(4)
    assert engine.half._jobs.pinned_blocks > 12, "the state is pinned too"
    engine.abort("a")
    engine.run()
    engine.assert_idle()
    engine.forget_local()
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192)]


def test_a_table_without_its_nulls_is_sent_whole(tmp_path: Path) -> None:
    """The half cuts no table of states: scratch closes it, whatever its length."""
    engine = SchedulerUnderTest(tmp_path, specs=STATES["scratch"], num_blocks=128)
    engine.warm_up(PROMPT)
    engine.add("b", PROMPT)
    engine.run()
    (job,) = engine.node.jobs
    table = next(table for table in job.tables if table.group == 1)
    assert (table.start, table.count) == (0, 12 + 2)
    engine.assert_idle()


@pytest.mark.parametrize("match_unit", [None, 32])
@pytest.mark.parametrize("sizes", [(16, 32), (16, 64), (32, 32)])
def test_states_beside_attention_whose_tokens_two_ranks_share(
    tmp_path: Path, sizes: tuple[int, int], match_unit: int | None
) -> None:
    """Decode context parallel: attention's blocks are twice as long, a state's are not."""
    engine = SchedulerUnderTest(
        tmp_path, specs=[full(sizes[0]), mamba(sizes[1])], num_blocks=128, ranks=2, dcp=2,
        match_unit=match_unit,
    )  # fmt: skip
    engine.add("own", PROMPT)
    engine.run()
    engine.add("again", PROMPT)
    engine.run()
    own = engine.first_computed("again")
    engine.forget_local()
    engine.node.jobs.clear()
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, own)]
    assert own >= 128
    engine.assert_idle()
