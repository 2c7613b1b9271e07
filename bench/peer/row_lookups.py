"""Row 2: lookups of 1 K to 128 K tokens, missed and hit."""

from __future__ import annotations

from typing import Any

from bench.peer.figures import Row, compared
from bench.peer.rig import Rig, turns
from bench.peer.stats import medians
from bench.peer.variants import CACHES, FERRY, LMCACHE

TOKENS = (1024, 8192, 32768, 131072)
STORED_SEED = 7
TARGET = 5.0
WAITS = "kvferry's first question waits for the answer where nobody else runs"
FIGURES = (
    ("hooks_ms", "time in the scheduler", "ms"),
    ("hooks_cpu_ms", "CPU in all hooks meanwhile", "ms"),
    ("answer_ms", "until the scheduler knows", "ms"),
    ("steps", "engine steps until then", ""),
    ("wire_bytes", "bytes on the wire", "bytes"),
)


def measure(engines: Rig, quick: bool) -> dict[str, Any]:
    """Return medians over rounds by tokens, hit or miss, and variant."""
    sizes = TOKENS[:2] if quick else TOKENS
    for name in CACHES:
        engines.engines[name].call("store", seed=STORED_SEED, tokens=sizes[-1] + 1)
    found: dict[str, dict[str, dict[str, float]]] = {}
    seed = 1000
    for tokens in sizes:
        rounds = 3 if quick else 9 if tokens > 8192 else 21
        for kind in ("miss", "hit"):
            samples: dict[str, list[dict[str, Any]]] = {name: [] for name in CACHES}
            for number in range(rounds + 1):
                seed += 1
                for name in turns(CACHES, number):
                    one = engines.engines[name].call(
                        "lookup", seed=STORED_SEED if kind == "hit" else seed, tokens=tokens,
                        hit=kind == "hit", count_bytes=False,
                    )  # fmt: skip
                    if number:  # the first warms up
                        samples[name].append(one)
            found[f"{kind}, {tokens} tokens"] = {
                name: medians(rounds_of) for name, rounds_of in samples.items()
            }
    # Last: counting bytes costs time, and stays.
    for tokens in sizes:
        for kind in ("miss", "hit"):
            seed += 1
            for name in CACHES:
                one = engines.engines[name].call(
                    "lookup", seed=STORED_SEED if kind == "hit" else seed, tokens=tokens,
                    hit=kind == "hit", count_bytes=True,
                )  # fmt: skip
                found[f"{kind}, {tokens} tokens"][name]["wire_bytes"] = one["wire_bytes"]
    return {"lookups": found}


def rows(result: dict[str, Any]) -> list[Row]:
    """Return the table's rows."""
    return [
        compared(f"{case}: {what}", unit, by_name[FERRY][key], by_name[LMCACHE][key],
                 target=TARGET if key in ("hooks_ms", "answer_ms") else 1.0,
                 note=WAITS if key == "hooks_ms" else "")
        for case, by_name in result["lookups"].items()
        for key, what, unit in FIGURES
    ]  # fmt: skip
