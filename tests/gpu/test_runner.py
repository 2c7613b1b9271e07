"""The runner of `make gpu`: deadlines, verdicts, arguments; and the steps over the fake GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu import runner
from gpu.main import STEPS, chosen, main
from gpu.runner import TESTS, Sizes, Step, run, run_all
from gpu.verdicts import refused, verdict_of
from kvferry_connector.cuda import CudaError as EngineError
from kvferry_connector.cuda import Driver as EngineDriver
from kvferry_sidecar.engines.cuda_driver import error_of
from support.fake_cuda import FakeGpu, as_driver, library
from support.waiting import wait_until

from bench.common import at_least, plain

# Steps need torch for CUDA, or last long; all others run here.
NOT_HERE = ("C-", "F-", "W-")


def passes(_sizes: Sizes) -> dict[str, Any]:
    return {"small": _sizes.small}


def crashes(_sizes: Sizes) -> None:
    os.abort()


HERE = "gpu.test_runner"


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {**as_driver(), "TOLD": str(tmp_path / "told")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{TESTS.parent}")


def test_a_step_that_hangs_loses_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "last_words_s_max", 60.0)
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
    assert "in hangs" in lines[0]["stacks"]
    assert "code -6" in lines[1]["why"]
    assert "in crashes" in lines[1]["stderr"]
    child = Path("/proc") / told.read_text()
    wait_until(lambda: not child.exists() or "Z" in state(child), "the step's child is gone")


def state(process: Path) -> str:
    return (process / "stat").read_text().rsplit(")", 1)[1]


def test_what_no_time_is_left_for_says_so() -> None:
    lines: list[dict[str, Any]] = []
    steps = [Step("fine", f"{HERE}:passes", 60, needed=True)]
    assert run_all(steps, lines.append, small=True, seconds=0.5) == 0
    assert lines[0]["verdict"] == "skipped"


@pytest.mark.parametrize(
    ("call", "code", "allowed"),
    [
        *(("cuInit", code, False) for code in (3, 34, 100, 999)),
        ("cuDevicePrimaryCtxRetain", 46, False),
        *(("cuIpcOpenMemHandle_v2", code, False) for code in (205, 304, 800, 801, 999)),
        ("cuIpcOpenMemHandle_v2", 1, True),
        ("cuIpcGetMemHandle", 801, False),
        ("cuMemHostRegister_v2", 2, False),
        ("cuMemHostRegister_v2", 304, False),
        ("cuStreamWriteValue64_v2", 801, False),
        ("cuStreamWriteValue64_v2", 700, True),
        *(("cuMemcpy2DAsync_v2", code, True) for code in (1, 801, 999)),
        ("cuNew", 500, False),
    ],
)
def test_what_a_machine_may_refuse(call: str, code: int, allowed: bool) -> None:
    assert refused(str(error_of(call, code))) is not allowed

    def work() -> None:
        raise RuntimeError(f"the other process: {error_of(call, code)}")

    assert verdict_of(work)["verdict"] == ("fail" if allowed else "env")


def test_an_engine_is_refused_in_words_that_are_understood(gpu: FakeGpu) -> None:
    driver = EngineDriver(str(library()))
    gpu.fail("cuDeviceGet", 801)
    with pytest.raises(EngineError) as caught:
        driver.export(0, 0)
    assert refused(str(caught.value))
    with pytest.raises(EngineError) as caught:
        EngineDriver("libcuda.so.0")
    assert refused(str(caught.value))


@pytest.mark.parametrize(
    ("name", "lost", "verdict"),
    [
        ("A1", "", "env"),  # no driver at all
        ("B3", "cuInit 999", "env"),
        ("A1", "cuIpcOpenMemHandle_v2 801", "env"),
        ("E", "cuMemHostRegister_v2 304", "env"),
        ("E", "cuMemHostUnregister 1", "pass"),  # only logged
        ("B2", "cuEventRecord 700", "fail"),
    ],
)
def test_a_step_tells_what_is_refused_from_what_is_wrong(
    name: str, lost: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lost").write_text(lost)
    monkeypatch.setenv("FAKE_CUDA_LOST", str(tmp_path / "lost"))
    if not lost:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    (step,) = chosen(f"{name}-")
    found = run(step, 150, small=True)
    assert found["verdict"] == verdict, found
    if verdict == "env":
        what, _, remedy = found["why"].partition(";")
        assert (lost.partition(" ")[0] or "no CUDA driver") in what
        assert remedy.strip()


def test_steps_are_chosen_by_the_beginning_of_their_name() -> None:
    assert chosen("") == list(STEPS)
    assert [step.name for step in chosen("A1,G")] == [
        "A1-open-close", "G1-exporter-killed", "G2-importer-killed", "G3-goodbyes",
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        main(["--only", "Z9"])


def test_every_step_exists() -> None:
    for step in STEPS:
        module, name = step.where.removeprefix("gpu.").split(":")
        assert f"def {name}(" in (TESTS / "gpu" / f"{module}.py").read_text(), step


def test_all_fit_into_eight_minutes_if_all_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that must hold get all of their time."""
    now_s = 0.0
    given: dict[str, float] = {}

    def late(step: Step, seconds_max: float, *, small: bool) -> dict[str, Any]:
        nonlocal now_s
        now_s += seconds_max + runner.ending_s_max
        given[step.name] = seconds_max
        return {"step": step.name, "verdict": "late"}

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(runner, "run", late)
    lines: list[dict[str, Any]] = []
    assert run_all(STEPS, lines.append, small=True, seconds=450) == 1
    assert sorted(line["step"] for line in lines) == sorted(step.name for step in STEPS)
    assert now_s <= 450 + runner.ending_s_max
    assert {step.name: given.get(step.name) for step in STEPS if step.needed} == {
        step.name: step.seconds_max for step in STEPS if step.needed
    }


