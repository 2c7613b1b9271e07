"""FerryConnector in vLLM's real Scheduler with sliding windows and chunked local attention.

The harness holds every block's content against the (group, prefix hash) it should have, before
each forward and for each job; what must be there and is null fails at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.scheduler_configs import chunked, full, rswa, swa
from support.scheduler_harness import SchedulerUnderTest, loads_of, saves_of

PROMPT = list(range(10, 210))  # 200 tokens
MODELS: dict[str, list[Any]] = {
    "full and window": [full(16), swa(16, 40)],
    "wide full": [full(32), swa(16, 40)],
    "wide window": [full(16), swa(32, 33)],
    "two windows": [full(16), swa(16, 17), swa(16, 90)],
    "window alone": [swa(16, 40)],
    "full and chunked": [full(16), chunked(16, 64)],
    "reference window": [rswa(16, 40)],
}


@pytest.fixture(params=MODELS.keys())
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> SchedulerUnderTest:
    return SchedulerUnderTest(tmp_path, specs=MODELS[request.param], num_blocks=128)


def test_repeated_prompt_hits_at_its_replay_boundary(engine: SchedulerUnderTest) -> None:
    engine.warm_up(PROMPT)
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, engine.replay_boundary(PROMPT))]
    assert saves_of(engine.node) == []
    assert not engine.node.lost, "each block was saved while the engine still had it"
    engine.assert_idle()


@pytest.mark.parametrize("count", [192, 193, 256])
def test_prompts_that_end_at_a_boundary(engine: SchedulerUnderTest, count: int) -> None:
    tokens = list(range(10, 10 + count))
    engine.warm_up(tokens)
    engine.add("b", tokens)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, engine.replay_boundary(tokens))]
    engine.assert_idle()


@pytest.mark.parametrize("batch", [23, 40, 512])
def test_steps_of_any_size_save_what_the_next_one_drops(tmp_path: Path, batch: int) -> None:
    for number, specs in enumerate(MODELS.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        engine = SchedulerUnderTest(folder, specs=specs, num_blocks=128, batch=batch)
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


def test_only_what_is_not_local_is_loaded(engine: SchedulerUnderTest) -> None:
    engine.warm_up([*PROMPT, *range(300, 340)])
    engine.add("b", PROMPT)
    engine.run()
    engine.node.jobs.clear()
    engine.add("c", [*PROMPT, *range(300, 340)])
    engine.run()
    total = engine.replay_boundary([*PROMPT, *range(40)])
    assert loads_of(engine.node) == [("c", engine.replay_boundary(PROMPT), total)]
    engine.assert_idle()


def test_a_junction_seen_by_the_engine_is_kept_for_the_third_request(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, specs=MODELS["full and window"], num_blocks=128)
    prompts = [[*PROMPT[:104], *range(base, base + 90)] for base in (300, 400, 250)]
    engine.add("a", prompts[0])
    engine.run()
    engine.add("b", prompts[1])
    engine.run()
    assert loads_of(engine.node) == []
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
        tmp_path, specs=MODELS["full and window"], num_blocks=128, retention=retention
    )
    engine.warm_up(PROMPT)
    engine.add("b", [*PROMPT[:104], *range(300, 390)])
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 96)]
    engine.assert_idle()


def test_pins_of_a_window_are_those_near_its_boundary(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, specs=MODELS["window alone"], num_blocks=128)
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


def test_failed_load_of_a_hybrid_is_computed(engine: SchedulerUnderTest) -> None:
    engine.warm_up(PROMPT)
    engine.node.load_fails = True
    engine.add("b", PROMPT)
    engine.run()
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle()


def test_preempted_requests_start_anew(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(
        tmp_path, specs=MODELS["full and window"], num_blocks=30, pinned_blocks_max=24
    )
    for name in ("a", "b", "c"):
        engine.add(name, [ord(name), *PROMPT[:120]], max_tokens=60)
    engine.run(2000)
    assert sum(request.num_preemptions for request in engine.requests.values()) > 0
    assert not engine.node.lost
    engine.assert_idle()


def test_blocks_that_could_not_be_pinned_in_time_are_a_miss_and_no_fault(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(
        tmp_path, specs=MODELS["full and window"], num_blocks=128, pinned_blocks_max=12
    )
    engine.node.save_steps = 40
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
    engine = SchedulerUnderTest(tmp_path, specs=MODELS["reference window"], num_blocks=128)
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
