"""Which chunks a hit of a given length needs, per kind of group.

Source: `allocate_slots` of vLLM 0.32's managers: the mask equals the non-null destinations that
a manager allocates for a hit of this length (and the store coordinator's own load mask).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.masks.kinds import WINDOWED, Kind
from kvferry_sidecar.masks.rules import GroupRule


def load_mask(rule: GroupRule, *, total_tokens: int) -> NDArray[np.bool_]:
    """Return (n,) with n = ceil(total / block): True where the chunk must be present.

    ``total_tokens`` is the whole hit from token 0, also when a part of it is local already:
    never a suffix. EAGLE changes nothing: the hit is the length after the drop. (0,) for groups
    that are not stored.
    """
    if not rule.stored:
        return np.zeros(0, dtype=np.bool_)
    mask = np.zeros(-(-total_tokens // rule.block), dtype=np.bool_)
    mask[skipped_tokens(rule, total_tokens) // rule.block :] = True
    return mask


def skipped_tokens(rule: GroupRule, total_tokens: int) -> int:
    """Return how many leading tokens a request that resumes at ``total_tokens`` never reads."""
    if rule.kind in WINDOWED:
        return max(0, total_tokens - rule.reach + 1)
    if rule.kind is Kind.CHUNKED:
        return total_tokens // rule.chunk * rule.chunk
    if rule.kind is Kind.MAMBA:
        return max(0, total_tokens - 1)
    return 0


def needed_chunks(rule: GroupRule, *, local_tokens: int, total_tokens: int) -> NDArray[np.int64]:
    """Return the chunks to load, ascending: in the mask at the total, and not whole locally."""
    if not rule.stored:
        return np.zeros(0, dtype=np.int64)
    # The mask has no hole: from what is never read to the end.
    first = max(skipped_tokens(rule, total_tokens), local_tokens) // rule.block
    return np.arange(first, -(-total_tokens // rule.block), dtype=np.int64)
