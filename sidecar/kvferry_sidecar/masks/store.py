"""Which chunks are worth storing, per kind of group.

Source: `reachable_block_mask` and `replay_boundaries` of vLLM 0.32.
What is kept decides which hits exist later, never whether a hit is right: an external store may
keep more (a denser retention), and loads stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.masks.kinds import WINDOWED, Kind
from kvferry_sidecar.masks.rules import GroupRule, Rules


def replay_boundaries(rules: Rules, prefill_tokens: int) -> tuple[int, ...]:
    """Return where a later request with this prompt, or a longer one, can resume.

    A resend recomputes its last token. With EAGLE the block above a boundary is matched and
    dropped, which costs one block, and a prompt that ends on a block has two boundaries.
    """
    if not rules.eagle_ids:
        return (prefill_tokens - 1,)
    block = rules.scheduler_block
    resend = (prefill_tokens - 1) // block * block
    extension = prefill_tokens // block * block
    return tuple(sorted({max(resend - block, 0), max(extension - block, 0)}))


def kept_boundaries(
    rules: Rules, prefill_tokens: int, shared_prefix_tokens: int = 0
) -> tuple[int, ...]:
    """Return the replay boundaries and, unless 0, the junction with another request's prefix."""
    boundaries = replay_boundaries(rules, prefill_tokens)
    return (*boundaries, shared_prefix_tokens) if shared_prefix_tokens else boundaries


def store_mask(
    rules: Rules, group: int, *, tokens: int, boundaries: Sequence[int]
) -> NDArray[np.bool_]:
    """Return (n,) with n = floor(tokens / block), whole chunks only: True where it is kept.

    ``tokens`` are confirmed tokens: the engine's `get_num_cacheable_tokens`. Of a Mamba group the
    mask says which boundaries are kept; the states themselves come from hand-offs only. (0,) for
    groups that are not stored.
    """
    rule = rules.groups[group]
    if not rule.stored:
        return np.zeros(0, dtype=np.bool_)
    chunks = tokens // rule.block
    if rule.kind in WINDOWED:
        return _window_mask(rules, rule, rules.eagle_by_group[group], chunks, boundaries)
    if rule.kind is Kind.MAMBA:
        return _state_mask(rules, rule, chunks, boundaries)
    return np.ones(chunks, dtype=np.bool_)


def _window_mask(
    rules: Rules, rule: GroupRule, eagle: bool, chunks: int, boundaries: Sequence[int]
) -> NDArray[np.bool_]:
    """The tail of ``need`` chunks before each kept boundary; with EAGLE one chunk later."""
    align, block = rules.alignment, rule.block
    if align % block:  # boundaries inside a chunk: the mask cannot say it, so all is kept
        return np.ones(chunks, dtype=np.bool_)
    need, shift = rule.window_blocks(eagle=eagle), int(eagle)
    mask = np.zeros(chunks, dtype=np.bool_)
    segment = align if rules.retention is None else rules.retention
    if segment:
        per_segment = segment // block
        if need >= per_segment:
            return np.ones(chunks, dtype=np.bool_)
        index = np.arange(-shift, chunks - shift)
        mask = (index >= 0) & (index % per_segment >= per_segment - need)
    if rules.retention is not None:
        for boundary in boundaries:
            end = boundary // align * align // block + shift
            mask[max(0, end - need) : max(0, end)] = True
    return mask


def _state_mask(
    rules: Rules, rule: GroupRule, chunks: int, boundaries: Sequence[int]
) -> NDArray[np.bool_]:
    """The one chunk that ends on each kept boundary."""
    if rules.retention is None:
        return np.ones(chunks, dtype=np.bool_)
    mask = np.zeros(chunks, dtype=np.bool_)
    if rules.retention:
        per_segment = max(1, rules.retention // rule.block)
        mask[per_segment - 1 :: per_segment] = True
    for boundary in boundaries:
        chunk = boundary // rules.alignment * rules.alignment // rule.block - 1
        if 0 <= chunk < chunks:
            mask[chunk] = True
    return mask


def kept_chunks(
    rules: Rules, group: int, *, start_tokens: int, tokens: int, boundaries: Sequence[int]
) -> NDArray[np.int64]:
    """Return the chunks to store, ascending: kept, and ending in ``(start_tokens, tokens]``."""
    rule = rules.groups[group]
    first = start_tokens // rule.block
    if rule.stored and rule.kind not in WINDOWED and rule.kind is not Kind.MAMBA:
        # All of them. A request saves block by block: no mask over the whole of it each time.
        return np.arange(first, max(first, tokens // rule.block), dtype=np.int64)
    mask = store_mask(rules, group, tokens=tokens, boundaries=boundaries)
    mask[:first] = False
    return np.flatnonzero(mask)
