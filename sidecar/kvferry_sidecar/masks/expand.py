"""Block tables to chunks: which block id is which chunk. Never guessed from equal sizes.

A positional table has an entry per chunk, index = chunk; entries past the computed tokens are
look-ahead or scratch. A compact table is shorter: rings and Mamba "none" keep one slot, and forks
that strip null blocks keep, in order, exactly the chunks of the load mask, then scratch slots.
Block id 0 is vLLM's null block and never the end of a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.masks.load import load_mask
from kvferry_sidecar.masks.rules import GroupRule, Refused

Ids = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Chunks (n,), ascending, and the block id (n,) of each: every one is a real block."""

    chunks: NDArray[np.int64]
    ids: NDArray[np.int64]


def expand_load(
    rule: GroupRule,
    table: Ids,
    *,
    total_tokens: int,
    local_tokens: int = 0,
    scratch_slots: int = 0,
) -> Blocks | Refused:
    """Return the destinations of a load that brings the request to ``total_tokens``.

    ``scratch_slots`` close the table (speculative blocks of a Mamba group), also a positional one:
    without them a short compact table would pass for it. Refused when the table has neither
    shape, or has the null block where bytes must go.
    """
    mask = load_mask(rule, total_tokens=total_tokens)
    if not rule.stored:
        return Blocks(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    chunks = np.flatnonzero(mask)
    slots = np.asarray(table, dtype=np.int64)
    if len(slots) >= len(mask) + scratch_slots:
        ids = slots[chunks]
    elif len(slots) - scratch_slots == len(chunks):
        ids = slots[: len(chunks)]
    else:
        return Refused(
            f"{len(slots)} slots, {scratch_slots} of them scratch, are no table of a {rule.kind} "
            f"group at {total_tokens} tokens: it has {len(mask)} chunks, {len(chunks)} of them kept"
        )
    wanted = (chunks + 1) * rule.block > local_tokens
    chunks, ids = chunks[wanted], ids[wanted]
    null = np.flatnonzero(ids <= 0)
    if len(null):
        return Refused(
            f"chunk {int(chunks[null[0]])} of a {rule.kind} group must be loaded at "
            f"{total_tokens} tokens, and its slot is the null block"
        )
    return Blocks(chunks, ids)
