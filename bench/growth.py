"""How the sidecar's own cost grows: with stored keys, tokens, ranks and engines.

The pipeline runs in this process over a real pool (``bench/bed.py``), so that the figures are CPU
time of the control loop, without sockets and without a byte copied. Per request: ``probe`` is a
miss; ``hit`` is probe, ask and lease of a stored prefix; ``save`` and ``load`` go from the submits
of all ranks to the end, commit and release. One quantity grows, the others stay at 8,192 tokens,
one rank, one engine and 100,000 keys. Each cost is the least of 30 (of 3 above 65,536 tokens). The
exponent is the slope of cost over size, both as logarithms, over the upper half of the sizes; a
cost that stands still has 0, a proportional one 1.

``python -m bench.growth --plots FOLDER`` also draws them (needs the extra ``bench``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import kvferry_native as native
import numpy as np

from bench import plots
from bench.bed import BLOCK_TOKENS, HASH_BYTES, Bed, Engine, fill, pool_of
from bench.common import Figure, at_most

TOKENS, KEYS = 8192, 100_000
EXPONENT_GOAL = 1.1
SIZES: dict[str, tuple[int, ...]] = {
    "keys": (10_000, 100_000, 1_000_000, 10_000_000),
    "tokens": (1024, 4096, 16_384, 65_536, 262_144, 1_048_576),
    "ranks": (1, 2, 4, 8),
    "engines": (1, 2, 4, 8),
}
UNITS = {"keys": "stored keys", "tokens": "tokens", "ranks": "ranks", "engines": "engines"}
OTHER = ("index, bytes",)  # what is no cost in us
Costs = dict[str, float]  # us by operation


def measured(
    rounds: int, *, keys: int = KEYS, tokens: int = TOKENS, ranks: int = 1, engines: int = 1
) -> Costs:
    """Return the least CPU time of each operation, in us."""
    chunks = tokens // BLOCK_TOKENS
    keys_max = keys + (rounds + 1) * engines * chunks
    pool = pool_of(keys_max)
    fill(pool, keys)
    bed = Bed(pool)
    crowd = [Engine(number, ranks) for number in range(engines)]
    best: Costs = {}

    def timed(name: str, run: Callable[[], int | None]) -> int:
        start = time.thread_time()
        result = run()
        spent = (time.thread_time() - start) * 1e6
        best[name] = min(best.get(name, spent), spent)
        return result or 0

    for number in range(rounds):
        for which, engine in enumerate(crowd):
            random = np.random.default_rng([number, which])
            hashes = random.bytes(chunks * HASH_BYTES)
            miss = timed("probe", lambda e=engine, h=hashes: bed.probe(e, h))
            bed.release(engine, miss)
            timed("save", lambda e=engine, h=hashes: bed.save(e, h))
            tokens_hit = 0

            def hit(e: Engine = engine, h: bytes = hashes) -> int:
                nonlocal tokens_hit
                admission = bed.probe(e, h)
                tokens_hit = bed.ask(e, admission)
                return admission

            admission = timed("hit", hit)
            if tokens_hit != tokens:
                raise RuntimeError(f"{tokens_hit} of {tokens} tokens hit")
            timed("load", lambda e=engine, a=admission: bed.load(e, a, tokens))
            bed.release(engine, admission)
    if problems := bed.pipeline.check():
        raise RuntimeError(f"the pipeline is unsound: {problems}")
    pool.close()
    return best


def index_bytes(keys: int) -> int:
    """Return what a pool for so many keys takes beside its arena."""
    slab_bytes = 2 << 20
    segment_bytes = native.Pool.segment_bytes_for(slab_bytes, slab_bytes, keys)
    return segment_bytes - slab_bytes + native.Pool.own_bytes_for(keys)


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Return the slope of log(cost) over log(size), over the upper half of the sizes."""
    first = (len(sizes) - 1) // 2
    return float(np.polyfit(np.log(sizes[first:]), np.log(costs[first:]), 1)[0])


def grown(quick: bool) -> dict[str, dict[str, dict[int, float]]]:
    """Return cost by what grows, operation and size."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for what, sizes in SIZES.items():
        by_operation: dict[str, dict[int, float]] = {}
        for size in sizes[:-1] if quick else sizes:
            rounds = 3 if quick or (what == "tokens" and size > 8 * TOKENS) else 30
            if what == "engines":
                rounds = -(-rounds // size)  # as many requests in all
            for operation, cost in measured(rounds, **{what: size}).items():
                by_operation.setdefault(operation, {})[size] = cost
        found[what] = by_operation
    found["keys"]["index, bytes"] = {size: index_bytes(size) for size in found["keys"]["probe"]}
    return found


def exponents(found: Mapping[str, Mapping[str, Mapping[int, float]]]) -> dict[str, Costs]:
    """Return the exponents by what grows and operation."""
    return {
        what: {name: exponent(list(costs), list(costs.values())) for name, costs in rows.items()}
        for what, rows in found.items()
    }


def run(quick: bool) -> dict[str, object]:
    """Return the exponents; ``quick`` leaves the largest sizes out."""
    found = grown(quick)
    figures: list[Figure] = [
        at_most(f"{name} over {UNITS[what]}: exponent", value, "", EXPONENT_GOAL)
        for what, rows in exponents(found).items()
        for name, value in rows.items()
    ]
    return {"figures": figures, "us": found}


def markdown(found: Mapping[str, Mapping[str, Mapping[int, float]]]) -> str:
    """Return a table per quantity that grows."""
    slopes = exponents(found)
    parts = []
    for what, rows in found.items():
        sizes = list(next(iter(rows.values())))
        parts.append(f"| {UNITS[what]} | {' | '.join(f'{n:,}' for n in sizes)} | exponent |")
        parts.append(f"|---|{'---|' * len(sizes)}---|")
        for name, costs in rows.items():
            title = name if name in OTHER else f"{name}, us"
            shown = " | ".join(f"{cost:,.4g}" for cost in costs.values())
            parts.append(f"| {title} | {shown} | {slopes[what][name]:.2f} |")
        parts.append("")
    return "\n".join(parts)


def main() -> None:
    """Print the tables, and draw them where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="without the largest sizes")
    parser.add_argument("--plots", type=Path, help="a folder for SVG files (needs the extra bench)")
    options = parser.parse_args()
    found = grown(options.quick)
    print(markdown(found))
    for what, rows in found.items() if options.plots else ():
        lines = {name: list(costs.values()) for name, costs in rows.items() if name not in OTHER}
        plots.lines(
            options.plots / f"growth-{what}.svg",
            list(next(iter(rows.values()))),
            lines,
            title=f"CPU of the control loop over {UNITS[what]}",
            across=UNITS[what],
            up="us per request",
            up_log=True,
        )


if __name__ == "__main__":
    main()
