"""Masks, hit search, keys of tails and expansion on configurations small enough to read.

That they equal vLLM's own managers everywhere is tests/property/test_masks_against_vllm.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvferry_sidecar.masks.expand import Blocks, expand_load
from kvferry_sidecar.masks.kinds import REFUSED_KINDS, Kind, kind_of
from kvferry_sidecar.masks.load import load_mask, needed_chunks
from kvferry_sidecar.masks.objects import handed_over, needed_objects, partial_tail
from kvferry_sidecar.masks.presence import from_ends
from kvferry_sidecar.masks.rules import GroupRule, Refused, Rules, check
from kvferry_sidecar.masks.search import find_hit
from kvferry_sidecar.masks.store import kept_boundaries, kept_chunks, store_mask

blocks = st.sampled_from([1, 8, 16, 528])


@given(st.integers(0, 20_000), blocks)
def test_a_full_hit_needs_every_chunk_it_reaches_into(total, block):
    mask = load_mask(GroupRule(Kind.FULL, block), total_tokens=total)
    assert mask.all()
    assert (len(mask) - 1) * block < total <= len(mask) * block or total == len(mask) == 0


@given(st.integers(0, 20_000), st.integers(0, 20_000), blocks)
def test_a_load_covers_exactly_what_is_not_whole_locally(local, total, block):
    chunks = needed_chunks(GroupRule(Kind.FULL, block), local_tokens=local, total_tokens=total)
    assert chunks.tolist() == [i for i in range(-(-total // block)) if (i + 1) * block > local]


@given(st.integers(0, 20_000), st.integers(0, 20_000), blocks)
def test_a_save_covers_whole_chunks_that_end_within_its_tokens(start, end, block):
    rules = Rules((GroupRule(Kind.FULL, block),), block, block, block)
    chunks = kept_chunks(rules, 0, start_tokens=start, tokens=end, boundaries=())
    assert chunks.tolist() == [i for i in range(end // block) if start < (i + 1) * block <= end]


# --- hybrid models -----------------------------------------------------------------------------

FULL = GroupRule(Kind.FULL, 16)
SWA = GroupRule(Kind.SWA, 16, window=33)  # a hit needs two chunks
STATE = GroupRule(Kind.MAMBA, 16)
RING = GroupRule(Kind.RING, 8, cacheable=False)


def rules_of(*groups, **changes):
    sizes = {"hash_block": 16, "scheduler_block": 16, "alignment": 16}
    return Rules(groups, **{**sizes, **changes})


def hit_tokens(rules, ends, *, max_tokens, hashed_tokens=4096):
    present = [
        from_ends(rules, i, ends.get(i, ()), hashed_tokens=hashed_tokens)
        for i in range(len(rules.groups))
    ]
    return find_hit(rules, present, max_tokens=max_tokens).tokens


def test_a_compact_state_slot_is_the_last_chunk_of_the_prefix():
    """Seed situation (b): the table `[slot]` of a 4-block prefix is chunk 3, nothing else."""
    blocks = expand_load(STATE, [77], total_tokens=64)
    assert isinstance(blocks, Blocks)
    assert (blocks.chunks.tolist(), blocks.ids.tolist()) == ([3], [77])
    with_scratch = expand_load(STATE, [77, 8, 9], total_tokens=64, scratch_slots=2)
    assert isinstance(with_scratch, Blocks)
    assert (with_scratch.chunks.tolist(), with_scratch.ids.tolist()) == ([3], [77])


def test_equal_block_sizes_say_nothing_about_the_masks():
    """Seed situation (c): full 1111, state 0001, window 0011, all with blocks of 16."""
    masks = [load_mask(rule, total_tokens=64).astype(int).tolist() for rule in (FULL, STATE, SWA)]
    assert masks == [[1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1]]


def test_a_sparse_prefix_with_all_its_objects_is_a_full_hit():
    """Seed situation (d): one state is enough where it ends, and is useless anywhere before."""
    rules = rules_of(FULL, STATE)
    stored = {0: range(16, 129, 16), 1: [128]}
    assert hit_tokens(rules, stored, max_tokens=143) == 128
    assert hit_tokens(rules, stored, max_tokens=127) == 0
    present = [from_ends(rules, i, stored[i], hashed_tokens=128) for i in (0, 1)]
    assert needed_objects(rules, 1, present[1], total_tokens=128) is not None
    assert needed_objects(rules, 1, present[1], total_tokens=64) is None


def test_a_ring_has_no_chunks_and_stops_no_hit():
    rules = rules_of(FULL, RING)
    assert check(rules) is None
    assert load_mask(RING, total_tokens=64).tolist() == []
    assert store_mask(rules, 1, tokens=64, boundaries=()).tolist() == []
    assert hit_tokens(rules, {0: [16, 32]}, max_tokens=100) == 32
    assert expand_load(RING, [5], total_tokens=64).chunks.tolist() == []


def test_chunked_attention_needs_nothing_where_its_chunk_begins():
    rule = GroupRule(Kind.CHUNKED, 16, chunk=64)
    assert load_mask(rule, total_tokens=64).tolist() == [False] * 4
    assert np.flatnonzero(load_mask(rule, total_tokens=96)).tolist() == [4, 5]
    rules = rules_of(FULL, rule)
    assert hit_tokens(rules, {0: range(16, 200, 16)}, max_tokens=100) == 64


def test_the_mask_is_that_of_the_total_and_only_then_cut():
    assert needed_chunks(SWA, local_tokens=40, total_tokens=64).tolist() == [2, 3]
    assert needed_chunks(SWA, local_tokens=48, total_tokens=64).tolist() == [3]
    assert needed_chunks(STATE, local_tokens=48, total_tokens=64).tolist() == [3]


def test_presence_counts_only_what_a_lookup_asks_for():
    rules = rules_of(GroupRule(Kind.FULL, 32), STATE, scheduler_block=32, alignment=32)
    ends = [0, 16, 32, 48, 64, 96]  # 16 and 48 are inside blocks, 96 is past the hashes
    assert from_ends(rules, 0, ends, hashed_tokens=80).tolist() == [True, True]
    assert hit_tokens(rules, {0: ends, 1: [64, 96]}, max_tokens=4000, hashed_tokens=80) == 64


def test_a_bound_past_the_hashes_finds_nothing_there():
    rules = rules_of(GroupRule(Kind.CHUNKED, 16, chunk=64), STATE)
    for bound in (1000, 32, 31):
        assert hit_tokens(rules, {0: [16], 1: [16]}, max_tokens=bound, hashed_tokens=32) == 16


# --- partial hits ------------------------------------------------------------------------------

FINE = Rules(
    (GroupRule(Kind.FULL, 16), GroupRule(Kind.MAMBA, 32)),
    hash_block=4,
    scheduler_block=32,
    alignment=4,
    partial=True,
)


def test_attention_tails_serve_earlier_boundaries_and_states_do_not():
    full = from_ends(FINE, 0, [16, 28], hashed_tokens=64)
    state = from_ends(FINE, 1, [20, 28], hashed_tokens=64)
    tail = needed_objects(FINE, 0, full, total_tokens=20)
    assert (tail.chunks.tolist(), tail.ends.tolist()) == ([0, 1], [16, 28])
    assert needed_objects(FINE, 1, state, total_tokens=20).ends.tolist() == [20]
    assert needed_objects(FINE, 1, state, total_tokens=24) is None
    assert needed_objects(FINE, 0, full, total_tokens=32) is None


def test_a_prompt_saves_its_tail_at_the_last_hash_boundary():
    tail = partial_tail(FINE, 0, boundary=44, computed_tokens=47, hashed_tokens=44)
    assert (tail.chunks.tolist(), tail.ends.tolist()) == ([2], [44])
    early = partial_tail(FINE, 0, boundary=44, computed_tokens=43, hashed_tokens=44)
    assert early.chunks.tolist() == []
    coarse = replace(FINE, partial=False)
    none = partial_tail(coarse, 0, boundary=44, computed_tokens=47, hashed_tokens=44)
    assert none.chunks.tolist() == []


@pytest.mark.parametrize(
    ("group", "block", "end", "reason"),
    [
        (1, 7, 44, None),
        (1, 7, 32, None),
        (1, 0, 44, "block 0"),
        (1, 7, 45, "no prefix hash"),
        (1, 7, 0, "no prefix hash"),
        (1, 7, 48, "past the prefill"),
        (0, 7, 44, "no states"),
        (2, 7, 44, "no states"),
    ],
)
def test_states_come_by_hand_off_only(group, block, end, reason):
    refused = handed_over(FINE, group, block=block, end_tokens=end, prefill_tokens=47)
    assert refused is None if reason is None else reason in refused.reason


# --- what is kept ------------------------------------------------------------------------------


def test_retention_keeps_replay_boundaries_junctions_and_segments():
    rules = rules_of(FULL, SWA, STATE)

    def kept(rules, group, junction=0):
        boundaries = kept_boundaries(rules, 200, junction)
        chunks = kept_chunks(rules, group, start_tokens=0, tokens=208, boundaries=boundaries)
        return chunks.tolist()

    assert kept(rules, 0) == list(range(13))
    assert kept(rules, 1) == [10, 11]  # a resend resumes at 192
    assert kept(rules, 2) == [11]
    assert kept(rules, 1, junction=100) == [4, 5, 10, 11]
    assert kept(rules, 2, junction=100) == [5, 11]
    assert kept(replace(rules, retention=64), 2) == [3, 7, 11]
    assert kept(replace(rules, retention=64), 1) == [2, 3, 6, 7, 10, 11]
    assert kept(replace(rules, retention=None), 2) == list(range(13))
    eagle = replace(rules, use_eagle=True)
    assert kept(eagle, 1) == [9, 10, 11]  # resumes at 176, and looks at the block above


def test_saving_starts_after_what_was_saved():
    rules = rules_of(FULL, SWA)
    chunks = kept_chunks(rules, 0, start_tokens=32, tokens=80, boundaries=())
    assert chunks.tolist() == [2, 3, 4]


# --- expansion ---------------------------------------------------------------------------------


def test_positional_and_stripped_tables_give_the_same_blocks():
    for table in ([0, 0, 12, 13], [0, 0, 12, 13, 14], [12, 13]):
        blocks = expand_load(SWA, table, total_tokens=64)
        assert isinstance(blocks, Blocks), table
        assert (blocks.chunks.tolist(), blocks.ids.tolist()) == ([2, 3], [12, 13])


def test_two_chunks_and_a_scratch_slot_are_no_positional_table():
    """`[state, scratch]` is as long as the prefix: only the scratch count tells them apart."""
    compact = expand_load(STATE, [9, 5], total_tokens=32, scratch_slots=1)
    positional = expand_load(STATE, [0, 9, 5], total_tokens=32, scratch_slots=1)
    assert isinstance(compact, Blocks)
    assert isinstance(positional, Blocks)
    assert compact.ids.tolist() == positional.ids.tolist() == [9]


@pytest.mark.parametrize(
    ("rule", "table", "scratch", "reason"),
    [
        (SWA, [12], 0, "1 slots, 0 of them scratch"),
        (SWA, [11, 12, 13], 0, "3 slots"),
        (STATE, [], 0, "0 slots"),
        (STATE, [77, 8], 2, "2 slots, 2 of them scratch"),
        (FULL, [1, 2, 3], 0, "3 slots"),
        (FULL, [1, 2, 0, 4], 0, "chunk 2"),
        (SWA, [0, 12], 0, "chunk 2"),
        (STATE, [0, 0, 0, 0], 0, "null block"),
    ],
)
def test_tables_of_neither_shape_are_refused_by_name(rule, table, scratch, reason):
    refused = expand_load(rule, table, total_tokens=64, scratch_slots=scratch)
    assert isinstance(refused, Refused)
    assert reason in refused.reason


def test_local_chunks_are_no_destinations():
    blocks = expand_load(FULL, [1, 2, 3, 4], total_tokens=64, local_tokens=32)
    assert (blocks.chunks.tolist(), blocks.ids.tolist()) == ([2, 3], [3, 4])


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        (rules_of(), "no group is cacheable"),
        (rules_of(RING, hash_block=8), "no group is cacheable"),
        (rules_of(FULL, scheduler_block=24), "multiples of the hash block"),
        (rules_of(FULL, GroupRule(Kind.SWA, 48, window=9)), "is no multiple of 48"),
        (rules_of(GroupRule(Kind.FULL, 8), FULL), "no multiple of the hash block"),
        (rules_of(FULL, hash_block=8), "single group"),
        (rules_of(FULL, GroupRule(Kind.SWA, 16)), "at least 1 token"),
        (rules_of(FULL, GroupRule(Kind.FULL, 0)), "at least 1 token"),
        (rules_of(FULL, GroupRule(Kind.CHUNKED, 16, chunk=40)), "chunk 40"),
        (rules_of(FULL, GroupRule(Kind.CHUNKED, 16)), "chunk 0"),
        (
            rules_of(
                GroupRule(Kind.FULL, 32),
                GroupRule(Kind.CHUNKED, 16, chunk=64),
                scheduler_block=32,
                alignment=32,
            ),
            "is not the alignment",
        ),
        (rules_of(FULL, GroupRule(Kind.CHUNKED, 16, chunk=64), use_eagle=True), "EAGLE"),
        (rules_of(FULL, SWA, pcp=2), "prefill context parallelism"),
        (rules_of(FULL, SWA, retention=24), "retention 24"),
        (rules_of(FULL, FULL, retention=32), "no such group"),
        (replace(FINE, partial=False), "needs partial hits"),
        (replace(FINE, alignment=8), "alignment is the hash block"),
        (replace(FINE, groups=(FULL, FULL)), "Mamba"),
        (replace(FINE, groups=(*FINE.groups, SWA)), "inside a block"),
        (rules_of(STATE, partial=True), "two groups"),
    ],
)
def test_what_is_not_exact_is_refused_with_the_reason(rules, reason):
    refused = check(rules)
    assert refused is not None
    assert reason in refused.reason


def test_every_kind_of_vllm_is_known_or_refused_with_a_reason():
    assert all(isinstance(kind_of(kind.value), Kind) for kind in Kind)
    for name in REFUSED_KINDS:
        assert kind_of(name) == REFUSED_KINDS[name]
    assert "'hologram' is unknown" in kind_of("hologram")
    assert check(rules_of(FULL, FULL, pcp=2)) is None
