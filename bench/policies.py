"""Hit rates of the pool's own eviction on traces, beside LRU and the best that is possible.

The pool is the native one with small payloads; per request it sees what the sidecar does: the
prefix that is there is leased and released, what lacks is reserved and committed, and the prefix
is marked used. One request at a time, engines without a cache of their own, and prompts only (a
trace does not name what was generated). LRU marks the tail of a prompt used first, as the pool
does. The best possible (Belady's) knows the future: after every request it keeps the blocks that
are wanted again soonest.

``python -m bench.policies TRACE... --plots FOLDER`` takes traces of Mooncake's form
(``bench/traces.py``); without any, the small one of the repository.
"""

from __future__ import annotations

import argparse
import heapq
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import kvferry_native as native
import numpy as np

from bench import plots
from bench.common import Figure, plain
from bench.traces import SMALL, Request, load

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8)  # of the trace's distinct blocks
SLAB_BYTES = 4096
SLOT_BYTES = 512
PAYLOAD_BYTES = 256


@dataclass(frozen=True, slots=True)
class Row:
    """Hits over wanted blocks at one size of the pool."""

    share: float
    blocks: int
    lru: float
    pool: float
    best: float


def leading(request: Request, held: dict[int, object] | OrderedDict[int, None]) -> int:
    """Return how many leading blocks are held."""
    for at, block in enumerate(request.blocks[: request.hit_max]):
        if block not in held:
            return at
    return min(len(request.blocks), request.hit_max)


def lru_hits(requests: Sequence[Request], capacity: int) -> int:
    """Return the hits of least recently used first."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        hits += leading(request, held)
        for block in reversed(request.blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits


def best_hits(requests: Sequence[Request], capacity: int) -> int:
    """Return the most hits that any policy can have.

    A block is never wanted later than the blocks behind it in a prompt, so that keeping those that
    are wanted soonest keeps prefixes whole.
    """
    never = len(requests)
    wanted: dict[int, int] = {}
    following: list[list[int]] = []
    for at in range(len(requests) - 1, -1, -1):
        following.append([wanted.get(block, never) for block in requests[at].blocks])
        wanted.update(dict.fromkeys(requests[at].blocks, at))
    following.reverse()
    held: dict[int, object] = {}
    latest: list[tuple[int, int, int]] = []  # (-next use, -place, block), also of past uses
    hits = 0
    for request, uses in zip(requests, following, strict=True):
        hits += leading(request, held)
        for place, (block, use) in enumerate(zip(request.blocks, uses, strict=True)):
            held[block] = (-use, -place)
            heapq.heappush(latest, (-use, -place, block))
        while len(held) > capacity:
            use, place, block = heapq.heappop(latest)
            if held.get(block) == (use, place):
                del held[block]
    return hits


def small_pool(capacity: int) -> tuple[native.Pool, int]:
    """Return a pool of about ``capacity`` objects, and how many fit."""
    keys_max = capacity + 4096
    total = native.Pool.segment_bytes_for(capacity * SLOT_BYTES, SLAB_BYTES, keys_max)
    fd = os.memfd_create("kvferry-bench")
    os.ftruncate(fd, total)
    pool = native.Pool.create(fd, total, SLAB_BYTES, keys_max, 1, 1)
    os.close(fd)
    return pool, pool.stats().total_bytes // SLOT_BYTES


def pool_hits(requests: Sequence[Request], pool: native.Pool) -> int:
    """Return the hits of the pool as the sidecar drives it. Raises RuntimeError when unsound."""
    count = 1 + max(max(request.blocks, default=0) for request in requests)
    keys = np.random.default_rng(7).integers(0, 256, (count, native.KEY_BYTES), dtype=np.uint8)
    hits = 0
    for request in requests:
        if not request.blocks:
            continue
        wanted = keys[list(request.blocks)]
        leased = pool.lease(wanted[: request.hit_max])
        pool.release(leased)
        hits += len(leased)
        if len(leased) < len(wanted):
            entries = pool.reserve(wanted[len(leased) :], PAYLOAD_BYTES, 1)
            pool.commit(entries[entries >= 0].astype(np.uint32))
        pool.refresh(wanted)
    if problems := pool.check():
        raise RuntimeError(f"the pool is unsound: {problems}")
    return hits


def measure(requests: Sequence[Request], shares: Sequence[float] = SHARES) -> list[Row]:
    """Return a row per size of the pool."""
    distinct = len({block for request in requests for block in request.blocks})
    wanted = sum(min(len(request.blocks), request.hit_max) for request in requests)
    rows = []
    for share in shares:
        pool, capacity = small_pool(max(SLAB_BYTES // SLOT_BYTES, int(distinct * share)))
        hits = pool_hits(requests, pool)
        pool.close()
        rows.append(
            Row(
                share,
                capacity,
                lru_hits(requests, capacity) / wanted,
                hits / wanted,
                best_hits(requests, capacity) / wanted,
            )
        )
    return rows


def markdown(name: str, rows: Sequence[Row]) -> str:
    """Return a table of percentages."""
    lines = [
        f"| {name}: pool, blocks | of all distinct | LRU | kvferry | best possible |"
        " kvferry over LRU |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        over = row.pool / row.lru if row.lru else 1.0
        rates = " | ".join(f"{100 * rate:.2f} %" for rate in (row.lru, row.pool, row.best))
        lines.append(f"| {row.blocks:,} | {100 * row.share:g} % | {rates} | {over:.3f} |")
    return "\n".join(lines)


def plot(name: str, rows: Sequence[Row], folder: Path) -> Path:
    """Draw hit rates over the pool's size."""
    lines = {
        "best possible": [100 * row.best for row in rows],
        "kvferry": [100 * row.pool for row in rows],
        "LRU": [100 * row.lru for row in rows],
    }
    return plots.lines(
        folder / f"policies-{name}.svg",
        [row.blocks for row in rows],
        lines,
        title=f"{name} trace: prompt tokens found in the pool",
        across="size of the pool, blocks of 512 tokens",
        up="hit rate, %",
    )


def run(quick: bool) -> dict[str, object]:
    """Return the figures of the repository's small trace; ``quick`` tries three sizes."""
    rows = measure(load(SMALL), SHARES[2:5] if quick else SHARES)
    figures: list[Figure] = []
    for row in rows:
        at = f"pool of {100 * row.share:g} % of the distinct blocks"
        figures.append(plain(f"{at}: hits over LRU's", row.pool / row.lru, "x"))
        figures.append(plain(f"{at}: hits over the best possible", row.pool / row.best, "x"))
    return {"figures": figures, "rows": [asdict(row) for row in rows]}


def main() -> None:
    """Print a table per trace, and draw it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path, default=[SMALL])
    parser.add_argument("--plots", type=Path, help="a folder for SVG files (needs the extra bench)")
    options = parser.parse_args()
    for path in options.traces:
        name = path.stem.removesuffix("_trace")
        rows = measure(load(path))
        print(markdown(name, rows), end="\n\n")
        if options.plots:
            plot(name, rows, options.plots)


if __name__ == "__main__":
    main()