def test_what_was_put_off_gets_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def quick(step: Step, seconds_max: float, *, small: bool) -> dict[str, Any]:
        ran.append(step.name)
        return {"step": step.name, "verdict": "pass"}

    monkeypatch.setattr(runner, "run", quick)
    steps = [Step("some", "", 50), Step("must", "", 50, needed=True), Step("last", "", 90)]
    for seconds, order in (
        (200, "some must last"),
        (100, "must last some"),
        (60, "must last some"),
    ):
        ran.clear()
        assert run_all(steps, lambda line: None, small=True, seconds=seconds) == 0
        assert ran == order.split()


def test_goals_become_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(value: float) -> dict[str, Any]:
        goals = [at_least("rate", value, "x", 0.9), plain("memory", 300, "MiB")]
        return {"step": "D", "figures": {"goals": goals}}

    lines = [{"machine": {}, "small": False}, step(0.5), {"step": "E"}, step(0.95)]
    file = tmp_path / "lines"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert main(["--table", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| gpu | rate | 0.95 x | >= 0.9 | met |",
        "| gpu | memory | 300.0 MiB |  |  |",
    ]


def test_the_steps_hold_over_a_gpu_made_of_host_memory(tmp_path: Path) -> None:
    out = tmp_path / "lines"
    only = ",".join(step.name for step in STEPS if not step.name.startswith(NOT_HERE))
    command = [sys.executable, "-m", "gpu.main", "--small", "--only", only, "--out", str(out)]
    subprocess.run(command, cwd=TESTS, check=True, stdout=subprocess.DEVNULL)
    machine, *lines, last = map(json.loads, out.read_text().splitlines())
    assert machine["machine"]["cpus"]
    assert last == {"verdicts": {"pass": len(lines)}, "exit_code": 0}
    verdicts = {line["step"]: line["verdict"] for line in lines}
    assert verdicts == dict.fromkeys(only.split(","), "pass")
    assert run(Step("F", "gpu.load:interference", 60), 60, small=True)["verdict"] == "env"
