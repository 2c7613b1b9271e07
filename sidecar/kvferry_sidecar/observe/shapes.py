"""What one chunk of each group is: its rules, and its bytes in the pool and on the ranks."""

from __future__ import annotations

import msgspec

from kvferry_sidecar.sessions.model import Session
from kvferry_sidecar.sessions.readiness import save_rules
from kvferry_sidecar.stages.shape import session_shape


class GroupStatus(msgspec.Struct, frozen=True):
    """One group. ``stored_bytes``: a chunk in the pool; ``held_bytes``: on all local ranks.

    They differ where ranks hold the same bytes: ``tp_replicas`` of them share one of the
    ``shards``. Numbers of tokens are 0 where the kind has none.
    """

    group: int
    kind: str
    block_tokens: int
    window_tokens: int
    window_extra_tokens: int
    chunk_tokens: int
    eagle: bool
    save_rule: str
    layers: int
    tp_replicas: int
    shards: int
    stored_bytes: int
    held_bytes: int


class GeometryStatus(msgspec.Struct, frozen=True):
    """The groups, and what they share. ``retention_tokens``: 0 replay boundaries, None dense."""

    hash_block_tokens: int
    scheduler_block_tokens: int
    alignment_tokens: int
    retention_tokens: int | None
    use_eagle: bool
    groups: list[GroupStatus]


def geometry_status(session: Session) -> GeometryStatus | None:
    """Return the geometry of a session; None until every local rank registered."""
    shape = session_shape(session)
    if shape is None:
        return None
    ranks = [worker.geometry for worker in session.workers.values() if worker.geometry]
    rules = save_rules(session)
    groups = []
    for group, rule in zip(shape.groups, rules, strict=True):
        held = [rank.groups[group.group] for rank in ranks]
        groups.append(
            GroupStatus(
                group=group.group,
                kind=group.kind,
                block_tokens=group.block_tokens,
                window_tokens=held[0].window_tokens,
                window_extra_tokens=held[0].window_extra_tokens,
                chunk_tokens=held[0].chunk_tokens,
                eagle=any(one.eagle for one in held),
                save_rule=rule,
                layers=max(one.layers for one in held),
                tp_replicas=held[0].tp_replicas,
                shards=group.stripe.shard_count,
                stored_bytes=group.stripe.payload_bytes,
                held_bytes=sum(one.payload_bytes for one in held),
            )
        )
    return GeometryStatus(
        hash_block_tokens=shape.hash_block_tokens,
        scheduler_block_tokens=session.scheduler_block_tokens,
        alignment_tokens=session.alignment_tokens,
        retention_tokens=shape.rules.retention,
        use_eagle=session.use_eagle,
        groups=groups,
    )
