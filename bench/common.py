"""What the benches share: figures with their goals, the machine's memcpy, percentiles, CPU clocks.

Figures are ratios against a named reference measured in the same run; absolute numbers only say
how the machine felt at the time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

GIB = 1 << 30

Figure = dict[str, object]


def at_most(name: str, value: float, unit: str, goal: float, **more: object) -> Figure:
    """Return a figure that should not be larger than its goal."""
    return _figure(name, value, unit) | {"goal": f"<= {goal:g}", "met": value <= goal} | more


def at_least(name: str, value: float, unit: str, goal: float, **more: object) -> Figure:
    """Return a figure that should not be smaller than its goal."""
    return _figure(name, value, unit) | {"goal": f">= {goal:g}", "met": value >= goal} | more


def plain(name: str, value: float, unit: str, **more: object) -> Figure:
    """Return a figure without a goal."""
    return _figure(name, value, unit) | more


def _figure(name: str, value: float, unit: str) -> Figure:
    return {"name": name, "value": float(f"{value:.4g}"), "unit": unit}


def bench_main(about: str | None, run: Callable[[bool], dict[str, object]]) -> None:
    """Parse ``--quick``, run one bench and print what it returns."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="small and short: a smoke test")
    print(json.dumps(run(parser.parse_args().quick), indent=1))


def best_s(run: Callable[[], None], repeats: int) -> float:
    """Return the shortest wall time of ``run`` over ``repeats`` calls, after one warm-up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def memcpy_gb_per_s(threads: int, working_set: int = GIB, repeats: int = 7) -> float:
    """Copy ``working_set`` contiguous, touched bytes by ``threads``; best of ``repeats``."""
    source = np.ones(working_set, dtype=np.uint8)
    target = np.zeros(working_set, dtype=np.uint8)
    cuts = np.linspace(0, working_set, threads + 1).astype(int)

    def part(index: int) -> None:
        low, high = cuts[index], cuts[index + 1]
        np.copyto(target[low:high], source[low:high])

    with ThreadPoolExecutor(threads) as pool:
        seconds = best_s(lambda: list(pool.map(part, range(threads))), repeats)
    return working_set / seconds / 1e9


class SharedMemcpy:
    """One thread's memcpy between two touched shared mappings: the memory that kvferry moves.

    Made once, timed between the rounds of a bench; ``best_gb_per_s`` is its best round so far.
    """

    def __init__(self, total_bytes: int = GIB // 2) -> None:
        self._total_bytes = total_bytes
        self._maps = [_shared(total_bytes) for _ in range(2)]
        self._source, self._target = (
            ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in self._maps
        )
        for address in (self._source, self._target):
            ctypes.memset(address, 1, total_bytes)
        self.best_gb_per_s = 0.0

    def round(self) -> float:
        """Copy once; return GB/s."""
        start = time.perf_counter()
        ctypes.memmove(self._target, self._source, self._total_bytes)
        rate = self._total_bytes / (time.perf_counter() - start) / 1e9
        self.best_gb_per_s = max(self.best_gb_per_s, rate)
        return rate


def _shared(total_bytes: int) -> mmap.mmap:
    fd = os.memfd_create("kvferry-bench")
    try:
        os.ftruncate(fd, total_bytes)
        return mmap.mmap(fd, total_bytes)
    finally:
        os.close(fd)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, round(percent / 100 * (len(ranked) - 1)))]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds a process has used, to the nanosecond (/proc counts in 10 ms)."""
    scheduler_clock = 2  # CPUCLOCK_SCHED of the kernel's per-process clock ids
    return time.clock_gettime((~pid << 3) | scheduler_clock)


def machine() -> dict[str, object]:
    """Return what a reader must know to read the figures."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }
