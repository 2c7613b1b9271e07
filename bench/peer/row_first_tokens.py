"""Row 4: time to the first token, cold and warm, and the price of a miss."""

from __future__ import annotations

import statistics
from typing import Any

from bench.peer.figures import Row, compared
from bench.peer.rig import Rig, turns
from bench.peer.stats import median_interval, medians
from bench.peer.variants import CACHES, FERRY, LMCACHE, NONE

TOKENS = (2048, 8192)
PAIRS = 20
PRICE_MAX_PERCENT = 1.0


def measure(engines: Rig, quick: bool) -> dict[str, Any]:
    """Return medians by prompt length, and the price of a miss over pairs of the same prompt."""
    pairs = 3 if quick else PAIRS
    names = tuple(engines.engines)
    found: dict[str, Any] = {}
    for tokens in TOKENS:
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for number in range(pairs + 1):
            for name in turns(names, number):
                one = engines.engines[name].call(
                    "first_token", seed=40_000 + 100 * number + tokens, tokens=tokens + 1,
                    warm=name != NONE,
                )  # fmt: skip
                if number:  # the first warms up
                    samples[name].append(one)
        prices = {}
        for name in CACHES:
            for key in ("cold_ms", "cold_cpu_ms"):
                ratios = [
                    (own[key] / plain[key] - 1) * 100
                    for own, plain in zip(samples[name], samples[NONE], strict=True)
                ]
                prices[f"{name} {key}"] = {
                    "median_percent": statistics.median(ratios),
                    "interval": median_interval(ratios),
                }
        found[str(tokens)] = {
            "medians": {name: medians(one) for name, one in samples.items()},
            "price": prices,
            "pairs": pairs,
        }
    return found


def rows(result: dict[str, Any]) -> list[Row]:
    """Return the table's rows."""
    made = []
    for tokens, one in result.items():
        ferry, lmcache, plain = (one["medians"][name] for name in (FERRY, LMCACHE, NONE))
        what = f"{tokens} tokens"
        own = "nothing hits: nearly all is the model's own time"
        made += [
            compared(f"{what}: cold", "ms", ferry["cold_ms"], lmcache["cold_ms"],
                     reference=plain["cold_ms"], why=own),
            compared(f"{what}: warm", "ms", ferry["warm_ms"], lmcache["warm_ms"],
                     note=f"hits {ferry['warm_hit_tokens']:.0f}, {lmcache['warm_hit_tokens']:.0f}"),
            compared(f"{what}: cold, CPU of the engine", "ms", ferry["cold_cpu_ms"],
                     lmcache["cold_cpu_ms"], reference=plain["cold_cpu_ms"], why=own),
            compared(f"{what}: warm, CPU of the engine", "ms", ferry["warm_cpu_ms"],
                     lmcache["warm_cpu_ms"]),
        ]  # fmt: skip
        for key, clock in (("cold_ms", "time"), ("cold_cpu_ms", "CPU of the engine")):
            shown = [_price(one["price"][f"{name} {key}"]) for name in CACHES]
            title = f"{what}: price of a miss, {clock}, {one['pairs']} pairs"
            note = ""
            if key == "cold_ms":
                low, high = one["price"][f"{FERRY} {key}"]["interval"]
                goal = f"kvferry's goal < {PRICE_MAX_PERCENT:g} %"
                met = high < PRICE_MAX_PERCENT
                note = f"{goal}: {'met' if met else 'missed' if low > 1 else 'not decided'}"
            made.append(Row(title, "", *shown, note=note))
    return made


def runs(result: dict[str, Any]) -> str:
    """Return how often this was measured."""
    (pairs,) = {one["pairs"] for one in result.values()}
    return f"Medians of {pairs} prompts of each length."


def _price(price: dict[str, Any]) -> str:
    low, high = price["interval"]
    return f"{price['median_percent']:+.1f} % ({low:+.1f} to {high:+.1f})"
