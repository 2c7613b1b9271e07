"""What holds for models of every kind of groups in vLLM's real Scheduler: windows and states.

The harness holds every block's content against what it should have, before each forward and for
each job. What only windows or only states have is in test_hybrid.py and test_states.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scheduler_configs import STATES, WINDOWS
from support.scheduler_harness import SchedulerUnderTest, loads_of, saves_of, states_of

PROMPT = list(range(10, 210))  # 200 tokens
MODELS = WINDOWS | STATES


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(model: str, tmp_path: Path) -> SchedulerUnderTest:
    return SchedulerUnderTest(tmp_path, specs=MODELS[model], num_blocks=128)


@pytest.mark.parametrize("count", [200, 192, 193, 256])
def test_repeated_prompt_hits_at_its_replay_boundary(
    engine: SchedulerUnderTest, model: str, count: int
) -> None:
    tokens = list(range(10, 10 + count))
    engine.warm_up(tokens)
    engine.add("b", tokens)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, engine.replay_boundary(tokens))]
    assert states_of(engine.node) == [], "the state that was loaded is stored already"
    assert not engine.node.lost, "each block was saved while the engine still had it"
    if count == 200:
        assert saves_of(engine.node) == [], "no whole block is behind the boundary"
    if model in STATES:
        assert engine.node.contents.states_checked > 0
    engine.assert_idle()


@pytest.mark.parametrize("batch", [23, 40, 512])
def test_steps_of_any_size_save_the_same(model: str, tmp_path: Path, batch: int) -> None:
    """Windows: what the next step drops; states: those at the boundary."""
    engine = SchedulerUnderTest(tmp_path, specs=MODELS[model], num_blocks=128, batch=batch)
    engine.warm_up(PROMPT)
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, engine.replay_boundary(PROMPT))]
    assert not engine.node.lost
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


@pytest.mark.parametrize("more", [40, 64])
def test_only_what_is_not_local_is_loaded(engine: SchedulerUnderTest, more: int) -> None:
    longer = [*PROMPT, *range(300, 300 + more)]
    engine.warm_up(longer)
    engine.add("b", PROMPT)
    engine.run()
    engine.node.jobs.clear()
    engine.add("c", longer)
    engine.run()
    local, total = engine.replay_boundary(PROMPT), engine.replay_boundary(longer)
    assert loads_of(engine.node) == ([("c", local, total)] if total > local else [])
    engine.assert_idle()


@pytest.mark.parametrize("name", ["full and window", "full and state"])
def test_a_junction_seen_by_the_engine_is_kept_for_the_third_request(
    name: str, tmp_path: Path
) -> None:
    engine = SchedulerUnderTest(tmp_path, specs=MODELS[name], num_blocks=128)
    prompts = [[*PROMPT[:104], *range(base, base + 90)] for base in (300, 400, 250)]
    for request, prompt in zip("ab", prompts, strict=False):
        engine.add(request, prompt)
        engine.run()
    assert loads_of(engine.node) == []
    assert (96 in states_of(engine.node)) == (name in STATES)
    engine.forget_local()
    engine.add("c", prompts[2])
    engine.run()
    assert loads_of(engine.node) == [("c", 0, 96)]
    engine.assert_idle()


def test_failed_load_is_computed(engine: SchedulerUnderTest) -> None:
    engine.warm_up(PROMPT)
    engine.node.load_fails = True
    engine.add("b", PROMPT)
    engine.run()
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle()
