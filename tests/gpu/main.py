"""The GPU checks: `python -m gpu.main [--only A1,B1] [--seconds 450] [--small] [--out FILE]`.

One JSON line per step as it ends, the machine first and a count of verdicts last: a run that is
killed leaves what it had found. `--table FILE` shows the goals in such lines as rows of
docs/benchmarks.md. Exit code: 0 when every step that must hold passed or is refused by this
machine (`env`), 1 when one of them failed, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from gpu.runner import Step, run_all

# In the order in which their answers matter; together under eight minutes.
STEPS = (
    Step("A1-open-close", "gpu.ipc:open_close", 30, needed=True),
    Step("A2-virtual", "gpu.ipc:virtual", 15),
    Step("A3-pid-clash", "gpu.ipc:pid_clash", 20),
    Step("A4-identity", "gpu.ipc:identity", 15),
    Step("B1-fence", "gpu.fence:order", 50, needed=True),
    Step("B4-fence-to-copy", "gpu.start:word_to_copy", 30),
    Step("B2-events-again", "gpu.fence:recorded_again", 15),
    Step("B3-events-shared", "gpu.ipc:events", 20),
    Step("C-conformance", "gpu.copies:conformance", 110, needed=True),
    Step("W-whole-sidecar", "gpu.whole:on_gpu", 90, needed=True),
    Step("F-interference", "gpu.load:interference", 70),
    Step("D-bandwidth", "gpu.copies:bandwidth", 90),
    Step("D2-checksums", "gpu.copies:checksummed", 40),
    Step("E-pinning", "gpu.pinning:pin", 50),
    Step("G1-exporter-killed", "gpu.deaths:exporter", 25, needed=True),
    Step("G2-importer-killed", "gpu.deaths:importer", 25, needed=True),
    Step("G3-goodbyes", "gpu.deaths:goodbyes", 10),
    Step("H-footprint", "gpu.pinning:footprint", 15),
    Step("I-direct-rdma", "gpu.ipc:direct_rdma", 10),
)


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    shm = shutil.disk_usage("/dev/shm")
    lock_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    query = (
        "name,driver_version,memory.total,memory.used,pcie.link.gen.current,pcie.link.width.current"
    )
    return {
        "kernel": platform.release(), "python": platform.python_version(),
        "cpus": os.cpu_count(), "shm_bytes": shm.total, "memlock_bytes": lock_bytes,
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "gpus": _output(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]),
    }  # fmt: skip


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout.strip() or done.stderr.strip()


def chosen(only: str) -> list[Step]:
    """Return the steps of which a name begins with one of these. Raises ValueError for none."""
    wanted = [name for name in only.split(",") if name]
    for name in wanted:
        if not any(step.name.startswith(name) for step in STEPS):
            raise ValueError(f"no step {name!r}; there are {', '.join(s.name for s in STEPS)}")
    return [s for s in STEPS if not wanted or any(s.name.startswith(name) for name in wanted)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gpu.main", description=__doc__)
    parser.add_argument("--only", default="", help="names of steps, or how they begin")
    parser.add_argument("--seconds", type=float, default=450, help="for all of them")
    parser.add_argument("--small", action="store_true", help="small sizes, of a fake GPU")
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    parser.add_argument("--table", type=Path, help="run nothing, show the goals in this file")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print("\n".join(rows(options.table.read_text().splitlines())))
        return 0
    started_s = time.monotonic()
    try:
        steps = chosen(options.only)
    except ValueError as error:
        parser.error(str(error))
    file = options.out.open("a") if options.out else None

    verdicts: Counter[str] = Counter()

    def report(line: dict[str, Any]) -> None:
        verdicts.update([line["verdict"]] if "step" in line else [])
        for stream in (sys.stdout, file):
            _write(stream, line)

    try:
        report({"machine": machine(), "small": options.small})
        left_s = options.seconds - (time.monotonic() - started_s)
        code = run_all(steps, report, small=options.small, seconds=left_s)
        report({"verdicts": verdicts, "exit_code": code})
        return code
    finally:
        if file is not None:
            file.close()


def rows(lines: Iterable[str]) -> list[str]:
    """Return a row of Markdown per goal; a step that ran again counts by its last line."""
    shown: dict[str, str] = {}
    small = False
    for line in map(json.loads, lines):
        small = line.get("small", small)  # in the line of the machine
        goals = [] if small else line.get("figures", {}).get("goals", [])
        for goal in goals:
            met = {None: "", True: "met", False: "missed"}[goal.get("met")]
            value = f"{goal['value']} {goal['unit']}"
            cells = ("gpu", goal["name"], value, goal.get("goal", ""), met)
            shown[goal["name"]] = f"| {' | '.join(cells)} |"
    return list(shown.values())


def _write(stream: TextIO | None, line: dict[str, Any]) -> None:
    if stream is not None:
        print(json.dumps(line), file=stream, flush=True)


if __name__ == "__main__":
    sys.exit(main())
