"""Real engines with several kinds of groups: prompts that grow or share a head, in a new process.

The expected lengths follow from vLLM's default retention: a sliding window is kept where a prompt
ends and where two prompts part.
"""

from __future__ import annotations

import pytest
from kvferry_demo import protocol
from support.engine import EngineUnderTest, Texts, running_engine
from support.sidecar import running_sidecar

pytestmark = pytest.mark.engine

# model: tokens that its hits are multiples of
MODELS = {"gptoss": 128, "gemma4": 256, "llama4": 128}
SHARED = 700


def run(engine: EngineUnderTest, prompts: list[list[int]]) -> list[protocol.Result]:
    return [engine.run(tokens) for tokens in prompts]


def computed(engine: EngineUnderTest, prompts: list[list[int]]) -> list[list[int]]:
    """Return the outputs without any hit: a salt of its own separates each prompt."""
    results = [engine.run(tokens, salt=f"{at}") for at, tokens in enumerate(prompts)]
    assert [one.local_tokens + one.hit_tokens for one in results] == [0] * len(prompts)
    return [one.output for one in results]


@pytest.mark.parametrize("model", MODELS)
def test_prompts_that_grow_or_share_a_head(model: str) -> None:
    texts, unit = Texts(), MODELS[model]
    first = texts.take(900)
    second = [*first, *texts.take(400)]
    forked = [*first[:SHARED], *texts.take(500)]
    later = [[*second, *texts.take(300)], [*first[:SHARED], *texts.take(650)]]
    with running_sidecar() as sidecar:
        with running_engine(sidecar.run_dir, model=model) as writer:
            run(writer, [first, second, forked])
            expected = computed(writer, later)
        with running_engine(sidecar.run_dir, model=model) as reader:
            found = run(reader, later)
        sidecar.wait_idle()
    assert [one.output for one in found] == expected
    assert [one.local_tokens + one.hit_tokens for one in found] == [
        (len(second) - 1) // unit * unit,
        SHARED // unit * unit,
    ]
    assert all(one.hit_tokens for one in found)
