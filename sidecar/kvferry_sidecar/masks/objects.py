"""Which objects a load reads and a partial tail saves: chunks and the tokens of their keys.

An object is named by its group and the prefix hash at its end token: the chunk's end, or a hash
boundary inside the chunk for a partial tail. Attention is append-only, so a tail saved under a
later boundary holds every earlier one of its chunk; a state is right at its own boundary only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.masks.kinds import Kind
from kvferry_sidecar.masks.load import needed_chunks
from kvferry_sidecar.masks.rules import Refused, Rules


@dataclass(frozen=True, slots=True)
class Objects:
    """Chunks (n,) of one group, ascending, and the end token (n,) of each one's key."""

    chunks: NDArray[np.int64]
    ends: NDArray[np.int64]


def needed_objects(
    rules: Rules,
    group: int,
    present: NDArray[np.bool_],
    *,
    total_tokens: int,
    local_tokens: int = 0,
) -> Objects | None:
    """Return what a hit of ``total_tokens`` reads past the local prefix; None if one is absent.

    ``present`` is this group's array (see `presence`).
    """
    objects = wanted_objects(
        rules, group, present, total_tokens=total_tokens, local_tokens=local_tokens
    )
    rule, unit, chunks, ends = rules.groups[group], rules.unit(group), objects.chunks, objects.ends
    if not len(ends):
        return objects
    last = int(ends[-1]) // unit - 1
    if not 0 <= last < len(present) or not present[last]:
        return None
    step = rule.block // unit  # of the whole chunks before it
    first = (int(chunks[0]) + 1) * step - 1
    whole = present[first : first + (len(chunks) - 1) * step : step]
    return objects if whole.all() else None


def wanted_objects(
    rules: Rules,
    group: int,
    present: NDArray[np.bool_],
    *,
    total_tokens: int,
    local_tokens: int = 0,
) -> Objects:
    """Return what a hit of ``total_tokens`` would read, stored or not; end 0 for an absent tail."""
    rule = rules.groups[group]
    chunks = needed_chunks(rule, local_tokens=local_tokens, total_tokens=total_tokens)
    ends = (chunks + 1) * rule.block
    if len(ends) and ends[-1] > total_tokens:
        ends[-1] = _tail_end(rules, group, present, total_tokens)
    return Objects(chunks, ends)


def _tail_end(rules: Rules, group: int, present: NDArray[np.bool_], total_tokens: int) -> int:
    """Return the end token of the stored object that serves a tail at ``total_tokens``, or 0."""
    rule, unit = rules.groups[group], rules.unit(group)
    if total_tokens % unit:
        return 0
    if rule.kind is Kind.MAMBA:
        return total_tokens
    first = total_tokens // unit - 1
    last = -(-total_tokens // rule.block) * rule.block // unit
    later = np.flatnonzero(present[first:last])
    return (first + int(later[0]) + 1) * unit if len(later) else 0


def partial_tail(
    rules: Rules, group: int, *, boundary: int, computed_tokens: int, hashed_tokens: int
) -> Objects:
    """Return what a tail that ends at a hash boundary saves of an attention group.

    The chunks from the last multiple of S up to the boundary and EAGLE's margin, each keyed at its
    end within them. Nothing without partial hits, before all of it is computed and hashed, or for
    a Mamba group: its state comes by hand-off.
    """
    rule = rules.groups[group]
    end = boundary + (rules.eagle_margin(group) if rules.eagle_by_group[group] else 0)
    named = boundary > 0 and boundary % rules.hash_block == 0
    due = rules.partial and rule.stored and rule.kind is not Kind.MAMBA and named
    if not due or end > computed_tokens or end > hashed_tokens:
        return Objects(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    start = boundary // rules.scheduler_block * rules.scheduler_block
    chunks = np.arange(start // rule.block, -(-end // rule.block), dtype=np.int64)
    return Objects(chunks, np.minimum((chunks + 1) * rule.block, end))


def handed_over(
    rules: Rules, group: int, *, block: int, end_tokens: int, prefill_tokens: int
) -> Refused | None:
    """Return why a hand-off of a state (block id, boundary) may not be stored, or None.

    ``prefill_tokens`` are all tokens that the prefill computes: the prompt, and for a resumed
    request what it had generated too.
    """
    if not 0 <= group < len(rules.groups) or rules.groups[group].kind is not Kind.MAMBA:
        return Refused(f"group {group} has no states")
    if block <= 0:
        return Refused(f"group {group}: the state at {end_tokens} is handed over in block {block}")
    if end_tokens <= 0 or end_tokens % rules.hash_block:
        return Refused(f"group {group}: no prefix hash ends at {end_tokens}")
    if end_tokens > prefill_tokens:
        return Refused(f"group {group}: the state at {end_tokens} is past the prefill")
    return None
