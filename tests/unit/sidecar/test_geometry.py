"""Registration of a rank: what is accepted, what is refused and with which words."""

from __future__ import annotations

import fcntl
import os
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from kvferry_connector.wire.attach import FieldRefusal, Group, Placement, RegisterRank, Shard
from kvferry_sidecar.geometry.identity import compare_identity, nearest_namespace
from kvferry_sidecar.geometry.validate import validate_rank
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.masks.kinds import REFUSED_KINDS

PAGE = 4096
BLOCKS = 10
LAYERS = ["l0", "l1", "l2"]


class RecordedLayout:
    """Stands in for the native layout: keeps what it was built from."""

    def __init__(self, mapping, offsets, strides, lengths, num_blocks):
        self.runs = list(zip(offsets.tolist(), strides.tolist(), lengths.tolist(), strict=True))
        for offset, stride, length in self.runs:
            if offset + stride * (num_blocks - 1) + length > mapping.total_bytes:
                raise ValueError("leaves the mapping")
        assert offsets.dtype == strides.dtype == lengths.dtype == np.int64
        self.num_blocks = num_blocks
        self.payload_bytes = int(lengths.sum())


def group(number=0, layers=LAYERS, **changes):
    fields = {"kind": "full", "block_tokens": 32, "spec": {"dtype": "float32"}, **changes}
    return Group(group=number, layers=list(layers), **fields)


def outermost(number=0, layers=LAYERS, **changes):
    """Layer-outermost: each layer's pages stand together."""
    fields = {
        "buffer": 0,
        "offset": 0,
        "layer_stride": PAGE * BLOCKS,
        "block_stride": PAGE,
        "page_bytes": PAGE,
        **changes,
    }
    return Placement(group=number, layers=list(layers), **fields)


def register(groups=None, placements=None, **changes):
    fields = {
        "serial": 1,
        "shard": Shard(),
        "identity": {"model": "tiny", "hash_seed": "0"},
        "num_blocks": BLOCKS,
        "layout": "LBHNC",
        "hash_block_tokens": 16,
        **changes,
    }
    return RegisterRank(
        groups=[group()] if groups is None else groups,
        placements=[outermost()] if placements is None else placements,
        **fields,
    )


def validate(message, total_bytes=PAGE * BLOCKS * 3, **options):
    memories = {0: SimpleNamespace(total_bytes=total_bytes)}
    return validate_rank(message, memories, make_layout=RecordedLayout, **options)


def refusal(message, field, **options):
    """The first refusal, which must be of ``field``; all must be complete."""
    found = validate(message, **options)
    assert isinstance(found, list), "accepted"
    assert found[0].field == field, found
    assert all(entry.theirs and entry.ours and entry.remedy for entry in found)
    return found[0]


def test_a_layer_outermost_cache_is_accepted():
    rank = validate(register())
    (only,) = rank.groups
    assert only.layout.runs == [(i * PAGE * BLOCKS, PAGE, PAGE) for i in range(3)]
    assert only.payload_bytes == 3 * PAGE
    assert (only.kind, only.save_rule) == ("full", "all")
    assert (only.num_blocks, only.block_tokens, rank.serial) == (BLOCKS, 32, 1)
    assert len(rank.digest) == 16


def test_a_block_outermost_cache_becomes_one_run_per_block():
    place = outermost(layer_stride=PAGE, block_stride=3 * PAGE)
    rank = validate(register(placements=[place]))
    assert rank.groups[0].layout.runs == [(0, 3 * PAGE, 3 * PAGE)]


def test_payload_order_is_the_groups_order_of_layers():
    places = [
        outermost(layers=["l2"], offset=0),
        outermost(layers=["l0", "l1"], offset=PAGE * BLOCKS),
    ]
    rank = validate(register(placements=places))
    offsets = [offset for offset, _, _ in rank.groups[0].layout.runs]
    assert offsets == [PAGE * BLOCKS, 2 * PAGE * BLOCKS, 0]


def test_heads_outside_blocks_are_runs():
    # LHBNC: two heads, each with its own column of half pages.
    half = PAGE // 2
    place = outermost(block_stride=half, runs=2, run_bytes=half, run_stride=half * BLOCKS)
    rank = validate(register(placements=[place]))
    assert len(rank.groups[0].layout.runs) == 6
    assert rank.groups[0].payload_bytes == 3 * PAGE


