"""FerryConnector in vLLM's real Scheduler with states (Mamba "align").

The harness follows every state from slot to slot, through copies on write and relocated scratch,
and holds what is handed over and loaded against the boundary it should be the state of.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.scheduler_configs import full, mamba, swa
from support.scheduler_harness import SchedulerUnderTest, loads_of

PROMPT = list(range(10, 210))  # 200 tokens
MODELS: dict[str, list[Any]] = {
    "full and state": [full(16), mamba(16)],
    "scratch": [full(16), mamba(16, scratch=2)],
    "wide full": [full(64), mamba(64)],
    "two sorts of states": [full(16), mamba(16), mamba(16, scratch=1)],
    "state alone": [mamba(16)],
    "window too": [full(16), swa(16, 40), mamba(16)],
}


@pytest.fixture(params=MODELS.keys())
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> SchedulerUnderTest:
    return SchedulerUnderTest(tmp_path, specs=MODELS[request.param], num_blocks=128)


def states_of(engine: SchedulerUnderTest) -> list[int]:
    """The boundaries of the states that were handed over, in order."""
    return [state.end_tokens for job in engine.node.jobs for state in getattr(job, "hand_offs", ())]


@pytest.mark.parametrize("count", [200, 192, 193, 256])
def test_repeated_prompt_hits_at_its_replay_boundary(
    engine: SchedulerUnderTest, count: int
) -> None:
    tokens = list(range(10, 10 + count))
    engine.warm_up(tokens)
    engine.add("b", tokens)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, engine.replay_boundary(tokens))]
    assert states_of(engine) == [], "the state that was loaded is stored already"
    assert engine.node.contents.states_checked > 0
    engine.assert_idle()


def test_only_the_state_at_the_replay_boundary_is_handed_over(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, specs=MODELS["full and state"], num_blocks=128)
    engine.add("a", PROMPT, max_tokens=60)
    engine.run()
    assert states_of(engine) == [192], "none of the prompt's middle, none of what was generated"


@pytest.mark.parametrize("batch", [23, 40, 512])
def test_steps_of_any_size_hand_the_same_states_over(tmp_path: Path, batch: int) -> None:
    for number, specs in enumerate(MODELS.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        engine = SchedulerUnderTest(folder, specs=specs, num_blocks=128, batch=batch)
        engine.warm_up(PROMPT)
        engine.add("b", PROMPT)
        engine.run()
        assert loads_of(engine.node) == [("b", 0, engine.replay_boundary(PROMPT))]
        engine.assert_idle()


def test_a_conversation_goes_on_from_the_last_prompt(engine: SchedulerUnderTest) -> None:
    engine.warm_up(PROMPT)
    longer = [*PROMPT, *range(300, 340)]
    engine.add("b", longer)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, engine.replay_boundary(PROMPT))]
    engine.forget_local()
    engine.add("c", longer)
    engine.run()
    assert loads_of(engine.node)[-1] == ("c", 0, engine.replay_boundary(longer))
    engine.assert_idle()


def test_only_what_is_not_local_is_loaded(engine: SchedulerUnderTest) -> None:
    longer = [*PROMPT, *range(300, 364)]
    engine.warm_up(longer)
    engine.add("b", PROMPT)
    engine.run()
    engine.node.jobs.clear()
    engine.add("c", longer)
    engine.run()
    assert loads_of(engine.node) == [
        ("c", engine.replay_boundary(PROMPT), engine.replay_boundary(longer))
    ]
    engine.assert_idle()


def test_a_junction_seen_by_the_engine_is_kept_for_the_third_request(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, specs=MODELS["full and state"], num_blocks=128)
    prompts = [[*PROMPT[:104], *range(base, base + 90)] for base in (300, 400, 250)]
    for name, prompt in zip("ab", prompts, strict=False):
        engine.add(name, prompt)
        engine.run()
    assert loads_of(engine.node) == []
    assert 96 in states_of(engine)
    engine.forget_local()
    engine.add("c", prompts[2])
    engine.run()
    assert loads_of(engine.node) == [("c", 0, 96)]
    engine.assert_idle()


@pytest.mark.parametrize("retention", [None, 48])
def test_denser_retention_of_the_engine_hits_inside_a_prompt(
    tmp_path: Path, retention: int | None
) -> None:
    engine = SchedulerUnderTest(
        tmp_path, specs=MODELS["full and state"], num_blocks=128, retention=retention, batch=16
    )
    engine.warm_up(PROMPT)
    engine.add("b", [*PROMPT[:104], *range(300, 390)], max_tokens=40)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 96)]
    assert max(states_of(engine)) < 194, "what was generated is not handed over"
    engine.assert_idle()


def test_states_are_loaded_whole_unless_scratch_comes_with_them(tmp_path: Path) -> None:
    specs = [full(16), mamba(16), mamba(16, scratch=1)]
    engine = SchedulerUnderTest(tmp_path, specs=specs, num_blocks=128)
    engine.warm_up(PROMPT)
    request = engine.add("b", PROMPT)
    engine.schedule()
    assert engine.connector.get_loaded_kv_cache_group_ids(request) == (0, 1)


def test_failed_load_is_computed(engine: SchedulerUnderTest) -> None:
    engine.warm_up(PROMPT)
    engine.node.load_fails = True
    engine.add("b", PROMPT)
    engine.run()
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle()


@pytest.mark.parametrize("v2_runner", [False, True])
def test_preempted_requests_start_anew(tmp_path: Path, v2_runner: bool) -> None:
    """Whole tables are replaced, states come back by load, and what resumed hands over anew."""
    engine = SchedulerUnderTest(
        tmp_path, specs=MODELS["scratch"], num_blocks=36, pinned_blocks_max=24, v2_runner=v2_runner
    )
    for name in ("a", "b", "c"):
        engine.add(name, [ord(name), *PROMPT[:120]], max_tokens=60)
    engine.run(2000)
    assert sum(request.num_preemptions for request in engine.requests.values()) > 0
    engine.assert_idle()


def test_states_that_could_not_be_pinned_are_a_miss(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(
        tmp_path, specs=MODELS["full and state"], num_blocks=128, pinned_blocks_max=1
    )
    engine.node.save_steps = 30
    engine.warm_up(PROMPT)
    assert engine.counts["pinned_blocks_max"] > 0
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == []
    engine.assert_idle()


def test_an_abort_after_the_hand_off_leaves_no_pin(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, specs=MODELS["scratch"], num_blocks=128, batch=512)
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
    engine = SchedulerUnderTest(tmp_path, specs=MODELS["scratch"], num_blocks=128)
    engine.warm_up(PROMPT)
    engine.add("b", PROMPT)
    engine.run()
    (job,) = engine.node.jobs
    table = next(table for table in job.tables if table.group == 1)
    assert (table.start, table.count) == (0, 12 + 2)
    engine.assert_idle()
