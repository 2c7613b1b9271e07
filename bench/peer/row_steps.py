"""Row 1: connector time per engine step, and whole steps against an engine without a connector."""

from __future__ import annotations

from typing import Any

from bench.peer.figures import Row, compared
from bench.peer.rig import Rig, turns
from bench.peer.stats import medians
from bench.peer.variants import CACHES, FERRY, LMCACHE, NONE, NULL

RUNNING = (1, 8, 32)
STEPS = 512  # in which kvferry saves what each request generated exactly once
TARGET = 5.0
DECODED = "kvferry saves generated tokens, LMCache only prompts"


def measure(engines: Rig, quick: bool) -> dict[str, Any]:
    """Return medians over rounds by count of running requests and variant."""
    rounds = 2 if quick else 5
    names = tuple(engines.engines)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {
        str(count): {name: [] for name in names} for count in RUNNING
    }
    for number in range(rounds):
        for count in RUNNING:
            for name in turns(names, number):
                seed = 1000 * (number + 1) + 100_000 * count
                one = engines.engines[name].call("decode", seed=seed, running=count, steps=STEPS)
                found[str(count)][name].append(one)
    return {
        "rounds": rounds,
        "running": {
            count: {name: medians(rounds) for name, rounds in by_name.items()}
            for count, by_name in found.items()
        },
    }


def rows(result: dict[str, Any]) -> list[Row]:
    """Return the table's rows."""
    made = []
    for count, by_name in result["running"].items():
        floor, plain = by_name[NULL], by_name[NONE]
        for key, what in (("hooks_us", "median"), ("hooks_mean_us", "mean")):
            net = {name: by_name[name][key] - floor[key] for name in CACHES}
            made.append(
                compared(
                    f"hooks per step, {count} running, {what}, net of an empty connector", "us",
                    net[FERRY], net[LMCACHE], target=TARGET,
                    note=DECODED if what == "mean" else "",
                )
            )  # fmt: skip
        shares = (_share(by_name[name], floor) for name in CACHES)
        hooks = "of a step {:.1f} and {:.1f} % are hooks".format(*shares)
        for key, what in (
            ("step_us", "whole step"), ("cpu_us", "engine's CPU per step"),
        ):  # fmt: skip
            made.append(
                compared(
                    f"{what}, {count} running", "us", by_name[FERRY][key], by_name[LMCACHE][key],
                    reference=plain[key],
                    why=f"{hooks}; an empty connector's takes {floor[key]:,.0f} us",
                )
            )  # fmt: skip
        made.append(
            compared(
                f"server's CPU per step, {count} running", "us",
                by_name[FERRY]["server_cpu_us"], by_name[LMCACHE]["server_cpu_us"], note=DECODED,
            )
        )  # fmt: skip
    return made


def _share(one: dict[str, float], floor: dict[str, float]) -> float:
    """Return what the hooks, net of an empty connector's, are of a step, in percent."""
    return (one["hooks_mean_us"] - floor["hooks_mean_us"]) / one["step_us"] * 100
