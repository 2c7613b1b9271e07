"""Groups, placements and identity, from vLLM's own specs, allocator and configs."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.kv_cache_interface as interface
from kvferry_connector import describe, identity, placements
from kvferry_connector.config import FerryConfig
from kvferry_connector.describe import DescribeError, describe_engine, describe_rank
from kvferry_connector.export import ExportError, KvMemory
from kvferry_connector.wire.attach import Placement, Shard
from support.vllm_configs import make_config, write_model
from support.vllm_memory import Kv, allocating
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
SWA = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64
)
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(4)]


@pytest.fixture
def allocate(tmp_path: Path) -> Iterator[Callable[..., Kv]]:
    with allocating(tmp_path) as make:
        yield make


def page_through_the_descriptor(kv: Kv, place: Placement, layer: str, block: int) -> bytes:
    """Read one page as the sidecar would: by the placement, from the memfd."""
    handle = kv.memory.handles()[place.buffer]
    at = place.offset + place.layers.index(layer) * place.layer_stride + block * place.block_stride
    with mmap.mmap(handle.fd, handle.memory.total_bytes) as mapping:
        starts = [at + run * place.run_stride for run in range(place.runs)]
        return b"".join(mapping[start : start + place.run_bytes] for start in starts)


@pytest.mark.parametrize("layout", [layout.name for layout in KVCacheLayout])
def test_placements_find_every_byte(allocate: Callable[..., Kv], layout: str) -> None:
    kv = allocate(dict.fromkeys(LAYERS, FULL), layout)
    places = placements.describe_placements(kv.kv_cache_config, kv.kv_caches, kv.memory)
    assert sorted(layer for place in places for layer in place.layers) == LAYERS
    rng = np.random.default_rng(1)
    for place in places:
        assert place.page_bytes == 2 * 32 * 64 * 4 == place.runs * place.run_bytes
        assert place.runs == (2 if layout in ("LHBNC", "BHLNC") else 1)
        for layer in place.layers:
            view = kv.kv_caches[layer]
            for block in (1, kv.kv_cache_config.num_blocks - 1):
                data = rng.integers(1, 2**31, view[block].numel(), dtype=np.int32)
                kv.kv_caches[layer].zero_()
                view[block].view(torch.int32).copy_(torch.from_numpy(data).view(view[block].shape))
                found = np.frombuffer(
                    page_through_the_descriptor(kv, place, layer, block), np.int32
                )
                # Each value once: nothing is missing, nothing is read twice or from elsewhere.
                assert np.array_equal(np.sort(found), np.sort(data))
                assert not any(page_through_the_descriptor(kv, place, layer, block - 1))


def test_kernel_blocks_are_undone(allocate: Callable[..., Kv]) -> None:
    kv = allocate(dict.fromkeys(LAYERS, FULL), "LBHNC", kernel_tokens=16)
    assert kv.kv_caches[LAYERS[0]].shape[0] == 2 * kv.kv_cache_config.num_blocks
    (place,) = placements.describe_placements(kv.kv_cache_config, kv.kv_caches, kv.memory)
    assert (place.runs, place.run_bytes) == (1, 2 * 32 * 64 * 4)
    kv.kv_caches[LAYERS[2]][2 * 5 + 1].fill_(1.0)
    page = page_through_the_descriptor(kv, place, LAYERS[2], 5)
    assert np.frombuffer(page, np.float32).sum() == len(page) // 8
    (group,) = describe.describe_groups(kv.vllm_config, kv.kv_cache_config, kv.kv_caches, {})
    assert group.spec["kernel_blocks"] == "2"


def test_hybrid_groups_keep_their_ids(allocate: Callable[..., Kv]) -> None:
    specs = {layer: SWA if i % 2 else FULL for i, layer in enumerate(LAYERS)}
    kv = allocate(specs)
    groups = describe.describe_groups(kv.vllm_config, kv.kv_cache_config, kv.kv_caches, {})
    assert [(group.group, group.kind) for group in groups] == [(0, "full"), (1, "swa")]
    assert [group.layers for group in groups] == [LAYERS[::2], LAYERS[1::2]]
    assert groups[1].spec["sliding_window"] == "64"
    assert all(group.block_tokens == 32 and group.cacheable for group in groups)
    assert [(group.window_tokens, group.chunk_tokens) for group in groups] == [(0, 0), (64, 0)]
    places = placements.describe_placements(kv.kv_cache_config, kv.kv_caches, kv.memory)
    assert {place.group for place in places} == {0, 1}


def parallel_of(tp_size: int) -> Any:
    """As much of a VllmConfig as groups are described by."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, tensor_parallel_size=tp_size
        )
    )


