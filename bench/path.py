"""Save and load through the whole path: engine hooks, sidecar, ledger, outcome, report.

A real engine (no attention: bench/engine.py) computes a prompt of 512 MiB of KV in one step; a save
counts from wait_for_save to the report in update_connector_output, a load from the request's
arrival (so with probe, ask and lease) to its report. Checksums on. The first load is compared with
the saved bytes. The reference is one thread's memcpy between two touched shared mappings, timed
between the rounds; the sidecar copies with one thread.
"""

from __future__ import annotations

from typing import Any

from bench.child import in_engine_process
from bench.common import Figure, at_least, bench_main, percentile, plain
from bench.sidecar import running_sidecar

BLOCKS, LAYERS = 64, 32
GOAL_RATIO, LATER_RATIO = 0.6, 0.85


def run(quick: bool) -> dict[str, object]:
    """Return ratios to memcpy and CPU seconds per GB."""
    blocks = 16 if quick else BLOCKS
    setup = {"blocks": blocks, "layers": LAYERS, "rounds": 3 if quick else 7}
    prompt_bytes = blocks * LAYERS * (256 << 10)
    flags = ("--copy-threads", "1", "--slab-bytes", "64MiB", "--log-level", "warning")
    with running_sidecar(3 * prompt_bytes + (256 << 20), flags) as sidecar:
        setup |= {"run_dir": str(sidecar.run_dir), "sidecar_pid": sidecar.pid}
        result: dict[str, Any] = in_engine_process("bench.path_child", setup)
    figures = [figure for name in ("saves", "loads") for figure in _figures(name, result)]
    return {
        "figures": figures,
        "reference": "memcpy of one thread between two touched shared mappings, same run",
        "later_goal_ratio": LATER_RATIO,
        **result,
    }


def _figures(name: str, result: dict[str, Any]) -> list[Figure]:
    rounds, what = result[name], name[:-1]
    rates = [one["gb_per_s"] for one in rounds]
    memcpy = result["memcpy_gb_per_s"]
    figures = [
        at_least(
            f"{what}: best GB/s over memcpy's", max(rates) / memcpy, "x", GOAL_RATIO,
            gb_per_s=round(max(rates), 3), memcpy_gb_per_s=round(memcpy, 3),
            median_ratio=round(percentile(rates, 50) / memcpy, 3),
        )
    ]  # fmt: skip
    # Its pages are touched for the first time by the sidecar, which costs a fault each.
    figures.append(
        plain(f"{what}: first round after attach, over memcpy's", rates[0] / memcpy, "x")
    )
    for side in ("sidecar", "hooks"):
        values = [one[f"{side}_cpu_s_per_gb"] for one in rounds]
        figures.append(plain(f"{what}: CPU of the {side}", percentile(values, 50), "s per GB"))
    return figures


if __name__ == "__main__":
    bench_main(__doc__, run)
