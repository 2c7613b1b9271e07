"""Hooks that raise inside vLLM's real Scheduler: the engine goes on, promises become failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvferry_connector import saves, scheduler_half
from kvferry_connector.jobs import Report
from kvferry_connector.meta import FerryWorkerMetadata, NodeState
from support.scheduler_harness import SchedulerUnderTest, loads_of
from vllm.v1.outputs import KVConnectorOutput

PROMPT = list(range(10, 210))


@pytest.fixture
def engine(tmp_path: Path) -> SchedulerUnderTest:
    engine = SchedulerUnderTest(tmp_path)
    engine.warm_up(PROMPT)
    return engine


def raise_bug(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


@pytest.mark.parametrize("place", ["cut_tables", "encode_job"])
def test_promised_load_that_cannot_be_ordered_fails_on_every_rank(
    engine: SchedulerUnderTest, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    engine.add("b", PROMPT)
    monkeypatch.setattr(scheduler_half, place, raise_bug)
    engine.step(2)
    monkeypatch.undo()
    engine.run()
    assert loads_of(engine.node) == []
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle(errors=1)


def test_promise_that_is_forgotten_before_anything_is_noted_fails_too(
    engine: SchedulerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add("b", PROMPT)
    monkeypatch.setattr(engine.half, "allocated", raise_bug)
    engine.step(1)
    monkeypatch.undo()
    engine.run()
    assert loads_of(engine.node) == []
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle(errors=1)


@pytest.mark.parametrize("place", ["encode_job", "pack_ids", "cut_tables"])
def test_save_that_cannot_be_ordered_leaves_no_pin(
    engine: SchedulerUnderTest, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(saves, place, raise_bug)
    engine.add("c", list(range(300, 480)))
    engine.run()
    assert engine.counts["hook_errors"] == 1, "the request saves nothing more"
    monkeypatch.undo()
    engine.add("d", list(range(200, 380)))
    engine.run()
    assert {job.request for job in engine.node.jobs} == {"d"}
    engine.assert_idle(errors=1)


def test_step_that_fails_while_built_fails_its_loads(
    engine: SchedulerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add("b", PROMPT)
    monkeypatch.setattr(engine.half._lookup, "end_step", raise_bug)
    engine.step(1)
    monkeypatch.undo()
    engine.run()
    assert loads_of(engine.node) == []
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle(errors=1)


def test_a_bug_over_what_nodes_said_costs_no_report(
    engine: SchedulerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.half._lookup, "hear_nodes", raise_bug)
    job = engine.half._jobs.open_load("b")
    told = FerryWorkerMetadata({job: [Report(0, "failed", "why")]}, {1: NodeState(5)})
    engine.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))
    engine.assert_idle(errors=1)
