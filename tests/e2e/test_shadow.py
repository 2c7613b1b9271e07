"""Shadow verification with real engines: what one computed is what another one computes."""

from __future__ import annotations

import pytest
from support.engine import Texts, running_engine
from support.sidecar import running_sidecar

pytestmark = [pytest.mark.engine, pytest.mark.long]


def test_real_engines_agree_within_rounding() -> None:
    """Other step sizes round differently, and are no difference."""
    texts = Texts()
    prompts = [texts.take(length) for length in (700, 1500, 2900)]
    with running_sidecar(flags=["--set", "loads.shadow_percent=100"]) as sidecar:
        with running_engine(sidecar.run_dir) as writer:
            cold = [writer.run(tokens) for tokens in prompts]
        with running_engine(sidecar.run_dir, max_num_batched_tokens=384) as reader:
            warm = [reader.run(tokens) for tokens in prompts]
        assert [one.output for one in warm] == [one.output for one in cold]
        assert [one.hit_tokens for one in warm] == [0, 0, 0]
        shadow = sidecar.wait_idle()["pipeline"]["shadow"]
        assert (shadow["compared"], shadow["differed"]) == (3, 0)
