"""The runs of one block of a group, and the exact test that no two of them share a byte.

A run is a stretch of ``length`` bytes that repeats for every block: of block b it lies at
``offset + b * stride``. A block's payload is its runs in order, packed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple


class Run(NamedTuple):
    """One run, in bytes; ``layer`` is the name it is reported under."""

    offset: int
    stride: int
    length: int
    layer: str


def merge(runs: Sequence[Run]) -> list[Run]:
    """Join runs that follow each other both in memory and in the payload.

    Block-outermost layouts become one long run per block, dense pages one run per page. The
    payload is unchanged. The runs must not overlap.
    """
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last and last.stride == run.stride and last.offset + last.length == run.offset:
            merged[-1] = last._replace(length=last.length + run.length)
        else:
            merged.append(run)
    return merged


def find_overlap(runs: Sequence[Run], num_blocks: int) -> tuple[Run, Run] | None:
    """Return two runs that share a byte for some pair of blocks, or None.

    ``num_blocks`` is at least 2. A run whose blocks overlap each other is returned twice. Runs of
    equal stride are compared exactly. Runs of different strides must keep to disjoint ranges of
    bytes over all blocks: no layout of vLLM interleaves them, and it keeps the test linear.
    """
    by_stride: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        by_stride[run.stride].append(run)
    for stride, members in by_stride.items():
        if found := _overlap_of_equal_strides(members, stride, num_blocks):
            return found
    return _overlap_of_strides(runs, num_blocks) if len(by_stride) > 1 else None


def _overlap_of_equal_strides(
    runs: Iterable[Run], stride: int, num_blocks: int
) -> tuple[Run, Run] | None:
    """Sweep over the position within a stride.

    With offset = row * stride + column, block b of a run occupies row + b from its column on. Two
    runs share a byte exactly when their columns overlap and their rows are less than num_blocks
    apart. Runs that are open at a column therefore have rows at least num_blocks apart, and a new
    one needs to be compared with its two neighbours only.
    """
    pieces: list[tuple[int, int, int, Run]] = []  # column start, column end, row, run
    for run in runs:
        row, column = divmod(run.offset, stride)
        end = column + run.length
        pieces.append((column, min(end, stride), row, run))
        if end > stride:  # reaches into the next row (its own, when longer than the stride)
            pieces.append((0, end - stride, row + 1, run))
    pieces.sort(key=lambda piece: piece[0])
    open_rows: list[tuple[int, Run]] = []
    closing: list[tuple[int, int, Run]] = []
    for start, end, row, run in pieces:
        while closing and closing[0][0] <= start:
            _, old_row, old_run = heappop(closing)
            del open_rows[bisect_left(open_rows, (old_row, old_run))]
        at = bisect_left(open_rows, (row, run))
        for other_row, other in open_rows[max(0, at - 1) : at + 1]:
            if abs(other_row - row) < num_blocks:
                return other, run
        insort(open_rows, (row, run))
        heappush(closing, (end, row, run))
    return None


def _overlap_of_strides(runs: Iterable[Run], num_blocks: int) -> tuple[Run, Run] | None:
    """Find two runs of different strides whose ranges over all blocks intersect."""
    # The two that end last so far, of different strides: one of them is no run of a given stride.
    last: tuple[int, Run] | None = None
    other: tuple[int, Run] | None = None
    for run in sorted(runs):
        rival = other if last is not None and last[1].stride == run.stride else last
        if rival is not None and rival[0] > run.offset:
            return rival[1], run
        end = run.offset + (num_blocks - 1) * run.stride + run.length
        if last is None or end > last[0]:
            if last is not None and last[1].stride != run.stride:
                other = last
            last = end, run
        elif last[1].stride != run.stride and (other is None or end > other[0]):
            other = end, run
    return None
