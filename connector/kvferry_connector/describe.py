"""What an engine is, as the sidecar is told: identity, groups, placements, block sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import iter_layer_specs

from kvferry_connector import vllm_compat
from kvferry_connector.config import FerryConfig
from kvferry_connector.identity import common_fact, identity_facts
from kvferry_connector.placements import DescribeError, describe_placements, page_data_bytes
from kvferry_connector.wire.attach import Group, RegisterEngine, RegisterRank, Shard
from kvferry_connector.wire.names import NO_VERSION

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from kvferry_connector.export import KvMemory

__all__ = ["DescribeError", "describe_engine", "describe_rank", "worker_shard"]

# By exact class: a subclass may keep its blocks by other rules than its base.
_KINDS: dict[str, str] = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "mla",
    "HiddenStateCacheSpec": "hidden-state",
    "SlidingWindowSpec": "swa",
    "SlidingWindowMLASpec": "swa-mla",
    "ChunkedLocalAttentionSpec": "chunked",
    "RSWASpec": "rswa",
    "MambaSpec": "mamba",
    "CircularBufferSpec": "ring",
    "SinkFullAttentionSpec": "sink",
    "CrossAttentionSpec": "cross",
    "EncoderOnlyAttentionSpec": "encoder-only",
    "HiSparseHotSpec": "hisparse",
    "HiSparseResidentSpec": "hisparse",
    "UniformTypeKVCacheSpecs": "uniform",
}
_WINDOWED = frozenset({"swa", "swa-mla"})
_FULL_FAMILY = frozenset({"full", "mla", "indexer"})
# Moves pages about, changes no byte inside one.
_NOT_CONTENT = frozenset({"block_stride_alignment", "page_size_padded", "kv_cache_specs"})


# --- scheduler half --------------------------------------------------------------------------


def describe_engine(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, life: bytes
) -> RegisterEngine:
    """Return the scheduler half's registration: block sizes S and H, hit alignment A, policy.

    ``ranks`` are not known yet.
    """
    scheduler_tokens, hash_tokens = block_sizes(vllm_config, kv_cache_config)
    drafter, events = vllm_config.speculative_config, vllm_config.kv_events_config
    return RegisterEngine(
        life=life,
        version=NO_VERSION,
        ranks=[],
        hash_block_tokens=hash_tokens,
        scheduler_block_tokens=scheduler_tokens,
        alignment_tokens=kv_cache_config.cache_hit_alignment_tokens or scheduler_tokens,
        load_failure_policy=vllm_config.kv_transfer_config.kv_load_failure_policy,
        retention_tokens=kv_cache_config.prefix_cache_retention_interval,
        use_eagle=drafter is not None and bool(drafter.use_eagle_block_drop()),
        reprefill_tokens=max(0, vllm_config.num_prefill_lookahead_tokens - 1),
        kv_events=events is not None and bool(events.enable_kv_cache_events),
    )


def block_sizes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Return (S, H) in tokens: scheduler block and hash block, as the engine core resolved them."""
    scheduler_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(scheduler_tokens), int(kv_cache_config.hash_block_size or hash_tokens)


# --- worker half -----------------------------------------------------------------------------


def worker_shard(vllm_config: VllmConfig) -> Shard:
    """Return which part of the model's KV this rank holds (ranks run over TP first, then PP)."""
    parallel = vllm_config.parallel_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    dcp_size = parallel.decode_context_parallel_size
    pp_rank, tp_rank = divmod(parallel.rank, tp_size)
    return Shard(tp_rank, tp_size, pp_rank, pp_size, tp_rank % dcp_size, dcp_size)


def describe_rank(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    memory: KvMemory,
    config: FerryConfig,
    *,
    serial: int = 1,
) -> RegisterRank:
    """Return a worker half's registration from what ``register_kv_caches`` was given.

    ``serial``: 1, and one more for every time the memory was mapped anew.

    Raises DescribeError when a tensor is not where the config says, ExportError when its memory
    is not ours, UnsupportedEngineError when its hashes cannot be shared.
    """
    hash_tokens = block_sizes(vllm_config, kv_cache_config)[1]
    backends = layer_backends(vllm_config, kv_cache_config)
    return RegisterRank(
        serial=serial,
        shard=worker_shard(vllm_config),
        identity=identity_facts(
            vllm_config,
            config,
            engine_version=vllm_compat.ENGINE_VERSION,
            hash_probe=vllm_compat.hash_probe(vllm_config.cache_config.prefix_caching_hash_algo),
            hash_block_tokens=hash_tokens,
            backends=backends,
        ),
        num_blocks=int(kv_cache_config.num_blocks),
        layout=str(kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout),
        groups=describe_groups(vllm_config, kv_cache_config, kv_caches, backends),
        placements=describe_placements(kv_cache_config, kv_caches, memory),
        hash_block_tokens=hash_tokens,
    )


def layer_backends(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, str]:
    """Return the attention backend of each KV layer of this rank, by layer name."""
    modules = vllm_config.compilation_config.static_forward_context
    names: dict[str, str] = {}
    for group in kv_cache_config.kv_cache_groups:
        for layer in group.layer_names:
            module = modules.get(layer)
            if module is not None and hasattr(module, "get_attn_backend"):
                backend = module.get_attn_backend()
                names[layer] = f"{backend.__module__}.{backend.__qualname__}"
    return names


