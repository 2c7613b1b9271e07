"""The main job as a user runs it: two engine processes, one after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kvferry_demo.models import MODELS
from kvferry_demo.processes import SHARED_MEMORY, kvferry_command

SHORT = {"qwen3next": 2300}  # its block is 1,152 tokens, and a state is kept where a prompt ends
FULL_ONLY = ("llama", "qwen3")
pytestmark = pytest.mark.engine


def pools() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("kvferry-demo-*")}


# Latent attention is compared byte for byte in test_mla.py, what gemma4, gptoss and llama4 load
# in test_hybrid.py; qwen3 differs from llama little.
LONG = (
    "deepseek_v3", "falconh1", "gemma4", "gptoss", "granitehybrid", "llama4", "llama_eagle",
    "qwen3", "qwen3next",
)  # fmt: skip


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in sorted(MODELS)],
)
def test_demo(model: str, tmp_path: Path) -> None:
    before = pools()
    file = tmp_path / "demo.json"
    command = [*kvferry_command(), "demo", "--model", model, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_bytes())
    assert report["model"] == model
    prompts = report["prompts"]
    assert min(one["tokens"] for one in prompts) == 500
    assert max(one["tokens"] for one in prompts) == 6000
    for one in prompts:
        assert set(one) == {
            "tokens",
            "hit_tokens",
            "bytes",
            "ttft_cold_ms",
            "ttft_warm_ms",
            "identical",
            "drafts",
            "own_hit",
        }
        assert one["identical"] != one["own_hit"]  # rounding: which text it meets changes
        assert one["hit_tokens"] > 0 or one["tokens"] <= SHORT.get(model, 0)
        if model in FULL_ONLY:
            assert one["bytes"] == one["hit_tokens"] * 2048
        assert (one["bytes"] > 0) == (one["hit_tokens"] > 0)
        assert (one["drafts"] > 0) == (MODELS[model].drafter is not None)
    assert pools() <= before, "the demo's pool is left behind"


def test_unknown_model_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvferry_demo.run", "--model", "gpt-9"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert "llama" in done.stderr
