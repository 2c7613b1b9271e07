"""Steps of `make gpu`: each a process of its own with its own deadline, one JSON line at its end.

A hang, a crash or a refusal of the sandbox loses that step only. A step is a function of a module;
it returns figures, or raises: `Env` when this machine cannot do it, anything else when the claim it
checks is wrong.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
# Codes of the driver by which a sandbox or a device refuses what other machines allow.
REFUSED_CODES = frozenset({100, 205, 304, 500, 800, 801, 999})
VERDICTS = ("pass", "env", "fail", "late", "skipped")


class Env(Exception):  # noqa: N818 - a verdict, not an error
    """This machine does not allow what the step needs."""


@dataclass(frozen=True, slots=True)
class Step:
    """``where`` is "module:function"; ``needed``: a failure of it fails the run."""

    name: str
    where: str
    seconds_max: float
    needed: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the steps move. ``small`` is for a GPU made of host memory."""

    small: bool = False

    @property
    def big_bytes(self) -> int:
        return 1 << 20 if self.small else 24 << 30

    @property
    def fill_bytes(self) -> int:
        return 1 << 20 if self.small else 64 << 20

    @property
    def pool_bytes(self) -> int:
        return 16 << 20 if self.small else 8 << 30

    @property
    def rounds(self) -> int:
        return 5 if self.small else 200


def run_all(
    steps: Iterable[Step], report: Callable[[dict[str, Any]], None], *, small: bool, seconds: float
) -> int:
    """Run steps in order, report each as it ends; returns 1 when a needed one failed."""
    end_s = time.monotonic() + seconds
    failed = False
    for step in steps:
        left_s = end_s - time.monotonic()
        if left_s < 1:
            report({"step": step.name, "verdict": "skipped", "why": f"{seconds:.0f} s are over"})
            continue
        found = run(step, min(step.seconds_max, left_s), small=small)
        report(found)
        failed |= step.needed and found["verdict"] not in ("pass", "env")
    return int(failed)


def run(step: Step, seconds_max: float, *, small: bool) -> dict[str, Any]:
    """Run one step in a process group of its own, which is killed at the deadline."""
    started_s = time.monotonic()
    command = [sys.executable, "-m", "gpu.step", step.where, *(["--small"] if small else [])]
    process = subprocess.Popen(
        command, cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=seconds_max)
        found = _verdict(out, process.returncode)
        if found["verdict"] == "fail":
            found["stderr"] = err[-1500:]
    except subprocess.TimeoutExpired:
        found = {"verdict": "late", "why": f"not ended after {seconds_max:.0f} s"}
    finally:
        _end_group(process)
    return {"step": step.name, **found, "wall_s": round(time.monotonic() - started_s, 2)}


def _end_group(process: subprocess.Popen[str]) -> None:
    """Kill what a step left behind, and reap it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _verdict(out: str, code: int) -> dict[str, Any]:
    for line in reversed(out.splitlines()):
        if line.startswith('{"verdict"'):
            return json.loads(line)
    return {"verdict": "fail", "why": f"ended with code {code}"}


def verdict_of(work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """Run a step here and return its verdict."""
    try:
        return {"verdict": "pass", "figures": work() or {}}
    except Env as refusal:
        return {"verdict": "env", "why": str(refusal)}
    except Exception as error:  # noqa: BLE001 - every way to fail is a verdict
        if getattr(error, "code", 0) in REFUSED_CODES:
            return {"verdict": "env", "why": str(error)}
        return {"verdict": "fail", "why": f"{type(error).__name__}: {error}",
                "end": traceback.format_exc()[-2000:]}  # fmt: skip
