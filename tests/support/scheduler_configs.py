"""vLLM configurations for its real Scheduler: specs of each kind, no model, nothing fetched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from kvferry_connector.describe import spec_kind
from kvferry_sidecar.sessions.model import RankGroup
from support.other_connector import transfer_config
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core.kv_cache_utils import (
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
)

MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
    "word_embed_proj_dim": 64,
    "torch_dtype": "float16",
    "eos_token_id": 2,
    "pad_token_id": 1,
    "bos_token_id": 2,
}


def swa(block: int, window: int, **fields: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=2, head_size=8, dtype=torch.float16,
        sliding_window=window, **fields,
    )  # fmt: skip


def rswa(block: int, window: int) -> RSWASpec:
    return RSWASpec(
        block_size=block, num_kv_heads=2, head_size=8, dtype=torch.float16, rswa_window=window
    )


def chunked(block: int, chunk: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block, num_kv_heads=2, head_size=8, dtype=torch.float16,
        attention_chunk_size=chunk,
    )  # fmt: skip


def ring(block: int) -> CircularBufferSpec:
    return CircularBufferSpec(
        block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float16, dcp_sharded=False
    )


def mamba(block: int, scratch: int = 0, **fields: Any) -> MambaSpec:
    return MambaSpec(
        block_size=block, shapes=((2, 8), (4, 4)), dtypes=(torch.float16, torch.float32),
        mamba_cache_mode="align", num_speculative_blocks=scratch, **fields,
    )  # fmt: skip


def rank_group(number: int, spec: Any, eagle: bool, dcp: int = 1) -> RankGroup:
    """The group as the sidecar has it after registration."""
    kind, _ = spec_kind(spec)
    return RankGroup(
        group=number,
        kind=kind,
        block_tokens=spec.block_size * (dcp if spec.dcp_sharded else 1),
        layout=None,
        payload_bytes=0,
        num_blocks=0,
        save_rule={"full": "all", "mamba": "hand-offs", "ring": "none"}.get(kind, "held"),
        window_tokens=getattr(spec, "sliding_window", None) or 0,
        chunk_tokens=getattr(spec, "attention_chunk_size", None) or 0,
        scratch_blocks=getattr(spec, "num_speculative_blocks", 0),
        spec=repr(spec),
        eagle=eagle,
    )


def full(block: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=8, dtype=torch.float16)


def make_kv_config(
    vllm_config: VllmConfig, specs: Sequence[Any], *, num_blocks: int, eagle: Sequence[int],
    retention: int | None, match_unit: int | None,
) -> tuple[KVCacheConfig, int, int]:  # fmt: skip
    """The KV cache config of these groups with S and H, resolved as the engine core does."""
    kv_config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer.{number}"], spec, is_eagle_group=number in eagle)
            for number, spec in enumerate(specs)
        ],
        prefix_cache_retention_interval=retention,
    )
    cache_config = vllm_config.cache_config
    cache_config.num_gpu_blocks = num_blocks
    if any(isinstance(spec, MambaSpec) for spec in specs):
        cache_config.mamba_cache_mode = "align"
    cache_config.prefix_match_unit = match_unit
    unit, hash_tokens = resolve_kv_cache_block_sizes(kv_config, vllm_config)
    kv_config.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
        kv_config, vllm_config, unit, hash_tokens
    )
    cache_config.block_size = unit
    return kv_config, unit, hash_tokens


def drafter(drafts: int) -> SpeculativeConfig:
    """A drafter of EAGLE's kind, of which the scheduler only knows that it is one."""
    config = SpeculativeConfig(
        method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=2, prompt_lookup_min=1
    )
    config.method = "eagle"
    return config


def make_config(
    folder: Path, *, block_size: int = 16, batch: int = 64, policy: str = "recompute",
    asynchronous: bool = False, extra: dict[str, Any] | None = None, ranks: int = 1,
    beside: str = "", dcp: int = 1,
) -> VllmConfig:  # fmt: skip
    """A VllmConfig from a config.json in ``folder``; nothing is fetched."""
    # Heads are split first: only ranks that would hold the same ones share a block's tokens.
    model = MODEL if dcp == 1 else {**MODEL, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(model))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float16", seed=1
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=batch, max_model_len=2048,
            enable_chunked_prefill=True, is_encoder_decoder=False,
            async_scheduling=asynchronous,
        ),
        cache_config=CacheConfig(
            block_size=block_size, enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",
        ),
        kv_transfer_config=KVTransferConfig(**transfer_config({
            "kv_connector": "FerryConnector", "kv_connector_module_path": "kvferry_connector",
            "kv_role": "kv_both", "kv_load_failure_policy": policy,
            "kv_connector_extra_config": extra or {},
        }, beside)),
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(
            tensor_parallel_size=ranks, distributed_executor_backend="mp" if ranks > 1 else "uni",
            decode_context_parallel_size=dcp,
        ),
    )  # fmt: skip


WINDOWS: dict[str, list[Any]] = {
    "full and window": [full(16), swa(16, 40)],
    "wide full": [full(32), swa(16, 40)],
    "wide window": [full(16), swa(32, 33)],
    "two windows": [full(16), swa(16, 17), swa(16, 90)],
    "window alone": [swa(16, 40)],
    "full and chunked": [full(16), chunked(16, 64)],
    "reference window": [rswa(16, 40)],
    "ring beside": [full(16), ring(32), swa(16, 40)],  # no prefix has it, but S is its 32
}
STATES: dict[str, list[Any]] = {
    "full and state": [full(16), mamba(16)],
    "scratch": [full(16), mamba(16, scratch=2)],
    "wide full and state": [full(64), mamba(64)],
    "two sorts of states": [full(16), mamba(16), mamba(16, scratch=1)],
    "state alone": [mamba(16)],
    "window too": [full(16), swa(16, 40), mamba(16)],
}
