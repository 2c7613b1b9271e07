"""The curve of misses by the pool's size: its error against pools of those sizes, and its cost.

The curve (``stages/curve.py``) sees a trace as it does in a sidecar whose pool holds a tenth of the
trace's distinct blocks; every other size is replayed whole through a native pool of that size
(``bench/policies.py``). The error is of the hit rate, in points. The cost is CPU time of a lookup
of 8,192 keys, of which 1 in 256 is followed, and of none.

``python -m bench.curve TRACE...``; without any, the small trace of the repository.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from kvferry_sidecar.stages.curve import SIZES, Curve

from bench.common import Figure, at_most, plain
from bench.policies import pool_hits, small_pool
from bench.traces import BLOCK_TOKENS, SMALL, Request, load

OBJECT_BYTES = 1 << 20
SHARE = 0.1
COST_GOAL_US = 1.0


def estimated(requests: Sequence[Request], capacity: int, tracked_max: int) -> list[float]:
    """Return the hit rate at each of SIZES, as the curve tells it."""
    count = 1 + max(max(request.blocks, default=0) for request in requests)
    keys = np.random.default_rng(3).integers(0, 256, (count, 16), dtype=np.uint8)
    curve = Curve(capacity * OBJECT_BYTES, tracked_max)
    for request in requests:
        wanted = keys[list(request.blocks)]
        most = min(len(request.blocks), request.hit_max)
        unit = (BLOCK_TOKENS, OBJECT_BYTES)
        curve.looked_up(wanted, unit, (0, most * BLOCK_TOKENS), 0, 0.0)
        curve.stored(wanted, OBJECT_BYTES * len(wanted))
    told = curve.reading()
    return [1 - missed / told.wanted_tokens for missed in told.missed_tokens]


def replayed(requests: Sequence[Request], capacity: int) -> list[float]:
    """Return the hit rate at each of SIZES, of a pool of that size."""
    wanted = sum(min(len(request.blocks), request.hit_max) for request in requests)
    rates = []
    for size in SIZES:
        pool, _ = small_pool(int(capacity * size))
        rates.append(pool_hits(requests, pool) / wanted)
        pool.close()
    return rates


def compared(requests: Sequence[Request]) -> dict[str, list[float]]:
    """Return hit rates by size: of pools, and as estimated with more and fewer keys followed."""
    requests = [request for request in requests if request.blocks]
    distinct = len({block for request in requests for block in request.blocks})
    pool, capacity = small_pool(int(distinct * SHARE))
    pool.close()
    rates = {"replayed": replayed(requests, capacity)}
    for tracked_max in (1024, 8192):
        rates[str(tracked_max)] = estimated(requests, capacity, tracked_max)
    return rates


def worst_points(rates: dict[str, list[float]], tracked: str) -> float:
    """Return the largest difference, in points of the hit rate."""
    pairs = zip(rates[tracked], rates["replayed"], strict=True)
    return max(abs(estimate - real) for estimate, real in pairs) * 100


def cost_us(rounds: int) -> tuple[float, float]:
    """Return CPU us of a lookup of 8,192 keys of which none is followed, and per followed key."""
    chunks, tracked = 8192, 8192
    keys = np.random.default_rng(5).integers(0, 256, (64, chunks, 16), dtype=np.uint8)
    curve = Curve(200 * tracked * OBJECT_BYTES // 4, tracked)  # 1 in 256 is followed
    for one in keys:
        curve.stored(one, chunks * OBJECT_BYTES)
    none = np.array(keys[0])
    none.view("<u8")[:, 1] |= np.uint64(1 << 63)
    best = {"none": 1e9, "some": 1e9}
    followed = int(np.count_nonzero(keys[1].view("<u8")[:, 1] < np.uint64(1 << 56)))
    for _ in range(rounds):
        for name, one in (("none", none), ("some", keys[1])):
            start = time.thread_time()
            curve.looked_up(one, (16, OBJECT_BYTES), (0, 16 * chunks), 0, 0.0)
            best[name] = min(best[name], time.thread_time() - start)
    return best["none"] * 1e6, (best["some"] - best["none"]) * 1e6 / followed


def run(quick: bool) -> dict[str, object]:
    """Return the figures of the repository's small trace."""
    rates = compared(load(SMALL))
    none_us, each_us = cost_us(100 if quick else 1000)
    figures: list[Figure] = [
        plain(f"{name} keys followed: largest error of the hit rate", worst_points(rates, name),
              "points")
        for name in rates if name != "replayed"
    ]  # fmt: skip
    figures.append(plain("lookup of 8,192 keys, none followed: CPU", none_us, "us"))
    figures.append(at_most("a followed key: CPU", each_us, "us", COST_GOAL_US))
    return {"figures": figures, "sizes": list(SIZES), "rates": rates}


def markdown(name: str, rates: dict[str, list[float]]) -> str:
    """Return a row per way to know the hit rate."""
    lines = [
        f"| {name}: pool over this one | {' | '.join(f'{size:g}' for size in SIZES)} | error |",
        f"|---|{'---|' * len(SIZES)}---|",
    ]
    for way, values in rates.items():
        shown = " | ".join(f"{100 * value:.1f} %" for value in values)
        title = "replayed whole" if way == "replayed" else f"{int(way):,} keys followed"
        error = "" if way == "replayed" else f"{worst_points(rates, way):.1f}"
        lines.append(f"| {title} | {shown} | {error} |")
    return "\n".join(lines)


def main() -> None:
    """Print a table per trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path, default=[SMALL])
    for path in parser.parse_args().traces:
        name = path.stem.removesuffix("_trace")
        print(markdown(name, compared(load(path))), end="\n\n")


if __name__ == "__main__":
    main()
