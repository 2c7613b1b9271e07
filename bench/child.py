"""Run one function of a bench module in a process with a real engine: environment, JSON in and out.

``python -m bench.child MODULE SETUP.json RESULT.json`` imports MODULE and calls its
``measure(setup)``; ``in_engine_process`` is the other side.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvferry_demo.processes import ENGINE_ENVIRONMENT, in_environment

DEADLINE_S = 420.0


def in_engine_process(
    module: str, setup: dict[str, object], environment: Mapping[str, str] | None = None
) -> dict[str, object]:
    """Return what ``module.measure(setup)`` returned. Raises RuntimeError, with its log."""
    with tempfile.TemporaryDirectory(prefix="kvf-bench-") as name:
        folder = Path(name)
        (folder / "setup.json").write_text(json.dumps(setup | {"folder": name}))
        command = [sys.executable, "-m", "bench.child", module]
        files = [str(folder / "setup.json"), str(folder / "result.json")]
        done = subprocess.run(
            in_environment({**ENGINE_ENVIRONMENT, **(environment or {})}, [*command, *files]),
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"{module} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        result: dict[str, object] = json.loads((folder / "result.json").read_text())
        return result


def main(arguments: list[str]) -> int:
    """Measure and write the result."""
    module, setup, result = arguments
    measured = importlib.import_module(module).measure(json.loads(Path(setup).read_text()))
    Path(result).write_text(json.dumps(measured))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
