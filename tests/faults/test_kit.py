"""The fault kit itself: what it refuses, and that copies and commits suffer what it says."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from kvferry_connector.wire.hot import Cancel
from kvferry_demo.processes import kvferry_command
from kvferry_sidecar.cli.api import Api
from kvferry_sidecar.config import load
from kvferry_sidecar.errors import ConfigError, RequestError
from kvferry_sidecar.faults.rules import Book, parse, parse_all, rules_max
from kvferry_sidecar.settings import Setting
from support.client_half import ClientEngine, client_engine
from support.kit import ENABLED, Kit
from support.sidecar import SidecarUnderTest, running_sidecar


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarUnderTest]:
    with running_sidecar(pool_bytes=32 << 20, flags=ENABLED) as found:
        yield found


@pytest.fixture(scope="module")
def engine(sidecar: SidecarUnderTest) -> Iterator[ClientEngine]:
    with client_engine(sidecar.run_dir) as found:
        yield found


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no action"),
        ("lose Outcome", "'lose'"),
        ("drop", "''"),
        ("drop commit", "'commit'"),
        ("fail Outcome", "'Outcome'"),
        ("delay load ms=soon", "'ms=soon'"),
        ("drop up chance=1.5", "'chance=1.5'"),
        ("drop up times", "'times'"),
    ],
)
def test_a_rule_that_says_nothing_is_refused_by_its_name(text: str, named: str) -> None:
    with pytest.raises(RequestError, match="rule") as caught:
        parse(text)
    assert named in caught.value.message
    assert caught.value.remedy


def test_rules_have_a_bound_and_the_first_that_fires_decides() -> None:
    with pytest.raises(RequestError, match="rules"):
        parse_all("drop up;" * (rules_max + 1))
    rules = parse_all("drop Submit skip=1 times=2; delay up ms=5;; drop down chance=0")
    book = Book(rules, seed=1)
    drawn = [book.draw("Submit", "up") for _ in range(5)]
    assert [rule.action for rule in drawn if rule] == ["delay", "drop", "drop", "delay", "delay"]
    assert book.draw("Hint", "down") is None
    assert [(one.met, one.fired) for one in book.view()] == [(5, 2), (3, 3), (1, 0)]


def test_rules_are_refused_where_the_kit_is_not_enabled() -> None:
    with pytest.raises(ConfigError, match=r"faults\.rules"):
        load(flags={"faults.rules": Setting("drop up", "--set")}, environment={})
    with running_sidecar(pool_bytes=8 << 20) as plain:
        api = Api(plain.run_dir)
        with pytest.raises(RequestError, match="not enabled"):
            api.act("faults", rules="drop up")
        assert "fault injection" not in plain.log.read_text()


def test_it_is_told_in_the_log_and_on_the_command_line(sidecar: SidecarUnderTest, kit: Kit) -> None:
    assert "fault injection is enabled" in sidecar.log.read_text()
    where = ("--run-dir", str(sidecar.run_dir))
    command = [*kvferry_command(), "faults", *where]
    shown = run([*command, "drop Hint", "hold save"])
    assert shown.stdout == "drop Hint: met 0, fired 0\nhold save: met 0, fired 0\n", shown.stderr
    wrong = run([*command, "drop everything"])
    assert wrong.returncode != 0
    assert "remedy" in wrong.stderr
    assert len(kit.view("hold").rule) > 0, "a mistake changes nothing"
    assert run([*command, "--clear"]).stdout == ""
    listed = run([*kvferry_command(), "--help"]).stdout
    assert "faults" not in listed


def test_copies_fail_and_wait_as_they_are_told(engine: ClientEngine, kit: Kit) -> None:
    kit.rules("fail save times=1")
    failed = engine.ended(engine.submit(engine.save_job("failed", (1, 2, 3))))
    assert (failed.status, failed.reason) == ("failed", "copy-failed")
    assert engine.get("failed") == 0
    engine.put("there")
    kit.rules("fail load times=1")
    admission, _ = engine.lease("there", 3)
    outcome = engine.ended(engine.submit(engine.load_job(admission, (4, 5, 6))))
    assert (outcome.status, outcome.reason) == ("failed", "copy-failed")
    kit.rules("break load times=1")
    admission, _ = engine.lease("there", 3)
    outcome = engine.ended(engine.submit(engine.load_job(admission, (4, 5, 6))))
    assert (outcome.status, outcome.reason) == ("failed", "internal")
    kit.rules("hold save")
    held = engine.submit(engine.save_job("held", (1, 2, 3)))
    kit.wait_fired()
    assert kit.view().held == 1
    assert engine.get("there") == 48, "others go on"
    engine.fill("held", (1, 2, 3))
    kit.rules()
    assert engine.ended(held).status == "done"
    assert engine.get("held") == 48
    kit.rules("delay load ms=150")
    assert engine.get("held") == 48
    kit.rules("hold load")
    admission, _ = engine.lease("held", 3)
    waits = engine.submit(engine.load_job(admission, (4, 5, 6)))
    kit.wait_fired()
    engine.scheduler.send(Cancel(waits))
    assert engine.ended(waits).status == "cancelled", "one that has not started ends at once"


def test_a_commit_that_fails_is_no_hit_and_keeps_nothing(engine: ClientEngine, kit: Kit) -> None:
    kit.rules("fail commit times=1")
    engine.put("uncommitted")
    assert engine.get("uncommitted") == 0
    kit.rules("delay commit ms=200")
    engine.put("uncommitted")
    assert engine.get("uncommitted") == 48
