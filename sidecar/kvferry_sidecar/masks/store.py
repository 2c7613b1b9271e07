"""Which chunks are worth storing, per kind of group (vLLM 0.32's `reachable_block_mask`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.masks.kinds import Kind


def store_mask(kind: str, *, end_tokens: int, block_tokens: int) -> NDArray[np.bool_]:
    """Return (n,) with n = floor(end / block), whole chunks only: True where it is kept.

    ValueError for a kind that registration should have refused.
    """
    chunks = end_tokens // block_tokens
    if kind == Kind.FULL:
        return np.ones(chunks, dtype=np.bool_)
    raise ValueError(f"no store mask for groups of kind {kind!r}")


def store_chunks(
    kind: str, *, start_tokens: int, end_tokens: int, block_tokens: int
) -> NDArray[np.int64]:
    """Return the indices of the chunks to store that end in ``(start_tokens, end_tokens]``."""
    mask = store_mask(kind, end_tokens=end_tokens, block_tokens=block_tokens)
    mask[: start_tokens // block_tokens] = False
    return np.flatnonzero(mask)
