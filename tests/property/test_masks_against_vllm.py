"""The masks, the expansion and the hit search against vLLM's own managers.

Each random configuration has a number, which is its seed (`Random("masks 17")`); a failure names
it, and `run(17, 1)` repeats it.
"""

from __future__ import annotations

import collections
import random

import numpy as np
import pytest
from kvferry_sidecar.masks.expand import Blocks, expand_load
from kvferry_sidecar.masks.kinds import Kind
from kvferry_sidecar.masks.load import load_mask
from kvferry_sidecar.masks.rules import GroupRule, Rules
from kvferry_sidecar.masks.search import find_hit
from support import mask_checks, vllm_managers
from support.mask_cases import PAIRS, Case, random_case
from support.mask_checks import Tally
from support.vllm_managers import Oracle, prefix_hashes

NORMAL_CASES = 2_000
LONG_CASES = 20_000
PAIR_CASES_MIN = 20


def run(first: int, count: int) -> tuple[Tally, collections.Counter[frozenset[str]]]:
    """Check ``count`` configurations; return what was met and how often which features."""
    tally = Tally()
    seen: collections.Counter[frozenset[str]] = collections.Counter()
    for number in range(first, first + count):
        rng = random.Random(f"masks {number}")
        case = random_case(rng)
        seen[case.features] += 1
        try:
            check(case, rng, tally)
        except Exception as error:
            error.add_note(f"configuration {number}: {case.rules}")
            raise
    return tally, seen


def check(case: Case, rng: random.Random, tally: Tally) -> None:
    mask_checks.loads(case, rng)
    mask_checks.stores(case, rng)
    mask_checks.partial_tails(case, rng)
    if rng.random() < 0.5:
        mask_checks.stepping(case, rng, tally)
    for _ in range(8 if case.rules.eagle_ids else 3):
        mask_checks.hits(case, rng, tally)


def assert_covered(tally: Tally, seen: collections.Counter[frozenset[str]]) -> None:
    pairs = {
        pair: sum(count for features, count in seen.items() if features.issuperset(pair))
        for pair in PAIRS
    }
    inner = tally.hits_inner / tally.hits
    rarest = sorted(pairs.items(), key=lambda item: item[1])[:5]
    print(f"{tally}; inner hits {inner:.0%}; {len(pairs)} pairs, rarest {rarest}")
    assert inner >= 0.3, "0 < hit < maximum in too few of the hit cases"
    assert tally.hits_eagle > tally.hits / 10
    assert min(tally.junctions, tally.tails_later, tally.hashed_tails) > 10
    rare = {pair: count for pair, count in pairs.items() if count < PAIR_CASES_MIN}
    assert not rare, f"pairs of features in too few configurations: {rare}"


def test_masks_and_hits_equal_those_of_vllm() -> None:
    tally, seen = run(0, NORMAL_CASES)
    assert_covered(tally, seen)


@pytest.mark.long
def test_masks_and_hits_equal_those_of_vllm_long() -> None:
    tally, seen = run(NORMAL_CASES, LONG_CASES)
    assert_covered(tally, seen)


# --- what the random configurations cannot hold ------------------------------------------------


def test_retained_tail_is_allocated_but_no_part_of_the_mask() -> None:
    """On 0.32 several MTP modules make SWA groups hold blocks that a hit does not need."""
    oracle = Oracle([vllm_managers.full(16), vllm_managers.swa(16, 40, extra_retained=20)])
    table = oracle.external_tables(160)[1]
    rule = GroupRule(Kind.SWA, 16, window=40)
    assert np.flatnonzero(table).tolist() == [6, 7, 8, 9]
    blocks = expand_load(rule, table, total_tokens=160)
    assert isinstance(blocks, Blocks)
    assert blocks.chunks.tolist() == [7, 8, 9]
    wider = GroupRule(Kind.SWA, 16, window=40, window_extra=20)  # what 0.33 resolves to
    assert np.flatnonzero(load_mask(wider, total_tokens=160)).tolist() == [6, 7, 8, 9]


@pytest.mark.parametrize("use_eagle", [False, True])
def test_single_group_hits_end_on_its_own_blocks(use_eagle: bool) -> None:
    """Also when the scheduler's block is larger: the store mask knows S, the hit does not."""
    oracle = Oracle([vllm_managers.swa(4, 9)], use_eagle=use_eagle, scheduler_block=8)
    rules = Rules((GroupRule(Kind.SWA, 4, window=9),), 4, 8, 8, use_eagle=use_eagle)
    present = np.array([False, True, True, True, False, True])
    oracle.put({0: {(i + 1) * 4 for i in np.flatnonzero(present).tolist()}})
    hit = find_hit(rules, [present], max_tokens=24)
    _, theirs, _ = oracle.coordinator.find_longest_cache_hit(prefix_hashes(6), 24)
    assert hit.tokens == theirs == (12 if use_eagle else 16)


# --- long ones -----------------------------------------------------------------------------------


def four_groups() -> tuple[Rules, list[vllm_managers.KVCacheSpec]]:
    rules = Rules(
        (
            GroupRule(Kind.FULL, 16),
            GroupRule(Kind.SWA, 16, window=1024),
            GroupRule(Kind.SWA, 16, window=4096),
            GroupRule(Kind.MAMBA, 16),
        ),
        hash_block=16,
        scheduler_block=16,
        alignment=16,
    )
    m = vllm_managers
    return rules, [m.full(16), m.swa(16, 1024), m.swa(16, 4096), m.mamba(16)]


def test_a_plan_of_a_million_tokens_names_the_blocks_of_vllm() -> None:
    rules, specs = four_groups()
    tokens = 1 << 20
    oracle = Oracle(specs, num_blocks=tokens // 16 + 1000, tokens_max=2 * tokens)
    tables = [np.array(table, dtype=np.int32) for table in oracle.external_tables(tokens)]
    for rule, table in zip(rules.groups, tables, strict=True):
        blocks = expand_load(rule, table, total_tokens=tokens)
        assert isinstance(blocks, Blocks)
        assert blocks.chunks.tolist() == np.flatnonzero(table).tolist()


def test_a_hit_of_128_ki_tokens_is_that_of_vllm() -> None:
    rules, specs = four_groups()
    chunks = (1 << 17) // 16
    oracle = Oracle(specs)
    oracle.put(dict.fromkeys(range(4), range(16, chunks * 16 + 1, 16)))
    everything = [np.ones(chunks, dtype=np.bool_)] * 4
    hashes, limit = prefix_hashes(chunks), chunks * 16 - 1
    hit = find_hit(rules, everything, max_tokens=limit)
    assert hit.tokens == oracle.coordinator.find_longest_cache_hit(hashes, limit)[1] > 0


def test_groups_that_never_agree_have_no_hit() -> None:
    """Of two windows one has every even chunk, the other every odd one."""
    rules = Rules(
        (
            GroupRule(Kind.FULL, 16),
            GroupRule(Kind.SWA, 16, window=10, spec="even"),
            GroupRule(Kind.SWA, 16, window=10, spec="odd"),
        ),
        hash_block=16,
        scheduler_block=16,
        alignment=16,
    )
    chunks = 1000
    even = np.arange(chunks) % 2 == 0
    present = [np.ones(chunks, dtype=np.bool_), even, ~even]
    assert find_hit(rules, present, max_tokens=chunks * 16).tokens == 0
