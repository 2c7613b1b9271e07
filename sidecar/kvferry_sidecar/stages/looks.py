"""What is known of one admission's objects in slower tiers: pure bookkeeping, no calls.

Chunks are counted per stored group, in the order of the admission's keys (one per unit: see
GroupShape). ``where`` says which
tier has a chunk that the pool lacks; ``came`` remembers what was brought, for the answer's
sources.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from kvferry_connector.wire.hot import Ask
from numpy.typing import NDArray

from kvferry_sidecar.masks.objects import wanted_objects
from kvferry_sidecar.masks.rules import Rules
from kvferry_sidecar.masks.search import find_hit
from kvferry_sidecar.sessions.admissions import Admission
from kvferry_sidecar.sessions.leases import LeaseKey
from kvferry_sidecar.sessions.model import Peer
from kvferry_sidecar.stages.behind import split
from kvferry_sidecar.stages.shape import GroupShape, SessionShape
from kvferry_sidecar.tiers.host import HostTier

_NOWHERE = -1
_SOURCES = ("host", "disk", "external")  # by the value of ``came``: the slowest one counts


class Chunk(NamedTuple):
    """Position of a chunk: which stored group, which chunk of it."""

    group: int
    chunk: int


@dataclass(slots=True, eq=False)
class Look:
    """One admission. ``ask`` waits for its answer until ``until_s``."""

    key: LeaseKey
    peer: Peer
    shape: SessionShape
    admission: Admission
    hint: Callable[[int, float], None]
    groups: tuple[GroupShape, ...]
    where: list[NDArray[np.int8]]
    came: list[NDArray[np.int8]]
    next_tier: int = 0
    finding: bool = False
    hinted: bool = False
    gone: bool = False
    ask: Ask | None = None
    held_s: float = 0.0  # since when it waits
    until_s: float = 0.0
    span: tuple[int, int] | None = None  # (local, most] tokens of the latest ask
    stale: bool = True  # ``where`` or ``span`` changed since the queue was planned
    queue: deque[Chunk] = field(default_factory=deque)  # to be fetched, in order of tokens
    open: set[bytes] = field(default_factory=set)  # keys that are being fetched
    calls: int = 0
    held: list[NDArray[np.uint32]] = field(default_factory=list)  # entries leased for ``ask``
    held_bytes: int = 0

    def key_of(self, at: Chunk) -> bytes:
        """Return the key of a chunk."""
        return bytes(self.admission.keys[at.group][at.chunk])

    def tier_of(self, at: Chunk) -> int:
        """Return the number of the tier that has a chunk, -1 when none does."""
        return int(self.where[at.group][at.chunk])

    def settled(self) -> bool:
        """Whether everything is known and brought that can be."""
        return not (self.finding or self.queue or self.open)


def new_look(
    key: LeaseKey,
    peer: Peer,
    shape: SessionShape,
    admission: Admission,
    hint: Callable[[int, float], None],
) -> Look:
    """Return a look that knows nothing yet."""
    return Look(
        key,
        peer,
        shape,
        admission,
        hint,
        shape.stored_groups(),
        [np.full(len(keys), _NOWHERE, np.int8) for keys in admission.keys],
        [np.zeros(len(keys), np.int8) for keys in admission.keys],
    )


def missing(look: Look, pool: HostTier) -> list[NDArray[np.int64]]:
    """Return, per group, the chunks that neither the pool nor a tier looked at so far has."""
    return [
        np.flatnonzero((where == _NOWHERE) & ~pool.present(keys))
        for where, keys in zip(look.where, look.admission.keys, strict=True)
    ]


def reach(look: Look, pool: HostTier, max_tokens: int) -> int:
    """Return how far the prefix goes over all tiers, in tokens."""
    present = _anywhere(look, pool)
    return find_hit(look.shape.rules, present, max_tokens=max(0, max_tokens)).tokens


def _anywhere(look: Look, pool: HostTier) -> list[NDArray[np.bool_]]:
    present = [np.zeros(0, np.bool_)] * len(look.shape.rules.groups)
    for group, where, keys in zip(look.groups, look.where, look.admission.keys, strict=True):
        present[group.group] = (where != _NOWHERE) | pool.present(keys)
    return present


def plan(look: Look, pool: HostTier) -> None:
    """Queue what the latest ask needs, is somewhere, and is not being fetched, head first.

    Does nothing while the queue is what it would be: a long prompt has 100,000 chunks.
    """
    if not look.stale or look.span is None:
        return
    look.stale = False
    look.queue.clear()
    local, most = look.span
    present = _anywhere(look, pool)
    total = find_hit(look.shape.rules, present, max_tokens=max(0, most)).tokens
    if total <= local:
        return
    wanted = []  # per group: where chunks end, in tokens, the group's place, and their rows
    for index, group in enumerate(look.groups):
        rows = _needed(look.shape.rules, group, present[group.group], (local, total))
        rows = _fetchable(look, index, rows, pool)
        wanted.append(((rows + 1) * group.unit_tokens, np.full(len(rows), index), rows))
    ends, groups, rows = (np.concatenate(column) for column in zip(*wanted, strict=True))
    order = np.lexsort((groups, ends))
    look.queue.extend(map(Chunk, groups[order].tolist(), rows[order].tolist()))


def _fetchable(
    look: Look, index: int, rows: NDArray[np.int64], pool: HostTier
) -> NDArray[np.int64]:
    """Return those rows of a group that a tier has, and that are neither here nor on their way."""
    keys = look.admission.keys[index]
    rows = rows[rows < len(keys)]
    rows = rows[look.where[index][rows] != _NOWHERE]
    rows = rows[~pool.present(np.ascontiguousarray(keys[rows]))]
    if look.open:
        rows = rows[[name not in look.open for name in split(keys[rows])]]
    return rows


def _needed(
    rules: Rules, shape: GroupShape, present: NDArray[np.bool_], span: tuple[int, int]
) -> NDArray[np.int64]:
    """Return the rows without which the pool's own hit would be shorter than the span's end.

    They are those of the load, and with EAGLE what it looks at past the hit.
    """
    group, (local, total) = shape.group, span
    wanted = wanted_objects(rules, group, present, local_tokens=local, total_tokens=total).ends
    if group in rules.eagle_ids:
        past = total + rules.eagle_margin(group)
        above = wanted_objects(rules, group, present, local_tokens=local, total_tokens=past).ends
        wanted = np.union1d(wanted, above)
    rows: NDArray[np.int64] = wanted[wanted > 0] // shape.unit_tokens - 1
    return rows


def sources(look: Look, local_tokens: int, total_tokens: int) -> dict[str, int]:
    """Split ``(local, total]`` by the tier that brought it; the slowest of all groups counts."""
    unit = look.shape.hash_block_tokens
    slowest = np.zeros(total_tokens // unit, np.int8)
    for group, came in zip(look.groups, look.came, strict=True):
        if not len(came):
            continue
        # A block's object is named by the end of its last unit, and has the tokens of all.
        first_units = np.arange(0, len(came), group.block_tokens // group.unit_tokens)
        by_block = np.maximum.reduceat(came, first_units)
        spread = np.repeat(by_block, group.block_tokens // unit)[: len(slowest)]
        np.maximum(slowest[: len(spread)], spread, out=slowest[: len(spread)])
    counts = np.bincount(slowest[local_tokens // unit :], minlength=len(_SOURCES))
    named = {name: int(n) * unit for name, n in zip(_SOURCES, counts, strict=True) if n}
    rest = total_tokens - local_tokens - sum(named.values())
    if rest:  # lengths that are no whole number of units
        named["host"] = named.get("host", 0) + rest
    return {name: tokens for name, tokens in named.items() if tokens}


def mark(look: Look, at: Chunk, source: str | None) -> None:
    """A chunk was brought from a source, or (None) could not be."""
    if source is None:
        look.where[at.group][at.chunk] = _NOWHERE
        look.stale = True
    else:
        look.came[at.group][at.chunk] = _SOURCES.index(source)
