"""The tiny models: real vLLM model classes, a few layers small, with no weights on disk.

A model is one entry of ``MODELS``: its Hugging Face config and the engine settings it needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

VOCABULARY = 1024
CONTEXT_TOKENS = 8192

Value = str | int | float | bool | None | list[str]


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One model: what it stands for, its config.json, and overrides of vLLM's EngineArgs."""

    about: str
    config: Mapping[str, Value]
    engine: Mapping[str, Value] = field(default_factory=dict)


def _decoder(architecture: str, model_type: str, **own: Value) -> dict[str, Value]:
    """Return the config of a small decoder: 4 layers, 2 KV heads of 32, float32."""
    common: dict[str, Value] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the CPU attention kernel has no 16
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return common | own


MODELS: Mapping[str, TinyModel] = {
    "llama": TinyModel(
        about="one group of full attention",
        config=_decoder("LlamaForCausalLM", "llama"),
    ),
    "qwen3": TinyModel(
        about="one group of full attention, normalised queries and keys",
        config=_decoder("Qwen3ForCausalLM", "qwen3"),
    ),
}
DEFAULT_MODEL = "llama"


def write_model(name: str, folder: Path) -> Path:
    """Write the model's config.json under ``folder/name`` and return that directory.

    Raises KeyError, naming the known models, when there is no such model.
    """
    if name not in MODELS:
        raise KeyError(f"no tiny model {name!r}; there are: {', '.join(MODELS)}")
    directory = folder / name
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(MODELS[name].config), indent=1, sort_keys=True)
    (directory / "config.json").write_text(text)
    return directory
