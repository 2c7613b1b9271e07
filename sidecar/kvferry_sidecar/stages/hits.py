"""How far a prefix is stored: what the pool has of each group, through the hit search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.masks.kinds import FULL_FAMILY
from kvferry_sidecar.masks.objects import Objects, needed_objects
from kvferry_sidecar.masks.presence import Presence
from kvferry_sidecar.masks.search import Hit, find_hit
from kvferry_sidecar.sessions.admissions import Keys
from kvferry_sidecar.stages.shape import GroupShape, SessionShape
from kvferry_sidecar.tiers.host import HostTier

_NOTHING: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)


def stored_hit(
    pool: HostTier, shape: SessionShape, keys: Sequence[Keys], *, max_tokens: int
) -> Hit:
    """Return the longest hit within ``max_tokens``; ``keys`` are those of the stored groups."""
    return find_hit(shape.rules, presence(pool, shape, keys), max_tokens=max(0, max_tokens))


def presence(pool: HostTier, shape: SessionShape, keys: Sequence[Keys]) -> Presence:
    """Return what is stored of every group, by its units."""
    present = [_NOTHING] * len(shape.rules.groups)
    for group, of_group in zip(shape.stored_groups(), keys, strict=True):
        whole = group.kind in FULL_FAMILY and group.unit_tokens == group.block_tokens
        present[group.group] = _leading(pool, of_group) if whole else pool.present(of_group)
    return present


def needed_of_all(
    shape: SessionShape, present: Presence, span: tuple[int, int]
) -> list[Objects] | None:
    """Return what the tokens ``span`` (local, total] read of the stored groups, or None.

    None: an object is absent.
    """
    found = [
        needed_objects(
            shape.rules, g.group, present[g.group], local_tokens=span[0], total_tokens=span[1]
        )
        for g in shape.stored_groups()
    ]
    whole = [objects for objects in found if objects is not None]
    return whole if len(whole) == len(found) else None


def keys_of(group: GroupShape, keys: Keys, objects: Objects) -> Keys:
    """Return the keys of a group's objects; a view where they follow one another."""
    rows = objects.ends // group.unit_tokens - 1
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return keys[int(rows[0]) : int(rows[-1]) + 1]
    return keys[rows]


def refresh(pool: HostTier, shape: SessionShape, keys: Sequence[Keys]) -> None:
    """Mark what is stored of a prefix recently used: windows and states too, anywhere in it."""
    for group, of_group in zip(shape.stored_groups(), keys, strict=True):
        if not len(of_group):
            continue
        if group.kind in FULL_FAMILY and group.unit_tokens == group.block_tokens:
            pool.refresh(of_group)
        else:
            pool.refresh(of_group[pool.present(of_group)])


def _leading(pool: HostTier, keys: Keys) -> NDArray[np.bool_]:
    present = np.zeros(len(keys), dtype=np.bool_)
    present[: pool.prefix(keys)] = True  # what lies behind a hole is of no use
    return present
