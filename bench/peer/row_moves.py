"""Rows 3 and 5: how fast whole prompts move, what that costs, and memory beyond the payload."""

from __future__ import annotations

import statistics
from typing import Any

from bench.common import SharedMemcpy
from bench.peer.figures import Row, compared
from bench.peer.resident import beyond_pool
from bench.peer.rig import Rig, turns
from bench.peer.stats import medians
from bench.peer.variants import CACHES, FERRY, LMCACHE, NONE

VERIFIED_SEED = 50


def measure(engines: Rig, quick: bool, blocks: int, pool_bytes: int) -> dict[str, Any]:
    """Return rates, memcpy's in the same run, CPU per GB, and memory before and after."""
    rounds = 2 if quick else 5
    memcpy = SharedMemcpy()
    before = {name: beyond_pool(engines.servers[name].pid, pool_bytes) for name in CACHES}
    for name in CACHES:  # bytes first: what is fast but wrong is no figure
        engines.engines[name].call("save", seed=VERIFIED_SEED, blocks=blocks, keep=True)
        engines.engines[name].call("load", seed=VERIFIED_SEED, blocks=blocks, verify=True)
    engines.engines[NONE].call("save", seed=VERIFIED_SEED, blocks=blocks, keep=False)
    saves: dict[str, list[dict[str, Any]]] = {name: [] for name in CACHES}
    loads: dict[str, list[dict[str, Any]]] = {name: [] for name in CACHES}
    copies = []
    for number in range(rounds):
        for name in turns(CACHES, number):
            engine, seed = engines.engines[name], 100 + number
            copies.append(memcpy.round())
            saves[name].append(engine.call("save", seed=seed, blocks=blocks, keep=False))
            copies.append(memcpy.round())
            loads[name].append(engine.call("load", seed=seed, blocks=blocks, verify=False))
    plain = engines.engines[NONE].call("memory")
    memory = {}
    for name in CACHES:
        own = engines.engines[name].call("memory")
        after = beyond_pool(engines.servers[name].pid, pool_bytes)
        memory[name] = {
            "server_mib": after,
            "server_growth_mib_per_gb": (after - before[name]) / _stored(rounds, saves[name]),
            "engine_mib": own["resident_mib"] - plain["resident_mib"],
        }
    return {
        "rounds": rounds, "verified": True, "prompt_gb": saves[FERRY][0]["gigabytes"],
        "memcpy_gb_per_s": statistics.median(copies),
        "saves": {name: medians(one) for name, one in saves.items()},
        "loads": {name: medians(one) for name, one in loads.items()},
        "memory": memory,
    }  # fmt: skip


def _stored(rounds: int, saves: list[dict[str, Any]]) -> float:
    return (rounds + 1) * float(saves[0]["gigabytes"])


def rows(result: dict[str, Any]) -> list[Row]:
    """Return the table's rows: speed and CPU, then memory."""
    made = []
    for what in ("saves", "loads"):
        ferry, lmcache = result[what][FERRY], result[what][LMCACHE]
        copy = result["memcpy_gb_per_s"]
        name = what[:-1]
        made.append(
            compared(
                f"{name}, GB/s over memcpy's of one thread ({copy:.1f} GB/s)", "x",
                ferry["gb_per_s"] / copy, lmcache["gb_per_s"] / copy, larger=True,
            )
        )  # fmt: skip
        made.append(
            compared(f"{name}", "GB/s", ferry["gb_per_s"], lmcache["gb_per_s"], larger=True)
        )
        for side in ("engine", "server"):
            key = f"{side}_cpu_s_per_gb"
            made.append(compared(f"{name}: CPU of the {side}", "s/GB", ferry[key], lmcache[key]))
    return made + _memory_rows(result)


def _memory_rows(result: dict[str, Any]) -> list[Row]:
    ferry, lmcache = (result["memory"][name] for name in CACHES)
    names = {
        "server_mib": ("server beyond its pool and the engine's KV memory", "MiB"),
        "server_growth_mib_per_gb": ("the same, growth per GB stored", "MiB/GB"),
        "engine_mib": ("engine's process beyond one without a connector", "MiB"),
    }
    return [compared(name, unit, ferry[key], lmcache[key]) for key, (name, unit) in names.items()]
