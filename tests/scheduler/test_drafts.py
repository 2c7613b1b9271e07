"""FerryConnector in vLLM's real Scheduler with a drafter (EAGLE, MTP): drops, guesses, scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.scheduler_configs import full, mamba, swa
from support.scheduler_harness import SchedulerUnderTest, loads_of, saves_of

PROMPT = list(range(10, 210))  # 200 tokens
# specs, groups that hold draft layers (none: all are taken for such)
MODELS: dict[str, tuple[list[Any], tuple[int, ...]]] = {
    "one group": ([full(16)], ()),
    "draft group": ([full(16), full(16)], (1,)),
    "drafted window": ([full(16), swa(16, 40)], (1,)),
    "all groups": ([full(16), swa(16, 40)], ()),
    "states": ([full(16), mamba(16, scratch=2)], (0,)),
    "all groups with states": ([full(16), mamba(16, scratch=2)], ()),
    "wide": ([full(32), swa(16, 40)], (0,)),
}


def engine_of(model: str, folder: Path, **options: Any) -> SchedulerUnderTest:
    specs, eagle = MODELS[model]
    settings = {"drafts": 2, "num_blocks": 128, **options}
    return SchedulerUnderTest(folder, specs=specs, eagle=eagle, **settings)


@pytest.mark.parametrize("count", [200, 192, 193, 255])
@pytest.mark.parametrize("model", MODELS)
def test_a_repeated_prompt_hits_one_block_below_its_end(
    model: str, count: int, tmp_path: Path
) -> None:
    """As vLLM's own cache: the block above a hit is matched and dropped."""
    tokens = list(range(10, 10 + count))
    engine = engine_of(model, tmp_path)
    engine.add("own", tokens)
    engine.run()
    assert not engine.node.lost, "each block was saved while the engine still had it"
    engine.add("again", tokens)
    engine.run()
    own = engine.first_computed("again")
    engine.forget_local()
    engine.node.jobs.clear()
    engine.add("b", tokens)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, own)]
    assert own >= (count - 1) // engine.unit * engine.unit - engine.unit
    engine.assert_idle()


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_saved_before_it_is_confirmed(model: str, tmp_path: Path) -> None:
    engine = engine_of(model, tmp_path)
    engine.add("a", PROMPT, max_tokens=120)
    for _ in range(200):
        if not engine.scheduler.has_requests():
            break
        known = engine.requests["a"].num_tokens
        engine.step()
        for _, _, end in saves_of(engine.node):
            assert end <= known, "drafts are guesses until they are accepted"
    assert engine.requests["a"].num_output_tokens == 120
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize(("model", "num_blocks"), [("drafted window", 30), ("states", 40)])
def test_preempted_requests_start_anew(model: str, num_blocks: int, tmp_path: Path) -> None:
    engine = engine_of(model, tmp_path, num_blocks=num_blocks, pinned_blocks_max=24)
    for name in ("a", "b", "c"):
        engine.add(name, [ord(name), *PROMPT[:120]], max_tokens=60)
    engine.run(2000)
    assert sum(request.num_preemptions for request in engine.requests.values()) > 0
    engine.assert_idle()
