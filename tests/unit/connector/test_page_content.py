"""Pages of every content through the native copy: saved from one memory, loaded into another.

vLLM lays the memory out and allocates it; what its tensors show is what must arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.kv_cache_interface as interface
from kvferry_connector.config import FerryConfig
from kvferry_connector.describe import describe_rank
from kvferry_native import CopyEngine, Mapping
from kvferry_sidecar.geometry.validate import validate_rank
from kvferry_sidecar.sessions.model import RankGeometry
from support.vllm_memory import Kv, allocating
from support.waiting import wait_until
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

MLA = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=96, dtype=torch.bfloat16)
INDEXER = MLAAttentionSpec(
    block_size=32,
    num_kv_heads=1,
    head_size=36,
    dtype=torch.uint8,
    cache_role=interface.SparseCacheRole.INDEXER,
    max_tp_shards=1,
)
FULL = FullAttentionSpec(block_size=32, num_kv_heads=3, head_size=32, dtype=torch.float32)


def packed(**fields: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.uint8, **fields
    )


MODELS: dict[str, dict[str, Any]] = {
    "mla and indexer": {"a": MLA, "a.indexer": INDEXER, "b": MLA, "b.indexer": INDEXER},
    "full of two head sizes": {
        "a": FULL,
        "b": FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32),
    },
    "fp8 blobs": {"a": packed(cache_dtype_str="fp8_ds_mla", state_content_bytes=656)},
    "padded and compressed": {
        "a": packed(
            cache_dtype_str="fp8_ds_mla",
            state_content_bytes=656,
            tokens_per_state=4,
            alignment=576,
        )
    },
    "nvfp4 blobs": {"a": packed(cache_dtype_str="nvfp4_ds_mla", state_content_bytes=352)},
    "nvfp4 with block scales in the row": {
        "a": FullAttentionSpec(
            block_size=32,
            num_kv_heads=2,
            head_size=64,
            dtype=torch.uint8,
            num_head_slots=2 * 2,  # keys and values have slots of their own
            state_content_bytes=nvfp4_kv_cache_full_dim(64),
            kv_quant_mode=interface.KVQuantMode.NVFP4,
        )
    },
    "fp8": {
        "a": FullAttentionSpec(
            block_size=32,
            num_kv_heads=2,
            head_size=32,
            dtype=torch.float8_e4m3fn,
            kv_quant_mode=interface.KVQuantMode.FP8_PER_TENSOR,
        )
    },
    "int8 with scales in the row": {
        "a": FullAttentionSpec(
            block_size=32,
            num_kv_heads=2,
            head_size=32,
            dtype=torch.int8,
            state_content_bytes=72,
            kv_quant_mode=interface.KVQuantMode.INT8_PER_TOKEN_HEAD,
        )
    },
}
NEED_COMPACT_BLOCKS = ("mla and indexer", "full of two head sizes")
LAYOUTS = [layout.name for layout in KVCacheLayout]


@pytest.fixture
def allocate(tmp_path: Path) -> Iterator[Callable[..., Kv]]:
    with allocating(tmp_path) as make:
        yield make


def geometry_of(kv: Kv) -> RankGeometry:
    """The rank as the sidecar has it, with its memory mapped from the descriptors."""
    register = describe_rank(
        kv.vllm_config, kv.kv_cache_config, kv.kv_caches, kv.memory, FerryConfig()
    )
    memories = {
        handle.memory.buffer: Mapping(handle.fd, handle.memory.total_bytes)
        for handle in kv.memory.handles()
    }
    geometry = validate_rank(register, memories)
    assert isinstance(geometry, RankGeometry), geometry
    return geometry


def content(kv: Kv, layer: str, block: int) -> bytes:
    """The data of one page as the engine's own tensor shows it, in the tensor's own order."""
    view = kv.kv_caches[layer]
    ratio = view.shape[0] // kv.kv_cache_config.num_blocks
    page = view[block * ratio : (block + 1) * ratio]
    return page.contiguous().view(torch.uint8).numpy().tobytes()


def move(layout: Any, direction: int, blocks: list[int], pool: np.ndarray) -> None:
    engine = CopyEngine(1)
    ids, count = np.array(blocks, np.int32), len(blocks)
    offsets = np.arange(count, dtype=np.uint64) * np.uint64(layout.payload_bytes)
    seeds = np.zeros(count, np.uint32)
    engine.submit(
        1, direction, layout, ids, pool.ctypes.data, offsets, True,
        seeds=seeds, expected=None, owner=pool, pool_bytes=pool.nbytes,
    )  # fmt: skip
    (result,) = wait_until(engine.poll, "the copy ends")
    assert result.status == 0
    assert result.moved_bytes == count * layout.payload_bytes
    engine.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_page_arrives_as_it_was(allocate: Callable[..., Kv], model: str, layout: str) -> None:
    specs = MODELS[model]
    if layout in ("LHBNC", "BHLNC") and model in NEED_COMPACT_BLOCKS:
        with pytest.raises(ValueError, match="mixed page sizes"):
            allocate(specs, layout)  # vLLM's own limit
        return
    _round_trip(allocate(specs, layout), allocate(specs, layout))


@pytest.mark.parametrize("model", ["mla and indexer", "full of two head sizes"])
@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_kernel_blocks_within_a_block(allocate: Callable[..., Kv], model: str, layout: str) -> None:
    specs = MODELS[model]
    _round_trip(*(allocate(specs, layout, kernel_tokens=16) for _ in range(2)))


def _round_trip(source: Kv, target: Kv) -> None:
    (group,) = geometry_of(source).groups
    (other,) = geometry_of(target).groups
    assert (
        group.payload_bytes
        == other.payload_bytes
        == sum(len(content(source, layer, 1)) for layer in source.kv_caches)
    )
    rng = np.random.default_rng(7)
    for view in source.kv_caches.values():
        raw = torch.from_numpy(rng.integers(0, 256, view.numel() * view.element_size(), np.uint8))
        view.copy_(raw.view(view.dtype).view(view.shape))
    last = source.kv_cache_config.num_blocks - 1
    taken, given = [3, 1, last], [last - 1, 5, 2]
    pool = np.zeros(3 * group.payload_bytes, np.uint8)
    move(group.layout, 0, taken, pool)
    move(other.layout, 1, given, pool)
    for layer in source.kv_caches:
        for before, after in zip(taken, given, strict=True):
            assert content(source, layer, before) == content(target, layer, after), layer
        assert not any(content(target, layer, 4)), "nothing else was written"
