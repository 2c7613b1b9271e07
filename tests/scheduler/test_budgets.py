"""How long the engine's thread waits for answers: one budget a step, whatever comes."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvferry_connector import lookup
from kvferry_connector.link import Link
from kvferry_connector.wire import hot
from support.scheduler_harness import SchedulerUnderTest, loads_of

PROMPT = list(range(10, 210))
STEP_US, IDLE_US = 300, 2_000  # the defaults


class SlowNode:
    """The engine's sidecar answers no ask: a wait takes what it may, on a clock of the test.

    With ``chatter_us`` something of no use comes that often, and each time ends the wait.
    """

    def __init__(
        self, engine: SchedulerUnderTest, monkeypatch: pytest.MonkeyPatch, chatter_us: int
    ) -> None:
        self.waited_us = 0
        self._chatter_us = chatter_us
        self._node: Any = engine.node
        self._node.answers = False
        self._node.receive = self._receive
        clock = SimpleNamespace(
            perf_counter=lambda: 100 + self.waited_us * 1e-6, monotonic=time.monotonic
        )
        monkeypatch.setattr(lookup, "time", clock)

    def _receive(self, link: Link, wait_us: int = 0) -> list[tuple[hot.FromSidecar, list[bytes]]]:
        self.waited_us += min(wait_us, self._chatter_us or wait_us)
        return [(hot.Hint(1 << 40, 16, 1), [])] if self._chatter_us else []

    def answer(self) -> None:
        """From now on it is as quick as ever."""
        del self._node.receive
        self._node.answers = True
        self._node.answer_all()


@pytest.fixture(params=[0, 70], ids=["silent", "chatter"])
def chatter_us(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_all_questions_of_a_step_share_one_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chatter_us: int
) -> None:
    engine = SchedulerUnderTest(tmp_path, probe_ms_max=60_000)
    engine.warm_up(PROMPT)
    node = SlowNode(engine, monkeypatch, chatter_us)
    for name, tokens in (("a", PROMPT), ("b", PROMPT[:150]), ("c", PROMPT[:100])):
        engine.add(name, tokens)
    engine.step()
    assert len(engine.node.sent(hot.Ask)) == 3
    assert 0 < node.waited_us <= STEP_US
    for _ in range(5):
        before_us = node.waited_us
        engine.step()
        assert node.waited_us <= before_us + STEP_US
    node.answer()
    engine.run()
    assert {name for name, *_ in loads_of(engine.node)} >= {"a"}
    engine.assert_idle()


def test_the_only_request_of_an_engine_waits_for_no_longer_than_its_own_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chatter_us: int
) -> None:
    engine = SchedulerUnderTest(tmp_path, probe_ms_max=60_000)
    engine.warm_up(PROMPT)
    node = SlowNode(engine, monkeypatch, chatter_us)
    engine.add("a", PROMPT)
    engine.step()
    assert STEP_US < node.waited_us <= IDLE_US
    node.answer()
    engine.run()
    assert loads_of(engine.node) == [("a", 0, 192)]
    engine.assert_idle()
