"""The resolved numbers of an engine's cache groups, and which of them are refused.

Everything that depends on vLLM's version or on parallelism (DCP, compression) is resolved by
whoever describes the engine; from here on there are only token counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from kvferry_sidecar.masks.kinds import FINE_LOOKUP, FULL_FAMILY, WINDOWED, Kind


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a configuration or a request cannot be represented exactly."""

    reason: str


@dataclass(frozen=True, slots=True)
class GroupRule:
    """One cache group; all numbers in tokens.

    ``block`` is the effective block size (times DCP where the group is sharded). ``window_extra``
    widens the window of lookups, loads and stores (vLLM 0.33 with several MTP modules; 0 on 0.32).
    ``eagle`` is vLLM's ``is_eagle_group``. Groups with equal ``spec`` and equal numbers are looked
    up jointly, as vLLM merges groups of equal specs: give different texts where specs differ.
    """

    kind: Kind
    block: int
    window: int = 0
    chunk: int = 0
    eagle: bool = False
    cacheable: bool = True
    window_extra: int = 0
    spec: str = ""

    @property
    def stored(self) -> bool:
        """Whether objects of this group exist at all."""
        return self.cacheable and self.kind is not Kind.RING

    @property
    def reach(self) -> int:
        """Tokens of the window that a hit must find."""
        return self.window + self.window_extra

    def window_blocks(self, *, eagle: bool) -> int:
        """Contiguous blocks that a hit needs, with the one above it that EAGLE drops."""
        return -(-(self.reach - 1) // self.block) + eagle

    def joint_key(self) -> tuple[Kind, int, int, int, str]:
        """Equal for groups that are looked up jointly."""
        return (self.kind, self.block, self.reach, self.chunk, self.spec)


@dataclass(frozen=True, slots=True)
class SpecGroup:
    """Groups looked up jointly; ``eagle`` if any member is an EAGLE group."""

    rule: GroupRule
    members: tuple[int, ...]
    eagle: bool


@dataclass(frozen=True)  # no slots: the cached properties live in __dict__
class Rules:
    """All groups of an engine in the order of their ids, and what they share.

    ``hash_block`` H, ``scheduler_block`` S and ``alignment`` A as vLLM resolves them: A = H with
    ``partial`` (fine-grained) hits, else S. ``retention``: None keeps every aligned boundary,
    0 the replay boundaries only, N one boundary per N tokens too. ``reprefill`` tokens at the end
    may still be rewritten (MTP modules - 1, else 0). ``pcp``: prefill context parallel size.
    """

    groups: tuple[GroupRule, ...]
    hash_block: int
    scheduler_block: int
    alignment: int
    partial: bool = False
    retention: int | None = 0
    use_eagle: bool = False
    reprefill: int = 0
    pcp: int = 1

    @cached_property
    def eagle_ids(self) -> frozenset[int]:
        """Groups with the EAGLE drop: the flagged ones, or all when none is flagged."""
        flagged = frozenset(i for i, rule in enumerate(self.groups) if rule.eagle)
        if self.use_eagle and not flagged:
            return frozenset(range(len(self.groups)))
        return flagged

    @property
    def hit_alignment(self) -> int:
        """Tokens that every hit is a multiple of: a single group's own block, else A."""
        return self.groups[0].block if len(self.groups) == 1 else self.alignment

    @cached_property
    def spec_groups(self) -> tuple[SpecGroup, ...]:
        """Stored groups, merged by spec, full attention first: the order of vLLM's search."""
        members: dict[tuple[object, ...], list[int]] = {}
        for i, rule in enumerate(self.groups):
            if rule.stored:
                members.setdefault(rule.joint_key(), []).append(i)
        merged = [
            SpecGroup(self.groups[ids[0]], tuple(ids), not self.eagle_ids.isdisjoint(ids))
            for ids in members.values()
        ]
        return tuple(sorted(merged, key=lambda group: group.rule.kind not in FULL_FAMILY))

    @cached_property
    def eagle_by_group(self) -> tuple[bool, ...]:
        """Whether each group keeps and drops the block above a boundary."""
        eagle = [False] * len(self.groups)
        for group in self.spec_groups:
            for i in group.members:
                eagle[i] = group.eagle
        return tuple(eagle)

    def fine(self, group: int) -> bool:
        """Whether lookups of this group look at hash boundaries inside its blocks."""
        rule = self.groups[group]
        return (
            rule.kind in FINE_LOOKUP
            and self.hit_alignment < rule.block
            and rule.block % self.hit_alignment == 0
        )

    def unit(self, group: int) -> int:
        """Tokens between two places where an object of this group can end."""
        return self.hash_block if self.fine(group) else self.groups[group].block

    def aligned_blocks(self, group: int) -> int:
        """Blocks between two block ends of a group that are aligned for hits."""
        return self.hit_alignment // math.gcd(self.hit_alignment, self.groups[group].block)

    def eagle_margin(self, group: int) -> int:
        """Tokens that an EAGLE group matches past a hit before it drops them."""
        rule = self.groups[group]
        inside = self.partial and rule.kind in FINE_LOOKUP and rule.block > self.hash_block
        return self.hash_block if inside else rule.block


def check(rules: Rules) -> Refused | None:
    """Return why these rules cannot be served exactly, or None."""
    reason = _check_shared(rules)  # first: what follows divides by these sizes
    for i, rule in enumerate(rules.groups):
        reason = reason or _check_group(rules, i, rule)
    reason = reason or _check_partial(rules) or _check_retention(rules)
    return Refused(reason) if reason else None


def _check_shared(rules: Rules) -> str | None:
    shared = (rules.hash_block, rules.scheduler_block, rules.alignment, rules.pcp)
    if min(shared) < 1 or rules.reprefill < 0:
        return "block sizes and the alignment are at least 1 token"
    if any(rule.block < 1 for rule in rules.groups):
        return "block sizes and the alignment are at least 1 token"
    if not any(rule.stored for rule in rules.groups):
        return "no group is cacheable: there is nothing to store"
    if rules.scheduler_block % rules.hash_block or rules.alignment % rules.hash_block:
        return (
            f"scheduler block {rules.scheduler_block} and alignment {rules.alignment} must be "
            f"multiples of the hash block {rules.hash_block}"
        )
    hybrid = any(rule.kind not in FULL_FAMILY for rule in rules.groups if rule.stored)
    if rules.pcp > 1 and hybrid:
        return "prefill context parallelism with hybrid groups: vLLM allows full attention only"
    return None


def _check_group(rules: Rules, group: int, rule: GroupRule) -> str | None:
    name = f"group {group} ({rule.kind})"
    if rules.scheduler_block % rule.block:
        return f"{name}: scheduler block {rules.scheduler_block} is no multiple of {rule.block}"
    if not rule.stored:
        return None
    if rule.block % rules.hash_block:
        return f"{name}: block {rule.block} is no multiple of the hash block {rules.hash_block}"
    if len(rules.groups) == 1 and rule.block != rules.hash_block:
        return f"{name}: a single group hashes whole blocks, not {rules.hash_block} tokens"
    if rule.kind in WINDOWED and (rule.window < 1 or rule.window_extra < 0):
        return f"{name}: a sliding window has at least 1 token"
    if rule.kind is Kind.CHUNKED:
        return _check_chunked(rules, group, rule, name)
    return None


def _check_chunked(rules: Rules, group: int, rule: GroupRule, name: str) -> str | None:
    if rule.chunk < 1 or rule.chunk % rule.block:
        return f"{name}: chunk {rule.chunk} is no multiple of block {rule.block}"
    if rule.block != rules.alignment:
        return f"{name}: block {rule.block} is not the alignment {rules.alignment}"
    if group in rules.eagle_ids or rules.eagle_by_group[group]:
        return f"{name}: vLLM forbids chunked local attention with EAGLE"
    return None


def _check_partial(rules: Rules) -> str | None:
    stored = [(i, rule) for i, rule in enumerate(rules.groups) if rule.stored]
    if not rules.partial:
        inside = [i for i, _ in stored if rules.fine(i)]
        if inside:
            return (
                f"group {inside[0]}: alignment {rules.alignment} lies inside its block, which "
                "needs partial hits"
            )
        if rules.alignment != rules.scheduler_block:
            return (
                f"without partial hits the alignment is the scheduler block, "
                f"{rules.scheduler_block}, not {rules.alignment}"
            )
        return None
    if len(rules.groups) == 1:
        return "partial hits need at least two groups"
    if rules.alignment != rules.hash_block:
        return f"with partial hits the alignment is the hash block, {rules.hash_block}"
    if not any(rule.kind is Kind.MAMBA for _, rule in stored):
        return "partial hits need a Mamba group"
    coarse = [
        i for i, rule in stored if rule.kind not in FINE_LOOKUP and rule.block != rules.hash_block
    ]
    if coarse:
        return f"group {coarse[0]} cannot be looked up inside a block: vLLM has partial hits off"
    return None


def _check_retention(rules: Rules) -> str | None:
    retention = rules.retention
    if not retention:
        return None
    if retention < 0 or retention % rules.scheduler_block:
        return (
            f"retention {retention} is no multiple of the scheduler block {rules.scheduler_block}"
        )
    if not any(rule.kind in WINDOWED or rule.kind is Kind.MAMBA for rule in rules.groups):
        return "retention acts on sliding windows and Mamba only, and there is no such group"
    return None
