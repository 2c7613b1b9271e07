"""How the shards of the local ranks share one stripe: one after the other, in rank order.

Ranks that hold the same bytes (replicas of an MLA cache, say) share one shard: it is stored once,
each of them loads all of it, and they save it by turns, chunk by chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

EVERY = slice(0, None, 1)


@dataclass(frozen=True, slots=True)
class StripeShape:
    """One chunk's payload over all local ranks, per rank in rank order.

    A rank that holds no layer of the group (pipeline parallel) has ``shards[i]`` None and no
    bytes; ``shard_count`` counts the distinct shards. ``turns[i]`` is which of a job's chunks
    the rank saves: every n-th of n replicas.
    """

    offsets: tuple[int, ...]
    shards: tuple[int | None, ...]
    payload_bytes: int
    shard_count: int
    turns: tuple[slice, ...]


def stripe_shape(shard_bytes: Sequence[int], names: Sequence[Hashable]) -> StripeShape:
    """Lay out shards of these sizes (bytes, per rank in rank order).

    Ranks of the same name hold the same bytes, and so the same number of them.
    """
    offsets: list[int] = []
    shards: list[int | None] = []
    known: dict[Hashable, tuple[int, int]] = {}  # name -> (shard, offset)
    at = 0
    for size, name in zip(shard_bytes, names, strict=True):
        if not size:
            offsets.append(at)
            shards.append(None)
            continue
        if name not in known:
            known[name] = (len(known), at)
            at += size
        shard, offset = known[name]
        offsets.append(offset)
        shards.append(shard)
    return StripeShape(tuple(offsets), tuple(shards), at, len(known), _turns(shards))


def _turns(shards: Sequence[int | None]) -> tuple[slice, ...]:
    replicas, before = Counter(shards), Counter[int | None]()
    turns = []
    for shard in shards:
        alone = shard is None or replicas[shard] == 1
        turns.append(EVERY if alone else slice(before[shard], None, replicas[shard]))
        before[shard] += 1
    return tuple(turns)
