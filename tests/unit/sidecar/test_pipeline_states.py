"""Models with states (Mamba and its kin) through the pipeline: hand-offs, hits, loads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvferry_connector.wire.hot import (
    HandOff,
    Outcome,
    OutcomeAck,
    Release,
    SaveJob,
    TableSlice,
)
from support.hybrid_bed import (
    LOADED,
    SCRATCH,
    assert_loaded,
    bed_and_engine,
    check_repeated_prompt,
    hit,
    load,
    probe,
    rules,
    save,
    scratch,
)
from support.pipeline_bed import HASH_BYTES, chain, table, value_of

FULL = {"kind": "full"}
SWA = {"kind": "swa", "window_tokens": 32, "save_rule": "held"}
STATE = {"kind": "mamba", "save_rule": "hand-offs"}
WIDE = {"kind": "mamba", "block_tokens": 64, "save_rule": "hand-offs"}
DRAFTED = {"kind": "mamba", "scratch_blocks": 2, "save_rule": "hand-offs"}
MODELS = {
    "full and state": [FULL, STATE],
    "wide state": [FULL, WIDE],
    "scratch": [FULL, DRAFTED],
    "state alone": [STATE],
    "two sorts of states": [FULL, WIDE, DRAFTED],
    "window too": [FULL, STATE, SWA],
}


def chunks_leased(bed, engine, admission=1):
    """Chunks of each group under the lease."""
    lease = bed.pipeline._core.leases.get((engine.session.life, admission))
    return {group.group: group.chunks.tolist() for group in lease.groups}


@pytest.mark.parametrize("tokens", [200, 256, 257])
@pytest.mark.parametrize("kinds", MODELS.values(), ids=MODELS.keys())
def test_a_repeated_prompt_hits_at_its_replay_boundary(kinds, tokens):
    check_repeated_prompt(kinds, tokens)


def test_a_state_is_loaded_also_where_the_attention_before_it_is_local():
    bed, engine = bed_and_engine(MODELS["wide state"])
    save(bed, engine, 1, 257)
    probe(bed, engine, 1, 1, 257)
    assert hit(bed, engine, 1, 257, local=192) == 256
    assert load(bed, engine, 1, 256, local=192)[0].status == "done"
    assert_loaded(engine, 1, 256, local=192)


def test_masks_of_equal_blocks_are_not_equal():
    """Full 1111, state 0001, window 0011: equal block sizes prove nothing."""
    bed, engine = bed_and_engine(MODELS["window too"])
    save(bed, engine, 1, 65)
    probe(bed, engine, 1, 1, 65)
    assert hit(bed, engine, 1, 65) == 64
    assert chunks_leased(bed, engine) == {0: [0, 1, 2, 3], 1: [3], 2: [2, 3]}
    assert load(bed, engine, 1, 64)[0].status == "done"
    assert_loaded(engine, 1, 64)


def test_a_sparse_prefix_whose_objects_all_exist_is_a_full_hit():
    bed, engine = bed_and_engine(MODELS["full and state"])
    save(bed, engine, 1, 129)
    assert bed.pool.stats().ready == 8 + 1
    probe(bed, engine, 1, 1, 129)
    assert hit(bed, engine, 1, 129) == 128


def test_a_state_further_on_allows_no_resume_before_it():
    """A state at 128 is of no use to a request that shares 64 tokens."""
    bed, engine = bed_and_engine(MODELS["full and state"])
    save(bed, engine, 1, 129)
    probe(bed, engine, 1, 2, 129, shared=64)
    assert hit(bed, engine, 1, 129) == 0
    save(bed, engine, 2, 129, junction=64)
    probe(bed, engine, 2, 2, 129)
    assert hit(bed, engine, 2, 129) == 128


def test_a_compact_table_of_one_slot_is_the_last_chunk():
    """`[slot]` of a 4-block prefix: the state of chunk 3, and of no other."""
    bed, engine = bed_and_engine(MODELS["full and state"])
    save(bed, engine, 1, 65)
    probe(bed, engine, 1, 1, 65)
    assert hit(bed, engine, 1, 65) == 64
    (end,) = load(bed, engine, 1, 64, tables={1: [LOADED]})
    assert end.status == "done"
    found = {b: v for b, v in engine.layouts[0, 1].values.items() if b >= LOADED}
    assert found == {LOADED: value_of(1, 3, 0, 1)}


@pytest.mark.parametrize("short", [0, 1], ids=["compact", "too few"])
def test_scratch_closes_a_compact_table(short):
    """State and scratch: as many slots as a positional table of 3 chunks, but none of its."""
    bed, engine = bed_and_engine(MODELS["scratch"])
    save(bed, engine, 1, 49)
    probe(bed, engine, 1, 1, 49)
    assert hit(bed, engine, 1, 49) == 48
    (end,) = load(bed, engine, 1, 48, tables={1: [LOADED, *scratch(engine, 1)][short:]})
    if short:
        assert (end.status, end.reason) == ("failed", "tables")
    else:
        found = {b: v for b, v in engine.layouts[0, 1].values.items() if b >= LOADED}
        assert found == {LOADED: value_of(1, 2, 0, 1)}


@pytest.mark.parametrize("slots", [[], [0], [0, 0, 0, 0], [LOADED, LOADED + 1], [5000]])
def test_other_tables_of_a_state_fail_the_load_by_name(slots):
    bed, engine = bed_and_engine(MODELS["full and state"])
    save(bed, engine, 1, 65)
    probe(bed, engine, 1, 1, 65)
    hit(bed, engine, 1, 65)
    (end,) = load(bed, engine, 1, 64, tables={1: slots})
    assert (end.status, end.reason) == ("failed", "tables")
    assert not any(block >= LOADED for block in engine.layouts[0, 0].values)


@pytest.mark.parametrize(
    "state",
    [
        HandOff(1, 0, 64),  # null
        HandOff(1, 1000, 64),  # no block
        HandOff(0, 5, 64),  # attention has no states
        HandOff(1, 5, 60),  # no hash ends there
        HandOff(1, 5, 0),
        HandOff(1, 5, 208),  # past the prefill: drafts may be rejected
    ],
)
def test_a_wrong_hand_off_is_refused_by_name(state):
    bed, engine = bed_and_engine(MODELS["full and state"])
    job = SaveJob(
        bed.next_job(), engine.session.life, engine.session.version, "r", 0, 0, 208, 208, 0,
        HASH_BYTES, [], [state], 200,
    )  # fmt: skip
    bed.submit(engine.workers[0], job, [b"", chain(1, 13)])
    (outcome,) = bed.take(Outcome)
    assert (outcome.status, outcome.reason) == ("failed", "tables")
    bed.say(engine.workers[0], OutcomeAck([job.job]))
    assert bed.pool.stats().ready == 0
    bed.assert_clean()


def test_a_hand_off_whose_hash_did_not_come_is_refused():
    bed, engine = bed_and_engine(MODELS["full and state"])
    job = SaveJob(
        bed.next_job(), engine.session.life, engine.session.version, "r", 0, 0, 128, 128, 7,
        HASH_BYTES, [], [HandOff(1, 5, 64)], 200,
    )  # fmt: skip
    bed.submit(engine.workers[0], job, [b"", chain(1, 8, 7)])
    (outcome,) = bed.take(Outcome)
    assert (outcome.status, outcome.reason) == ("failed", "hashes")


def test_scratch_is_never_written():
    bed, engine = bed_and_engine(MODELS["scratch"])
    save(bed, engine, 1, 200)
    probe(bed, engine, 1, 1, 200)
    assert load(bed, engine, 1, hit(bed, engine, 1, 200))[0].status == "done"
    assert not any(block >= SCRATCH for block in engine.layouts[0, 1].values)


@pytest.mark.parametrize(
    ("retention", "group", "shorter"),
    [(0, 0, 0), (0, 1, 0), (0, 2, 0), (None, 0, 0), (None, 1, 176), (None, 2, 160)],
)
def test_each_kind_of_object_that_fails_names_what_is_still_complete(retention, group, shorter):
    """Full attention, state and window in turn; two loads that share the object fail once each."""
    bed, engine = bed_and_engine(MODELS["window too"], retention=retention)
    save(bed, engine, 1, 200)
    for admission in (1, 2):
        probe(bed, engine, admission, 1, 200)
        assert hit(bed, engine, admission, 200) == 192
    lease = bed.pipeline._core.leases.get((engine.session.life, 1))
    first = int(bed.pool.payload_offsets(lease.groups[group].entries[:1])[0])
    bed.copies.memory[first] += 1
    ends = [load(bed, engine, admission, 192)[0] for admission in (1, 2)]
    assert [end.reason for end in ends] == ["checksum", "gone"], "the second reads nothing"
    assert {end.shorter_tokens for end in ends} == {shorter}
    bed.say(engine.scheduler, Release([1, 2]))
    probe(bed, engine, 3, 1, 200)
    assert hit(bed, engine, 3, 200) == shorter
    if shorter:
        assert load(bed, engine, 3, shorter)[0].status == "done"
        bed.say(engine.scheduler, Release([3]))
    (said,) = bed.log.errors
    assert "checksum" in said
    bed.log.errors.clear()
    bed.assert_clean()


def test_one_pipeline_stage_holds_the_attention_and_the_other_the_states():
    bed, engine = bed_and_engine(MODELS["full and state"], ranks=2)
    for stage, worker in enumerate(engine.workers):
        groups = tuple(
            group if group.group == stage else replace(group, layout=None, payload_bytes=0)
            for group in worker.geometry.groups
        )
        worker.geometry = replace(worker.geometry, groups=groups, position=(0, stage, 0))
        del engine.layouts[stage, 1 - stage]
    save(bed, engine, 1, 65)
    probe(bed, engine, 1, 1, 65)
    assert hit(bed, engine, 1, 65) == 64
    assert [end.status for end in load(bed, engine, 1, 64)] == ["done", "done"]
    assert_loaded(engine, 1, 64)
    bed.say(engine.scheduler, Release([1]))
    bed.assert_clean()


# --- hits inside a block ----------------------------------------------------------------------

WIDE_FULL = {"kind": "full", "block_tokens": 64}


def bed_with_tails():
    """Prompt 1 is stored up to its last whole block, 192; a state of it holds 64 tokens."""
    bed, engine = bed_and_engine([WIDE_FULL, WIDE], alignment=16)
    assert rules(engine).partial
    save(bed, engine, 1, 215)
    engine.layouts[0, 0].values[4] = value_of(1, 3, 0, 0)
    engine.layouts[0, 1].values[50] = value_of(1, 3, 0, 1)
    return bed, engine


def save_tail(bed, engine, *, attention=0, state=0):
    """Keep attention of chunk 3 up to a boundary, and the state at one."""
    end = max(attention, state)
    tables, raw = ([TableSlice(0, 3, 1)], table([4])) if attention else ([], b"")
    job = SaveJob(
        bed.next_job(), engine.session.life, engine.session.version, "r", 0, 0, 192, end, 12,
        HASH_BYTES, tables, [HandOff(1, 50, state)] if state else [], 230, 0, attention,
    )  # fmt: skip
    bed.submit(engine.workers[0], job, [raw, chain(1, end // 16, 12)])
    bed.run_copies()
    (outcome,) = bed.take(Outcome)
    bed.say(engine.workers[0], OutcomeAck([job.job]))
    assert outcome.status == "done", outcome


def test_a_prompt_hits_inside_a_block(monkeypatch):
    bed, engine = bed_with_tails()
    save_tail(bed, engine, attention=208, state=208)
    probe(bed, engine, 1, 1, 215)
    assert hit(bed, engine, 1, 215) == 208
    used = []
    monkeypatch.setattr(bed.pipeline._core.behind, "reused", lambda keys, *_: used.append(keys))
    assert load(bed, engine, 1, 208)[0].status == "done"
    assert_loaded(engine, 1, 208)
    assert [len(keys) for keys in used] == [4, 1], "three chunks and a tail, and a state"
    assert all(bed.pool.present(keys).all() for keys in used), "what was read is written on"


def test_attention_stored_further_serves_a_state_before_it():
    bed, engine = bed_with_tails()
    save_tail(bed, engine, state=208)
    save_tail(bed, engine, attention=224)
    probe(bed, engine, 1, 1, 230)
    assert hit(bed, engine, 1, 230) == 208
    assert load(bed, engine, 1, 208)[0].status == "done"
    assert_loaded(engine, 1, 208)


@pytest.mark.parametrize(
    ("attention", "state"), [(224, 224), (208, 224), (0, 208)], ids=["both", "state", "alone"]
)
def test_a_state_further_on_serves_nothing_before_it(attention, state):
    bed, engine = bed_with_tails()
    save_tail(bed, engine, attention=attention, state=state)
    probe(bed, engine, 1, 1, 215)
    assert hit(bed, engine, 1, 215) == 192


def test_a_shorter_load_than_the_lease_takes_no_state_of_it():
    """Both end in the same chunk: the leased state is further on, and no other's."""
    bed, engine = bed_with_tails()
    save_tail(bed, engine, attention=224, state=224)
    probe(bed, engine, 1, 1, 230)
    assert hit(bed, engine, 1, 230) == 224
    (end,) = load(bed, engine, 1, 208)
    assert (end.status, end.reason) == ("failed", "lease")
