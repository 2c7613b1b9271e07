"""Tables, shards and keys of chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvferry_connector.wire.hot import TableSlice
from kvferry_native import mix_keys
from kvferry_sidecar.masks.kinds import Kind
from kvferry_sidecar.masks.rules import GroupRule
from kvferry_sidecar.plan.chunk_keys import keys_of_ends, new_keys
from kvferry_sidecar.plan.shards import stripe_shape
from kvferry_sidecar.plan.tables import Fault, load_blocks, pick_blocks, read_tables
from support.pipeline_bed import chain, table

NAMESPACE = bytes(range(16))


def test_tables_are_cut_in_the_order_of_their_slices():
    tables = read_tables([TableSlice(1, 4, 2), TableSlice(0, 0, 1)], table([7, 8, 9]))
    assert not isinstance(tables, Fault)
    assert tables[1].ids.tolist() == [7, 8]
    assert tables[0].ids.tolist() == [9]


def test_tables_that_do_not_fit_their_frame_are_a_fault():
    frame = table([1, 2])
    for slices in (
        [TableSlice(0, 0, 3)],
        [TableSlice(0, 0, 1)],
        [TableSlice(0, 0, -1), TableSlice(1, 0, 3)],
        [TableSlice(0, -1, 2)],
        [TableSlice(0, 0, 1), TableSlice(0, 1, 1)],
        [],
    ):
        assert isinstance(read_tables(slices, frame), Fault), slices
    assert isinstance(read_tables([TableSlice(0, 0, 0)], frame[:3]), Fault)


@given(st.lists(st.integers(-2, 12), max_size=10), st.integers(0, 4), st.data())
def test_picked_blocks_are_the_tables_own_and_never_null(ids, start, data):
    chunks = np.array(sorted(data.draw(st.sets(st.integers(0, 14), max_size=6))), dtype=np.int64)
    tables = read_tables([TableSlice(0, start, len(ids))], table(ids))
    assert not isinstance(tables, Fault)
    picked = pick_blocks(tables, 0, chunks, 10)
    wanted = [ids[c - start] if 0 <= c - start < len(ids) else None for c in chunks]
    if all(block is not None and 1 <= block < 10 for block in wanted):
        assert not isinstance(picked, Fault)
        assert picked.tolist() == wanted
        assert picked.dtype == np.int32
    else:
        assert isinstance(picked, Fault)


def test_shards_lie_in_rank_order_and_ranks_without_layers_have_none():
    shape = stripe_shape([100, 0, 50], "abc")
    assert shape.offsets == (0, 100, 100)
    assert shape.shards == (0, None, 1)
    assert (shape.payload_bytes, shape.shard_count) == (150, 2)


def test_ranks_of_the_same_bytes_share_a_shard_and_save_it_by_turns():
    shape = stripe_shape([100, 100, 50, 50, 50], "aabbb")
    assert shape.offsets == (0, 0, 100, 100, 100)
    assert shape.shards == (0, 0, 1, 1, 1)
    assert (shape.payload_bytes, shape.shard_count) == (150, 2)
    chunks = list(range(7))
    taken = [chunks[turn] for turn in shape.turns]
    assert sorted(taken[0] + taken[1]) == sorted(taken[2] + taken[3] + taken[4]) == chunks
    assert [len(one) for one in taken] == [4, 3, 3, 2, 2]


@given(st.integers(0, 20), st.integers(1, 4), st.lists(st.integers(1, 7), max_size=6))
def test_keys_of_delta_probes_are_those_of_one_probe(first, per_block, steps):
    """However a request's hashes are cut into probes, its keys are the same."""
    ends = np.cumsum([first, *steps]).tolist()
    whole = new_keys(
        NAMESPACE, 3, chain(1, ends[-1]), hashes_per_unit=per_block, hash_bytes=32, start=0
    )
    assert len(whole) == ends[-1] // per_block
    parts = [
        new_keys(
            NAMESPACE,
            3,
            chain(1, end, start),
            hashes_per_unit=per_block,
            hash_bytes=32,
            start=start,
        )
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    assert np.array_equal(np.concatenate(parts), whole)


@given(st.integers(0, 9), st.integers(1, 3), st.sets(st.integers(0, 9), min_size=1))
def test_keys_of_a_save_are_those_of_the_probe(first_hash, per_block, picked):
    chunks = np.array(sorted(picked), dtype=np.int64)
    whole = new_keys(NAMESPACE, 0, chain(1, 30), hashes_per_unit=per_block, hash_bytes=32, start=0)
    keys = keys_of_ends(
        NAMESPACE,
        0,
        chain(1, 30, first_hash),
        (chunks + 1) * per_block - 1,
        hash_bytes=32,
        first_hash=first_hash,
    )
    if (chunks[0] + 1) * per_block - 1 < first_hash:
        assert isinstance(keys, Fault)
    else:
        assert not isinstance(keys, Fault)
        assert np.array_equal(keys, whole[chunks])


def test_the_key_of_a_chunk_is_mixed_from_the_hash_at_its_end():
    keys = new_keys(NAMESPACE, 2, chain(1, 6), hashes_per_unit=3, hash_bytes=32, start=0)
    ends = chain(1, 3, 2) + chain(1, 6, 5)
    assert np.array_equal(keys, mix_keys(NAMESPACE, 2, 0, ends, 32, 0, 1))


@pytest.mark.parametrize("ids", [[0, 3], [3]], ids=["positional", "compact"])
def test_a_load_of_nothing_names_no_block(ids):
    tables = read_tables([TableSlice(0, 0, len(ids))], table(ids))
    rule = GroupRule(Kind.MAMBA, 16)
    found = load_blocks(tables, 0, rule, span=(32, 32), scratch_slots=0, num_blocks=8)
    assert not isinstance(found, Fault)
    assert len(found) == 0
