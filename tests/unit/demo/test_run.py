"""The demo's verdict and the children's handling, without an engine."""

from __future__ import annotations

import json
import secrets
import signal
import sys
from pathlib import Path

import pytest
from kvferry_demo import processes, run
from kvferry_demo.processes import Child, ChildError, Engine, in_environment
from kvferry_demo.prompts import cut_prompts
from kvferry_demo.protocol import EngineSetup
from kvferry_demo.run import Report, Row
from support.group import GroupChild, members
from support.waiting import wait_until


def row(*, hit_tokens: int = 384, identical: bool = True, own_hit: bool = False) -> Row:
    return Row(500, hit_tokens, hit_tokens * 2048, 20.0, 10.0, identical, own_hit=own_hit)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([row(), row()], ""),
        ([row(), row(hit_tokens=0)], ""),
        ([row(hit_tokens=0), row(hit_tokens=0)], "nothing hit"),
        ([row(), row(identical=False)], "1 of 2 outputs differ"),
        ([row(), row(identical=False, own_hit=True)], ""),
    ],
)
def test_verdict(rows: list[Row], complaint: str) -> None:
    verdict = Report("llama", rows).verdict()
    assert verdict.startswith(complaint)
    assert bool(verdict) == bool(complaint)


@pytest.mark.parametrize(
    ("rows", "code", "words"),
    [
        ([row(), row()], 0, "all 2 outputs are identical; 768 of 1,000 tokens hit"),
        ([row(), row(identical=False)], 1, "1 of 2 outputs differ"),
        ([row(), row(identical=False, own_hit=True)], 0, "but 1, where vLLM's own hits differ"),
        ([row(hit_tokens=0), row(hit_tokens=0)], 1, "nothing hit"),
    ],
)
def test_what_it_prints_writes_and_returns(
    rows: list[Row], code: int, words: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(run, "_measure", lambda model, *_: Report(model, rows))
    file = tmp_path / "demo.json"
    assert run.run_demo("qwen3", 2, str(file)) == code
    printed = capsys.readouterr()
    assert words in printed.out + printed.err
    head, *lines = printed.out.splitlines()
    for column in ("tokens", "hit tokens", "bytes", "cold ms", "warm ms", "outputs"):
        assert column in head
    for prompt, one, line in zip(cut_prompts(2), rows, lines, strict=False):
        name, shown = line[: len(prompt.name)], line[len(prompt.name) :].split()
        assert name == prompt.name
        numbers = [f"{one.tokens:,}", f"{one.hit_tokens:,}", f"{one.bytes:,}", "20.0", "10.0"]
        word = "as vLLM's own hit" if one.own_hit else "DIFFERS"
        assert shown == [*numbers, *("identical" if one.identical else word).split()]
    stored = json.loads(file.read_bytes())
    assert stored["model"] == "qwen3"
    assert [one["identical"] for one in stored["prompts"]] == [one.identical for one in rows]


def test_a_child_never_outlives_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that ignores the order to end."""
    ignoring = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)"
    command = [sys.executable, "-c", f"{ignoring}; signal.pause()"]
    log = tmp_path / "log"
    children: list[Child] = []

    def fail_meanwhile() -> None:
        with Child(command, log) as child:
            children.append(child)
            wait_until(lambda: "up" in child.tail(), "the child runs")
            raise KeyError

    monkeypatch.setattr(processes, "STOP_S", 0.2)
    with pytest.raises(KeyError):
        fail_meanwhile()
    assert children[0].process.poll() == -signal.SIGKILL


HEIR = """
import mmap, os, signal, sys
if not os.fork():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    memory = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 4096)
    print("up", flush=True)
    signal.pause()
signal.pause()
"""


@pytest.mark.parametrize("ended_before", [False, True])
def test_nothing_of_a_group_outlives_its_block(tmp_path: Path, ended_before: bool) -> None:
    """Neither what a killed leader leaves behind nor what it has in shared memory."""
    shared, log = processes.SHARED_MEMORY / f"vllm_dist_{secrets.token_hex(6)}", tmp_path / "log"
    shared.write_bytes(bytes(4096))
    with GroupChild([sys.executable, "-c", HEIR, str(shared)], log) as child:
        wait_until(lambda: "up" in child.tail(), "the heir runs")
        assert len(members(child.pid)) == 2
        if ended_before:
            child.kill()
            assert len(members(child.pid)) == 1
    assert not members(child.pid)
    assert not shared.exists()


def test_variables_reach_the_child_and_only_it(tmp_path: Path) -> None:
    code = "import os; print(os.getenv('KVFERRY_CONFIG'), os.getenv('A'))"
    command = in_environment(
        {"KVFERRY_CONFIG": "theirs"}, in_environment({"A": "1"}, [sys.executable, "-c", code])
    )
    with Child(command, tmp_path / "log") as child:
        child.process.wait(90)
    assert child.tail() == "None 1"


def test_an_engine_that_ends_at_once_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    broken = [sys.executable, "-c", "raise SystemExit('no such engine')"]
    with (
        Engine(EngineSetup("nowhere"), tmp_path, log, python=broken) as engine,
        pytest.raises(ChildError, match="no such engine"),
    ):
        engine.wait_ready()
