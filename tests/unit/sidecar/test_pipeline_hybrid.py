"""Models of several kinds of groups through the pipeline: what is kept, hit and loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvferry_connector.wire.hot import Release
from kvferry_sidecar.stages.shape import session_shape
from support.hybrid_bed import (
    LOADED,
    assert_loaded,
    bed_and_engine,
    check_repeated_prompt,
    hit,
    load,
    probe,
    save,
)
from support.pipeline_bed import BLOCK, Bed, make_engine

FULL = {"kind": "full"}
WIDE = {"kind": "full", "block_tokens": 64}
MLA = {"kind": "mla"}
SWA = {"kind": "swa", "window_tokens": 40, "save_rule": "held"}
WIDE_SWA = {"kind": "swa", "window_tokens": 40, "block_tokens": 32, "save_rule": "held"}
SWA_MLA = {"kind": "swa-mla", "window_tokens": 17, "save_rule": "held"}
CHUNKED = {"kind": "chunked", "chunk_tokens": 64, "save_rule": "held"}
RING = {"kind": "ring", "block_tokens": 32, "save_rule": "none"}
RSWA = {"kind": "rswa", "save_rule": "held"}
MODELS = {
    "reference sliding window": [RSWA],
    "full and sliding window": [FULL, SWA],
    "mixed block sizes": [WIDE, WIDE_SWA, SWA],
    "sliding window alone": [SWA],
    "full and chunked local": [FULL, CHUNKED],
    "chunked local alone": [CHUNKED],
    "all of mla": [MLA, SWA_MLA],
    "a ring beside": [FULL, RING, SWA],
    "four kinds": [FULL, SWA, CHUNKED, SWA_MLA],
}


@pytest.mark.parametrize("tokens", [200, 256, 257])
@pytest.mark.parametrize("kinds", MODELS.values(), ids=MODELS.keys())
def test_a_repeated_prompt_hits_at_its_replay_boundary(kinds, tokens):
    check_repeated_prompt(kinds, tokens)


@pytest.mark.parametrize("kinds", MODELS.values(), ids=MODELS.keys())
def test_what_is_local_is_neither_leased_nor_loaded(kinds):
    bed, engine = bed_and_engine(kinds)
    save(bed, engine, 1, 257)
    probe(bed, engine, 1, 1, 257)
    total = hit(bed, engine, 1, 257, local=192)
    assert total == 256
    assert load(bed, engine, 1, total, local=192)[0].status == "done"
    assert_loaded(engine, 1, total, local=192)


DRAFT, DRAFT_SWA = FULL | {"eagle": True}, SWA | {"eagle": True}
STATE = {"kind": "mamba", "save_rule": "hand-offs"}
DRAFTED = {"layers": [FULL, DRAFT], "window": [FULL, DRAFT_SWA], "states": [DRAFT, STATE]}


@pytest.mark.parametrize("tokens", [200, 192, 193])
@pytest.mark.parametrize("kinds", DRAFTED.values(), ids=DRAFTED.keys())
def test_a_drafter_matches_a_block_above_the_hit_and_drops_it(kinds, tokens):
    bed, engine = bed_and_engine(kinds)
    save(bed, engine, 1, tokens)
    probe(bed, engine, 1, 1, tokens)
    total = hit(bed, engine, 1, tokens)
    assert total == 176
    assert load(bed, engine, 1, total)[0].status == "done"
    assert_loaded(engine, 1, total)


def test_only_the_draft_groups_of_any_stage_drop_a_block():
    """vLLM clears the mark on a pipeline stage that has no layers of the draft group."""
    engine = make_engine(kinds=[FULL, DRAFT], ranks=2)
    engine.session.use_eagle = True
    first = engine.workers[0]
    unmarked = tuple(replace(group, eagle=False) for group in first.geometry.groups)
    first.geometry = replace(first.geometry, groups=unmarked)
    assert session_shape(engine.session).rules.eagle_ids == {1}


def test_a_window_is_kept_at_the_replay_boundary_only():
    bed, engine = bed_and_engine([FULL, SWA])
    save(bed, engine, 1, 200)
    assert bed.pool.stats().ready == 12 + 3
    probe(bed, engine, 1, 2, 200, shared=100)
    assert hit(bed, engine, 1, 200) == 0


def test_a_junction_is_kept_too_and_hit_by_the_next_request():
    bed, engine = bed_and_engine([FULL, SWA])
    save(bed, engine, 1, 200, junction=100)
    assert bed.pool.stats().ready == 12 + 6
    probe(bed, engine, 1, 2, 200, shared=100)
    assert hit(bed, engine, 1, 200) == 96
    assert load(bed, engine, 1, 96)[0].status == "done"
    assert_loaded(engine, 1, 96)


@pytest.mark.parametrize(("retention", "length"), [(None, 96), (48, 96), (64, 64)])
def test_denser_retention_hits_inside_a_prompt(retention, length):
    bed, engine = bed_and_engine([FULL, SWA], retention=retention)
    save(bed, engine, 1, 200)
    probe(bed, engine, 1, 2, 200, shared=100)
    assert hit(bed, engine, 1, 200) == length
    assert load(bed, engine, 1, length)[0].status == "done"
    assert_loaded(engine, 1, length)


def test_a_window_whose_block_is_gone_is_not_stored_and_no_fault():
    bed, engine = bed_and_engine([FULL, SWA])
    save(bed, engine, 1, 200, lost=(1, 10))
    probe(bed, engine, 1, 1, 200)
    assert hit(bed, engine, 1, 200) == 0


@pytest.mark.parametrize("lost", [(0, 3), (1, 10)])
def test_a_load_into_the_null_block_is_refused(lost):
    bed, engine = bed_and_engine([FULL, SWA])
    save(bed, engine, 1, 200)
    probe(bed, engine, 1, 1, 200)
    hit(bed, engine, 1, 200)
    (end,) = load(bed, engine, 1, 192, lost=lost)
    assert (end.status, end.reason) == ("failed", "tables")


@pytest.mark.parametrize("local", [0, 160])
def test_a_window_s_table_without_its_nulls_is_expanded(local):
    """Three slots of twelve chunks: those that a hit of 192 tokens reads, in order."""
    bed, engine = bed_and_engine([FULL, SWA])
    save(bed, engine, 1, 200)
    probe(bed, engine, 1, 1, 200)
    assert hit(bed, engine, 1, 200, local=local) == 192
    slots = [LOADED + chunk for chunk in (9, 10, 11)]
    (end,) = load(bed, engine, 1, 192, local=local, tables={1: slots})
    assert end.status == "done"
    assert_loaded(engine, 1, 192, local=local)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_window_s_table_of_other_slots_fails_the_load_by_name(count):
    bed, engine = bed_and_engine([FULL, SWA])
    save(bed, engine, 1, 200)
    probe(bed, engine, 1, 1, 200)
    hit(bed, engine, 1, 200)
    (end,) = load(bed, engine, 1, 192, tables={1: [LOADED + slot for slot in range(count)]})
    assert (end.status, end.reason) == ("failed", "tables")
    assert not any(block >= LOADED for layout in engine.layouts.values() for block in layout.values)


def test_a_shorter_total_than_was_leased_is_refused_when_its_window_differs():
    bed, engine = bed_and_engine([FULL, SWA])
    save(bed, engine, 1, 200)
    probe(bed, engine, 1, 1, 200)
    hit(bed, engine, 1, 200)
    (end,) = load(bed, engine, 1, 96)
    assert (end.status, end.reason) == ("failed", "lease")


@pytest.mark.parametrize(("retention", "shorter"), [(0, 0), (None, 144)])
def test_a_bad_checksum_names_what_is_still_complete(retention, shorter):
    bed, engine = bed_and_engine([FULL, SWA], retention=retention)
    save(bed, engine, 1, 200)
    probe(bed, engine, 1, 1, 200)
    hit(bed, engine, 1, 200)
    window = bed.pipeline._core.leases.get((engine.session.life, 1)).groups[1]
    first = int(bed.pool.payload_offsets(window.entries[:1])[0])
    bed.copies.memory[first] += 1
    (end,) = load(bed, engine, 1, 192)
    assert (end.status, end.reason, end.shorter_tokens) == ("failed", "checksum", shorter)


def test_windows_of_a_local_hit_are_refreshed_with_the_prefix():
    """A full pool drops what nobody used: not the window that the engine itself hit."""
    bed, engine = Bed(slots=19), make_engine(kinds=[FULL, SWA], num_blocks=1000)
    save(bed, engine, 1, 200)
    save(bed, engine, 2, 2 * BLOCK + 1)
    probe(bed, engine, 1, 1, 200)
    bed.say(engine.scheduler, Release([1]))
    save(bed, engine, 3, 2 * BLOCK + 1)
    probe(bed, engine, 2, 1, 200)
    assert hit(bed, engine, 2, 200) == 192


def test_a_prefix_is_in_use_until_its_request_ends():
    """What it saves last comes after its release, and cannot say which prefix it belongs to."""
    bed, engine = Bed(slots=8), make_engine(kinds=[FULL], num_blocks=1000)
    save(bed, engine, 1, 4 * BLOCK)
    probe(bed, engine, 1, 1, 4 * BLOCK + 1)
    assert hit(bed, engine, 1, 4 * BLOCK + 1) == 4 * BLOCK
    save(bed, engine, 2, 4 * BLOCK)
    bed.say(engine.scheduler, Release([1]))
    save(bed, engine, 3, 4 * BLOCK)
    probe(bed, engine, 2, 1, 4 * BLOCK + 1)
    assert hit(bed, engine, 2, 4 * BLOCK + 1) == 4 * BLOCK, "what ended before it went instead"