def test_numbers_of_each_positional_kind_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    swa = replace(SWA, extra_retained_tokens=5)
    chunked = interface.ChunkedLocalAttentionSpec(
        block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, attention_chunk_size=64
    )
    promoted = replace(FULL, sliding_window=64)
    config = KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"l{i}"], spec) for i, spec in enumerate((swa, chunked, promoted))
        ],
    )
    vllm_config = parallel_of(2)

    def numbers() -> list[tuple[int, int, int]]:
        groups = describe.describe_groups(vllm_config, config, {}, {})
        return [(g.window_tokens, g.window_extra_tokens, g.chunk_tokens) for g in groups]

    assert numbers() == [(64, 0, 0), (0, 0, 64), (0, 0, 0)]
    monkeypatch.setattr(describe.vllm_compat, "ENGINE_VERSION", "0.33.0")
    assert numbers()[0] == (64, 5, 0)


def test_memory_that_is_not_where_the_config_says_is_refused(allocate: Callable[..., Kv]) -> None:
    kv = allocate(dict.fromkeys(LAYERS, FULL))
    (tensor,) = kv.kv_cache_config.kv_cache_tensors

    def describe_with(**wrong: Any) -> None:
        config = replace(kv.kv_cache_config, kv_cache_tensors=[replace(tensor, **wrong)])
        placements.describe_placements(config, kv.kv_caches, kv.memory)

    describe_with()
    with pytest.raises(DescribeError, match=f"block 0 of layer {LAYERS[0]} is at 0x"):
        describe_with(offset=64)
    with pytest.raises(DescribeError, match=f"block 0 of layer {LAYERS[1]} is at 0x"):
        describe_with(layer_stride=tensor.layer_stride + 64)
    with pytest.raises(DescribeError, match=f"block 1 of layer {LAYERS[0]} is at 0x"):
        describe_with(block_stride=tensor.block_stride + 64)
    swapped = dict(zip(reversed(LAYERS), kv.kv_caches.values(), strict=True))
    with pytest.raises(DescribeError, match="this KV layout is not understood"):
        placements.describe_placements(kv.kv_cache_config, swapped, kv.memory)
    with pytest.raises(DescribeError, match="have no KV tensor"):
        placements.describe_placements(kv.kv_cache_config, {}, kv.memory)
    with pytest.raises(ExportError, match="get_mem_pool_context"):
        placements.describe_placements(kv.kv_cache_config, kv.kv_caches, KvMemory())


def test_pages_that_are_neither_dense_nor_per_head_are_refused() -> None:
    view = torch.zeros(8, 6, 64, 16)[:, ::2, ::2, :8]
    with pytest.raises(DescribeError, match="neither dense nor one run per head"):
        placements.page_runs(view, 8)


def test_layers_that_share_the_kv_of_another_are_not_placed_twice(
    allocate: Callable[..., Kv],
) -> None:
    """vLLM lists them among the tensors only; their bytes are those of the layer they share."""
    kv = allocate(dict.fromkeys(LAYERS, FULL))
    plain = describe_rank(
        kv.vllm_config, kv.kv_cache_config, kv.kv_caches, kv.memory, FerryConfig()
    )
    kv.kv_caches["model.layers.4.self_attn.attn"] = kv.kv_caches[LAYERS[1]]
    rank = describe_rank(kv.vllm_config, kv.kv_cache_config, kv.kv_caches, kv.memory, FerryConfig())
    assert rank == plain
    assert [layer for place in rank.placements for layer in place.layers] == LAYERS


def test_every_spec_class_of_vllm_has_a_kind() -> None:
    found: set[type] = set()
    new: set[type] = {interface.KVCacheSpec}
    while new:
        found |= new
        new = {sub for cls in new for sub in cls.__subclasses__()} - found
    ours = {cls.__name__ for cls in found if cls.__module__ == interface.__name__}
    assert ours - {"KVCacheSpec", "AttentionSpec"} == set(describe._KINDS)


def test_what_is_not_kept_by_prefix_is_named_for_its_refusal() -> None:
    state = interface.MambaSpec(block_size=2048, shapes=((4, 4),), dtypes=(torch.float32,))
    assert state.mamba_cache_mode == "none"
    assert describe.spec_kind(state)[0] == "mamba-none"
    served = {"full", "mla", "rswa", "swa", "swa-mla", "chunked", "mamba", "ring", "uniform"}
    assert set(describe._KINDS.values()) - served == {
        "cross", "encoder-only", "hidden-state", "hisparse", "sink",
    }  # fmt: skip
    config = KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["l0"], FULL, host_resident=True)],
    )
    (group,) = describe.describe_groups(parallel_of(1), config, {}, {})
    assert group.kind == "hisparse"


