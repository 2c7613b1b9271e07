"""Masks of full-attention groups, and the hit search over groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvferry_sidecar.masks.hit import GroupRun, longest_hit
from kvferry_sidecar.masks.load import load_chunks, load_mask
from kvferry_sidecar.masks.store import store_chunks, store_mask

blocks = st.sampled_from([1, 8, 16, 528])


@given(st.integers(0, 20_000), blocks)
def test_a_full_hit_needs_every_chunk_it_reaches_into(total, block):
    mask = load_mask("full", total_tokens=total, block_tokens=block)
    assert mask.all()
    assert (len(mask) - 1) * block < total <= len(mask) * block or total == len(mask) == 0


@given(st.integers(0, 20_000), st.integers(0, 20_000), blocks)
def test_a_load_covers_exactly_what_is_not_whole_locally(local, total, block):
    chunks = load_chunks("full", local_tokens=local, total_tokens=total, block_tokens=block)
    assert chunks.tolist() == [i for i in range(-(-total // block)) if (i + 1) * block > local]


@given(st.integers(0, 20_000), st.integers(0, 20_000), blocks)
def test_a_save_covers_whole_chunks_that_end_within_its_tokens(start, end, block):
    chunks = store_chunks("full", start_tokens=start, end_tokens=end, block_tokens=block)
    assert chunks.tolist() == [i for i in range(end // block) if start < (i + 1) * block <= end]


@given(
    st.lists(st.tuples(blocks, st.integers(0, 50)), min_size=1, max_size=4),
    st.integers(0, 9_000),
    st.sampled_from([16, 528]),
)
def test_the_hit_is_the_largest_complete_aligned_length(groups, most, alignment):
    runs = [GroupRun("full", block, chunks) for block, chunks in groups]
    hit = longest_hit(runs, max_tokens=most, alignment_tokens=alignment)

    def complete(tokens: int) -> bool:
        return all(tokens <= chunks * block for block, chunks in groups)

    candidates = [t for t in range(0, most + 1, alignment) if complete(t)]
    assert hit == max(candidates)


def test_no_groups_hit_nothing():
    assert longest_hit([], max_tokens=100, alignment_tokens=16) == 0


def test_kinds_that_registration_refuses_raise():
    with pytest.raises(ValueError, match="mamba"):
        load_mask("mamba", total_tokens=16, block_tokens=16)
    with pytest.raises(ValueError, match="mamba"):
        store_mask("mamba", end_tokens=16, block_tokens=16)
    with pytest.raises(ValueError, match="mamba"):
        longest_hit([GroupRun("mamba", 16, 1)], max_tokens=16, alignment_tokens=16)
