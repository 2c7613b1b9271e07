"""Run the benches, write bench/results/latest.json, print a table: ``python -m bench.run``.

A missed goal is shown, never an error: the exit code is 1 only when a bench could not run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.common import Figure, at_least, machine

BENCHES = (
    "copy_engine",
    "index",
    "policies",
    "curve",
    "growth",
    "moved",
    "masks",
    "probe",
    "hooks",
    "path",
    "saves",
    "memory",
    "observe",
    "stores",
    "behind",
    "endurance",
    "recovery",
    "demo",
)
RESULTS = Path(__file__).parent / "results" / "latest.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run, write and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(BENCHES)} (all)")
    parser.add_argument("--quick", action="store_true", help="small and short: a smoke test")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(BENCHES)
    if unknown:
        parser.error(f"no bench {', '.join(sorted(unknown))}; there are: {', '.join(BENCHES)}")
    report: dict[str, object] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": options.quick,
        "machine": machine(),
    }
    console = Console(stderr=True)
    benches = {}
    for name in options.names or BENCHES:
        console.print(f"bench {name} ...")
        benches[name] = run_bench(name, options.quick)
    report["benches"] = benches
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    Console(width=120).print(table(benches, str(report["machine"])))
    failed = [name for name, result in benches.items() if "error" in result]
    return 1 if failed else 0


def run_bench(name: str, quick: bool) -> dict[str, object]:
    """Return a bench's figures and details, or its error."""
    start = time.monotonic()
    try:
        result: dict[str, object] = importlib.import_module(f"bench.{name}").run(quick)
    except Exception as error:  # noqa: BLE001 - the others still run; the report says what failed
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    if "figures" not in result:
        result = {"figures": copy_figures(result), **result}
    return result | {"took_s": round(time.monotonic() - start, 1)}


def copy_figures(result: dict[str, object]) -> list[Figure]:
    """Return the copy engine's worst ratio over the runs, per direction, checksum and block order.

    Ascending block ids are what a block pool hands out when it is young, shuffled ones what it
    hands out in the end: both count.
    """
    worst: dict[str, tuple[float, str, float]] = {}
    cases = result["cases"]
    assert isinstance(cases, dict)
    for case, measured in cases.items():
        if "target" in measured:
            direction, _, crc, order = case.split("/")
            key = f"{direction}, {'with CRC' if crc == 'crc' else 'CRC off'}, {order} blocks"
            one = (measured["ratio"], case, measured["target"])
            worst[key] = min(worst.get(key, one), one)
    return [
        at_least(f"{key}: worst of the runs of 4 KiB to 1 MiB, over memcpy's", ratio, "x", goal,
                 case=case)
        for key, (ratio, case, goal) in worst.items()
    ]  # fmt: skip


def table(benches: dict[str, dict[str, object]], machine_line: str) -> Table:
    """Return all figures as a table for people."""
    shown = Table(title="kvferry benches", caption=machine_line, title_justify="left")
    for column, justify in (("bench", "left"), ("figure", "left"), ("value", "right"),
                            ("unit", "left"), ("goal", "right"), ("", "left")):  # fmt: skip
        shown.add_column(column, justify=justify)
    for name, result in benches.items():
        if "error" in result:
            shown.add_row(name, str(result["error"]).splitlines()[0], "", "", "", "failed")
        figures = result.get("figures", [])
        assert isinstance(figures, list)
        for figure in figures:
            met = figure.get("met")
            verdict = "" if met is None else "met" if met else "missed"
            value = f"{figure['value']:,.4g}"
            goal = str(figure.get("goal", ""))
            shown.add_row(name, str(figure["name"]), value, str(figure["unit"]), goal, verdict)
        shown.add_section()
    return shown


if __name__ == "__main__":
    raise SystemExit(main())
