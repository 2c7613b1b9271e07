"""What the bench of eviction compares with is right, and the pool keeps up with it."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from bench import policies, traces
from bench.traces import SMALL, Request


def test_the_small_trace_is_the_generated_one():
    written = [json.loads(line) for line in SMALL.read_text().splitlines()]
    assert written == list(traces.generated())


def test_a_line_that_is_no_request_is_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 1024, "hash_ids": [0, 1]}\n{"input_length": 5}\n')
    with pytest.raises(ValueError, match="line 2: no request"):
        traces.load(path)


def test_the_last_token_is_no_hit(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 1024, "hash_ids": [0, 1]}\n')
    assert traces.load(path) == [Request((0, 1), 1)]


def by_trying(requests: list[Request], capacity: int) -> int:
    """The most hits over every choice of what to keep after every request."""
    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for request in requests:
        after: dict[frozenset[int], int] = {}
        for held, hits in reached.items():
            found = hits + policies.leading(request, dict.fromkeys(held))
            there = held | set(request.blocks)
            for kept in itertools.combinations(there, min(capacity, len(there))):
                key = frozenset(kept)
                after[key] = max(after.get(key, 0), found)
        reached = after
    return max(reached.values())


@pytest.mark.parametrize("seed", range(8))
def test_best_possible_is_what_trying_everything_finds(seed):
    choice = random.Random(seed)
    prompts = [(0, 1, 2), (0, 1, 3), (0, 4), (5, 6), (5,)]
    picked = [choice.choice(prompts) for _ in range(9)]
    requests = [Request(blocks, len(blocks)) for blocks in picked]
    for capacity in (2, 3):
        best = policies.best_hits(requests, capacity)
        assert best == by_trying(requests, capacity)
        assert policies.lru_hits(requests, capacity) <= best


def test_the_pool_finds_as_much_as_lru():
    """Holding ended conversations for having been used again once cost a third of the hits."""
    for row in policies.measure(traces.load(SMALL), (0.02, 0.1)):
        assert 0.97 * row.lru <= row.pool <= row.best


def test_a_scan_leaves_what_was_used_again():
    again = [Request((0, 1, 2), 3)] * 3
    scans = [Request(tuple(range(at, at + 40)), 40) for at in range(100, 1700, 40)]
    requests = [*again, *scans, again[0]]
    pool, capacity = policies.small_pool(64)
    assert policies.pool_hits(requests, pool) == 9
    assert policies.lru_hits(requests, capacity) == 6
    pool.close()
