"""What the sidecar says of its pool, as vLLM's KV events."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvferry_connector import events as module
from kvferry_connector.events import KvEvents
from kvferry_connector.wire.hot import Removed, Stored
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as named
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import Request

HASH = 8
FULL = FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=8, dtype=torch.float16)
SWA = SlidingWindowSpec(
    block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16, sliding_window=40
)
ADAPTER = LoRARequest("adapter", 3, "/adapters/one")


def request(tokens: int = 64, lora: Any = None) -> Any:
    names = [b"hash %d" % number for number in range(tokens // HASH)]
    return SimpleNamespace(
        all_token_ids=list(range(tokens)), block_hashes=names, lora_request=lora, session_id=None,
        mm_features=[], cache_salt=None, prompt_embeds=None,
    )  # fmt: skip


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


@pytest.fixture
def events(counts: Counter[str]) -> KvEvents:
    def count(name: str, number: int = 1) -> None:
        counts[name] += number

    return KvEvents([FULL, SWA], [8, 16], HASH, count)


def test_objects_that_follow_one_another_are_one_event(events: KvEvents) -> None:
    events.saving(1, request())
    events.hear(Stored(1, {0: [16, 24, 40], 1: [32]}))
    first, second, window = events.take()
    assert isinstance(first, BlockStored)
    assert first.block_hashes == [named(b"hash 1"), named(b"hash 2")]
    assert (first.parent_block_hash, first.token_ids) == (named(b"hash 0"), list(range(8, 24)))
    assert (first.block_size, first.medium, first.group_idx) == (8, "CPU", 0)
    assert (first.kv_cache_spec_kind, first.locality) == ("full_attention", "LOCAL")
    assert (second.block_hashes, second.token_ids) == ([named(b"hash 4")], list(range(32, 40)))
    assert (window.group_idx, window.block_size, window.token_ids) == (1, 16, list(range(16, 32)))
    assert (window.kv_cache_spec_sliding_window, window.block_hashes) == (40, [named(b"hash 3")])
    assert events.take() == []


def test_the_first_chunk_has_no_parent_and_a_partial_one_stands_alone(events: KvEvents) -> None:
    events.saving(1, request(lora=ADAPTER))
    events.hear(Stored(1, {1: [16, 24]}))
    whole, tail = events.take()
    assert (whole.parent_block_hash, whole.block_size) == (None, 16)
    assert (tail.parent_block_hash, tail.token_ids) == (named(b"hash 1"), list(range(16, 24)))
    assert (tail.block_size, tail.lora_id, tail.lora_name) == (8, 3, "adapter")


def image(name: str, offset: int) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=10)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)


@pytest.mark.parametrize("first", [0, 2])
def test_adapter_salt_and_images_are_named_as_vllm_names_them(events: KvEvents, first: int) -> None:
    init_none_hash(sha256_cbor)
    asked = Request(
        request_id="r", prompt_token_ids=list(range(64)), sampling_params=SamplingParams(),
        pooling_params=None, lora_request=ADAPTER, cache_salt="salt", session_id="talk",
        mm_features=[image("cat", 3), image("dog", 30)],
        block_hasher=get_request_block_hasher(HASH, sha256_cbor),
    )  # fmt: skip
    pool = BlockPool(20, True, HASH, enable_kv_cache_events=True)
    pool.cache_full_blocks(asked, pool.get_new_blocks(8), first, 8, HASH, 0)
    (theirs,) = pool.take_events()
    events.saving(1, asked)
    events.hear(Stored(1, {0: [HASH * (chunk + 1) for chunk in range(first, 8)]}))
    (ours,) = events.take()
    assert ours.extra_keys == theirs.extra_keys
    assert sum(keys != ("adapter",) for keys in ours.extra_keys) == (2 + 2 if first == 0 else 2)
    for field in ("block_hashes", "parent_block_hash", "token_ids", "block_size", "session_id",
                  "lora_id", "lora_name", "group_idx"):  # fmt: skip
        assert getattr(ours, field) == getattr(theirs, field), field


def test_a_save_that_failed_or_is_not_known_is_no_event(events: KvEvents) -> None:
    events.saving(1, request())
    events.failed(1)
    events.hear(Stored(1, {0: [8]}))
    events.hear(Stored(2, {0: [8]}))
    assert events.take() == []


def test_a_save_of_what_is_stored_is_no_event_and_waits_for_none(
    events: KvEvents, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "saves_max", 1)
    for job in range(3):
        events.saving(job, request())
        events.hear(Stored(job, {}))
    assert events.take() == []
    assert counts["events_dropped"] == 0, "none of them is kept"


def test_removals_name_group_and_medium(events: KvEvents) -> None:
    events.hear(Removed({0: [b"a", b"b"], 1: [b"c"]}))
    assert events.take() == [
        BlockRemoved([named(b"a"), named(b"b")], "CPU", 0, "LOCAL"),
        BlockRemoved([named(b"c")], "CPU", 1, "LOCAL"),
    ]


def test_what_is_not_taken_is_bounded(
    events: KvEvents, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "saves_max", 3)
    monkeypatch.setattr(module, "events_max", 2)
    for job in range(5):
        events.saving(job, request())
    assert counts["events_dropped"] == 2
    for job in range(5):
        events.hear(Stored(job, {0: [8 * (job + 1)]}))
    assert [event.block_hashes for event in events.take()] == [
        [named(b"hash 3")],
        [named(b"hash 4")],
    ]
    assert counts["events_dropped"] == 3