def test_only_plain_full_attention_is_full() -> None:
    mla = interface.MLAAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float16
    )
    assert describe.spec_kind(FULL) == ("full", "FullAttentionSpec")
    assert describe.spec_kind(mla) == ("mla", "MLAAttentionSpec")
    indexer = replace(mla, cache_role=interface.SparseCacheRole.INDEXER)
    assert describe.spec_kind(indexer)[0] == "indexer"
    assert describe.spec_kind(replace(FULL, non_causal=True))[0] == "non-causal"

    class OwnSpec(FullAttentionSpec):
        pass

    own = OwnSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    assert describe.spec_kind(own) == ("unknown", "OwnSpec")


def test_spec_facts_name_what_changes_bytes() -> None:
    facts = describe.spec_facts(FULL)
    assert facts["class"] == "FullAttentionSpec"
    assert facts["page_data_bytes"] == str(2 * 32 * 64 * 4)
    for change in (
        {"num_kv_heads": 4},
        {"head_size": 64},
        {"dtype": torch.float16},
        {"block_size": 16},
        {"max_tp_shards": 1},
        {"state_content_bytes": 99},
        {"kv_quant_mode": interface.KVQuantMode.NVFP4},
    ):
        assert describe.spec_facts(replace(FULL, **change)) != facts
    assert describe.spec_facts(replace(FULL, page_size_padded=1 << 20)) == facts


def test_a_rank_and_an_engine_are_described(allocate: Callable[..., Kv]) -> None:
    kv = allocate(dict.fromkeys(LAYERS, FULL))
    rank = describe_rank(kv.vllm_config, kv.kv_cache_config, kv.kv_caches, kv.memory, FerryConfig())
    assert (rank.serial, rank.layout, rank.hash_block_tokens) == (1, "LBNHC", 32)
    assert rank.shard == Shard()
    assert rank.num_blocks == kv.kv_cache_config.num_blocks
    assert all(isinstance(value, str) for value in rank.identity.values())
    engine = describe_engine(kv.vllm_config, kv.kv_cache_config, bytes(16))
    assert (engine.hash_block_tokens, engine.scheduler_block_tokens) == (32, 32)
    assert (engine.alignment_tokens, engine.load_failure_policy) == (32, "recompute")
    assert (engine.retention_tokens, engine.use_eagle) == (0, False), "vLLM's defaults"
    dense = replace(kv.kv_cache_config, prefix_cache_retention_interval=None)
    assert describe_engine(kv.vllm_config, dense, bytes(16)).retention_tokens is None


def test_ranks_run_over_tensor_then_pipeline_parallel() -> None:
    parallel = SimpleNamespace(
        rank=5, tensor_parallel_size=4, pipeline_parallel_size=2, decode_context_parallel_size=2
    )
    shard = describe.worker_shard(SimpleNamespace(parallel_config=parallel))
    assert shard == Shard(tp_rank=1, tp_size=4, pp_rank=1, pp_size=2, dcp_rank=1, dcp_size=2)


# --- identity --------------------------------------------------------------------------------


def facts_of(vllm_config: VllmConfig, config: FerryConfig | None = None) -> dict[str, str]:
    return identity.identity_facts(
        vllm_config,
        config or FerryConfig(),
        engine_version="0.32.0",
        hash_probe="ab",
        hash_block_tokens=32,
        backends={"a": "CPU_ATTN"},
    )


def differing(one: dict[str, str], two: dict[str, str]) -> set[str]:
    return {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)}


def test_equal_engines_have_equal_identities(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "a")
    one = facts_of(make_config(folder))
    assert one == facts_of(make_config(folder))
    assert one["model"] == str(folder.resolve())
    # Where memory lies, how much of it there is, and names of engines are nobody's business here.
    other = make_config(folder, cache_gpu_memory_utilization=0.5, transfer_engine_id="x")
    assert facts_of(other) == one


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model_dtype": "bfloat16"}, {"dtype"}),
        ({"model_revision": "v2"}, {"model_revision"}),
        ({"cache_cache_dtype": "fp8"}, {"cache_dtype"}),
        ({"cache_prefix_caching_hash_algo": "sha256_cbor"}, {"hash_algorithm"}),
        ({"cache_kv_cache_dtype_skip_layers": ["0"]}, {"cache_dtype_skip_layers"}),
        ({"model_hf_overrides": {"rope_theta": 5.0}}, {"model_config"}),
        ({"load_load_format": "dummy"}, {"model_weights"}),
    ],
)
def test_what_changes_bytes_changes_the_identity(
    tmp_path: Path, changes: dict[str, Any], names: set[str]
) -> None:
    folder = write_model(tmp_path / "a")
    one, two = facts_of(make_config(folder)), facts_of(make_config(folder, **changes))
    assert differing(one, two) == names


