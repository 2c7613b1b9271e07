"""Real vLLM configs of a tiny model, for tests that start no engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a model folder with nothing but a config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return folder


def make_config(folder: Path, layout: str = "LBNHC", **changes: Any) -> VllmConfig:
    """Return a VllmConfig; ``changes`` are ``model_*``, ``cache_*``, ``transfer_*``, ``load_*``."""

    def of(prefix: str, **defaults: Any) -> dict[str, Any]:
        own = {k.removeprefix(prefix): v for k, v in changes.items() if k.startswith(prefix)}
        return {**defaults, **own}

    model = ModelConfig(
        **of("model_", model=str(folder), dtype="float32", seed=1, skip_tokenizer_init=True)
    )
    cache = CacheConfig(**of("cache_", block_size=32))
    cache.kv_cache_layout = layout
    transfer = of(
        "transfer_",
        kv_connector="FerryConnector",
        kv_connector_module_path="kvferry_connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    return VllmConfig(
        model_config=model,
        cache_config=cache,
        load_config=LoadConfig(**of("load_", load_format="auto")),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=512,
            max_model_len=2048,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(**transfer),
        device_config=DeviceConfig("cpu"),
    )
