"""What is compared with vLLM for one random configuration."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from kvferry_sidecar.masks import expand, objects, presence, search, store
from kvferry_sidecar.masks.kinds import FULL_FAMILY, Kind
from kvferry_sidecar.masks.load import load_mask
from kvferry_sidecar.masks.rules import Refused, Rules
from support.mask_cases import Case
from support.vllm_managers import prefix_hashes
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import (
    _partial_tail_non_mamba_puts,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker
from vllm.v1.core.kv_cache_coordinator import replay_boundaries

Ends = dict[int, set[int]]


@dataclass
class Tally:
    """What the checks really met, so that a generator that went blind is seen."""

    hits: int = 0
    hits_inner: int = 0  # 0 < hit < the largest aligned length that was asked for
    hits_eagle: int = 0
    junctions: int = 0
    tails: int = 0
    tails_later: int = 0
    steps: int = 0
    hashed: int = 0
    hashed_tails: int = 0


# --- loads -----------------------------------------------------------------------------------


def loads(case: Case, rng: random.Random) -> None:
    """Load mask == the store coordinator's == non-null destinations; both table forms expand."""
    rules, align = case.rules, case.rules.alignment
    coordinator = case.oracle.store_coordinator()
    for _ in range(2):
        length = align * rng.randint(1, max(1, case.tokens_max // align))
        masks = [load_mask(rule, total_tokens=length) for rule in rules.groups]
        theirs = coordinator.load_mask(prefix_hashes(length // rules.hash_block), length)
        assert [masks[i].tolist() for i in case.stored] == [list(mask) for mask in theirs]
        tables = case.oracle.external_tables(length)
        for i in case.stored:
            chunks = len(masks[i])
            real = [block != 0 for block in tables[i][:chunks]]
            assert real == masks[i].tolist(), (i, length)
            _expansion(case, i, length, tables[i], rng)


def _expansion(case: Case, group: int, length: int, table: list[int], rng: random.Random) -> None:
    rule, scratch = case.rules.groups[group], case.scratch[group]
    mask = load_mask(rule, total_tokens=length)
    expected = [(i, table[i]) for i in np.flatnonzero(mask).tolist()]
    stripped = [block for block in table if block]
    for form in (table, stripped):
        blocks = expand.expand_load(rule, form, total_tokens=length, scratch_slots=scratch)
        assert isinstance(blocks, expand.Blocks), blocks
        assert list(zip(blocks.chunks.tolist(), blocks.ids.tolist(), strict=True)) == expected
    local = rng.randint(0, length)
    part = expand.expand_load(
        rule, table, total_tokens=length, local_tokens=local, scratch_slots=scratch
    )
    assert isinstance(part, expand.Blocks)
    wanted = [(i, block) for i, block in expected if (i + 1) * rule.block > local]
    assert list(zip(part.chunks.tolist(), part.ids.tolist(), strict=True)) == wanted
    if expected:
        broken = list(table)
        broken[rng.choice(expected)[0]] = 0
        short = stripped[:-1]
        for wrong in (broken, short):
            refused = expand.expand_load(rule, wrong, total_tokens=length, scratch_slots=scratch)
            assert isinstance(refused, Refused), (wrong, refused)


# --- stores ----------------------------------------------------------------------------------


def stores(case: Case, rng: random.Random) -> None:
    """Store mask == `reachable_block_mask` of the manager's class, at any end and start."""
    rules = case.rules
    tokens = rng.randint(1, case.tokens_max)
    prefill = max(1, tokens + rng.randint(-tokens, 2 * rules.scheduler_block))
    junction = rng.randint(1, tokens) if case.junction else 0
    boundaries = store.kept_boundaries(rules, prefill, junction)
    eagle = bool(case.oracle.coordinator.eagle_group_ids)
    theirs = replay_boundaries(prefill, rules.scheduler_block, use_eagle=eagle)
    assert boundaries == (*theirs, *([junction] if junction else []))
    for i in case.stored:
        manager, rule = case.oracle.groups[i], rules.groups[i]
        assert bool(manager.use_eagle) == rules.eagle_by_group[i]
        mask = store.store_mask(rules, i, tokens=tokens, boundaries=boundaries)
        start = rng.randint(0, len(mask))
        expected = manager.reachable_block_mask(
            start_block=start,
            end_block=tokens // rule.block,
            alignment_tokens=manager.cache_hit_alignment_tokens,
            kv_cache_spec=manager.kv_cache_spec,
            use_eagle=manager.use_eagle,
            retention_interval=rules.retention,
            reachable_boundaries=boundaries,
            dcp_world_size=manager.dcp_world_size,
        )
        if expected is None:
            expected = [True] * (tokens // rule.block - start)
        assert mask[start:].tolist() == expected, (i, tokens, prefill, junction)


def partial_tails(case: Case, rng: random.Random) -> None:
    """What a partial tail saves of attention groups == the store connector's puts."""
    rules = case.rules
    if not _same_eagle(case):
        return
    prefill = rng.randint(2, case.tokens_max)
    computed = prefill + rng.choice((-1, 0, 0, rules.scheduler_block))
    hashed = max(0, prefill - rng.choice((0, 0, rules.hash_block)))
    hashed = hashed // rules.hash_block * rules.hash_block
    size = -(-computed // min(rule.block for rule in rules.groups)) + 1
    request = SimpleNamespace(
        boundary_puts=[],
        publish_partial_tail=True,
        num_prompt_tokens=prefill,
        completed_token_len=computed,
        block_hashes=range(hashed // rules.hash_block),
        block_ids=[list(range(1, size + 1))] * len(case.stored),
    )
    puts: dict[int, list[tuple[int, int]]] = {i: [] for i in case.stored}
    if rules.partial:
        sizes = [rules.groups[i].block for i in case.stored]
        for put in _partial_tail_non_mamba_puts(case.oracle.store_coordinator(), request, sizes):
            puts[case.stored[put.group_id]].append((put.block_id - 1, put.num_tokens))
    for i in case.stored:
        ours = objects.partial_tail(
            rules, i, boundary=_prompt_boundary(rules, prefill),
            computed_tokens=computed, hashed_tokens=hashed,
        )  # fmt: skip
        assert list(zip(ours.chunks.tolist(), ours.ends.tolist(), strict=True)) == puts[i], i


def _prompt_boundary(rules: Rules, prefill_tokens: int) -> int:
    """Return the hash boundary at which a resend of this prompt finds its last state."""
    proof = prefill_tokens if rules.use_eagle else prefill_tokens - 1
    boundary = proof // rules.hash_block * rules.hash_block
    return max(0, boundary - rules.hash_block if rules.use_eagle else boundary)


# --- stepping --------------------------------------------------------------------------------


def stepping(case: Case, rng: random.Random, tally: Tally) -> None:
    """What the managers really hash over prefill and decode == the masks, among what is held."""
    rules, oracle = case.rules, case.oracle
    if rules.reprefill and any(rules.eagle_by_group[i] for i in _states(case)):
        return  # vLLM 0.32 hashes a state `reprefill` tokens early here, or fails an assertion
    oracle.put({})
    prompt = rng.randint(1, min(case.tokens_max, 30 * min(r.block for r in rules.groups)))
    request = oracle.request(prompt)
    junction = 0
    if case.junction and prompt > 1:
        junction = rng.randint(1, prompt - 1) // rules.alignment * rules.alignment
    request.shared_prefix_boundary = junction
    boundaries = store.kept_boundaries(rules, prompt, junction)
    expected: list[set[int]] = [set() for _ in rules.groups]
    reached = [0] * len(rules.groups)
    for tokens in _chunks(case, rng, prompt, junction):
        oracle.step(request, tokens)
        tally.steps += 1
        computed = request.num_computed_tokens
        tables, hashed = oracle.tables(request), oracle.hashed(request)
        for i in case.stored:
            block = rules.groups[i].block
            final = oracle.coordinator.get_num_cacheable_tokens(computed, i)
            mask = store.store_mask(rules, i, tokens=final, boundaries=boundaries)
            fresh = range(reached[i], len(mask))
            expected[i] |= {k for k in fresh if mask[k] and tables[i][k]}
            expected[i] |= _prompt_state(case, i, prompt, final)
            reached[i] = max(reached[i], len(mask))
            whole = {k for k, end in hashed[i].items() if end == {(k + 1) * block}}
            held = {k for k, slot in enumerate(tables[i]) if slot}
            assert whole == expected[i] & held, (i, computed, prompt, junction)
            tally.hashed += len(whole)
            _check_tails(case, i, prompt, hashed[i], tally)
        if computed >= prompt:
            request.append_output_token_ids(7)
    oracle.manager.free(request)


def _states(case: Case) -> list[int]:
    return [i for i in case.stored if case.rules.groups[i].kind is Kind.MAMBA]


def _prompt_state(case: Case, group: int, prompt: int, final: int) -> set[int]:
    """The state at the prompt's last hash boundary, which Mamba keeps whatever the mask says."""
    boundary = _prompt_boundary(case.rules, prompt)
    block = case.rules.groups[group].block
    state = case.rules.groups[group].kind is Kind.MAMBA
    return {boundary // block - 1} if state and final == boundary and not final % block else set()


def _check_tails(
    case: Case, group: int, prompt: int, hashed: dict[int, set[int]], tally: Tally
) -> None:
    """Hashes inside a block are only those of the prompt's end."""
    rules, rule = case.rules, case.rules.groups[group]
    if rule.kind in FULL_FAMILY:
        limit = prompt if rules.eagle_by_group[group] else prompt - 1
        place = limit // rules.hash_block * rules.hash_block
    else:
        place = _prompt_boundary(rules, prompt)
    inside = {end for ends in hashed.values() for end in ends if end % rule.block}
    assert inside <= {place}, (group, inside, place)
    tally.hashed_tails += len(inside)


def _chunks(case: Case, rng: random.Random, prompt: int, junction: int) -> list[int]:
    """Sizes of the steps: Mamba's states exist only where a step ends, so each one is met."""
    states = [case.rules.groups[i].block for i in _states(case)]
    stops = {prompt}
    if states:
        for block in states:
            stops |= set(range(block, prompt, block))
        stops |= {_prompt_boundary(case.rules, prompt), junction} - {0}
    else:
        stops |= {rng.randint(1, prompt) for _ in range(4)}
    ends = [0, *sorted(stops)]
    decode = rng.choice((1, 2, 2 * case.rules.groups[0].block))
    return [b - a for a, b in itertools.pairwise(ends)] + [1] * decode


# --- hits ------------------------------------------------------------------------------------


def hits(case: Case, rng: random.Random, tally: Tally) -> None:
    """Hit and junction == the engine's, hit == the store coordinator's, with presence put in."""
    rules, oracle = case.rules, case.oracle
    tokens = rng.randint(rules.alignment + 1, case.tokens_max)
    ends = random_presence(case, rng, tokens)
    oracle.put(ends)
    hashed = tokens // rules.hash_block * rules.hash_block
    present = [
        presence.from_ends(rules, i, ends.get(i, ()), hashed_tokens=hashed)
        for i in range(len(rules.groups))
    ]
    limit = tokens - 1
    if rng.random() < 0.3:
        _, theirs, junction = oracle.manager.get_computed_blocks(oracle.request(tokens))
    else:
        if rng.random() < 0.5:
            limit = rng.randint(1, limit)
        hashes = prefix_hashes(hashed // rules.hash_block)
        _, theirs, uncached = oracle.coordinator.find_longest_cache_hit(hashes, limit)
        junction = theirs + uncached if uncached else 0
    hit = search.find_hit(rules, present, max_tokens=limit)
    assert (hit.tokens, hit.junction_tokens) == (theirs, junction), (limit, hashed, ends)
    if limit >= hashed:  # what lies past the hashes is no part of any hit
        far = limit + rng.randint(1, 4 * rules.scheduler_block)
        assert search.find_hit(rules, present, max_tokens=far) == hit, (far, hashed, ends)
    largest = limit // rules.alignment * rules.alignment
    tally.hits += 1
    tally.hits_inner += 0 < hit.tokens < largest
    tally.hits_eagle += bool(rules.eagle_ids) and hit.tokens > 0
    tally.junctions += hit.junction_tokens > 0
    _check_store_coordinator(case, ends, hit.tokens, limit, hashed, present, tally)
    _check_complete(case, present, ends, hit.tokens, limit)


def random_presence(case: Case, rng: random.Random, tokens: int) -> Ends:
    """Objects of a prefix that was stored (its masks, and the block above), noise and holes."""
    rules = case.rules
    ends: Ends = {i: set() for i in case.stored}
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        length = rules.alignment * rng.randint(1, max(1, tokens // rules.alignment))
        for i in case.stored:
            rule = rules.groups[i]
            chunks = np.flatnonzero(load_mask(rule, total_tokens=length)).tolist()
            tail = length
            if rule.kind in FULL_FAMILY and rng.random() < 0.4:  # saved by a longer prompt
                tail = rng.randrange(length, length // rule.block * rule.block + rule.block + 1)
                tail -= tail % rules.unit(i)
            ends[i] |= {min((k + 1) * rule.block, max(tail, length)) for k in chunks}
            if rules.eagle_by_group[i] and rng.random() < 0.9:
                ends[i].add(length + rules.eagle_margin(i))
            if rng.random() < 0.2:
                later = length + rules.unit(i) * rng.randint(1, 3)
                ends[i].add(later)
    density = rng.choice((0.0, 0.0, 0.1, 0.5, 0.7, 0.9, 1.0))
    for i in case.stored:
        unit = rules.groups[i].block if rng.random() < 0.7 else rules.hash_block
        ends[i] |= {e for e in range(unit, tokens + 1, unit) if rng.random() < density}
        if rng.random() < 0.3 and ends[i]:
            ends[i] -= set(rng.sample(sorted(ends[i]), min(len(ends[i]), rng.randint(1, 3))))
        ends[i] = {e for e in ends[i] if e <= tokens}
    return ends


def _check_store_coordinator(
    case: Case,
    ends: Ends,
    hit: int,
    limit: int,
    hashed: int,
    present: list[Any],
    tally: Tally,
) -> None:
    """The store coordinator has no margin for EAGLE with a single spec group; the engine has."""
    rules = case.rules
    if not _same_eagle(case) or (rules.eagle_ids and len(rules.spec_groups) == 1):
        return
    coordinator = case.oracle.store_coordinator()
    pool = case.oracle.external_pool(ends)
    hashes = prefix_hashes(hashed // rules.hash_block)
    _, theirs = coordinator.find_longest_cache_hit(hashes, limit, pool)
    assert theirs == hit
    if hit and all(load_mask(rules.groups[i], total_tokens=hit).any() for i in case.stored):
        _check_tail_keys(case, coordinator, pool, hashes, hit, present, tally)


def _same_eagle(case: Case) -> bool:
    """Whether the store coordinator sees the flagged groups: it looks at cacheable ones only."""
    return not case.rules.eagle_ids or not case.rules.eagle_ids.isdisjoint(case.stored)


def _check_tail_keys(
    case: Case,
    coordinator: Any,
    pool: Any,
    hashes: list[bytes],
    hit: int,
    present: list[Any],
    tally: Tally,
) -> None:
    rules = case.rules
    worker = SimpleNamespace(
        token_dbs=[SimpleNamespace(block_size=rules.groups[i].block) for i in case.stored],
        _kv_cache_groups=coordinator.kv_cache_groups,
        coord=coordinator,
        hash_block_size=rules.hash_block,
    )
    for tail in MooncakeStoreWorker._tail_key_boundaries(worker, hashes, hit, pool):
        group = case.stored[tail.group_id]
        needed = objects.needed_objects(rules, group, present[group], total_tokens=hit)
        assert needed is not None
        assert needed.ends[-1] == tail.num_tokens
        tally.tails += 1
        tally.tails_later += int(needed.ends[-1]) > hit


def _check_complete(case: Case, present: list[Any], ends: Ends, hit: int, limit: int) -> None:
    """A hit is complete; without EAGLE it is the longest complete length."""
    rules = case.rules
    lengths = range(rules.alignment, limit + 1, rules.alignment)
    complete = [n for n in lengths if _is_complete(case, present, n)]
    assert complete == [n for n in lengths if all(_serves(case, i, ends[i], n) for i in ends)]
    assert hit == 0 or hit in complete
    if not rules.eagle_ids:
        longest = max(complete, default=0)
        assert hit <= longest if rules.partial else hit == longest


def _is_complete(case: Case, present: list[Any], length: int) -> bool:
    """Whether a request can resume at ``length`` with what is stored in all groups."""
    return all(
        objects.needed_objects(case.rules, i, present[i], total_tokens=length) is not None
        for i in case.stored
    )


def _serves(case: Case, group: int, ends: set[int], length: int) -> bool:
    """Whether objects with these end tokens are all that a hit of ``length`` reads."""
    rule = case.rules.groups[group]
    if rule.kind is Kind.MAMBA:
        return length in ends
    for chunk in np.flatnonzero(load_mask(rule, total_tokens=length)).tolist():
        end = (chunk + 1) * rule.block
        if end not in ends and (end <= length or ends.isdisjoint(range(length, end))):
            return False
    return True
