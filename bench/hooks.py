"""Connector time in hooks per engine step, net of a connector that does nothing.

One real engine (no attention: bench/engine.py) runs requests with FerryConnector and a real
sidecar, and by turns with bench/null_connector.py. Every public method of both connectors' objects
is wrapped with the same clock; the null connector's time, clock included, is subtracted. ``median``
is the step on which nothing completes; ``mean`` has the saves of what is generated in it, each
request's once in a round of 512 steps, and is that of the best round.
"""

from __future__ import annotations

from typing import Any

from bench.child import in_engine_process
from bench.common import Figure, at_most, bench_main, plain
from bench.sidecar import running_sidecar

POOL_BYTES = 512 << 20
GOALS_US = {"1": 4.0, "8": 11.0, "32": 19.0}
PROBE_GOALS_MS = {"8192": 0.1, "131072": 0.5}
PROBE_BYTES_RATIO = 1.1


def run(quick: bool) -> dict[str, object]:
    """Return us per step net of the null connector, and what probes cost."""
    steps = {"what": "steps", "block_tokens": 128, "turns": 1 if quick else 5,
             "rounds": 5 if quick else 20}  # fmt: skip
    probes = {"what": "probes", "block_tokens": 16, "rounds": 10 if quick else 40}
    with running_sidecar(POOL_BYTES, ("--log-level", "warning")) as sidecar:
        run_dir = {"run_dir": str(sidecar.run_dir)}
        step: dict[str, Any] = in_engine_process("bench.hooks_child", steps | run_dir)
        probe: dict[str, Any] = in_engine_process("bench.hooks_child", probes | run_dir)
    if step["hook_errors"] or probe["hook_errors"]:
        raise RuntimeError("hooks raised: the figures would be of the error path")
    figures = _steps(step["ferry"], step["null"]) + _probes(probe["ferry"], probe["null"])
    return {
        "figures": figures,
        "reference": "the same clock around a connector that does nothing, same engine, by turns",
        "ferry": step["ferry"], "null": step["null"], "probes": probe,
    }  # fmt: skip


def _steps(own: dict[str, Any], null: dict[str, Any]) -> list[Figure]:
    figures: list[Figure] = []
    for count, goal in GOALS_US.items():
        mine, floor = own["running"][count], null["running"][count]
        for kind in ("median", "mean"):
            key = f"{kind}_us"
            title = f"{count} running: hooks per step, {kind}, net"
            figures.append(at_most(title, mine[key] - floor[key], "us", goal, null=floor[key]))
    floor_us = null["prefill"]["median_us"]
    net_us = own["prefill"]["median_us"] - floor_us
    figures.append(plain("step that saves 16 chunks, median, net", net_us, "us", null=floor_us))
    loads = own["loads"]
    net_us = loads["median_us"] - null["running"]["1"]["median_us"]
    title = f"step with {loads['pending']} loads pending, 1 running, median, net"
    figures.append(plain(title, net_us, "us"))
    store_ns, call_ns = own["fence_ns"], null["fence_ns"]
    title = "fence store, over a method call that does nothing"
    figures.append(plain(title, store_ns / call_ns, "x", store_ns=store_ns, call_ns=call_ns))
    return figures


def _probes(own: dict[str, Any], null: dict[str, Any]) -> list[Figure]:
    figures: list[Figure] = []
    for tokens, goal in PROBE_GOALS_MS.items():
        mine, floor = own[tokens], null[tokens]
        net_ms = (mine["median_us"] - floor["median_us"]) / 1e3
        title = f"probe of {tokens} tokens ({mine['hashes']} hashes): hook time, median, net"
        figures.append(at_most(title, net_ms, "ms", goal))
        title = f"probe of {tokens} tokens: bytes over bytes of its hashes"
        ratio = mine["probe_bytes"] / mine["hashes_bytes"]
        figures.append(at_most(title, ratio, "x", PROBE_BYTES_RATIO))
    return figures


if __name__ == "__main__":
    bench_main(__doc__, run)
