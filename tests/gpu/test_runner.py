"""The runner of `make gpu`: deadlines, verdicts, arguments; and the steps over the fake GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu import runner
from gpu.main import STEPS, chosen, main
from gpu.runner import TESTS, Env, Sizes, Step, run, run_all, verdict_of
from kvferry_sidecar.engines.cuda_driver import error_of
from support.fake_cuda import as_driver
from support.waiting import wait_until

# Steps need torch for CUDA, or last long; all others run here.
NOT_HERE = ("C-", "F-", "H-", "W-")


def passes(_sizes: Sizes) -> dict[str, Any]:
    return {"small": _sizes.small}


def crashes(_sizes: Sizes) -> None:
    os.abort()


HERE = "gpu.test_runner"


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {**as_driver(), "TOLD": str(tmp_path / "told")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def test_a_step_that_hangs_loses_only_itself(tmp_path: Path) -> None:
    told = tmp_path / "told"
    for seconds in (8, 60):  # a machine that stands still may take a short time before it hangs
        lines: list[dict[str, Any]] = []
        steps = [
            Step("late", "gpu.hangs:hangs", seconds, needed=True),
            Step("crash", f"{HERE}:crashes", 150),
            Step("fine", f"{HERE}:passes", 150),
        ]
        assert run_all(steps, lines.append, small=True, seconds=400) == 1
        if told.exists():
            break
    assert [line["verdict"] for line in lines] == ["late", "fail", "pass"]
    assert lines[2]["figures"] == {"small": True}
    assert "code -6" in lines[1]["why"]
    child = Path("/proc") / told.read_text()
    wait_until(lambda: not child.exists() or "Z" in state(child), "the step's child is gone")


def state(process: Path) -> str:
    return (process / "stat").read_text().rsplit(")", 1)[1]


def test_what_no_time_is_left_for_says_so() -> None:
    lines: list[dict[str, Any]] = []
    steps = [Step("fine", f"{HERE}:passes", 60, needed=True)]
    assert run_all(steps, lines.append, small=True, seconds=0.5) == 0
    assert lines[0]["verdict"] == "skipped"


@pytest.mark.parametrize("code", sorted(runner.REFUSED_CODES))
def test_a_refusal_of_the_sandbox_is_no_failure(code: int) -> None:
    def refused() -> None:
        raise error_of("cuIpcGetMemHandle", code)

    assert verdict_of(refused)["verdict"] == "env"


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (Env("no namespaces"), "env"),
        (AssertionError("other bytes"), "fail"),
        (error_of("cuMemcpy2DAsync_v2", 1), "fail"),
        (AttributeError("no such thing"), "fail"),
        (error_of("cuNew", 500), "env"),
    ],
)
def test_what_else_ends_a_step(error: Exception, verdict: str) -> None:
    def work() -> None:
        raise error

    found = verdict_of(work)
    assert found["verdict"] == verdict
    assert str(error) in found["why"]


def test_steps_are_chosen_by_the_beginning_of_their_name() -> None:
    assert chosen("") == list(STEPS)
    assert [step.name for step in chosen("A1,G")] == [
        "A1-open-close", "G1-exporter-killed", "G2-importer-killed", "G3-goodbyes",
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        main(["--only", "Z9"])


def test_every_step_exists_and_all_fit_into_eight_minutes() -> None:
    for step in STEPS:
        module, name = step.where.removeprefix("gpu.").split(":")
        assert f"def {name}(" in (TESTS / "gpu" / f"{module}.py").read_text(), step
    needed_s = sum(step.seconds_max for step in STEPS if step.needed)
    assert needed_s < 450 - 60


def test_the_steps_hold_over_a_gpu_made_of_host_memory(tmp_path: Path) -> None:
    out = tmp_path / "lines"
    only = ",".join(step.name for step in STEPS if not step.name.startswith(NOT_HERE))
    command = [sys.executable, "-m", "gpu.main", "--small", "--only", only, "--out", str(out)]
    subprocess.run(command, cwd=TESTS, check=True, stdout=subprocess.DEVNULL)
    machine, *lines = map(json.loads, out.read_text().splitlines())
    assert machine["machine"]["cpus"]
    verdicts = {line["step"]: line["verdict"] for line in lines}
    assert verdicts == dict.fromkeys(only.split(","), "pass")
    assert run(Step("F", "gpu.load:interference", 60), 60, small=True)["verdict"] == "env"
