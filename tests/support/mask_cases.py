"""Random configurations of cache groups: vLLM's managers and our rules for the same model."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry_sidecar.masks.kinds import Kind
from kvferry_sidecar.masks.rules import GroupRule, Rules, check
from support import vllm_managers
from support.vllm_managers import Oracle
from vllm.v1.kv_cache_interface import KVCacheSpec

KINDS = (Kind.FULL, Kind.MLA, Kind.RSWA, Kind.SWA, Kind.CHUNKED, Kind.MAMBA, Kind.RING)
FEATURES = (
    *(str(kind) for kind in KINDS),
    "mixed",  # block sizes
    "merged",  # two groups of one spec
    "eagle-all",
    "eagle-some",
    "dense",
    "interval",  # retention of N tokens
    "partial",
    "dcp",
    "extra",  # a window wider than the model's
    "modules",  # several MTP modules
    "junction",
)
# Pairs that vLLM refuses, or that contradict each other.
IMPOSSIBLE = {
    frozenset(pair)
    for pair in (
        ("chunked", "eagle-all"),
        ("chunked", "eagle-some"),
        ("chunked", "modules"),
        ("eagle-all", "eagle-some"),
        ("dense", "interval"),
    )
}
PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if frozenset(pair) not in IMPOSSIBLE]


@dataclass(frozen=True)
class Case:
    """One configuration. ``scratch`` speculative blocks close each group's table."""

    rules: Rules
    oracle: Oracle
    scratch: tuple[int, ...]
    junction: bool
    features: frozenset[str]

    @property
    def stored(self) -> list[int]:
        return [i for i, rule in enumerate(self.rules.groups) if rule.stored]

    @property
    def tokens_max(self) -> int:
        """A length of at most 48 of the smallest blocks, at least two alignments."""
        smallest = min(rule.block for rule in self.rules.groups)
        return max(2 * self.rules.scheduler_block, 48 * smallest)


@dataclass
class _Draft:
    """A group before the blocks of all groups are known."""

    kind: Kind
    block: int  # effective tokens
    window: int = 0
    chunk: int = 0
    extra: int = 0
    scratch: int = 0


def random_case(rng: random.Random) -> Case:
    """Return a configuration that vLLM accepts; asserts that our check accepts it too."""
    unit, dcp = rng.choice((2, 4, 8)), 2 if rng.random() < 0.25 else 1
    fine = rng.random() < 0.35
    drafts = _drafts(rng, unit * dcp, fine)
    _place_chunked(rng, drafts, unit * dcp, fine)
    kinds = {draft.kind for draft in drafts}
    flagged, use_eagle = _eagle(rng, drafts)
    scheduler = math.lcm(*(draft.block for draft in drafts))
    retention = _retention(rng, kinds, scheduler)
    modules = rng.randint(2, min(4, scheduler)) if use_eagle and rng.random() < 0.4 else 0
    match_unit = unit * dcp if fine and len(drafts) > 1 else None
    oracle = Oracle(
        [_spec(draft, dcp) for draft in drafts],
        flagged=flagged,
        use_eagle=use_eagle,
        retention=retention,
        dcp=dcp,
        match_unit=match_unit,
        lookahead=modules,
    )
    rules = Rules(
        groups=tuple(_rule(draft, i in flagged) for i, draft in enumerate(drafts)),
        hash_block=oracle.hash_block,
        scheduler_block=oracle.scheduler_block,
        alignment=oracle.alignment,
        partial=oracle.partial,
        retention=retention,
        use_eagle=use_eagle,
        reprefill=max(0, modules - 1),
    )
    assert check(rules) is None, (rules, check(rules))
    assert rules.scheduler_block == scheduler
    assert [rule.block for rule in rules.groups] == [m.block_size for m in oracle.groups]
    junction = rng.random() < 0.3
    features = _features(rules, dcp, modules, junction)
    return Case(rules, oracle, tuple(d.scratch for d in drafts), junction, features)


def _drafts(rng: random.Random, unit: int, fine: bool) -> list[_Draft]:
    count = rng.choices((1, 2, 3, 4, 5), (1, 4, 4, 3, 1))[0]
    mixed = rng.random() < 0.6
    pool = (*KINDS, Kind.FULL, Kind.SWA, Kind.MAMBA)
    if not fine and rng.random() < 0.2:  # several windows: where EAGLE's bookkeeping matters
        count, pool = rng.randint(2, 5), (Kind.FULL, Kind.SWA, Kind.SWA, Kind.SWA)
    drafts: list[_Draft] = []
    for _ in range(count):
        if drafts and rng.random() < 0.2:
            drafts.append(_Draft(**vars(rng.choice(drafts))))
            continue
        kind = rng.choice(pool)
        if fine and kind is Kind.MAMBA:
            block = unit * rng.choice((2, 2, 3, 4))
        elif fine and kind is Kind.SWA:
            block = unit
        else:
            block = unit * (rng.choice((1, 1, 2, 3, 4)) if mixed else 1)
        drafts.append(_fill(rng, _Draft(kind, block)))
    if not any(draft.kind is not Kind.RING for draft in drafts):
        drafts[0] = _fill(rng, _Draft(Kind.FULL, unit))
    if fine and not any(draft.kind is Kind.MAMBA for draft in drafts):
        drafts.append(_fill(rng, _Draft(Kind.MAMBA, unit * rng.choice((2, 4)))))
    rng.shuffle(drafts)
    return drafts


