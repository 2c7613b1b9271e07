"""Bytes that one request moves with masks, over what it would move without any, per tiny model.

Pure computation over the geometries that engines of the demo's models registered
(``geometries.json``; ``kvferry geometry show --json`` prints one). A prompt of 32,768 tokens and
one more is saved, and loaded whole by an engine that has nothing; without masks every chunk of
every group would move. The engine's retention is vLLM's default.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvferry_sidecar.masks.kinds import Kind
from kvferry_sidecar.masks.load import needed_chunks
from kvferry_sidecar.masks.rules import GroupRule, Rules
from kvferry_sidecar.masks.store import kept_boundaries, kept_chunks

from bench.common import Figure, bench_main, plain

GEOMETRIES = Path(__file__).parent / "geometries.json"
TOKENS = 32_768
MIB = 1 << 20


def rules_of(geometry: dict[str, Any]) -> Rules:
    groups = tuple(
        GroupRule(
            Kind(one["kind"]),
            one["block_tokens"],
            window=one["window_tokens"],
            chunk=one["chunk_tokens"],
            cacheable=one["save_rule"] != "none",
            window_extra=one["window_extra_tokens"],
        )
        for one in geometry["groups"]
    )
    return Rules(
        groups,
        geometry["hash_block_tokens"],
        geometry["scheduler_block_tokens"],
        geometry["alignment_tokens"],
        partial=geometry["alignment_tokens"] < geometry["scheduler_block_tokens"],
        retention=geometry["retention_tokens"],
    )


def moved(geometry: dict[str, Any]) -> dict[str, int]:
    """Return bytes of a save and of a load, with masks (``saved``, ``loaded``) and without."""
    rules = rules_of(geometry)
    total = TOKENS // rules.alignment * rules.alignment
    boundaries = kept_boundaries(rules, TOKENS + 1)
    found = {"saved": 0, "loaded": 0, "all": 0}
    for group, one in enumerate(geometry["groups"]):
        rule, size = rules.groups[group], one["stored_bytes"]
        if not rule.stored:
            continue
        kept = kept_chunks(rules, group, start_tokens=0, tokens=total, boundaries=boundaries)
        needed = needed_chunks(rule, local_tokens=0, total_tokens=total)
        found["saved"] += len(kept) * size
        found["loaded"] += len(needed) * size
        found["all"] += total // rule.block * size
    return found


def run(quick: bool) -> dict[str, object]:
    """Return the figures; ``quick`` changes nothing."""
    del quick
    figures: list[Figure] = []
    details = {}
    for model, geometry in json.loads(GEOMETRIES.read_text()).items():
        details[model] = found = moved(geometry)
        for what in ("loaded", "saved"):
            title = f"{model}: bytes {what} with masks, over all chunks"
            figures.append(plain(title, found[what] / found["all"], "x"))
    return {"figures": figures, "bytes": details, "tokens": TOKENS}


if __name__ == "__main__":
    bench_main(__doc__, run)
