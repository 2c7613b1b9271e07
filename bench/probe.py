"""The sidecar's answer to a probe, over the real sockets: full miss, full hit, by length.

A real ``kvferry serve``; the halves are raw (one scheduler half and 8 ranks in this process, 4
groups), so what is measured is send, transport, sidecar and receive, and no engine. The hit is of
chunks really saved by all ranks. ``probe`` is Probe to Hint, ``ask`` is Ask to Answer (which takes
the lease), ``both`` is one after the other. The goals stand where a request waits: after a miss the
hint is enough (a fresh hint of nothing is never asked about), a hit needs both.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import bench.halves as halves
from bench.common import Figure, at_most, bench_main, cpu_s, percentile, plain
from bench.sidecar import running_sidecar

GROUPS = 4
RANKS = 8
CHUNKS = 8192
POOL_BYTES = 256 << 20
KEYS_MAX = 4 * GROUPS * CHUNKS
GOALS_MS = {"miss": ("probe", 1.0), "hit": ("both", 3.0)}  # of CHUNKS hashes


def run(quick: bool) -> dict[str, object]:
    """Return milliseconds (p50, p99) and the sidecar's CPU per lookup."""
    rounds = 20 if quick else 200
    flags = ("--keys-max", str(KEYS_MAX), "--log-level", "warning")
    figures: list[Figure] = []
    with running_sidecar(POOL_BYTES, flags) as sidecar:
        engine = halves.RawEngine(sidecar.run_dir, groups=GROUPS, ranks=RANKS, chunks=CHUNKS)
        stored = halves.hashes(CHUNKS, seed=1)
        save_s = engine.save(stored)
        for count in (CHUNKS, 512):
            hit = stored[: count * halves.HASH_BYTES]
            tokens = count * halves.BLOCK_TOKENS
            for name, source, expect in (
                ("miss", lambda n, c=count: halves.hashes(c, 100 + n), 0),
                ("hit", lambda _n, h=hit: h, tokens),
            ):
                times, cpu_us = _measure(engine, sidecar.pid, source, tokens, expect, rounds)
                goal = GOALS_MS[name] if count == CHUNKS else None
                figures += _figures(f"{name}, {count} hashes", times, cpu_us, goal)
        engine.close()
    return {
        "figures": figures,
        "groups": GROUPS,
        "ranks": RANKS,
        "rounds": rounds,
        "save_of_all_chunks_s": round(save_s, 4),
        "chunks_saved": GROUPS * CHUNKS,
    }


def _measure(
    engine: halves.RawEngine,
    pid: int,
    source: Callable[[int], bytes],
    tokens: int,
    expect: int,
    rounds: int,
) -> tuple[dict[str, list[float]], float]:
    """Look up ``rounds`` times; returns ms by kind and the sidecar's CPU us per lookup."""
    times: dict[str, list[float]] = {"probe": [], "ask": [], "both": []}
    used_s = 0.0
    for number in range(rounds + 5):
        raw = source(number)
        time.sleep(0.002)  # the sidecar has gone to sleep again, as between requests
        before_s = cpu_s(pid)
        start = time.perf_counter()
        admission, hint = engine.probe(raw)
        middle = time.perf_counter()
        answer = engine.ask(admission, tokens)
        end = time.perf_counter()
        if (hint.hit_tokens, answer.hit_tokens) != (expect, expect):
            raise RuntimeError(f"expected {expect} tokens: {hint}, {answer}")
        time.sleep(0.001)
        if number >= 5:
            used_s += cpu_s(pid) - before_s
            times["probe"].append((middle - start) * 1e3)
            times["ask"].append((end - middle) * 1e3)
            times["both"].append((end - start) * 1e3)
        engine.release(admission)
    return times, used_s / rounds * 1e6


def _figures(
    name: str, times: dict[str, list[float]], cpu_us: float, goal: tuple[str, float] | None
) -> list[Figure]:
    figures: list[Figure] = []
    for kind, values in times.items():
        p50, p99 = percentile(values, 50), percentile(values, 99)
        title = f"{name}: {kind}, p50"
        more = {"p99": round(p99, 4), "min": round(min(values), 4)}
        if goal is not None and kind == goal[0]:
            figures.append(at_most(title, p50, "ms", goal[1], **more))
        else:
            figures.append(plain(title, p50, "ms", **more))
    figures.append(plain(f"{name}: CPU of the sidecar", cpu_us, "us per lookup"))
    return figures


if __name__ == "__main__":
    bench_main(__doc__, run)
