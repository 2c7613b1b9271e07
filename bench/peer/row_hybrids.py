"""Row 7: of which models are there external hits, and are they right?"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvferry_demo.models import MODELS

from bench.peer.figures import Row
from bench.peer.rig import new_engine, serving
from bench.peer.servers import Server
from bench.peer.variants import CACHES, FERRY, LMCACHE

POOL_BYTES = 1 << 30


def measure(quick: bool) -> dict[str, Any]:
    """Return what each cache did with each model."""
    names = ("llama", "gptoss", "nemotronh") if quick else tuple(MODELS)
    with serving(CACHES, POOL_BYTES) as (folder, servers):
        found = {}
        for name in names:
            print(f"   {name}", flush=True)
            found[name] = _model(name, folder, servers)
        return found


def _model(name: str, folder: Path, servers: dict[str, Server]) -> dict[str, Any]:
    """Run one model with both caches at the same time: nothing is timed here."""
    setup: dict[str, object] = {"what": "hybrids"}
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        engines = {
            cache: stack.enter_context(new_engine(cache, setup, folder, servers))
            for cache in CACHES
        }
        for engine in engines.values():
            engine.begin("model", name=name)
        for cache, engine in engines.items():
            try:
                engine.reply()  # it is there
                found[cache] = engine.reply()
            except RuntimeError as error:
                found[cache] = {"problem": str(error)}
    return found


def rows(result: dict[str, Any]) -> list[Row]:
    """Return one row per model, and one that counts."""
    made = []
    good = dict.fromkeys(CACHES, 0)
    for name, by_cache in result.items():
        made.append(
            Row(f"{name}: {MODELS[name].about}", "", *(_word(by_cache[one]) for one in CACHES))
        )
        for cache in CACHES:
            good[cache] += _word(by_cache[cache]).startswith("right")
    total = Row(
        f"right hits, of {len(result)} models", "", good[FERRY], good[LMCACHE],
        good[FERRY] / good[LMCACHE] if good[LMCACHE] else None, 1.0,
    )  # fmt: skip
    return [total, *made]


def _word(found: dict[str, Any]) -> str:
    if "problem" in found:
        return f"`{str(found['problem']).splitlines()[0][:160]}`"
    hits, tokens = sum(found["hits"]), sum(found["tokens"])
    if not hits:
        return "no hit"
    right = all(found["right"])
    return f"{'right' if right else '**wrong output**'}, {hits:,} of {tokens:,} tokens hit"
