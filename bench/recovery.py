"""What a crash costs: restart with a full index, exit and mapping per GiB, an engine's death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import structlog
from kvferry_demo.processes import Sidecar, new_pool_name, unlink_pool
from kvferry_sidecar.cli.query import ask_status
from kvferry_sidecar.config import default_keys_max, default_slab_bytes
from kvferry_sidecar.errors import KvferryError
from kvferry_sidecar.tiers.segment import PoolSegment, open_pool

from bench.common import Figure, at_most, bench_main, plain
from bench.halves import wait_until
from bench.sidecar import running_sidecar

MILLION = 1 << 20
BATCH = 8192
PAYLOAD_BYTES = 256
ENGINE = """
import sys, time
from pathlib import Path
from bench.halves import RawEngine
engine = RawEngine(Path(sys.argv[1]), groups=1, ranks=2, chunks=1024)
print("ready", flush=True)
time.sleep(600)
"""


class Node:
    """A run directory and a pool, served by one sidecar after the other."""

    def __init__(self, folder: Path, pool_bytes: int, keys_max: int) -> None:
        self.run_dir, self.log = folder / "run", folder / "sidecar.log"
        self.run_dir.mkdir(mode=0o700)
        self.pool_name = new_pool_name("bench")
        self.pool_bytes, self.keys_max = pool_bytes, keys_max

    def start(self) -> tuple[Sidecar, float]:
        """Return a sidecar and the seconds until it answered."""
        began_s = time.monotonic()
        flags = ("--keys-max", str(self.keys_max), "--log-level", "warning")
        sidecar = Sidecar(self.run_dir, self.log, pool_name=self.pool_name,
                          pool_bytes=self.pool_bytes, flags=flags)  # fmt: skip
        wait_until(lambda: answers(sidecar), "the sidecar answers")
        return sidecar, time.monotonic() - began_s

    def crash(self, times: int = 3) -> tuple[float, float]:
        """Start, kill -9, start again: seconds from kill to end of the first, least of a start.

        The first has touched every page of its pool; a warm one maps them as they are used.
        """
        ends_s, starts_s = [], []
        sidecar, _ = self.start()
        for _ in range(times):
            began_s = time.monotonic()
            sidecar.kill(signal.SIGKILL)
            ends_s.append(time.monotonic() - began_s)
            sidecar, started_s = self.start()
            starts_s.append(started_s)
        sidecar.stop()
        return ends_s[0], min(starts_s)


def answers(sidecar: Sidecar) -> bool:
    assert sidecar.process.poll() is None, sidecar.tail()
    try:
        return bool(json.loads(ask_status(sidecar.run_dir))["pid"] == sidecar.pid)
    except KvferryError:
        return False


@contextmanager
def node(pool_bytes: int, keys_max: int = 0) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        made = Node(Path(folder), pool_bytes, keys_max or default_keys_max(pool_bytes))
        try:
            yield made
        finally:
            unlink_pool(made.pool_name)


def opened(where: Node) -> PoolSegment:
    """Open the node's pool as a sidecar does."""
    return open_pool(
        where.pool_name,
        arena_bytes=where.pool_bytes,
        slab_bytes=default_slab_bytes(where.pool_bytes),
        keys_max=where.keys_max,
        epoch=1,
        threads=1,
        log=structlog.get_logger(),
    )


def fill(where: Node) -> None:
    """Put a million tiny objects into the node's pool."""
    segment = opened(where)
    keys = np.random.default_rng(1).integers(0, 256, (MILLION, 16), dtype=np.uint8)
    for start in range(0, MILLION, BATCH):
        entries = segment.pool.reserve(keys[start : start + BATCH], PAYLOAD_BYTES, 1)
        assert (entries >= 0).all()
        segment.pool.commit(entries.astype(np.uint32))
    segment.close()


def warm_s(where: Node) -> float:
    """Seconds until a pool that is there is open: attached, checked, its index rebuilt."""
    began_s = time.monotonic()
    segment = opened(where)
    took_s = time.monotonic() - began_s
    assert segment.warm
    assert segment.pool.stats().ready == MILLION
    segment.close()
    return took_s


def engine_death_s() -> float:
    """Seconds from the SIGKILL of an engine until its session and mappings are gone."""
    with running_sidecar(64 << 20, ("--log-level", "warning")) as sidecar:
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(sidecar.run_dir)], stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert engine.stdout is not None
        assert engine.stdout.readline().strip() == "ready"
        maps = Path(f"/proc/{sidecar.pid}/maps")
        assert "/memfd:" in maps.read_text()
        began_s = time.monotonic()
        os.kill(engine.pid, signal.SIGKILL)
        engine.wait()
        wait_until(lambda: "/memfd:" not in maps.read_text(), "its memory is unmapped")
        took_s = time.monotonic() - began_s
        engine.stdout.close()
        return took_s


def run(quick: bool) -> dict[str, object]:
    """Return seconds; sizes are GiB of the pool."""
    small, large = (1, 2) if quick else (1, 4)
    with node(64 << 20) as empty:
        _, base_s = empty.crash()
    with node(1 << 30, MILLION + BATCH) as full:
        fill(full)
        index_s = min(warm_s(full) for _ in range(3))
        _, full_s = full.crash()
    sizes = {}
    for gib in (small, large):
        with node(gib << 30) as sized:
            sizes[gib] = sized.crash()
    exit_s = (sizes[large][0] - sizes[small][0]) / (large - small)
    deaths = sorted(engine_death_s() for _ in range(3))
    figures: list[Figure] = [
        at_most("pool of 1 M keys opened again", index_s, "s", 1.0),
        plain("restart after kill -9 with 1 M keys, until it answers", full_s, "s"),
        plain("the same with an empty pool of 64 MiB", base_s, "s"),
        plain("end of a killed sidecar, per GiB of pool", exit_s * 1e3, "ms"),
        plain(f"warm start with a pool of {large} GiB", sizes[large][1], "s"),
        at_most("engine killed, session and mappings gone", deaths[1], "s", 1.0),
    ]
    return {"figures": figures, "seconds_by_gib": {str(gib): one for gib, one in sizes.items()}}


if __name__ == "__main__":
    bench_main(__doc__, run)
