"""What small saves cost the sidecar: CPU of `kvferry serve` while requests decode.

A raw engine (bench/halves.py) over the real sockets: every ``PAUSE_S`` each of its requests has
filled one more block of 256 KiB, so that as many saves of one block come at once, and then nothing
for a while. What the sidecar spends in such a pause without saves is subtracted: ``idle``.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import bench.halves as halves
from bench.common import Figure, bench_main, cpu_s, plain
from bench.sidecar import running_sidecar

BLOCK_BYTES = 256 << 10
BLOCKS = 1024
PAUSE_S = 0.2  # the time in which a request of 128-token blocks fills one
RUNNING = (1, 8, 32)


def run(quick: bool) -> dict[str, object]:
    """Return CPU per save by the number of requests that decode, in us."""
    turns = 4 if quick else 30
    flags = ("--copy-threads", "1", "--log-level", "warning", "--slab-bytes", "64MiB")
    with running_sidecar(BLOCKS * BLOCK_BYTES + (128 << 20), flags) as sidecar:
        load = Load(sidecar.run_dir, sidecar.pid)
        idle_us = median(load.turn(0) for _ in range(turns))
        figures: list[Figure] = [plain("idle", idle_us, "us in 0.2 s")]
        for running in RUNNING:
            each_us = median(load.turn(running) - idle_us for _ in range(turns)) / running
            figures.append(plain(f"{running} at once", each_us, "us per save"))
        load.engine.close()
    return {"figures": figures, "turns": turns, "block_bytes": BLOCK_BYTES}


class Load:
    """One engine at one sidecar."""

    def __init__(self, run_dir: Path, pid: int) -> None:
        self._pid = pid
        self._seed = 0
        self.engine = halves.RawEngine(
            run_dir, groups=1, ranks=1, chunks=BLOCKS, page_bytes=BLOCK_BYTES
        )
        prompts = [halves.hashes(2, seed=10**6 + number) for number in range(max(RUNNING))]
        self._admissions = [self.engine.probe(prompt)[0] for prompt in prompts]

    def turn(self, running: int) -> float:
        """Return the sidecar's CPU, us, for a block of each request and the pause after it."""
        before_s = cpu_s(self._pid)
        if running:
            self._seed += 1
            self.engine.save_blocks(halves.hashes(running, self._seed), self._admissions)
        time.sleep(PAUSE_S)
        return (cpu_s(self._pid) - before_s) * 1e6


if __name__ == "__main__":
    bench_main(__doc__, run)
