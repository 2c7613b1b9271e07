"""A disk tier at work: how long a request waits for it.

From probe to answer: what was saved is only on the disk (the pool was cleared), a request's hashes
are sent, and its ask is answered with a lease over all of it: looked up, read, verified, committed.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from kvferry_demo.processes import Sidecar
from kvferry_sidecar.cli.api import Api

import bench.halves as halves
from bench.common import Figure, bench_main, percentile, plain
from bench.sidecar import running_sidecar

MIB = 1 << 20
STAGED_BYTES = 32 * MIB
POOL_BYTES = 128 * MIB


def run(quick: bool) -> dict[str, object]:
    """Return milliseconds from probe to answer by object size."""
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
                figures += staged(sidecar, page_bytes, rounds=2 if quick else 7)
    finally:
        shutil.rmtree(folder)
    return {"figures": figures}


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


def put_objects(sidecar: Sidecar) -> int:
    """Return how many objects the disk has taken."""
    tiers: Any = Api(sidecar.run_dir).get("tiers")
    return int(tiers["slower"][0]["counts"].get("put_objects", 0))


if __name__ == "__main__":
    bench_main(__doc__, run)
