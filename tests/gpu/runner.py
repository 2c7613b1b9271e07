"""Steps of `make gpu`: each a process of its own with its own deadline, one JSON line at its end.

A hang, a crash or a refusal of the sandbox loses that step only. A step is a function of a module;
it returns figures, or raises: `verdicts.Env` when this machine cannot do it, anything else when the
claim it checks is wrong.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from support.waiting import wait_until

TESTS = Path(__file__).parents[1]
last_words_s_max = 3.0  # of a step that is late: its stacks, those of its children, its end
ending_s_max = 3 * last_words_s_max
_VERDICT = '{"verdict"'  # how a step's last line begins
_SAID = 3000  # characters of what a step wrote that are reported; of stacks twice as many


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
    steps: Sequence[Step], report: Callable[[dict[str, Any]], None], *, small: bool, seconds: float
) -> int:
    """Run steps in order, report each as it ends; returns 1 when a needed one failed.

    One whose deadline would take time from needed ones after it is put off to the end.
    """
    end_s = time.monotonic() + seconds
    failed = False
    put_off: list[Step] = []

    def go(step: Step) -> None:
        nonlocal failed
        left_s = end_s - time.monotonic()
        if left_s < 1:
            why = f"no time of the {seconds:.0f} s is left for it"
            found = {"step": step.name, "verdict": "skipped", "why": why}
        else:
            found = run(step, min(step.seconds_max, left_s), small=small)
            failed |= step.needed and found["verdict"] not in ("pass", "env")
        report(found)

    for number, step in enumerate(steps):
        needed = [one for one in steps[number + 1 :] if one.needed]
        later_s = sum(one.seconds_max + ending_s_max for one in needed)
        fits = time.monotonic() + step.seconds_max + ending_s_max + later_s <= end_s
        if step.needed or fits or not needed:
            go(step)
        else:
            put_off.append(step)
    for step in put_off:
        go(step)
    return int(failed)


def run(step: Step, seconds_max: float, *, small: bool) -> dict[str, Any]:
    """Run one step in a process group of its own, which is killed at the deadline.

    It writes to files: whatever it leaves behind keeps nobody waiting here.
    """
    started_s = time.monotonic()
    command = [sys.executable, "-m", "gpu.step", step.where, *(["--small"] if small else [])]
    with _file() as out, _file() as err:
        process = subprocess.Popen(
            command, cwd=TESTS, stdout=out, stderr=err, start_new_session=True,
            env=os.environ | {"PYTHONFAULTHANDLER": "1"},
        )  # fmt: skip
        late = not _ends(process, seconds_max)
        if late:
            _signal(process, signal.SIGABRT)  # every Python of the group writes its stacks
            _ends(process, last_words_s_max)
            with suppress(AssertionError):
                wait_until(lambda: not _signal(process, 0), "all of it ended", last_words_s_max)
        _signal(process, signal.SIGKILL)  # and what the step left behind
        stays = not _ends(process, last_words_s_max)
        said, complained = _read(out), _read(err)
    if late:
        why = f"not ended after {seconds_max:.0f} s"
        found = {"verdict": "late", "why": why, "stacks": complained[-2 * _SAID :]}
    else:
        found = _verdict(said, process.returncode)
    if found["verdict"] == "fail":
        lines = [line for line in said.splitlines() if not line.startswith(_VERDICT)]
        found |= {"stdout": "\n".join(lines)[-_SAID:], "stderr": complained[-_SAID:]}
    if stays:
        found["stays"] = f"process {process.pid} cannot be killed: the driver holds it"
    return {"step": step.name, **found, "wall_s": round(time.monotonic() - started_s, 2)}


def _ends(process: subprocess.Popen[bytes], seconds_max: float) -> bool:
    try:
        process.wait(seconds_max)
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to what is left of a step's group; False: nothing is."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def _file() -> IO[str]:
    return tempfile.TemporaryFile("w+", errors="replace")


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _verdict(out: str, code: int) -> dict[str, Any]:
    for line in reversed(out.splitlines()):
        if line.startswith(_VERDICT):
            found: dict[str, Any] = json.loads(line)
            return found
    return {"verdict": "fail", "why": f"ended with code {code}"}
