"""A worker's KV memory, laid out and allocated by vLLM itself, in memory that can be shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kvferry_connector.export import KvMemory
from support.vllm_configs import make_config, write_model
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache


@dataclass(frozen=True)
class Kv:
    """What ``register_kv_caches`` would be given, and the memory it lies in."""

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    kv_caches: dict[str, torch.Tensor]
    memory: KvMemory


@contextmanager
def allocating(folder: Path, total_bytes: int = 8 << 20) -> Iterator[Callable[..., Kv]]:
    """Yield a function that allocates for ``specs`` by layer name; all of it goes at the end."""
    memories: list[KvMemory] = []

    def make(
        specs: Mapping[str, Any], layout: str = "LBNHC", kernel_tokens: int | None = None
    ) -> Kv:
        memories.append(memory := KvMemory())
        vllm_config = make_config(write_model(folder / "model"), layout)
        (kv,) = get_kv_cache_configs(vllm_config, [dict(specs)], [total_bytes])
        sizes = [kernel_tokens or group.kv_cache_spec.block_size for group in kv.kv_cache_groups]
        with memory.context():
            caches = allocate_kv_cache(kv, torch.device("cpu"), KVCacheLayout[layout], sizes)
        return Kv(vllm_config, kv, caches, memory)

    yield make
    for memory in memories:
        memory.close()
