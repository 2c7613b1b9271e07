"""Write-behind for an hour: whether the sidecar's memory, descriptors, threads, queues stay flat.

A steady stream of saves, over a disk tier and a Redis that are both full and evict, through a pool
that wraps all the time. Once a minute a burst overflows the write-behind queues, which drop their
coldest objects and count them. Every few saves a prompt that only the slower tiers still hold is
asked for and loaded; every five minutes Redis loses its clients, every seven all it holds.

The slope is that of a straight line through what is resident beyond the pool from the fifth minute
on; an hour is ``--minutes 60``, and ``--out bench/results/endurance.json`` keeps it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import redis
from kvferry_demo.processes import Sidecar
from kvferry_sidecar.cli.api import Api

import bench.halves as halves
from bench.common import Figure, at_most, cpu_s, machine, plain
from bench.memory import resident
from bench.sidecar import running_sidecar
from bench.stores import free_port, server

MIB = 1 << 20
POOL_BYTES, DISK_BYTES, REDIS_BYTES = 64 * MIB, 256 * MIB, 512 * MIB
CHUNKS, PAGE_BYTES = 32, 64 << 10
SAVE_BYTES = CHUNKS * PAGE_BYTES
SAVES_PER_S = 2
ASK_EVERY = 8  # saves
ASK_BACK = (50, 150)  # saves ago, by turns: the disk has it; mostly only Redis has it
BURST_SAVES = 4 * POOL_BYTES // SAVE_BYTES
GOAL_MIB_PER_HOUR = 2.0
minutes_default = 1.0
settled_s_max = 300.0
sloping_s_min = 1200.0  # of less a slope is noise


@dataclass(slots=True)
class Sample:
    """What the sidecar holds at one moment."""

    at_s: float
    beyond_mib: float
    anonymous_mib: float
    fds: int
    threads: int
    waiting: int  # objects that wait to be written on


@dataclass(slots=True)
class Load:
    """What one engine does, at a steady rate."""

    engine: halves.RawEngine
    saves: int = 0
    asks: int = 0
    hit_tokens: int = 0
    samples: list[Sample] = field(default_factory=list)

    def save(self) -> None:
        self.saves += 1
        self.engine.save(halves.hashes(CHUNKS, self.saves))

    def ask(self) -> None:
        """Ask for what left the pool, and load what was found."""
        back = ASK_BACK[self.asks % len(ASK_BACK)]
        if self.saves <= max(ASK_BACK):
            return
        self.asks += 1
        admission, _ = self.engine.probe(halves.hashes(CHUNKS, self.saves - back))
        answer = self.engine.ask(admission, CHUNKS * halves.BLOCK_TOKENS)
        if answer.hit_tokens:
            self.hit_tokens += answer.hit_tokens
            self.engine.load(admission, answer.hit_tokens)
        self.engine.release(admission)


def run(quick: bool, minutes: float = minutes_default) -> dict[str, object]:
    """Return MiB in the fifth minute and at the end, their slope, and what was written."""
    seconds = 5.0 if quick else 60 * minutes
    with slow_tiers() as (flags, client), running_sidecar(POOL_BYTES, flags) as sidecar:
        began_cpu_s = cpu_s(sidecar.pid)
        engine = halves.RawEngine(
            sidecar.run_dir, groups=1, ranks=1, chunks=CHUNKS, page_bytes=PAGE_BYTES
        )
        load = Load(engine)
        drive(load, sidecar, client, seconds)
        halves.wait_until(lambda: not waiting(sidecar), "all is written on")
        time.sleep(1.0)  # no call is open
        load.samples.append(sample(sidecar, seconds))
        counts = counts_of(sidecar)
        busy = (cpu_s(sidecar.pid) - began_cpu_s) / seconds
        engine.close()
    figures = figures_of(load, counts, seconds)
    figures.append(plain("sidecar's CPU", 100 * busy, "% of a core"))
    samples = [[getattr(one, name) for name in Sample.__slots__] for one in load.samples]
    return {
        "figures": figures,
        "seconds": seconds,
        "counts": counts,
        "columns": list(Sample.__slots__),
        "samples": samples,
    }


@contextmanager
def slow_tiers() -> Iterator[tuple[list[str], redis.Redis]]:
    """Yield the flags of a sidecar over a disk tier and a Redis that evicts, and a client of it."""
    program = shutil.which("redis-server")
    if program is None:
        raise RuntimeError("no redis-server is installed")
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir="/var/tmp"))
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--maxmemory", str(REDIS_BYTES), "--maxmemory-policy", "allkeys-lru"]
    settings = {
        "tiers.disk.paths": folder,
        "tiers.disk.bytes": DISK_BYTES,
        "tiers.disk.free_bytes_min": 0,
        "tiers.remote.url": f"redis://127.0.0.1:{port}/0",
        "limits.write_behind_max": 64,
        "limits.stage_ms_max": 5000,
        "limits.records_max": 64,  # full long before the fifth minute
    }
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    try:
        with server(command, port):
            yield [*flags, "--log-level", "error"], redis.Redis(port=port, protocol=2)
    finally:
        shutil.rmtree(folder)


def drive(load: Load, sidecar: Sidecar, client: redis.Redis, seconds: float) -> None:
    """Save, ask and burst until the time is over."""
    began_s = time.monotonic()
    sample_every_s = min(30.0, seconds / 10)
    next_sample_s = 0.0
    minute, steady = 0, 0
    while (at_s := time.monotonic() - began_s) < seconds:
        if at_s >= next_sample_s:
            load.samples.append(sample(sidecar, at_s))
            next_sample_s += sample_every_s
        load.save()
        steady += 1
        if steady % ASK_EVERY == 0:
            load.ask()
        if at_s // 60 > minute:
            minute = int(at_s // 60)
            for _ in range(BURST_SAVES):
                load.save()
            if minute % 5 == 0:
                client.client_kill_filter(_type="normal")
            if minute % 7 == 0:
                client.flushall()
        time.sleep(max(0.0, began_s + steady / SAVES_PER_S - time.monotonic()))


def figures_of(load: Load, counts: dict[str, dict[str, int]], seconds: float) -> list[Figure]:
    at_s = np.array([one.at_s for one in load.samples])
    mib = np.array([one.beyond_mib for one in load.samples])
    settled = at_s >= min(settled_s_max, seconds / 2)
    first, last = load.samples[int(np.argmax(settled))], load.samples[-1]
    figures: list[Figure] = []
    if seconds >= sloping_s_min:
        slope = float(np.polyfit(at_s[settled] / 3600, mib[settled], 1)[0])
        figures.append(at_most("memory beyond the pool: slope", slope, "MiB/h", GOAL_MIB_PER_HOUR))
    figures += [
        plain(f"memory beyond the pool after {first.at_s / 60:.1f} min", first.beyond_mib, "MiB"),
        plain(f"memory beyond the pool after {last.at_s / 60:.1f} min", last.beyond_mib, "MiB"),
        plain("most memory since then", float(mib[settled].max()), "MiB"),
        plain("descriptors at the end over then", last.fds - first.fds, ""),
        plain("threads at the end over then", last.threads - first.threads, ""),
        plain("objects waiting at the end", last.waiting, ""),
        plain("saved", load.saves * SAVE_BYTES / 1e9, "GB"),
        plain("asked for of slower tiers", load.asks, "", hit_tokens=load.hit_tokens),
    ]
    for source, one in counts.items():
        dropped = sum(one.get(f"put_{why}", 0) for why in ("dropped_full", "evicted_before"))
        figures.append(plain(f"{source}: written", one.get("put_bytes", 0) / 1e9, "GB"))
        figures.append(plain(f"{source}: writes dropped or overtaken", dropped, "objects"))
    return figures


def sample(sidecar: Sidecar, at_s: float) -> Sample:
    """Return what the sidecar holds now."""
    found = resident(sidecar.pid, sidecar.pool_name)
    process = Path(f"/proc/{sidecar.pid}")
    return Sample(
        at_s=round(at_s, 1),
        beyond_mib=found["beyond"],
        anonymous_mib=found["beyond_anonymous"],
        fds=len(list((process / "fd").iterdir())),
        threads=len(list((process / "task").iterdir())),
        waiting=waiting(sidecar),
    )


def waiting(sidecar: Sidecar) -> int:
    told: Any = Api(sidecar.run_dir).act("flush", dry_run=True)["waiting"]
    return sum(told.values())


def counts_of(sidecar: Sidecar) -> dict[str, dict[str, int]]:
    """Return each slower tier's counts, by where its hits come from."""
    tiers: Any = Api(sidecar.run_dir).get("tiers")
    return {one["source"]: one["counts"] for one in tiers["slower"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and short: a smoke test")
    parser.add_argument("--minutes", type=float, default=minutes_default, help="of writes")
    parser.add_argument("--out", type=Path, help="a file for the JSON")
    wanted = parser.parse_args()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    result = {"date": date, "machine": machine(), **run(wanted.quick, wanted.minutes)}
    text = json.dumps(result, indent=1) + "\n"
    if wanted.out is None:
        print(text, end="")
    else:
        wanted.out.write_text(text)