def test_two_folders_and_two_contents_are_two_models(tmp_path: Path) -> None:
    first, second = write_model(tmp_path / "a"), write_model(tmp_path / "b")
    one = facts_of(make_config(first))
    assert "model" in differing(one, facts_of(make_config(second)))
    (first / "model.safetensors").write_bytes(b"weights")
    changed = facts_of(make_config(first))
    assert differing(one, changed) == {"model_weights"}
    link = tmp_path / "current"
    link.symlink_to(first)
    assert facts_of(make_config(link)) == changed
    link.unlink()
    link.symlink_to(second)
    assert "model" in differing(changed, facts_of(make_config(link)))


def test_where_fp8_scales_come_from_changes_the_identity(tmp_path: Path) -> None:
    """Scales per tensor lie in no page: they are the checkpoint's, or all 1 without a scheme."""
    folder = tmp_path / "a"
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    written = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    facts = []
    for own in (None, {**written, "kv_cache_scheme": scheme}):
        write_model(folder, **({} if own is None else {"quantization_config": own}))
        facts.append(facts_of(make_config(folder, cache_cache_dtype="fp8")))
    assert differing(*facts) == {"model_config", "model_weights", "quantization"}
    scaled = facts[-1]
    (folder / "kv_scales.safetensors").write_bytes(b"other scales")
    assert differing(scaled, facts_of(make_config(folder, cache_cache_dtype="fp8"))) == {
        "model_weights"
    }


def test_settings_overrule_what_the_engine_says(tmp_path: Path) -> None:
    own = FerryConfig(model_identity="m", model_revision="r", weights_version="7")
    first, second = write_model(tmp_path / "a"), write_model(tmp_path / "b")
    one = facts_of(make_config(first), own)
    assert one == facts_of(make_config(second), own)
    assert (one["model"], one["model_revision"], one["model_weights"]) == ("m", "r", "7")
    newer = FerryConfig(model_identity="m", model_revision="r", weights_version="8")
    assert differing(one, facts_of(make_config(first), newer)) == {"model_weights"}


def test_tenants_share_nothing(tmp_path: Path) -> None:
    model = make_config(write_model(tmp_path / "a"))
    nobody, one = facts_of(model), facts_of(model, FerryConfig(tenant="one"))
    assert differing(nobody, one) == {"tenant"}
    assert differing(one, facts_of(model, FerryConfig(tenant="two"))) == {"tenant"}


def test_the_config_digest_ignores_where_and_when() -> None:
    class Config:
        def __init__(self, **values: Any) -> None:
            self.values = values

        def to_dict(self) -> dict[str, Any]:
            return self.values

    one = Config(hidden_size=64, _name_or_path="/a", transformers_version="1", text={"x": (1, 2)})
    two = Config(text={"x": [1, 2], "_commit_hash": "f"}, hidden_size=64, _name_or_path="/b")
    assert identity.canonical_config(one) == identity.canonical_config(two)
    assert identity.canonical_config(one) != identity.canonical_config(Config(hidden_size=65))


def test_the_length_limit_counts_where_it_changes_the_rotation(tmp_path: Path) -> None:
    model = SimpleNamespace(
        model=str(tmp_path),
        revision=None,
        max_model_len=4096,
        hf_config=SimpleNamespace(to_dict=lambda: {"rope_scaling": {"rope_type": "longrope"}}),
    )
    facts = identity.model_facts("model", model, SimpleNamespace(load_format="auto"), FerryConfig())
    assert facts["model_max_len"] == "4096"


def test_backends_are_one_name_or_a_digest_of_who_uses_which() -> None:
    assert identity.common_fact({"a": "X", "b": "X"}) == "X"
    mixed = identity.common_fact({"a": "X", "b": "Y"})
    assert mixed.startswith("X,Y:")
    assert mixed != identity.common_fact({"a": "Y", "b": "X"})
    assert identity.common_fact({}) == ""
