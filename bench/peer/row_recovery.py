"""Row 6: the server is killed idle, during a load, during a save, and started again after 3 s."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.peer.figures import Row, compared
from bench.peer.rig import rig
from bench.peer.variants import CACHES, FERRY, LMCACHE

MOMENTS = ("idle", "load", "save")
RESTART_S = 3.0
OBSERVE_S = 60.0
POOL_BYTES = 2 << 30
TARGET = 5.0
ENGINE: dict[str, object] = {
    "kv_cache_bytes": 288 << 20, "max_model_len": 8448, "max_num_seqs": 12,
    "max_num_batched_tokens": 8448, "engine_args": {"block_size": 128},
    "connector_extra": {"pinned_blocks_max": 128},  # the long prompts take half of the blocks
}  # fmt: skip
MODEL: dict[str, object] = {
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip


def measure(quick: bool, times: int) -> dict[str, Any]:
    """Return what ``times`` runs of each scenario found, by moment and cache."""
    moments = MOMENTS[1:2] if quick else MOMENTS
    return {
        moment: {name: over([_scenario(name, moment) for _ in range(times)]) for name in CACHES}
        for moment in moments
    }


def over(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of times and shares, the most that hung or failed, and the number of runs.

    ``back_s`` is absent unless hits came back in every run; ``back``: in how many.
    """
    back = [one["back_s"] for one in runs if "back_s" in one]
    found: dict[str, Any] = {
        key: statistics.median(one[key] for one in runs)
        for key in ("usual_gap_ms", "longest_gap_ms", "share", "server_start_s")
    }
    found |= {key: max(one[key] for one in runs) for key in ("hung", "failed")}
    found["subject"] = ", ".join(sorted({one["subject"] for one in runs}))
    found["engine_died"] = next((one["engine_died"] for one in runs if one["engine_died"]), "")
    found |= {"runs": len(runs), "back": len(back)}
    return found | ({"back_s": statistics.median(back)} if len(back) == len(runs) else {})


def _scenario(name: str, moment: str) -> dict[str, Any]:
    print(f"   {name}, {moment}", flush=True)
    with rig((name,), "recovery", pool_bytes=POOL_BYTES, model=MODEL, engine=ENGINE) as it:
        engine, server = it.engines[name], it.servers[name]
        engine.call("prepare")
        engine.begin("scenario", moment=moment, observe_s=OBSERVE_S)
        event = engine.reply()
        if event != {"event": "killed"}:
            raise RuntimeError(f"{event} instead of the kill")
        server.kill()  # dead already: this waits for its end
        time.sleep(RESTART_S)  # what the row is about
        began_s = time.monotonic()
        server.start()
        started_s = time.monotonic() - began_s
        return engine.reply() | {"server_start_s": started_s}


def rows(result: dict[str, Any]) -> list[Row]:
    """Return the table's rows."""
    made = []
    for moment, by_name in result.items():
        ferry, lmcache = by_name[FERRY], by_name[LMCACHE]
        when = f"killed {'idle' if moment == 'idle' else f'during a {moment}'}"
        made.append(_back(when, ferry, lmcache))
        made.append(
            Row(
                f"{when}: cached bytes still hits", "%", ferry["share"] * 100,
                lmcache["share"] * 100,
                ferry["share"] / lmcache["share"] if lmcache["share"] else None, 1.0,
            )
        )  # fmt: skip
        made.append(
            compared(
                f"{when}: longest stall of unrelated requests", "ms", ferry["longest_gap_ms"],
                lmcache["longest_gap_ms"],
                note=f"usual: {ferry['usual_gap_ms']:.0f}, {lmcache['usual_gap_ms']:.0f} ms",
            )
        )  # fmt: skip
        made.append(Row(f"{when}: requests hung, failed", "", _lost(ferry), _lost(lmcache)))
    return made


def _back(when: str, ferry: dict[str, Any], lmcache: dict[str, Any]) -> Row:
    def shown(one: dict[str, Any]) -> float | str:
        times = f"; in {one['back']} of {one['runs']} runs" if one["back"] else ""
        return one.get("back_s") or f"not within {OBSERVE_S:.0f} s{times}"

    started = f"servers took {ferry['server_start_s']:.1f}, {lmcache['server_start_s']:.1f} s"
    name = f"{when}: hits are back after"
    if "back_s" not in ferry or "back_s" not in lmcache:
        return Row(name, "s", shown(ferry), shown(lmcache), note=started)
    return compared(name, "s", ferry["back_s"], lmcache["back_s"], target=TARGET, note=started)


def _lost(one: dict[str, Any]) -> str:
    died = f"; the engine died: {one['engine_died']}" if one["engine_died"] else ""
    return f"{one['hung']}, {one['failed']}{died}"


def runs(result: dict[str, Any]) -> str:
    """Return how often this was measured."""
    (times,) = {one["runs"] for by_name in result.values() for one in by_name.values()}
    if times == 1:
        return "A single run of each moment."
    return f"Medians of {times} runs of each moment; of what hung or failed, the most in one run."
