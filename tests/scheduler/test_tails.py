"""FerryConnector in vLLM's real Scheduler with hits that end inside a block of states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.scheduler_configs import full, mamba, swa
from support.scheduler_harness import SchedulerUnderTest, loads_of

HASH = 16
MODELS: dict[str, list[Any]] = {
    "fine attention": [full(16), mamba(64)],
    "wide attention": [full(64), mamba(64)],
    "scratch": [full(32), mamba(64, scratch=2)],
    "window too": [full(16), swa(16, 40), mamba(64)],
    "two widths": [full(16), mamba(32), mamba(64, scratch=1)],
}


def engine_of(model: str, folder: Path, **options: Any) -> SchedulerUnderTest:
    settings = {"num_blocks": 128, "match_unit": HASH, **options}
    engine = SchedulerUnderTest(folder, specs=MODELS[model], **settings)
    assert (engine.unit, engine.hash_tokens, engine.node.rules.alignment) == (64, HASH, HASH)
    return engine


def tokens_of(count: int) -> list[int]:
    return list(range(10, 10 + count))


@pytest.mark.parametrize("batch", [64, 512])
@pytest.mark.parametrize("count", [200, 192, 193, 209, 230, 255])
@pytest.mark.parametrize("model", MODELS)
def test_a_repeated_prompt_hits_at_its_last_hash(
    model: str, count: int, batch: int, tmp_path: Path
) -> None:
    engine = engine_of(model, tmp_path, batch=batch)
    tokens = tokens_of(count)
    engine.warm_up(tokens)
    engine.add("b", tokens)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, (count - 1) // HASH * HASH)]
    assert engine.node.contents.states_checked > 0
    engine.assert_idle()


@pytest.mark.parametrize("model", MODELS)
def test_a_longer_prompt_goes_on_inside_the_block(model: str, tmp_path: Path) -> None:
    """Attention may be stored beyond the boundary; the state is the one exactly there."""
    engine = engine_of(model, tmp_path)
    engine.add("a", tokens_of(200), max_tokens=30)
    engine.run()
    engine.forget_local()
    engine.node.jobs.clear()
    engine.add("b", [*tokens_of(200), *range(300, 350)])
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192)]
    engine.forget_local()
    engine.add("c", [*tokens_of(200), *range(300, 350)])
    engine.run()
    assert loads_of(engine.node)[-1] == ("c", 0, 240)
    engine.assert_idle()


@pytest.mark.parametrize("model", MODELS)
def test_a_request_that_ends_at_its_last_hash_still_hands_its_state_over(
    model: str, tmp_path: Path
) -> None:
    engine = engine_of(model, tmp_path, batch=512)
    tokens = tokens_of(215)
    engine.add("a", tokens)
    while engine.requests["a"].num_computed_tokens < 208:
        engine.step()
    assert engine.requests["a"].num_computed_tokens == 208
    engine.abort("a")
    engine.run()
    engine.assert_idle()
    engine.forget_local()
    engine.add("b", tokens)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 208)]
    engine.assert_idle()


@pytest.mark.parametrize("batch", [16, 512])
@pytest.mark.parametrize("count", [192, 200, 208, 272])
@pytest.mark.parametrize("model", MODELS)
def test_a_drafter_drops_one_hash_as_in_the_engine_s_own_cache(
    model: str, count: int, batch: int, tmp_path: Path
) -> None:
    """Of 208 tokens the state at 192 ends a block: the attention above it is saved a step later."""
    engine = engine_of(model, tmp_path, drafts=2, batch=batch)
    tokens = tokens_of(count)
    engine.add("own", tokens)
    engine.run()
    engine.add("again", tokens)
    engine.run()
    own = engine.first_computed("again")
    engine.forget_local()
    engine.node.jobs.clear()
    engine.add("b", tokens)
    engine.run()
    found = count // HASH * HASH - HASH
    assert loads_of(engine.node) == [("b", 0, found)]
    # The engine keeps windows at whole scheduler blocks only, where this store keeps them too.
    assert own == found or (model == "window too" and own < found)
    engine.assert_idle()


def test_what_the_engine_has_inside_a_block_is_not_loaded(tmp_path: Path) -> None:
    """The engine keeps its own tail unless ours is longer."""
    engine = engine_of("fine attention", tmp_path)
    engine.add("a", tokens_of(220))
    engine.run()
    engine.node.jobs.clear()
    engine.add("again", tokens_of(220))
    engine.run()
    assert loads_of(engine.node) == []
    engine.assert_idle()
