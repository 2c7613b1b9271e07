"""Real engines with states: prompts that grow, and hits that end inside a block of states."""

from __future__ import annotations

import pytest
from support.engine import Texts, running_engine
from support.sidecar import running_sidecar

pytestmark = [pytest.mark.engine, pytest.mark.long]

MATCH_UNIT = 32  # tokens: a state holds 128


@pytest.mark.parametrize("model", ["nemotronh", "lfm2"])
def test_a_prompt_hits_at_its_last_hash_inside_a_block(model: str) -> None:
    texts = Texts()
    first = texts.take(900)
    prompts = [first, [*first, *texts.take(333)]]
    fine = {"prefix_match_unit": MATCH_UNIT}
    with running_sidecar() as sidecar:
        with running_engine(sidecar.run_dir, model=model, engine_args=fine) as writer:
            writer.run(first)
        with running_engine(sidecar.run_dir, model=model, engine_args=fine) as reader:
            found = [reader.run(tokens) for tokens in prompts]
        sidecar.wait_idle()
    with running_engine(model=model, engine_args=fine) as plain:
        expected = [plain.run(tokens) for tokens in prompts]
    assert [one.output for one in found] == [one.output for one in expected]
    assert found[0].hit_tokens == (len(first) - 1) // MATCH_UNIT * MATCH_UNIT
    assert found[1].local_tokens + found[1].hit_tokens == found[0].hit_tokens
