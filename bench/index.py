"""The pool's index: batched probes with key mixing included, and how the cost grows.

Hits and misses apart, one core. Growth compares the largest number of keys with 100,000. The sizes
take turns, and the best stretch of 128 Ki probes of each counts.
"""

from __future__ import annotations

import math
import os
import time

import kvferry_native as native
import numpy as np

from bench.common import Figure, at_least, at_most, bench_main

BATCH, ROUND, ROUNDS = 8192, 1 << 17, 5
HASH_BYTES = 32
NAMESPACE = bytes(range(16))
PAYLOAD_BYTES = 256  # tiny objects: the index is measured, not the arena
PROBES_GOAL, GROWTH_GOAL, BYTES_GOAL = 10.0, 2.0, 64.0


def _hashes(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, HASH_BYTES), dtype=np.uint8)


def _mix(hashes: np.ndarray) -> np.ndarray:
    return native.mix_keys(NAMESPACE, 0, 0, hashes.reshape(-1), HASH_BYTES, 0, 1)


def _pool(keys_max: int) -> native.Pool:
    slab_bytes = 16 << 20
    arena = keys_max * 512 + 4 * slab_bytes
    total = native.Pool.segment_bytes_for(arena, slab_bytes, keys_max)
    fd = os.memfd_create("bench-pool")
    os.ftruncate(fd, total)
    pool = native.Pool.create(fd, total, slab_bytes, keys_max, 1, 1)
    os.close(fd)
    return pool


class _Index:
    """A pool full of ``count`` keys, and hashes to look up: of its own, and of none."""

    def __init__(self, count: int, probes: int) -> None:
        self.pool = _pool(count)
        stored = _hashes(count, 1)
        for start in range(0, count, BATCH):
            entries = self.pool.reserve(_mix(stored[start : start + BATCH]), PAYLOAD_BYTES, 1)
            self.pool.commit(entries[entries >= 0].astype(np.uint32))
        order = np.random.default_rng(2).integers(0, count, probes)
        self.hashes = {"hit_ns": stored[order], "miss_ns": _hashes(probes, 3)}
        self.best_ns = {"hit_ns": math.inf, "miss_ns": math.inf}

    def round(self) -> None:
        """Look all of them up, batch by batch."""
        for kind, hashes in self.hashes.items():
            for start in range(0, len(hashes), ROUND):
                began_ns = time.perf_counter_ns()
                for at in range(start, start + ROUND, BATCH):
                    found = self.pool.present(_mix(hashes[at : at + BATCH]))
                    assert bool(found.all()) if kind == "hit_ns" else not bool(found.any())
                took_ns = (time.perf_counter_ns() - began_ns) / ROUND
                self.best_ns[kind] = min(self.best_ns[kind], took_ns)


def _index_bytes(keys: int) -> int:
    slab_bytes = 16 << 20
    segment_bytes = native.Pool.segment_bytes_for(slab_bytes, slab_bytes, keys)
    return segment_bytes - slab_bytes + native.Pool.own_bytes_for(keys)


def run(quick: bool) -> dict[str, object]:
    """Return the figures; ``quick`` stops at 1 M keys."""
    probes = 1 << 18 if quick else 1 << 20
    sizes = [100_000, 1_000_000] if quick else [100_000, 1_000_000, 10_000_000]
    indexes = {str(size): _Index(size, probes) for size in sizes}
    for _ in range(ROUNDS):
        for index in indexes.values():
            index.round()
    rows = {size: index.best_ns for size, index in indexes.items()}
    million, small, large = rows["1000000"], rows[str(sizes[0])], rows[str(sizes[-1])]
    keys = 1 << 20
    index_bytes = _index_bytes(2 * keys) - _index_bytes(keys)
    figures: list[Figure] = []
    for kind in ("hit", "miss"):
        rate = 1e3 / million[f"{kind}_ns"]
        figures.append(at_least(f"{kind} at 1 M keys", rate, "M probes/s", PROBES_GOAL))
    for kind in ("hit", "miss"):
        growth = large[f"{kind}_ns"] / small[f"{kind}_ns"]
        title = f"{kind}: cost per probe at {sizes[-1]:,} keys over {sizes[0]:,}"
        figures.append(at_most(title, growth, "x", GROWTH_GOAL))
    figures.append(at_most("index bytes per key", index_bytes / keys, "bytes", BYTES_GOAL))
    return {"figures": figures, "ns_per_probe": rows}


if __name__ == "__main__":
    bench_main(__doc__, run)
