"""The longest hit of one group within a bound, per kind of group.

Ports of `find_longest_cache_hit` of vLLM 0.32's manager classes. Presence is looked at once, when
a finder is made; each question is then a binary search, so that the fixed point over groups stays
linear in the number of chunks whatever the presence looks like.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.masks.kinds import FULL_FAMILY, WINDOWED, Kind
from kvferry_sidecar.masks.rules import GroupRule, Rules, SpecGroup


class Finder(Protocol):
    """Answers for one spec group."""

    def longest(self, bound_tokens: int, *, drop: bool) -> int:
        """Return the hit in tokens within the bound, after EAGLE's drop where asked for."""


def finder(rules: Rules, group: SpecGroup, present: NDArray[np.bool_]) -> Finder:
    """Return the finder of a spec group; ``present`` holds what all its members have."""
    rule, first = group.rule, group.members[0]
    if rule.kind in FULL_FAMILY:
        return _Full(rule, present, rules.hit_alignment, rules.fine(first))
    if rule.kind in WINDOWED:
        return _Window(rule, present, rules.aligned_blocks(first))
    if rule.kind is Kind.CHUNKED:
        return _Chunked(rule, present)
    steps = 1 if rules.fine(first) else rules.aligned_blocks(first)
    return _State(present, rules.unit(first), steps)


class _Full:
    """The run of whole blocks from 0, then the last stored hash boundary inside the next one."""

    def __init__(
        self, rule: GroupRule, present: NDArray[np.bool_], alignment: int, fine: bool
    ) -> None:
        self._block = rule.block
        self._alignment = alignment
        self._scale = rule.block // alignment if fine else 1
        self._present = present
        self._run = leading(present[self._scale - 1 :: self._scale])

    def longest(self, bound_tokens: int, *, drop: bool) -> int:
        blocks = min(self._run, bound_tokens // self._block)
        hit = blocks * self._block
        if self._scale > 1:
            first = blocks * self._scale
            last = min(first + self._scale - 1, bound_tokens // self._alignment)
            inside = np.flatnonzero(self._present[first:last])
            if len(inside):
                hit = (first + int(inside[-1]) + 1) * self._alignment
        if drop and hit > 0:
            hit -= min(self._alignment, self._block)
        return hit - hit % self._alignment


class _Window:
    """The last run of ``need`` blocks whose right edge is aligned, else the run from block 0."""

    def __init__(self, rule: GroupRule, present: NDArray[np.bool_], steps: int) -> None:
        self._rule = rule
        self._steps = steps
        self._chunks = len(present)
        edges = np.diff(present.astype(np.int8), prepend=0, append=0)
        self._starts = np.flatnonzero(edges == 1)
        self._ends = np.flatnonzero(edges == -1)
        self._matches: dict[bool, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def longest(self, bound_tokens: int, *, drop: bool) -> int:
        block = self._rule.block
        blocks = self._blocks(min(bound_tokens // block, self._chunks), drop)
        return blocks // self._steps * self._steps * block

    def _blocks(self, limit: int, drop: bool) -> int:
        """Return the blocks of the hit after the drop, aligned or not."""
        run = int(np.searchsorted(self._starts, limit)) - 1
        if run < 0:
            return 0
        need = max(1, self._rule.window_blocks(eagle=drop))
        start, end = int(self._starts[run]), min(int(self._ends[run]), limit)
        last = self._aligned_last(end, drop)
        if last - start + 1 >= need:
            return last + 1 - drop
        lasts, latest = self._matched(drop, need)
        match = int(latest[run - 1]) if run else -1
        if match >= 0:
            return int(lasts[match]) + 1 - drop
        if int(self._starts[0]) != 0:
            return 0
        # Too short for the window, but there is nothing before block 0.
        last = self._aligned_last(min(int(self._ends[0]), limit), drop)
        blocks = (last + 1) // self._steps * self._steps
        return blocks - drop if blocks > 0 else 0

    def _aligned_last(self, end: int, drop: bool) -> int:
        """Return the last block before ``end`` whose right edge, after the drop, is aligned."""
        return (end - drop) // self._steps * self._steps - 1 + drop

    def _matched(self, drop: bool, need: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Last blocks per run, and per run the latest run up to it that is long enough, or -1."""
        if drop not in self._matches:
            lasts = (self._ends - drop) // self._steps * self._steps - 1 + drop
            numbers = np.where(lasts - self._starts + 1 >= need, np.arange(len(lasts)), -1)
            self._matches[drop] = (lasts, np.maximum.accumulate(numbers))
        return self._matches[drop]


class _Chunked:
    """Everything before the bound's attention chunk is free; then the run up to a hole."""

    def __init__(self, rule: GroupRule, present: NDArray[np.bool_]) -> None:
        self._rule = rule
        self._holes = np.append(np.flatnonzero(~present), len(present))

    def longest(self, bound_tokens: int, *, drop: bool) -> int:
        assert not drop, "chunked local attention with EAGLE is refused"
        block, chunk = self._rule.block, self._rule.chunk
        # Within the hashes: past them no attention chunk begins, and none is free.
        blocks = min(bound_tokens // block, int(self._holes[-1]))
        start = blocks * block // chunk * chunk // block
        return min(int(self._holes[np.searchsorted(self._holes, start)]), blocks) * block


class _State:
    """The last stored state at an aligned boundary. Never drops: drafts have no Mamba layers."""

    def __init__(self, present: NDArray[np.bool_], unit: int, steps: int) -> None:
        self._ends = (np.flatnonzero(present[steps - 1 :: steps]) + 1) * steps * unit

    def longest(self, bound_tokens: int, *, drop: bool) -> int:  # noqa: ARG002 - never drops
        at = int(np.searchsorted(self._ends, bound_tokens, side="right"))
        return int(self._ends[at - 1]) if at else 0


def leading(present: NDArray[np.bool_]) -> int:
    """Return how many leading entries are True."""
    if not len(present):
        return 0
    hole = int(np.argmin(present))
    return len(present) if present[hole] else hole
