"""A disk tier at work: how long a request waits for it, and the sidecar's memory under its writes.

From probe to answer: what was saved is only on the disk (the pool was cleared), a request's hashes
are sent, and its ask is answered with a lease over all of it: looked up, read, verified, committed.
Memory: saves follow one another for ``--minutes`` (default 1; an hour is --minutes 60), each is
written on behind it, and the pool and the disk are overwritten many times. The slope is that of a
straight line through what is resident beyond the pool, over the second half of the time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from kvferry_demo.processes import Sidecar
from kvferry_sidecar.cli.api import Api

import bench.halves as halves
from bench.common import Figure, at_most, percentile, plain
from bench.memory import resident
from bench.sidecar import running_sidecar

MIB = 1 << 20
STAGED_BYTES = 32 * MIB
POOL_BYTES = 128 * MIB
GOAL_MIB_PER_MINUTE = 1.0
minutes_default = 1.0


def run(quick: bool, minutes: float = minutes_default) -> dict[str, object]:
    """Return milliseconds from probe to answer by object size, and MiB per minute."""
    rounds, seconds = (2, 3.0) if quick else (7, 60 * minutes)
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir="/var/tmp"))
    settings = {
        "tiers.disk.paths": folder,
        "tiers.disk.bytes": "512MiB",
        "tiers.disk.free_bytes_min": 0,
        "limits.stage_ms_max": 20_000,
    }
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    flags += ["--log-level", "warning", "--slab-bytes", "2MiB"]
    figures: list[Figure] = []
    try:
        with running_sidecar(POOL_BYTES, flags) as sidecar:
            for page_bytes in (64 << 10, 256 << 10, MIB):
                figures += staged(sidecar, page_bytes, rounds)
            samples = written(sidecar, seconds)
    finally:
        shutil.rmtree(folder)
    slope, last = slope_of(samples), samples[-1][1]
    figures.append(at_most("memory under writes", slope, "MiB/min", GOAL_MIB_PER_MINUTE))
    figures.append(plain("memory beyond the pool at the end", last, "MiB"))
    return {"figures": figures, "seconds": seconds, "samples": samples}


def staged(sidecar: Sidecar, page_bytes: int, rounds: int) -> list[Figure]:
    """Return the median and the worst time from probe to answer of STAGED_BYTES in such objects."""
    chunks = STAGED_BYTES // page_bytes
    engine = halves.RawEngine(
        sidecar.run_dir, groups=1, ranks=1, chunks=chunks, page_bytes=page_bytes
    )
    raw = halves.hashes(chunks, seed=page_bytes)
    before = put_objects(sidecar)
    engine.save(raw)
    halves.wait_until(lambda: put_objects(sidecar) >= before + chunks, "all is on the disk")
    took_ms = []
    for _ in range(rounds):
        # What is leased would stay: the release travels by another way than the action.
        halves.wait_until(lambda: not Api(sidecar.run_dir).get("leases"), "nothing is leased")
        Api(sidecar.run_dir).act("clear-pool")
        began_s = time.perf_counter()
        admission, _ = engine.probe(raw)
        answer = engine.ask(admission, chunks * halves.BLOCK_TOKENS)
        took_ms.append((time.perf_counter() - began_s) * 1e3)
        if answer.sources != {"disk": chunks * halves.BLOCK_TOKENS}:
            raise RuntimeError(f"the answer is {answer}, not all of it from the disk")
        engine.release(admission)
    engine.close()
    what = f"probe to answer, {STAGED_BYTES // MIB} MiB of {page_bytes >> 10} KiB objects on disk"
    median, worst = percentile(took_ms, 50), max(took_ms)
    return [plain(what, median, "ms", worst_ms=round(worst, 1), rounds=rounds)]


def written(sidecar: Sidecar, seconds: float) -> list[tuple[float, float]]:
    """Save new prompts until the time is over; return (seconds, MiB beyond the pool) samples."""
    chunks = 256
    engine = halves.RawEngine(
        sidecar.run_dir, groups=1, ranks=1, chunks=chunks, page_bytes=64 << 10
    )
    samples: list[tuple[float, float]] = []
    began_s = time.monotonic()
    next_s, seed = 0.0, 1 << 20
    while (at_s := time.monotonic() - began_s) < seconds:
        seed += 1
        engine.save(halves.hashes(chunks, seed))
        if at_s >= next_s:
            samples.append((at_s, resident(sidecar.pid, sidecar.pool_name)["beyond"]))
            next_s = at_s + seconds / 60
    engine.close()
    return samples


def slope_of(samples: list[tuple[float, float]]) -> float:
    """Return MiB per minute over the second half of the samples."""
    at_s, mib = np.array(samples[len(samples) // 2 :]).T
    return float(np.polyfit(at_s / 60, mib, 1)[0]) if len(at_s) > 1 else 0.0


def put_objects(sidecar: Sidecar) -> int:
    """Return how many objects the disk has taken."""
    tiers: Any = Api(sidecar.run_dir).get("tiers")
    return int(tiers["slower"][0]["counts"].get("put_objects", 0))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and short: a smoke test")
    parser.add_argument("--minutes", type=float, default=minutes_default, help="of writes")
    wanted = parser.parse_args()
    print(json.dumps(run(wanted.quick, wanted.minutes), indent=1))
