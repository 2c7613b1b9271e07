"""The sidecar's memory beyond the pool: idle, under lookups and saves, and after them.

Counted from /proc/PID/smaps: everything resident but the pool's segment and the engines' KV memory
and fence pages that it maps (they are charged to whoever touched them first, and gone with the
engine). Shared library pages count in full.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import bench.halves as halves
from bench.common import Figure, at_most, bench_main, plain
from bench.sidecar import running_sidecar

GOAL_MIB = 120.0
GROUPS, RANKS, CHUNKS = 4, 8, 8192
POOL_BYTES = 256 << 20
OPEN_LOOKUPS = 64
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)$")


def run(quick: bool) -> dict[str, object]:
    """Return MiB in the three states, with what they are made of."""
    flags = ("--keys-max", str(4 * GROUPS * CHUNKS), "--log-level", "warning")
    with running_sidecar(POOL_BYTES, flags) as sidecar:
        idle = resident(sidecar.pid, sidecar.pool_name)
        engine = halves.RawEngine(sidecar.run_dir, groups=GROUPS, ranks=RANKS, chunks=CHUNKS)
        stored = halves.hashes(CHUNKS, seed=1)
        engine.save(stored)
        admissions: list[int] = []
        for number in range(OPEN_LOOKUPS * (1 if quick else 8)):
            raw = stored if number % 2 else halves.hashes(CHUNKS, number + 2)
            admission, _ = engine.probe(raw)
            engine.ask(admission, CHUNKS * halves.BLOCK_TOKENS)
            admissions.append(admission)
            if len(admissions) > OPEN_LOOKUPS:
                engine.release(admissions.pop(0))
        loaded = resident(sidecar.pid, sidecar.pool_name)
        engine.release(*admissions)
        engine.close()
        time.sleep(1.5)  # the halves have left, their lookups and mappings are gone
        after = resident(sidecar.pid, sidecar.pool_name)
    figures: list[Figure] = [
        at_most("idle", idle["beyond"], "MiB", GOAL_MIB),
        at_most("after lookups and saves", after["beyond"], "MiB", GOAL_MIB),
        at_most(f"with {OPEN_LOOKUPS} lookups of 32,768 keys open", loaded["beyond"], "MiB",
                GOAL_MIB),
        plain("engines' memory still mapped after they left", after["engine"], "MiB"),
    ]  # fmt: skip
    return {"figures": figures, "idle": idle, "under_load": loaded, "after": after}


def resident(pid: int, pool_name: str) -> dict[str, float]:
    """Return resident MiB by kind: pool, engine (memfds), beyond (all else), anonymous of it."""
    sums = {"pool": 0, "engine": 0, "beyond": 0, "beyond_anonymous": 0}
    kind = "beyond"
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if found := _MAPPING.match(line):
            path = found[1]
            kind = "pool" if pool_name in path else "engine" if "/memfd:" in path else "beyond"
        elif line.startswith("Rss:"):
            sums[kind] += int(line.split()[1])
        elif line.startswith("Anonymous:") and kind == "beyond":
            sums["beyond_anonymous"] += int(line.split()[1])
    return {name: round(kib / 1024, 2) for name, kib in sums.items()}


if __name__ == "__main__":
    bench_main(__doc__, run)
