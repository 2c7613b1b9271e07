"""Planning a load and searching a hit, beside vLLM's own managers for the same answers.

Four groups: full attention, two windows, states. CPU of the fastest of several calls in one
process; the answers are compared with vLLM first (tests/support/vllm_managers.py, on CPU).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from kvferry_sidecar.masks.expand import expand_load
from kvferry_sidecar.masks.kinds import Kind
from kvferry_sidecar.masks.rules import GroupRule, Rules
from kvferry_sidecar.masks.search import find_hit

from bench.child import in_engine_process
from bench.common import at_most, bench_main

BLOCK_TOKENS = 16
WINDOWS = (1024, 4096)
PLAN_GOAL_MS, PLAN_GOAL_RATIO = 10.0, 1 / 20
SEARCH_GOAL_MS, SHORTENING_GOAL = 5.0, 8.0


def run(quick: bool) -> dict[str, object]:
    """Return CPU milliseconds, and ratios to vLLM's; ``quick`` plans an eighth of the tokens."""
    setup = {"plan_tokens": (1 << 20) // (8 if quick else 1), "hit_tokens": 1 << 17}
    found: dict[str, Any] = in_engine_process("bench.masks", setup, {"PYTHONPATH": "tests"})
    plan, hit, shortening = found["plan"], found["hit"], found["shortening"]
    tokens = f"{setup['plan_tokens']:,} tokens, 4 groups"
    hit_tokens = f"{setup['hit_tokens']:,} tokens, 4 groups"
    return {
        "figures": [
            at_most(f"plan of a load of {tokens}: CPU", plan["ours_ms"], "ms", PLAN_GOAL_MS),
            at_most(f"plan of a load of {tokens}: over vLLM's masks alone",
                    plan["ours_ms"] / plan["theirs_ms"], "x", PLAN_GOAL_RATIO),
            at_most(f"hit search in {hit_tokens}, all there: CPU", hit["ours_ms"], "ms",
                    SEARCH_GOAL_MS),
            at_most("hit search that shortens block by block: four times the blocks, CPU over",
                    shortening["large_ms"] / shortening["small_ms"], "x", SHORTENING_GOAL),
        ],
        "reference": "vLLM's cache managers, same process, same hashes",
        **found,
    }  # fmt: skip


def measure(setup: dict[str, Any]) -> dict[str, Any]:
    """In a process that has vLLM: compare the answers, then take the times."""
    from support import vllm_managers as m  # noqa: PLC0415 - vLLM, and only the child has the path

    windows = [m.swa(BLOCK_TOKENS, window) for window in WINDOWS]
    specs = [m.full(BLOCK_TOKENS), *windows, m.mamba(BLOCK_TOKENS)]
    kinds = (GroupRule(Kind.FULL, BLOCK_TOKENS),
             *(GroupRule(Kind.SWA, BLOCK_TOKENS, window=window) for window in WINDOWS),
             GroupRule(Kind.MAMBA, BLOCK_TOKENS))  # fmt: skip
    rules = Rules(kinds, BLOCK_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS)
    tokens = int(setup["plan_tokens"])
    oracle = m.Oracle(specs, num_blocks=tokens // 16 + 1000, tokens_max=2 * tokens)
    plan = _plan(rules, oracle, m.prefix_hashes(tokens // BLOCK_TOKENS), tokens)
    hit = _search(rules, m.Oracle(specs), m.prefix_hashes(int(setup["hit_tokens"]) // BLOCK_TOKENS))
    small_ms, large_ms = (cpu_ms(lambda n=n: _contrary(n), 3) for n in (1000, 4000))
    return {"plan": plan, "hit": hit, "shortening": {"small_ms": small_ms, "large_ms": large_ms}}


def cpu_ms(call: Callable[[], object], times: int) -> float:
    """Return the CPU milliseconds of the fastest of several calls."""
    best_ns = []
    for _ in range(times):
        started = time.process_time_ns()
        call()
        best_ns.append(time.process_time_ns() - started)
    return min(best_ns) / 1e6


def _plan(rules: Rules, oracle: Any, hashes: Any, tokens: int) -> dict[str, float]:
    tables = [np.array(table, dtype=np.int32) for table in oracle.external_tables(tokens)]
    coordinator = oracle.store_coordinator()

    def plan() -> list[Any]:
        pairs = zip(rules.groups, tables, strict=True)
        return [expand_load(rule, table, total_tokens=tokens) for rule, table in pairs]

    for blocks, table in zip(plan(), tables, strict=True):
        assert blocks.chunks.tolist() == np.flatnonzero(table).tolist()
    theirs_ms = cpu_ms(lambda: coordinator.load_mask(hashes, tokens), 2)
    return {"ours_ms": cpu_ms(plan, 5), "theirs_ms": theirs_ms}


def _search(rules: Rules, oracle: Any, hashes: Any) -> dict[str, float]:
    tokens = len(hashes) * BLOCK_TOKENS
    oracle.put(dict.fromkeys(range(4), range(BLOCK_TOKENS, tokens + 1, BLOCK_TOKENS)))
    present, limit = [np.ones(len(hashes), dtype=np.bool_)] * 4, tokens - 1

    def theirs() -> int:
        return int(oracle.coordinator.find_longest_cache_hit(hashes, limit)[1])

    assert find_hit(rules, present, max_tokens=limit).tokens == theirs() > 0
    ours_ms = cpu_ms(lambda: find_hit(rules, present, max_tokens=limit), 5)
    return {"ours_ms": ours_ms, "theirs_ms": cpu_ms(theirs, 3)}


def _contrary(chunks: int) -> None:
    """Two windows that never agree: one has every even chunk, the other every odd one."""
    windows = [GroupRule(Kind.SWA, BLOCK_TOKENS, window=10, spec=spec) for spec in ("even", "odd")]
    groups = (GroupRule(Kind.FULL, BLOCK_TOKENS), *windows)
    rules = Rules(groups, BLOCK_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS)
    even = np.arange(chunks) % 2 == 0
    present = [np.ones(chunks, dtype=np.bool_), even, ~even]
    assert find_hit(rules, present, max_tokens=chunks * BLOCK_TOKENS).tokens == 0


if __name__ == "__main__":
    bench_main(__doc__, run)
