"""Every fact, outside the geometry, that must agree for two engines to share bytes.

The prefix hashes cover tokens, LoRA name and path, salt and multimodal items; all that is said
here they do not cover. A fact too many costs hits, a fact too few gives wrong tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry_connector.config import FerryConfig

VllmConfig = Any  # read by attribute, so that this file runs without vLLM

# Raised whenever a fact is added or changes its meaning: old objects are then no hits.
FORMAT_VERSION = "1"
_VOLATILE_KEYS = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"}
)
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json"})
_weight_files_max = 10_000


def identity_facts(
    vllm_config: VllmConfig,
    config: FerryConfig,
    *,
    engine_version: str,
    hash_probe: str,
    hash_block_tokens: int,
    backends: Mapping[str, str],
) -> dict[str, str]:
    """Return the facts by name. ``backends``: attention backend by layer name of this rank."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    lora = vllm_config.lora_config
    return {
        **({"tenant": config.tenant} if config.tenant else {}),
        "format": FORMAT_VERSION,
        "vllm_version": engine_version,
        "device": str(vllm_config.device_config.device_type),
        **model_facts("model", model, vllm_config.load_config, config),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "cache_dtype_skip_layers": ",".join(sorted(cache.kv_cache_dtype_skip_layers)),
        "kv_layout": str(cache.kv_cache_layout),
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "hash_seed_probe": hash_probe,
        "hash_block_tokens": str(hash_block_tokens),
        "attention_backends": common_fact(backends),
        "tp_size": str(parallel.tensor_parallel_size),
        "pp_size": str(parallel.pipeline_parallel_size),
        "dcp_size": str(parallel.decode_context_parallel_size),
        "pcp_size": str(parallel.prefill_context_parallel_size),
        "cp_interleave": str(parallel.cp_kv_cache_interleave_size),
        "mm_processor": _mm_fact(model.multimodal_config),
        # Adapters are in the prefix hash by name and path; here is how they are computed.
        "lora": f"dtype={lora.lora_dtype}" if lora is not None else "off",
        **_drafter_facts(vllm_config, config),
    }


def model_facts(prefix: str, model: Any, load_config: Any, config: FerryConfig) -> dict[str, str]:
    """Return name, revision, weights and config digest of one model.

    Two local folders with equal configs are two models: the real path is the name. The same
    folder with other files in it is another one as well, by size and time of its weight files.
    Settings overrule all three, for weights that the operator versions himself.
    """
    folder = Path(str(model.model))
    local = folder.is_dir()
    name = config.model_identity or (str(folder.resolve()) if local else str(model.model))
    if load_config.load_format == "dummy":
        weights = "dummy"
    else:
        weights = weights_fingerprint(folder) if local and not config.model_identity else "hub"
    canonical = canonical_config(model.hf_config)
    facts = {
        prefix: name,
        f"{prefix}_revision": config.model_revision or str(model.revision),
        f"{prefix}_weights": config.weights_version or weights,
        f"{prefix}_config": hashlib.sha256(canonical.encode()).hexdigest(),
    }
    if "longrope" in canonical:  # there the length limit selects the rotation's factors
        facts[f"{prefix}_max_len"] = str(model.max_model_len)
    return facts


def weights_fingerprint(folder: Path) -> str:
    """Return a digest of name, size and modification time of the weight files in ``folder``."""
    lines: list[str] = []
    for path in sorted(folder.iterdir())[:_weight_files_max]:
        if path.suffix in _WEIGHT_SUFFIXES and path.is_file():
            info = path.stat()
            lines.append(f"{path.name} {info.st_size} {info.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def canonical_config(hf_config: Any) -> str:
    """Return the resolved model config as canonical JSON, without keys that change no bytes."""
    return json.dumps(_plain(hf_config.to_dict()), sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if str(k) not in _VOLATILE_KEYS}
    if isinstance(value, set | frozenset):
        return sorted(str(v) for v in value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def common_fact(by_layer: Mapping[str, str]) -> str:
    """Return the one value that all layers have, else the values and a digest of who has which."""
    names = sorted(set(by_layer.values()))
    if len(names) <= 1:
        return "".join(names)
    lines = "\n".join(f"{layer} {name}" for layer, name in sorted(by_layer.items()))
    return f"{','.join(names)}:{hashlib.sha256(lines.encode()).hexdigest()}"


def _mm_fact(multimodal: Any) -> str:
    options = _plain(multimodal.mm_processor_kwargs or {}) if multimodal is not None else None
    return json.dumps(options, sort_keys=True) if options is not None else ""


def _drafter_facts(vllm_config: VllmConfig, config: FerryConfig) -> dict[str, str]:
    """Draft layers live in KV groups too, so who drafts changes bytes."""
    drafter = vllm_config.speculative_config
    if drafter is None:
        return {"drafter_method": "none"}
    facts = {"drafter_method": str(drafter.method)}
    if drafter.draft_model_config is not None:
        # The identity settings name the main model; a drafter is known by its own path only.
        own = FerryConfig(weights_version=config.weights_version)
        model = drafter.draft_model_config
        facts.update(model_facts("drafter", model, vllm_config.load_config, own))
    return facts
