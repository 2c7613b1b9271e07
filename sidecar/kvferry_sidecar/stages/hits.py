"""How far a prefix is stored: what the pool has of each group, through the hit search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.masks.kinds import FULL_FAMILY
from kvferry_sidecar.masks.search import Hit, find_hit
from kvferry_sidecar.sessions.admissions import Keys
from kvferry_sidecar.stages.shape import GroupShape, SessionShape
from kvferry_sidecar.tiers.host import HostTier

_NOTHING: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)


def stored_hit(
    pool: HostTier, shape: SessionShape, keys: Sequence[Keys], *, max_tokens: int
) -> Hit:
    """Return the longest hit within ``max_tokens``; ``keys`` are those of the stored groups."""
    present = [_NOTHING] * len(shape.rules.groups)
    for group, of_group in zip(shape.stored_groups(), keys, strict=True):
        present[group.group] = _present(pool, group, of_group)
    return find_hit(shape.rules, present, max_tokens=max(0, max_tokens))


def refresh(pool: HostTier, shape: SessionShape, keys: Sequence[Keys]) -> None:
    """Mark what is stored of a prefix recently used: windows too, which begin anywhere."""
    for group, of_group in zip(shape.stored_groups(), keys, strict=True):
        if group.kind in FULL_FAMILY:
            pool.refresh(of_group)
        else:
            pool.refresh(of_group[pool.present(of_group)])


def _present(pool: HostTier, group: GroupShape, keys: Keys) -> NDArray[np.bool_]:
    if group.kind not in FULL_FAMILY:
        return pool.present(keys)
    present = np.zeros(len(keys), dtype=np.bool_)
    present[: pool.prefix(keys)] = True  # what lies behind a hole is of no use
    return present
