"""What a crash costs: restart with a full index, exit and mapping per GiB, an engine's death."""

from __future__ import annotations

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
from kvferry_sidecar.config import default_keys_max, default_slab_bytes
from kvferry_sidecar.tiers.segment import open_pool

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
        sidecar.wait_ready()
        return sidecar, time.monotonic() - began_s

    def crash(self) -> tuple[float, float]:
        """Start, kill -9, start again: seconds from kill to the process's end, and of the start."""
        sidecar, _ = self.start()
        began_s = time.monotonic()
        sidecar.kill(signal.SIGKILL)
        ended_s = time.monotonic() - began_s
        sidecar, started_s = self.start()
        sidecar.stop()
        return ended_s, started_s


@contextmanager
def node(pool_bytes: int, keys_max: int = 0) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        made = Node(Path(folder), pool_bytes, keys_max or default_keys_max(pool_bytes))
        try:
            yield made
        finally:
            unlink_pool(made.pool_name)


def fill(where: Node) -> None:
    """Put a million tiny objects into the node's pool."""
    segment = open_pool(
        where.pool_name,
        arena_bytes=where.pool_bytes,
        slab_bytes=default_slab_bytes(where.pool_bytes),
        keys_max=where.keys_max,
        epoch=1,
        threads=1,
        log=structlog.get_logger(),
    )
    keys = np.random.default_rng(1).integers(0, 256, (MILLION, 16), dtype=np.uint8)
    for start in range(0, MILLION, BATCH):
        entries = segment.pool.reserve(keys[start : start + BATCH], PAYLOAD_BYTES, 1)
        assert (entries >= 0).all()
        segment.pool.commit(entries.astype(np.uint32))
    segment.close()


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
        _, full_s = full.crash()
    sizes = {}
    for gib in (small, large):
        with node(gib << 30) as sized:
            sizes[gib] = sized.crash()
    exit_s, start_s = ((sizes[large][at] - sizes[small][at]) / (large - small) for at in (0, 1))
    deaths = sorted(engine_death_s() for _ in range(3))
    figures: list[Figure] = [
        at_most("restart after kill -9 with 1 M keys", full_s, "s", 1.0 + start_s),
        plain("of it, what a start with an empty pool takes", base_s, "s"),
        plain("end of a killed sidecar, per GiB of pool", exit_s * 1e3, "ms"),
        plain("warm start, per GiB of pool", start_s * 1e3, "ms"),
        at_most("engine killed, session and mappings gone", deaths[1], "s", 1.0),
    ]
    return {"figures": figures, "seconds_by_gib": {str(gib): one for gib, one in sizes.items()}}


if __name__ == "__main__":
    bench_main(__doc__, run)