def _fill(rng: random.Random, draft: _Draft) -> _Draft:
    if draft.kind in (Kind.SWA, Kind.RSWA):
        draft.window = rng.randint(2, rng.choice((1, 2, 5)) * draft.block)
    if draft.kind is Kind.SWA and rng.random() < 0.4:
        draft.extra = rng.randint(1, draft.block)
    if draft.kind is Kind.MAMBA:
        draft.scratch = rng.choice((0, 0, 1, 2))
    return draft


def _place_chunked(rng: random.Random, drafts: list[_Draft], unit: int, fine: bool) -> None:
    """Give chunked groups the one block size that vLLM accepts: the alignment."""
    local = [draft for draft in drafts if draft.kind is Kind.CHUNKED]
    if not local:
        return
    others = [draft.block for draft in drafts if draft.kind is not Kind.CHUNKED]
    block = unit if fine and len(drafts) > 1 else math.lcm(unit, *others)
    chunk = block * rng.randint(1, 4)
    for draft in local:
        draft.block, draft.chunk = block, chunk


def _eagle(rng: random.Random, drafts: list[_Draft]) -> tuple[set[int], bool]:
    if rng.random() < 0.45 or any(draft.kind is Kind.CHUNKED for draft in drafts):
        return set(), False
    if len(drafts) == 1 or rng.random() < 0.45:
        return set(), True
    flagged = set(rng.sample(range(len(drafts)), rng.randint(1, len(drafts) - 1)))
    return flagged, rng.random() < 0.9


def _retention(rng: random.Random, kinds: Iterable[Kind], scheduler: int) -> int | None:
    chosen = rng.random()
    if chosen < 0.35:
        return None
    if chosen < 0.7 and not {Kind.SWA, Kind.MAMBA}.isdisjoint(kinds):
        return scheduler * rng.randint(1, 4)
    return 0


def _rule(draft: _Draft, flagged: bool) -> GroupRule:
    window = draft.window if draft.kind is Kind.SWA else 0
    spec = f"{draft.scratch} scratch, window {0 if window else draft.window}"
    return GroupRule(
        draft.kind,
        draft.block,
        window=window,
        chunk=draft.chunk,
        eagle=flagged,
        cacheable=draft.kind is not Kind.RING,
        window_extra=draft.extra,
        spec=spec,
    )


def _spec(draft: _Draft, dcp: int) -> KVCacheSpec:
    """DCP divides what is sharded; the other kinds are replicated, as vLLM asks for."""
    block, window = draft.block, draft.window + draft.extra
    match draft.kind:
        case Kind.FULL:
            return vllm_managers.full(block // dcp)
        case Kind.MLA:
            return vllm_managers.mla(block // dcp)
        case Kind.RSWA:
            return vllm_managers.rswa(block // dcp, window)
        case Kind.SWA:
            return vllm_managers.swa(block, window, dcp_sharded=False)
        case Kind.CHUNKED:
            return vllm_managers.chunked(block, draft.chunk, dcp_sharded=False)
        case Kind.MAMBA:
            return vllm_managers.mamba(block, draft.scratch)
        case _:
            return vllm_managers.ring(block)


def _features(rules: Rules, dcp: int, modules: int, junction: bool) -> frozenset[str]:
    groups = rules.groups
    found = {
        **{str(kind): any(rule.kind is kind for rule in groups) for kind in KINDS},
        "mixed": len({rule.block for rule in groups}) > 1,
        "merged": any(len(group.members) > 1 for group in rules.spec_groups),
        "eagle-all": rules.use_eagle and not any(rule.eagle for rule in groups),
        "eagle-some": any(rule.eagle for rule in groups),
        "dense": rules.retention is None,
        "interval": bool(rules.retention),
        "partial": rules.partial,
        "dcp": dcp > 1,
        "extra": any(rule.window_extra for rule in groups),
        "modules": modules > 0,
        "junction": junction,
    }
    return frozenset(name for name, there in found.items() if there)
