"""The plots of the comparison, out of the rows' measured numbers (``Panel``); no drawing here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.peer.row_recovery import OBSERVE_S
from bench.peer.variants import CACHES, NONE, NULL
from bench.plots import Panel

Measured = Mapping[str, Any]


def steps(measured: Measured) -> list[Panel]:
    """Row 1, over running requests."""
    by_count = measured["running"]
    counts = [int(count) for count in by_count]

    def over(name: str, key: str, floor: str = "") -> list[float]:
        return [one[name][key] - (one[floor][key] if floor else 0) for one in by_count.values()]

    return [
        Panel(
            "hooks per step (median, net), us", counts,
            {name: over(name, "hooks_us", NULL) for name in CACHES},
            "running requests", up_log=True,
        ),
        Panel(
            "whole step, us", counts,
            {name: over(name, "step_us") for name in (*CACHES, NONE)}, "running requests",
        ),
        Panel(
            "server's CPU per step, us", counts,
            {name: over(name, "server_cpu_us") for name in CACHES},
            "running requests", up_log=True,
        ),
    ]  # fmt: skip


def lookups(measured: Measured) -> list[Panel]:
    """Row 2, over tokens."""
    cases = measured["lookups"]  # "miss, 1024 tokens"
    tokens = sorted({int(case.split()[1]) for case in cases})
    return [
        Panel(
            up, tokens,
            {
                f"{name}, {kind}": [cases[f"{kind}, {size} tokens"][name][key] for size in tokens]
                for name in CACHES
                for kind in ("miss", "hit")
            },
            "tokens", up_log=True,
        )
        for key, up in (
            ("hooks_ms", "time in the scheduler, ms"),
            ("answer_ms", "until the scheduler knows, ms"),
            ("wire_bytes", "bytes on the wire"),
        )
    ]  # fmt: skip


def moves(measured: Measured) -> list[Panel]:
    """Rows 3 and 5: saves and loads, and memory."""
    ways = {"save": measured["saves"], "load": measured["loads"]}
    copy = measured["memcpy_gb_per_s"]
    spent = [(way, side) for way in ways for side in ("engine", "server")]
    return [
        Panel(
            "GB/s over memcpy's of one thread", list(ways),
            {name: [one[name]["gb_per_s"] / copy for one in ways.values()] for name in CACHES},
        ),
        Panel(
            "CPU seconds per GB", [f"{way},\n{side}" for way, side in spent],
            {
                name: [ways[way][name][f"{side}_cpu_s_per_gb"] for way, side in spent]
                for name in CACHES
            },
        ),
        Panel(
            "MiB beyond pool and KV memory", ["server", "engine"],
            {
                name: [measured["memory"][name][key] for key in ("server_mib", "engine_mib")]
                for name in CACHES
            },
        ),
    ]  # fmt: skip


def first_tokens(measured: Measured) -> list[Panel]:
    """Row 4, over tokens."""
    places = [f"{int(tokens):,} tokens" for tokens in measured]

    def medians(name: str, key: str) -> list[float]:
        return [one["medians"][name][key] for one in measured.values()]

    prices = {name: [one["price"][f"{name} cold_ms"] for one in measured.values()]
              for name in CACHES}  # fmt: skip
    return [
        Panel(
            "first token, cold, ms", places,
            {name: medians(name, "cold_ms") for name in (*CACHES, NONE)},
        ),
        Panel("first token, warm, ms", places, {name: medians(name, "warm_ms") for name in CACHES}),
        Panel(
            "price of a miss, % (95 % interval)", places,
            {name: [one["median_percent"] for one in of] for name, of in prices.items()},
            spans={name: [tuple(one["interval"]) for one in of] for name, of in prices.items()},
        ),
    ]  # fmt: skip


def recovery(measured: Measured) -> list[Panel]:
    """Row 6, by the moment of the kill."""
    places = list(measured)

    def by_moment(name: str, of: Callable[[Mapping[str, Any]], float]) -> list[float]:
        return [of(one[name]) for one in measured.values()]

    return [
        Panel(up, places, {name: by_moment(name, of) for name in CACHES}, "killed", up_log=log)
        for up, of, log in (
            (f"s until hits are back ({OBSERVE_S:.0f}: never)",
             lambda one: one.get("back_s", OBSERVE_S), False),
            ("cached bytes still hits, %", lambda one: 100 * one["share"], False),
            ("longest stall of unrelated requests, ms", lambda one: one["longest_gap_ms"], True),
        )
    ]  # fmt: skip


CHARTS: dict[int, tuple[str, str, Callable[[Measured], list[Panel]]]] = {
    1: ("peer-steps", "Engine steps", steps),
    2: ("peer-lookups", "Lookups", lookups),
    3: ("peer-moves", "Moving whole prompts of 512 MiB, and memory", moves),
    4: ("peer-first-tokens", "Time to the first token", first_tokens),
    6: ("peer-recovery", "The server is killed, and started again after 3 s", recovery),
}
