"""Groups of layers with several specs, and caches that several ranks hold, against vLLM's own."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.kv_cache_interface as interface
from kvferry_connector import describe
from vllm.v1.core.kv_cache_utils import kv_cache_groups_tp_replicas
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
SWA = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64
)
MLA = MLAAttentionSpec(
    block_size=32, num_kv_heads=1, head_size=96, dtype=torch.bfloat16, max_tp_shards=1
)
INDEXER = replace(
    MLA, head_size=36, dtype=torch.uint8, cache_role=interface.SparseCacheRole.INDEXER
)
STATE = MambaSpec(
    block_size=32, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode="align"
)


def uniform(*specs: Any) -> UniformTypeKVCacheSpecs:
    members = {f"layer.{i}": spec for i, spec in enumerate(specs)}
    return UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=members)


@pytest.mark.parametrize(
    ("specs", "kind"),
    [
        ((MLA, INDEXER), "mla"),
        ((INDEXER, INDEXER), "indexer"),
        ((FULL, replace(FULL, head_size=64)), "full"),
        ((FULL, MLA), "full"),
        ((SWA, replace(SWA, head_size=64)), "swa"),
        ((SWA, replace(SWA, sliding_window=96)), "uniform"),
        ((SWA, FULL), "uniform"),
        ((FULL, replace(FULL, non_causal=True)), "uniform"),
    ],
)
def test_a_group_of_several_specs_has_the_kind_of_all_or_none(specs: Any, kind: str) -> None:
    found, detail = describe.spec_kind(uniform(*specs))
    assert found == kind
    assert detail.startswith("UniformTypeKVCacheSpecs of ")


def test_groups_that_vllm_takes_for_equal_differ_in_their_members_only() -> None:
    """vLLM's scheduler compares groups by their first layers; objects differ with every layer."""
    one = describe.spec_facts(uniform(MLA, INDEXER))
    two = describe.spec_facts(uniform(MLA, replace(INDEXER, head_size=40)))
    assert one["members"] != two["members"]
    assert {k: v for k, v in one.items() if k != "members"} == describe.spec_facts(MLA)
    swapped = describe.spec_facts(uniform(INDEXER, MLA))
    assert swapped["members"] != one["members"], "who has which spec counts"
    assert swapped["head_size"] == "36"


@pytest.mark.parametrize(("tp_size", "dcp_size"), [(1, 1), (2, 1), (4, 1), (6, 1), (8, 1), (8, 2)])
def test_replicas_are_those_that_vllm_counts(tp_size: int, dcp_size: int) -> None:
    parallel = SimpleNamespace(tensor_parallel_size=tp_size, decode_context_parallel_size=dcp_size)
    single = [FULL, SWA, MLA, INDEXER, *(replace(FULL, max_tp_shards=n) for n in (1, 2, 3, 4, 16))]
    single.append(replace(MLA, dcp_sharded=False))
    for specs in (*zip(single), *itertools.combinations(single, 2)):
        groups = [KVCacheGroupSpec([f"layer.{i}" for i in range(len(specs))], uniform(*specs))]
        expected = kv_cache_groups_tp_replicas(groups, tp_size, dcp_size)
        assert describe.tp_replicas(uniform(*specs), parallel) == expected, specs


def test_states_are_replicated_only_where_their_spec_says_so() -> None:
    parallel = SimpleNamespace(tensor_parallel_size=4, decode_context_parallel_size=1)
    assert describe.tp_replicas(STATE, parallel) == 1
    assert describe.tp_replicas(replace(STATE, tp_replicated=True), parallel) == 4
