"""What small saves cost the sidecar: CPU of `kvferry serve` while requests decode.

A raw engine (bench/halves.py) over the real sockets: every ``PAUSE_S`` each of its requests has
filled one more block of 256 KiB, so that as many saves of one block come at once, and then nothing
for a while. Medians of such turns. Before them, what nothing costs: the sidecar alone, then with
that engine attached and idle, and the engine's two halves. Then the pipeline alone: 32 such saves
in this process, whose copies end at once (bench/bed.py); the least of many turns.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import bench.halves as halves
from bench.bed import Bed, Engine, pool_of
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
        idle_s = turns * PAUSE_S
        alone, _ = idle_us(sidecar.pid, idle_s)
        load = Load(sidecar.run_dir, sidecar.pid)
        attached, halves_us = idle_us(sidecar.pid, idle_s)
        figures: list[Figure] = [
            plain("nobody attached", alone, "us of CPU per s"),
            plain("nothing to save", attached, "us of CPU per s"),
            plain("nothing to save: both halves of the engine", halves_us, "us of CPU per s"),
        ]
        for running in RUNNING:
            each_us = median(load.turn(running) for _ in range(turns)) / running
            figures.append(plain(f"{running} at once", each_us, "us per save"))
        load.engine.close()
    figures.append(plain("pipeline alone, 32 at once", alone_us(40 * turns), "us per save"))
    return {"figures": figures, "turns": turns, "block_bytes": BLOCK_BYTES}


def idle_us(pid: int, idle_s: float) -> tuple[float, float]:
    """Return the CPU of a sidecar and of this process while nothing happens, us per second."""
    before_s, own_s = cpu_s(pid), time.process_time()
    time.sleep(idle_s)
    spent_s, own_s = cpu_s(pid) - before_s, time.process_time() - own_s
    return spent_s * 1e6 / idle_s, own_s * 1e6 / idle_s


def alone_us(rounds: int) -> float:
    """Return the least CPU of a save, in us, over rounds of 32."""
    bed, engine, count = Bed(pool_of(1 << 17)), Engine(0, 1), max(RUNNING)
    least_s = float("inf")
    for number in range(rounds):
        hashes = halves.hashes(count, seed=number)
        began_s = time.process_time()
        bed.save_blocks(engine, hashes)
        least_s = min(least_s, time.process_time() - began_s)
    return least_s * 1e6 / count


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
        halves.wait_until(lambda: not self._mapping(), "the engine's memory is mapped ahead")

    def _mapping(self) -> bool:
        """Whether the sidecar's thread still maps the engine's memory, which happens once."""
        for task in Path(f"/proc/{self._pid}/task").iterdir():
            with suppress(OSError):  # that thread has ended meanwhile
                if task.joinpath("comm").read_text().startswith("kvferry-ahead"):
                    return True
        return False

    def turn(self, running: int) -> float:
        """Return the sidecar's CPU, us, for a block of each request and the pause after it."""
        before_s = cpu_s(self._pid)
        self._seed += 1
        self.engine.save_blocks(halves.hashes(running, self._seed), self._admissions)
        time.sleep(PAUSE_S)
        return (cpu_s(self._pid) - before_s) * 1e6


if __name__ == "__main__":
    bench_main(__doc__, run)
