"""The hit of models with full attention only: a group's longest run from 0 answers it.

`search.find_hit` is the search over all kinds, from what is present instead of from runs.
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
