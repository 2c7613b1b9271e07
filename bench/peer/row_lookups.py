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
PAUSES = (
    "LMCache waits for empty steps, each with vLLM's pause of 1 ms; kvferry for one exchange"
    " between two processes"
)
ROUNDS, LONG_ROUNDS, LONG_TOKENS = 21, 9, 8192
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
        rounds = 3 if quick else LONG_ROUNDS if tokens > LONG_TOKENS else ROUNDS
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
    return {"lookups": found, "rounds": (3, 3) if quick else (ROUNDS, LONG_ROUNDS)}


def rows(result: dict[str, Any]) -> list[Row]:
    """Return the table's rows."""
    whys = {"hooks_ms": WAITS, "answer_ms": PAUSES}
    return [
        compared(f"{case}: {what}", unit, by_name[FERRY][key], by_name[LMCACHE][key],
                 target=TARGET if key in whys else 1.0, why=whys.get(key, ""))
        for case, by_name in result["lookups"].items()
        for key, what, unit in FIGURES
    ]  # fmt: skip


def runs(result: dict[str, Any]) -> str:
    """Return how often this was measured, and what is asked of which figure."""
    few, fewer = result["rounds"]
    return (
        f"Medians of {few} lookups, {fewer} above {LONG_TOKENS:,} tokens. The {TARGET:g}x is asked"
        " of both times, in the scheduler and until it knows. Steps cannot be fewer than one, and"
        " of the bytes two per token are the hashes of the blocks: in these, and in CPU, kvferry"
        " has to be ahead."
    )
