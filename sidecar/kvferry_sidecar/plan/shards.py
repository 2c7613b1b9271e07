"""How the shards of the local ranks share one stripe: one after the other, in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StripeShape:
    """One chunk's payload over all local ranks, per rank in rank order.

    A rank that holds no layer of the group (pipeline parallel) has ``shards[i]`` None and no
    bytes; ``shard_count`` counts the others.
    """

    offsets: tuple[int, ...]
    shards: tuple[int | None, ...]
    payload_bytes: int
    shard_count: int


def stripe_shape(shard_bytes: Sequence[int]) -> StripeShape:
    """Lay out shards of these sizes (bytes, per rank in rank order)."""
    offsets: list[int] = []
    shards: list[int | None] = []
    at = 0
    count = 0
    for size in shard_bytes:
        offsets.append(at)
        shards.append(count if size else None)
        at += size
        count += 1 if size else 0
    return StripeShape(tuple(offsets), tuple(shards), at, count)
