"""The rules of a session's cache groups, from what its halves registered.

The scheduler half knows what the groups share (block sizes, alignment, retention), a rank knows
the groups: only both together say whether the engine can be served exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from kvferry_connector.wire.attach import FieldRefusal

from kvferry_sidecar.masks.kinds import WINDOWED, Kind
from kvferry_sidecar.masks.rules import GroupRule, Refused, Rules, check
from kvferry_sidecar.sessions.model import RankGeometry, RankGroup

_NO_WAY = (
    "start vLLM with --disable-hybrid-kv-cache-manager, which keeps such layers as full "
    "attention, or run this model without kvferry"
)


class Shared(Protocol):
    """What all groups of an engine share: a RegisterEngine, or a Session that took it over."""

    @property
    def scheduler_block_tokens(self) -> int:
        """S."""

    @property
    def alignment_tokens(self) -> int:
        """A: hits are multiples of it."""

    @property
    def retention_tokens(self) -> int | None:
        """See RegisterEngine."""

    @property
    def use_eagle(self) -> bool:
        """Whether lookups drop a block for a drafter."""

    @property
    def reprefill_tokens(self) -> int:
        """Tokens at the end that may be rewritten."""


def with_drafts(ranks: Sequence[RankGeometry]) -> RankGeometry:
    """Return the first rank's geometry with the draft groups of all.

    vLLM clears the mark on a pipeline stage that has no layers of the group.
    """
    marked = {group.group for rank in ranks for group in rank.groups if group.eagle}
    groups = tuple(replace(one, eagle=one.group in marked) for one in ranks[0].groups)
    return replace(ranks[0], groups=groups)


def rules_of(shared: Shared, geometry: RankGeometry) -> Rules:
    """Return the rules; ranks agree on their groups but for the drafts (see ``with_drafts``)."""
    groups = tuple(_group_rule(group) for group in geometry.groups)
    # vLLM ignores the dense setting, and refuses others, where no group is ever sparse.
    sparse = any(rule.stored and rule.kind in WINDOWED | {Kind.MAMBA} for rule in groups)
    return Rules(
        groups=groups,
        hash_block=geometry.hash_block_tokens,
        scheduler_block=max(1, shared.scheduler_block_tokens),
        alignment=max(1, shared.alignment_tokens),
        partial=shared.alignment_tokens < shared.scheduler_block_tokens,
        retention=shared.retention_tokens if sparse else 0,
        use_eagle=shared.use_eagle,
        reprefill=shared.reprefill_tokens,
    )


def retention_of(setting: str, engine_tokens: int | None, scheduler_block: int) -> int | None:
    """Return the distance of the boundaries at which windows are kept, None for every aligned one.

    ``setting`` is "engine", "dense" or a number of tokens, which is rounded up to whole scheduler
    blocks. Never sparser than the engine's own: a store may keep more, and hits stay exact.
    """
    if setting == "engine" or engine_tokens is None:
        return engine_tokens
    if setting == "dense":
        return None
    tokens = -(-int(setting) // scheduler_block) * scheduler_block
    return math.gcd(tokens, engine_tokens)


def check_rules(
    shared: Shared, ranks: Sequence[RankGeometry], *, complete: bool
) -> list[FieldRefusal]:
    """Return why this engine cannot be served exactly, or nothing.

    ``complete``: these are all ranks. Without a mark all groups are draft groups, which until then
    is not known: a stage that is still to come may mark one.
    """
    rules = rules_of(shared, with_drafts(ranks))
    if not complete and not any(rule.eagle for rule in rules.groups):
        rules = replace(rules, use_eagle=False)
    refused = check(rules)
    if isinstance(refused, Refused):
        return [FieldRefusal("groups", refused.reason, "groups whose masks are exact", _NO_WAY)]
    drafted = [
        group
        for group, rule in enumerate(rules.groups)
        if rule.stored and rule.kind is Kind.MAMBA and rules.eagle_by_group[group]
    ]
    if rules.reprefill and drafted:
        # vLLM 0.32 names such a state by a boundary that is so many tokens off, or ends.
        theirs = f"{rules.reprefill} rewritten tokens with the states of EAGLE group {drafted[0]}"
        remedy = "draft with one MTP module (num_speculative_tokens 1), or without kvferry"
        return [FieldRefusal("reprefill_tokens", theirs, "0", remedy)]
    return []


def save_rule_of(rules: Rules, group: RankGroup) -> str:
    """Return what the engine should name of a group in a save (see wire.attach.Registered)."""
    rule = rules.groups[group.group]
    sparse = rule.stored and rule.kind in WINDOWED and rules.retention == 0
    # With EAGLE the boundaries lie elsewhere: the engine names all it holds, the mask decides.
    if not sparse or rules.alignment % rule.block or rules.eagle_ids:
        return group.save_rule
    return f"tail:{rule.window_blocks(eagle=False)}"


def _group_rule(group: RankGroup) -> GroupRule:
    if group.save_rule == "none":  # counted in S, and otherwise not there, whatever it is
        return GroupRule(Kind.RING, group.block_tokens, cacheable=False)
    return GroupRule(
        Kind(group.kind),
        group.block_tokens,
        window=group.window_tokens,
        chunk=group.chunk_tokens,
        eagle=group.eagle,
        window_extra=group.window_extra_tokens,
        spec=group.spec,
    )
