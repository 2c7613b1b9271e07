"""The tiny models' table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvferry_demo import models


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_config_is_written(name: str, tmp_path: Path) -> None:
    directory = models.write_model(name, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    assert config["vocab_size"] == models.VOCABULARY
    assert config["max_position_embeddings"] == models.CONTEXT_TOKENS
    assert config["architectures"][0].endswith("ForCausalLM")


def test_unknown_model_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="llama"):
        models.write_model("nothing", tmp_path)
