"""Which chunks a hit of a given length needs, per kind of group.

Source: the managers of vLLM 0.32 (`find_longest_cache_hit`, `allocate_slots`): the mask equals
the non-null destinations that the manager allocates for a hit of this length.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.masks.kinds import Kind


def load_mask(kind: str, *, total_tokens: int, block_tokens: int) -> NDArray[np.bool_]:
    """Return (n,) with n = ceil(total / block): True where the chunk must be present.

    ``total_tokens`` is the whole hit from token 0, also when a part of it is local already.
    ValueError for a kind that registration should have refused.
    """
    chunks = -(-total_tokens // block_tokens)
    if kind == Kind.FULL:
        return np.ones(chunks, dtype=np.bool_)
    raise ValueError(f"no load mask for groups of kind {kind!r}")


def load_chunks(
    kind: str, *, local_tokens: int, total_tokens: int, block_tokens: int
) -> NDArray[np.int64]:
    """Return the indices of the chunks to load: in the mask, and not yet whole locally.

    The mask is evaluated at the total and only then cut: never at the suffix.
    """
    mask = load_mask(kind, total_tokens=total_tokens, block_tokens=block_tokens)
    mask[: local_tokens // block_tokens] = False
    return np.flatnonzero(mask)