def test_blhnc_heads_interleaved_with_layers():
    # BHLNC: head outside layer inside the block.
    half = PAGE // 2
    place = outermost(
        block_stride=3 * PAGE, layer_stride=half, runs=2, run_bytes=half, run_stride=3 * half
    )
    rank = validate(register(placements=[place]))
    assert rank.groups[0].layout.runs == [
        (layer * half + head * 3 * half, 3 * PAGE, half) for layer in range(3) for head in range(2)
    ]


def test_groups_may_alias_each_other():
    groups = [group(0), group(1, ["m0", "m1", "m2"])]
    rank = validate(register(groups, [outermost(0), outermost(1, ["m0", "m1", "m2"])]))
    assert rank.groups[0].layout.runs == rank.groups[1].layout.runs


def test_a_group_without_layers_here_has_no_layout():
    rank = validate(register([group(0), group(1, [])]))
    assert rank.groups[1].layout is None
    assert rank.groups[1].payload_bytes == 0
    assert rank.groups[1].save_rule == "all"


def test_a_group_that_is_not_cacheable_is_allowed_and_never_saved():
    ring = group(1, ["r0"], kind="ring", block_tokens=8, cacheable=False)
    rank = validate(register([group(), ring]))
    assert (rank.groups[1].save_rule, rank.groups[1].layout) == ("none", None)


@pytest.mark.parametrize("kind", [*REFUSED_KINDS, "ring", "non-causal", "never heard of"])
def test_other_kinds_are_refused_by_name(kind):
    found = refusal(register([group(kind=kind, detail="window 128")]), "groups[0].kind")
    assert REFUSED_KINDS.get(kind, "its masks are not known") in found.ours
    assert found.theirs == f"{kind} (window 128)"
    assert "full, mla, indexer, rswa, swa, swa-mla, chunked, mamba" in found.ours
    assert "without kvferry" in found.remedy


@pytest.mark.parametrize(
    ("changes", "save_rule"),
    [
        ({"kind": "mla"}, "all"),
        ({"kind": "indexer"}, "all"),
        ({"kind": "swa", "window_tokens": 40, "window_extra_tokens": 3}, "held"),
        ({"kind": "swa-mla", "window_tokens": 40}, "held"),
        ({"kind": "chunked", "chunk_tokens": 64}, "held"),
        ({"kind": "mamba", "scratch_blocks": 3}, "hand-offs"),
    ],
)
def test_kinds_are_served_with_their_numbers(changes, save_rule):
    only = validate(register([group(**changes)])).groups[0]
    names = ("window_tokens", "window_extra_tokens", "chunk_tokens", "scratch_blocks")
    assert all(getattr(only, name) == changes.get(name, 0) for name in names)
    assert (only.kind, only.save_rule) == (changes["kind"], save_rule)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kind": "swa"}, "window_tokens"),
        ({"kind": "swa", "window_tokens": 40, "window_extra_tokens": -1}, "window_extra_tokens"),
        ({"kind": "chunked"}, "chunk_tokens"),
        ({"kind": "chunked", "chunk_tokens": 64, "window_tokens": 5}, "window_tokens"),
        ({"kind": "full", "window_tokens": 40}, "window_tokens"),
        ({"kind": "mla", "scratch_blocks": 1}, "scratch_blocks"),
    ],
)
def test_numbers_that_a_kind_lacks_or_does_not_have_are_refused(changes, field):
    refusal(register([group(**changes)]), f"groups[0].{field}")


