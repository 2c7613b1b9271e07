"""vLLM 0.32's own cache managers and coordinators on CPU, as the oracle for the masks.

No model, no GPU: specs of a few bytes, hashes that are made up (`prefix_hash`), and presence put
straight into the block pool. Importing this file imports vLLM (10 to 20 s of CPU).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    make_block_hash_with_group_id,
    resolve_dcp_kv_cache_spec,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

register_all_kvcache_specs(None)

_ATTENTION: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}


def full(block: int) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block, **_ATTENTION)


def mla(block: int) -> KVCacheSpec:
    return MLAAttentionSpec(block_size=block, **_ATTENTION)


def rswa(block: int, window: int) -> KVCacheSpec:
    return RSWASpec(block_size=block, rswa_window=window, **_ATTENTION)


def swa(block: int, window: int, extra_retained: int = 0, dcp_sharded: bool = True) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=block,
        sliding_window=window,
        extra_retained_tokens=extra_retained,
        dcp_sharded=dcp_sharded,
        **_ATTENTION,
    )


def chunked(block: int, chunk: int, dcp_sharded: bool = True) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block, attention_chunk_size=chunk, dcp_sharded=dcp_sharded, **_ATTENTION
    )


def mamba(block: int, speculative_blocks: int = 0) -> KVCacheSpec:
    return MambaSpec(
        block_size=block,
        shapes=((2, 2),),
        dtypes=(torch.float16,),
        mamba_cache_mode="align",
        num_speculative_blocks=speculative_blocks,
    )


def ring(block: int) -> KVCacheSpec:
    return CircularBufferSpec(block_size=block, dcp_sharded=False, **_ATTENTION)


class Oracle:
    """A KVCacheManager over groups of specs, with block sizes as the engine core resolves them.

    ``lookahead``: MTP modules. ``match_unit``: vLLM's prefix_match_unit. ``scheduler_block``: a
    multiple of what vLLM resolves. ValueError where vLLM itself refuses the combination.
    """

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        *,
        flagged: Iterable[int] = (),
        use_eagle: bool = False,
        retention: int | None = 0,
        dcp: int = 1,
        match_unit: int | None = None,
        scheduler_block: int | None = None,
        lookahead: int = 0,
        num_blocks: int = 500,
        tokens_max: int = 1 << 20,
    ) -> None:
        marked = set(flagged)
        self.config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer.{i}"], spec, is_eagle_group=i in marked)
                for i, spec in enumerate(specs)
            ],
            prefix_cache_retention_interval=retention,
        )
        resolved, self.hash_block = resolve_kv_cache_block_sizes(
            self.config, _vllm_config(specs[0].block_size, dcp, match_unit)
        )
        self.scheduler_block = scheduler_block or resolved
        self.dcp = dcp
        self.use_eagle = use_eagle
        self.manager = KVCacheManager(
            self.config,
            max_model_len=tokens_max,
            scheduler_block_size=self.scheduler_block,
            hash_block_size=self.hash_block,
            use_eagle=use_eagle,
            num_prefill_lookahead=lookahead,
            dcp_world_size=dcp,
        )
        self.coordinator = self.manager.coordinator
        self.groups = self.coordinator.single_type_managers
        self.partial = self.coordinator.enable_partial_hash_hits
        self.alignment = self.groups[0].cache_hit_alignment_tokens
        self._requests = 0

    def request(self, tokens: int) -> Request:
        """Return a new request whose hash k is `prefix_hash(k)`, whatever its tokens."""
        self._requests += 1
        params = SamplingParams(max_tokens=64)
        params.update_from_generation_config({}, 50256)
        return Request(
            request_id=f"r{self._requests}",
            prompt_token_ids=[1] * tokens,
            sampling_params=params,
            pooling_params=None,
            mm_features=None,
            block_hasher=self._new_hashes,
        )

    def _new_hashes(self, request: Request) -> list[bytes]:
        known, total = len(request.block_hashes), request.num_tokens // self.hash_block
        return [prefix_hash(k) for k in range(known, total)]

    def step(self, request: Request, tokens: int) -> None:
        """One synchronous step of the scheduler."""
        self.manager.new_step_starts()
        assert self.manager.allocate_slots(request, tokens) is not None
        request.num_computed_tokens += tokens
        self.manager.take_boundary_state_offloads()

    def external_tables(self, tokens: int) -> list[list[int]]:
        """Return the tables that an external load of ``tokens`` gets (0 is null); frees them."""
        request = self.request(tokens + 1)
        self.manager.new_step_starts()
        allocated = self.manager.allocate_slots(
            request, 0, num_external_computed_tokens=tokens, delay_cache_blocks=True
        )
        assert allocated is not None
        tables = self.tables(request)
        self.manager.free(request)
        return tables

    def tables(self, request: Request) -> list[list[int]]:
        return [list(ids) for ids in self.manager.get_block_ids(request.request_id)]

    def hashed(self, request: Request) -> list[dict[int, set[int]]]:
        """Return per group {chunk: end tokens of the hash} of the blocks the table still holds."""
        return [
            {
                i: {block.block_hash_num_tokens}
                for i, block in enumerate(blocks)
                if not block.is_null and block.block_hash is not None
            }
            for blocks in self.manager.get_blocks(request.request_id).blocks
        ]

    def put(self, ends: Mapping[int, Iterable[int]]) -> None:
        """Make exactly these objects (end tokens per group) present in the local cache."""
        cache = BlockHashToBlockMap()
        for group, tokens in ends.items():
            for end in tokens:
                key = make_block_hash_with_group_id(prefix_hash(end // self.hash_block - 1), group)
                cache.insert(key, self.manager.block_pool.blocks[1])
        self.manager.block_pool.cached_block_hash_to_block = cache

    def store_coordinator(self) -> MooncakeStoreCoordinator:
        """Return the coordinator of vLLM's store connector, over the cacheable groups."""
        groups = [
            KVCacheGroupSpec(
                group.layer_names,
                resolve_dcp_kv_cache_spec(group.kv_cache_spec, self.dcp),
                is_eagle_group=group.is_eagle_group,
            )
            for group in self.config.kv_cache_groups
            if group.kv_cache_spec.prefix_cacheable
        ]
        return MooncakeStoreCoordinator(
            groups,
            self.scheduler_block,
            self.hash_block,
            use_eagle=self.use_eagle,
            retention_interval=self.config.prefix_cache_retention_interval,
            enable_partial_hash_hits=self.partial,
        )

    @property
    def stored_ids(self) -> list[int]:
        """Group ids in the order of the store coordinator's groups."""
        groups = self.config.kv_cache_groups
        return [i for i, group in enumerate(groups) if group.kv_cache_spec.prefix_cacheable]

    def external_pool(self, ends: Mapping[int, Iterable[int]]) -> ExternalCachedBlockPool:
        """Return the same presence as `put`, for the store coordinator."""
        exists = {
            (self.stored_ids.index(group), prefix_hash(end // self.hash_block - 1))
            for group, tokens in ends.items()
            for end in tokens
        }
        return ExternalCachedBlockPool(self.hash_block, exists)


def prefix_hash(index: int) -> bytes:
    """Return the made-up hash of the prefix that ends with hash block ``index``."""
    return index.to_bytes(32, "big")


def prefix_hashes(count: int) -> list[bytes]:
    return [prefix_hash(k) for k in range(count)]


def _vllm_config(block: int, dcp: int, match_unit: int | None) -> Any:
    cache = SimpleNamespace(
        block_size=block, prefix_match_unit=match_unit, enable_prefix_caching=True
    )
    parallel = SimpleNamespace(decode_context_parallel_size=dcp)
    return SimpleNamespace(
        cache_config=cache, parallel_config=parallel, kv_transfer_config=object()
    )
