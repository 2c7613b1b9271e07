"""The hit search over groups: the longest prefix that is complete in all of them.

L is complete iff it is a multiple of the alignment and every chunk in each group's load mask at
L is present. With full groups only, a group's longest run from 0 answers it; kinds with holes
will have their own search here, and the fixed point over groups around it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry_sidecar.masks.kinds import Kind


@dataclass(frozen=True, slots=True)
class GroupRun:
    """What is there of one group: ``chunks`` leading present chunks of ``block_tokens``."""

    kind: str
    block_tokens: int
    chunks: int


def longest_hit(groups: Iterable[GroupRun], *, max_tokens: int, alignment_tokens: int) -> int:
    """Return the tokens of the longest aligned prefix complete in all groups.

    0 without any group: nothing is stored for such a model. ValueError for an unknown kind.
    """
    lengths = [_longest(group) for group in groups]
    if not lengths:
        return 0
    bound = max(0, min(max_tokens, *lengths))
    return bound // alignment_tokens * alignment_tokens


def _longest(group: GroupRun) -> int:
    if group.kind == Kind.FULL:
        return group.chunks * group.block_tokens
    raise ValueError(f"no hit search for groups of kind {group.kind!r}")
