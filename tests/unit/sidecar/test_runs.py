"""Runs of a block: the overlap test against brute force, and joining without a trace."""

from __future__ import annotations

import itertools
import random

from kvferry_sidecar.geometry.runs import Run, find_overlap, merge


def slow_overlap(runs, num_blocks):
    """Every block of every run against every other."""
    spans = [
        (run.offset + block * run.stride, run.length, index, block)
        for index, run in enumerate(runs)
        for block in range(num_blocks)
    ]
    return any(
        a < b + length_b and b < a + length_a
        for (a, length_a, *_), (b, length_b, *_) in itertools.combinations(spans, 2)
    )


def test_overlaps_are_found_exactly():
    random_ = random.Random(20261129)
    seen = {True: 0, False: 0}
    for _ in range(3000):
        stride = random_.randint(1, 12)
        lengths = stride * random_.choice((1, 1, 1, 1, 3))
        num_blocks = random_.randint(2, 5)
        runs = [
            Run(random_.randint(0, 40), stride, random_.randint(1, lengths), f"l{i}")
            for i in range(random_.randint(1, 4))
        ]
        found = find_overlap(runs, num_blocks)
        expected = slow_overlap(runs, num_blocks)
        assert (found is not None) == expected, (runs, num_blocks)
        if found:
            assert slow_overlap(found, num_blocks), (found, num_blocks)
        seen[expected] += 1
    assert min(seen.values()) > 300


def test_overlaps_of_different_strides_are_never_missed():
    random_ = random.Random(7)
    accepted = 0
    for _ in range(3000):
        num_blocks = random_.randint(2, 4)
        runs = []
        for index in range(random_.randint(2, 4)):
            stride = random_.randint(1, 6)
            runs.append(Run(random_.randint(0, 60), stride, random_.randint(1, stride), f"{index}"))
        if find_overlap(runs, num_blocks) is None:
            accepted += 1
            assert not slow_overlap(runs, num_blocks), (runs, num_blocks)
    assert accepted > 300


def test_merge_keeps_the_payload():
    runs = [Run(0, 64, 8, "a"), Run(8, 64, 8, "b"), Run(24, 64, 8, "c"), Run(16, 64, 8, "d")]
    assert merge(runs) == [Run(0, 64, 16, "a"), Run(24, 64, 8, "c"), Run(16, 64, 8, "d")]
