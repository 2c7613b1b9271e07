"""``kvferry demo``: time to the first token with a warm store over that with a cold one."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from kvferry_demo.processes import in_environment, kvferry_command

from bench.common import Figure, bench_main, plain

DEADLINE_S = 600.0


def run(quick: bool) -> dict[str, object]:
    """Return warm over cold per prompt. Raises RuntimeError when the demo says it failed."""
    with tempfile.TemporaryDirectory(prefix="kvf-bench-") as name:
        report = Path(name) / "demo.json"
        command = [*kvferry_command(), "demo", "--json", os.fspath(report)]
        command += ["--prompts", "3"] if quick else []
        done = subprocess.run(
            in_environment({}, command),
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"the demo ended with {done.returncode}:\n{done.stderr[-4000:]}")
        rows = json.loads(report.read_text())["prompts"]
    figures: list[Figure] = [
        plain(
            f"prompt {number} of {row['tokens']} tokens: warm over cold TTFT",
            row["ttft_warm_ms"] / row["ttft_cold_ms"],
            "x",
            hit_tokens=row["hit_tokens"],
            cold_ms=row["ttft_cold_ms"],
            warm_ms=row["ttft_warm_ms"],
        )
        for number, row in enumerate(rows)
    ]
    return {"figures": figures, "reference": "the same prompt, first engine process, same run"}


if __name__ == "__main__":
    bench_main(__doc__, run)