def test_windows_and_chunks_are_part_of_the_digest():
    def digest(**changes):
        return validate(register([group(**changes)])).digest

    digests = [digest(kind="swa", window_tokens=tokens) for tokens in (40, 41)]
    digests += [digest(kind="chunked", chunk_tokens=tokens) for tokens in (64, 128)]
    assert len(set(digests)) == 4


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_blocks": 1}, "num_blocks"),
        ({"num_blocks": 2**31}, "num_blocks"),
        ({"hash_block_tokens": 0}, "hash_block_tokens"),
        ({"shard": Shard(tp_rank=2, tp_size=2)}, "shard.tp_rank"),
        ({"shard": Shard(pp_size=0)}, "shard.pp_size"),
        ({"shard": Shard(tp_size=3, dcp_size=2)}, "shard.dcp_size"),
        ({"groups": [group(tp_replicas=2)], "shard": Shard(tp_size=3)}, "groups[0].tp_replicas"),
        ({"groups": [group(tp_replicas=0)], "shard": Shard(tp_size=3)}, "groups[0].tp_replicas"),
        ({"groups": []}, "groups"),
        ({"groups": [group(1)]}, "groups[].group"),
        ({"groups": [group(cacheable=False)]}, "groups"),
        ({"groups": [group(block_tokens=24)]}, "groups[0].block_tokens"),
        ({"groups": [group(), group(1, ["l0"])]}, "groups[1].layers"),
    ],
)
def test_facts_of_the_rank_are_refused(changes, field):
    refusal(register(**changes), field)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"offset": 1}, "placements[0]"),
        ({"offset": -1}, "placements[0].offset"),
        ({"layer_stride": PAGE * BLOCKS + 1}, "placements[0]"),
        ({"layer_stride": -PAGE}, "placements[0].layer_stride"),
        ({"layer_stride": 2**63}, "placements[0].layer_stride"),
        ({"block_stride": 2**61}, "placements[0]"),
        ({"block_stride": 0}, "placements[0].block_stride"),
        ({"page_bytes": 0}, "placements[0].page_bytes"),
        ({"runs": 0}, "placements[0].runs"),
        ({"runs": 2}, "placements[0].run_bytes"),
        ({"run_bytes": PAGE + 1}, "placements[0].run_bytes"),
        ({"runs": 2, "run_bytes": PAGE, "run_stride": 8}, "placements[0].runs"),
        ({"buffer": 7}, "placements[0].buffer"),
        ({"layers": ["l0", "l1"]}, "groups[0].layers"),
        ({"layers": ["l0", "l1", "l2", "l2"]}, "placements[0].layers"),
        ({"layers": ["l0", "l1", "l2", "other"]}, "placements[0].layers"),
        # What would put two things on the same bytes:
        ({"block_stride": PAGE - 1}, "groups[0].layers"),
        ({"layer_stride": 0}, "groups[0].layers"),
        ({"layer_stride": PAGE}, "groups[0].layers"),
        ({"layer_stride": PAGE * BLOCKS - 1}, "groups[0].layers"),
        ({"runs": 2, "run_bytes": 8, "run_stride": 4}, "groups[0].layers"),
    ],
)
def test_placements_are_refused(changes, field):
    place = {"layers": LAYERS, **changes}
    total_bytes = PAGE * BLOCKS * (4 if len(place["layers"]) > 3 else 3)
    refusal(register(placements=[outermost(**place)]), field, total_bytes=total_bytes)


def test_an_unknown_group_in_a_placement_is_refused():
    refusal(register(placements=[outermost(), outermost(3, ["x"])]), "placements[1].group")


def test_a_group_over_two_buffers_is_refused():
    places = [outermost(0, ["l0", "l1"]), outermost(0, ["l2"], buffer=1)]
    memories = {n: SimpleNamespace(total_bytes=PAGE * BLOCKS * 3) for n in (0, 1)}
    found = validate_rank(register(placements=places), memories, make_layout=RecordedLayout)
    assert [entry.field for entry in found] == ["placements[1].buffer"]


def test_two_placements_of_a_group_may_not_alias():
    places = [outermost(0, ["l0", "l1"]), outermost(0, ["l2"], offset=PAGE * BLOCKS)]
    found = refusal(register(placements=places), "groups[0].layers")
    assert "l1" in found.theirs
    assert "l2" in found.theirs


def test_pages_of_two_sizes_in_one_group():
    small = {"block_stride": 512, "page_bytes": 512, "offset": 2 * PAGE * BLOCKS}
    places = [outermost(0, ["l0", "l1"]), outermost(0, ["l2"], **small)]
    assert validate(register(placements=places)).groups[0].payload_bytes == 2 * PAGE + 512
    inside = msgspec.structs.replace(places[1], offset=2 * PAGE * BLOCKS - 512)
    refusal(register(placements=[places[0], inside]), "groups[0].layers")


@pytest.mark.parametrize(
    ("message", "limits", "field"),
    [
        (register([group(), group(1, [])]), {"groups_max": 1}, "groups"),
        (register(), {"layers_max": 2}, "groups[].layers"),
        (register(), {"facts_max": 1}, "identity"),
        (register(), {"text_chars_max": 8}, "text"),
        (register(), {"runs_max": 2}, "groups[0].layers"),
    ],
)
def test_sizes_are_bounded(message, limits, field):
    found = validate(message, limits=Limits(**limits))
    assert field in [entry.field for entry in found]
    assert all(next(iter(limits)) in entry.remedy for entry in found)