def describe_groups(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    backends: Mapping[str, str],
) -> list[Group]:
    """Return every KV cache group under its scheduler-wide id, served or not.

    A group without layers on this rank (pipeline parallel) is listed with none.
    """
    dcp_size = int(vllm_config.parallel_config.decode_context_parallel_size)
    cacheable = set(kv_cache_config.prefix_cacheable_group_ids)
    groups: list[Group] = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        kind, detail = spec_kind(spec)
        first = first_spec(spec)
        window = first.sliding_window if kind in _WINDOWED else 0
        if group.host_resident or group.role.value != "default":
            kind, detail = "hisparse", f"role {group.role.value}"
        layers = sorted(group.layer_names)
        facts = spec_facts(spec)
        facts["backends"] = common_fact({name: backends.get(name, "none") for name in layers})
        # With heads outermost, each kernel block orders its own tokens.
        rows = {kv_caches[name].shape[0] for name in layers if name in kv_caches}
        ratios = sorted(count // kv_cache_config.num_blocks for count in rows)
        facts["kernel_blocks"] = ",".join(map(str, ratios))
        groups.append(
            Group(
                group=number,
                kind=kind,
                block_tokens=int(spec.block_size) * (dcp_size if spec.dcp_sharded else 1),
                spec=facts,
                layers=layers,
                cacheable=number in cacheable,
                eagle=bool(group.is_eagle_group),
                detail=detail,
                window_tokens=window,
                window_extra_tokens=vllm_compat.window_extra(first) if window else 0,
                chunk_tokens=first.attention_chunk_size if kind == "chunked" else 0,
                tp_replicas=tp_replicas(spec, vllm_config.parallel_config),
                scratch_blocks=first.num_speculative_blocks if kind == "mamba" else 0,
            )
        )
    return groups


def spec_kind(spec: KVCacheSpec) -> tuple[str, str]:
    """Return the kind of a spec and a detail for the operator; unknown classes are "unknown"."""
    name = type(spec).__name__
    kind = _KINDS.get(name, "unknown")
    if kind == "uniform":
        return _uniform_kind(spec)
    if kind == "mla" and spec.cache_role.value == "indexer":
        return "indexer", name
    if kind == "mamba" and spec.mamba_cache_mode != "align":
        return "mamba-none", f"{name}: one state per request, whatever its length"
    if kind == "full" and spec.non_causal:
        return "non-causal", f"{name}: a prefix depends on the tokens after it"
    return kind, name


def _uniform_kind(spec: KVCacheSpec) -> tuple[str, str]:
    """Return the kind of a group whose layers have one block table and pages of several sizes.

    vLLM's manager knows such a group by its first layer: where the others would be kept by other
    rules, no mask is exact for all.
    """
    members = list(iter_layer_specs(spec))
    kinds = sorted({spec_kind(member)[0] for member in members})
    detail = f"{type(spec).__name__} of {', '.join(kinds)}"
    if len(kinds) > 1 and set(kinds) <= _FULL_FAMILY:
        return ("full" if "full" in kinds else "mla"), detail
    reaches = {
        (getattr(one, "sliding_window", None), getattr(one, "attention_chunk_size", None))
        for one in members
    }
    return (kinds[0] if len(kinds) == len(reaches) == 1 else "uniform"), detail


def first_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """Return the spec by which vLLM's scheduler knows a group: of several, the first layer's."""
    return next(iter(iter_layer_specs(spec)))


def tp_replicas(spec: KVCacheSpec, parallel: Any) -> int:
    """Return how many consecutive tensor-parallel ranks hold the same bytes of a group."""
    tp_size = int(parallel.tensor_parallel_size)
    dcp_size = int(parallel.decode_context_parallel_size)
    return math.gcd(tp_size, *(_replicas(one, tp_size, dcp_size) for one in iter_layer_specs(spec)))


def _replicas(spec: KVCacheSpec, tp_size: int, dcp_size: int) -> int:
    if getattr(spec, "tp_replicated", False):  # a state that every rank computes whole
        return tp_size
    shards = getattr(spec, "max_tp_shards", None)  # None: not known to be replicated
    split_by_tokens = spec.dcp_sharded and dcp_size > 1
    return 1 if shards is None or split_by_tokens else max(1, tp_size // shards)


def spec_facts(spec: KVCacheSpec) -> dict[str, str]:
    """Return what determines the bytes inside a page of this spec, by name.

    Of a group with several: the first layer's, as vLLM compares groups, and all as ``members``.
    """
    members = getattr(spec, "kv_cache_specs", None)
    if members is not None:
        texts = {
            layer: "; ".join(f"{name}={value}" for name, value in spec_facts(member).items())
            for layer, member in members.items()
        }
        return {**spec_facts(first_spec(spec)), "members": common_fact(texts)}
    facts = {"class": type(spec).__name__}
    for field in sorted(fields(spec), key=lambda field: field.name):
        if field.name not in _NOT_CONTENT:
            facts[field.name] = str(getattr(spec, field.name))
    facts["page_data_bytes"] = str(page_data_bytes(spec))
    return facts
