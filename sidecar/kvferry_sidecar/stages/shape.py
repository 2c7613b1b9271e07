"""The shape of a session's objects: its groups, and how their shards lie in a stripe."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry_sidecar.masks.kinds import FULL_FAMILY
from kvferry_sidecar.masks.rules import Rules
from kvferry_sidecar.plan.shards import StripeShape, stripe_shape
from kvferry_sidecar.sessions.model import RankGroup, Session
from kvferry_sidecar.sessions.rules import rules_of, with_drafts
from kvferry_sidecar.tiers.store import Form


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One group over all local ranks. ``num_blocks`` is the least of them.

    Objects end at multiples of ``unit_tokens``: the block, or the hash block with partial hits.
    """

    group: int
    kind: str
    block_tokens: int
    unit_tokens: int
    hashes_per_unit: int
    scratch_blocks: int
    save_rule: str
    num_blocks: int
    stripe: StripeShape


@dataclass(frozen=True, slots=True)
class SessionShape:
    """Groups by their id, as in ``rules``; ``ranks`` ascending, as shards lie."""

    ranks: tuple[int, ...]
    groups: tuple[GroupShape, ...]
    rules: Rules
    _stored: tuple[GroupShape, ...] = field(init=False)  # asked for several times a message
    # Places among the stored groups of those whose every unit a hit needs.
    whole: tuple[int, ...] = field(init=False)
    hit_alignment: int = field(init=False)  # tokens that every hit is a multiple of
    group_ids: frozenset[int] = field(init=False)
    # One unit of what hits count by: tokens, of the first group of ``whole``; bytes, of all.
    whole_unit: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Work out once what every lookup asks for."""
        stored = tuple(group for group in self.groups if group.save_rule != "none")
        whole = tuple(
            i
            for i, group in enumerate(stored)
            if group.kind in FULL_FAMILY and group.unit_tokens == group.block_tokens
        )
        object.__setattr__(self, "_stored", stored)
        object.__setattr__(self, "whole", whole)
        object.__setattr__(self, "hit_alignment", self.rules.hit_alignment)
        unit_bytes = sum(stored[one].stripe.payload_bytes for one in whole)
        unit_tokens = stored[whole[0]].unit_tokens if whole else 0
        object.__setattr__(self, "whole_unit", (unit_tokens, unit_bytes))
        object.__setattr__(self, "group_ids", frozenset(group.group for group in self.groups))

    @property
    def hash_block_tokens(self) -> int:
        """Tokens that one block hash covers."""
        return self.rules.hash_block

    def rank_index(self, rank: int) -> int:
        """Return the position of a rank among the shards."""
        return self.ranks.index(rank)

    def stored_groups(self) -> tuple[GroupShape, ...]:
        """Groups that have objects at all."""
        return self._stored


def form_of(stripe: StripeShape) -> Form:
    """Return the form of a group's objects: each distinct shard once, in their order."""
    pairs = zip(stripe.shards, stripe.offsets, strict=True)
    starts = [at for _, at in sorted({(n, at) for n, at in pairs if n is not None})]
    ends = (*starts[1:], stripe.payload_bytes)
    return Form(tuple(end - start for start, end in zip(starts, ends, strict=True)))


def session_shape(session: Session) -> SessionShape | None:
    """Return the shape, or None while a local rank has no geometry.

    Registration has compared the ranks field by field: here the first one speaks for all, and
    only sizes are read per rank.
    """
    ranks = tuple(sorted(session.ranks))
    geometries = []
    for rank in ranks:
        peer = session.workers.get(rank)
        if peer is None or peer.geometry is None:
            return None
        geometries.append(peer.geometry)
    if not geometries:
        return None
    rules = rules_of(session, with_drafts(geometries))
    groups = tuple(
        _group_shape(
            [geometry.groups[i] for geometry in geometries],
            [geometry.position for geometry in geometries],
            rules,
        )
        for i in range(len(geometries[0].groups))
    )
    return SessionShape(ranks, groups, rules)


def _group_shape(
    ranks: list[RankGroup], positions: list[tuple[int, int, int]], rules: Rules
) -> GroupShape:
    first = ranks[0]
    unit_tokens = rules.unit(first.group)
    # Replicas are consecutive in tensor parallel; pipeline stages have layers of their own.
    names = [(tp_rank // first.tp_replicas, pp_rank) for tp_rank, pp_rank, _ in positions]
    return GroupShape(
        group=first.group,
        kind=first.kind,
        block_tokens=first.block_tokens,
        unit_tokens=unit_tokens,
        hashes_per_unit=unit_tokens // rules.hash_block,
        scratch_blocks=first.scratch_blocks,
        save_rule=first.save_rule,
        num_blocks=min(rank.num_blocks for rank in ranks),
        stripe=stripe_shape([rank.payload_bytes for rank in ranks], names),
    )