def test_the_digest_covers_what_changes_bytes_and_nothing_else():
    base = register()
    digest = validate(base).digest

    def changed(**changes):
        result = validate(msgspec.structs.replace(base, **changes), total_bytes=1 << 30)
        return result.digest != digest

    assert not changed(num_blocks=5)
    assert not changed(serial=9)
    assert not changed(placements=[outermost(offset=PAGE)])
    assert not changed(placements=[outermost(layer_stride=PAGE, block_stride=3 * PAGE)])
    assert not changed(identity={"hash_seed": "0", "model": "tiny"})
    assert not changed(groups=[group(detail="words")])
    assert changed(identity={"hash_seed": "1", "model": "tiny"})
    assert changed(hash_block_tokens=32)
    assert changed(layout="LBNHC")
    assert changed(shard=Shard(tp_size=2))
    assert changed(groups=[group(spec={"dtype": "float16"})])
    assert changed(groups=[group(block_tokens=64)])
    assert changed(groups=[group(layers=["l0", "l2", "l1"])])
    assert changed(placements=[outermost(page_bytes=PAGE - 1)])
    assert changed(placements=[outermost(run_bytes=PAGE - 1)])
    half = {"runs": 2, "run_bytes": PAGE // 2, "run_stride": PAGE // 2}
    assert changed(placements=[outermost(**half)])


def test_a_cache_stored_once_is_not_one_stored_per_rank():
    one, two = (
        validate(register(groups=[group(tp_replicas=n)], shard=Shard(tp_size=2))) for n in (1, 2)
    )
    assert one.digest != two.digest


def test_the_digest_leaves_out_the_ranks_own_number():
    one, two = (
        validate(register(shard=Shard(tp_rank=rank, tp_size=2, dcp_rank=rank, dcp_size=2)))
        for rank in (0, 1)
    )
    assert one.digest == two.digest
    assert (one.position, two.position) == ((0, 0, 0), (1, 0, 1))


def test_identity_is_compared_field_by_field():
    a = {"model": "tiny", "hash_seed": "1", "dtype": "float32"}
    b = {"model": "tiny", "hash_seed": "0", "lora": "x"}
    assert compare_identity(a, a) == []
    assert [(d.field, d.theirs, d.ours) for d in compare_identity(a, b)] == [
        ("dtype", "float32", "(absent)"),
        ("hash_seed", "1", "0"),
        ("lora", "(absent)", "x"),
    ]
    assert all(isinstance(d, FieldRefusal) and d.remedy for d in compare_identity(a, b))


def test_the_nearest_namespace_names_what_to_change():
    mine = {"model": "tiny", "hash_seed": "1", "dtype": "float32"}
    near = nearest_namespace(
        mine,
        {
            "same": dict(mine),
            "far": {"model": "big", "hash_seed": "0", "dtype": "float16"},
            "two": {**mine, "hash_seed": "0", "dtype": "float16"},
            "one": {**mine, "hash_seed": "0"},
        },
    )
    assert near is not None
    assert near.session == "one"
    assert "hash_seed (1 against 0) differs from session one: no hits" in near.text
    assert "PYTHONHASHSEED" in near.text
    assert nearest_namespace(mine, {"same": dict(mine)}) is None
    assert nearest_namespace(mine, {"far": {"model": "tiny"}}) is not None
    assert nearest_namespace(mine, {"other model": {**mine, "model": "big"}}) is None


HEADS = {"runs": 2, "run_bytes": PAGE // 2}


@pytest.mark.parametrize(
    ("place", "num_runs"),
    [
        (outermost(), 3),
        (outermost(layer_stride=PAGE, block_stride=3 * PAGE), 1),
        (outermost(block_stride=PAGE // 2, run_stride=PAGE // 2 * BLOCKS, **HEADS), 6),
        (outermost(block_stride=3 * PAGE, layer_stride=PAGE // 2,
                   run_stride=3 * PAGE // 2, **HEADS), 6),
    ],
    ids=["layers", "blocks", "heads-layers", "blocks-heads"],
)  # fmt: skip
def test_the_native_layout_accepts_what_validation_accepts(place, num_runs):
    from kvferry_native import Mapping

    total_bytes = PAGE * BLOCKS * 3
    fd = os.memfd_create("kv", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, total_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        rank = validate_rank(register(placements=[place]), {0: Mapping(fd, total_bytes)})
    finally:
        os.close(fd)
    assert rank.groups[0].payload_bytes == 3 * PAGE
    assert rank.groups[0].layout.num_runs == num_runs
