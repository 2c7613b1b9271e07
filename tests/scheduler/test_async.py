"""FerryConnector in vLLM's AsyncScheduler: two batches in flight, and the V2 runner's shapes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from kvferry_connector.wire import hot
from support.scheduler_harness import SchedulerUnderTest, loads_of, saves_of

PROMPT = list(range(10, 210))


@pytest.fixture(params=[False, True], ids=["v1-runner", "v2-runner"])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> SchedulerUnderTest:
    return SchedulerUnderTest(
        tmp_path, asynchronous=True, num_blocks=24, v2_runner=request.param, pinned_blocks_max=24,
        gather_tokens=0,
    )  # fmt: skip


def test_two_batches_in_flight_save_each_chunk_once(engine: SchedulerUnderTest) -> None:
    engine.add("a", PROMPT, max_tokens=60)
    engine.run()
    ends = [(start, end) for _, start, end in saves_of(engine.node)]
    assert ends[:3] == [(0, 64), (64, 128), (128, 192)]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
    assert ends[-1][1] >= 240, "generated tokens are saved one step late, but saved"
    assert set(engine.node.saved.values()) == {1}
    engine.assert_idle()


def test_steps_are_numbered_when_built_not_when_run(engine: SchedulerUnderTest) -> None:
    """ScriptedNode.execute compares a job's step with that of the metadata it came in."""
    engine.add("a", PROMPT)
    first = engine.schedule().kv_connector_metadata
    second = engine.schedule().kv_connector_metadata
    assert first is not None
    assert second is not None
    assert (first.step, second.step) == (1, 2)
    engine.drain()
    engine.run()
    engine.assert_idle()


def test_load_and_failed_load(engine: SchedulerUnderTest) -> None:
    engine.warm_up(PROMPT)
    engine.add("b", PROMPT)
    engine.run()
    engine.forget_local()
    engine.node.load_fails = True
    engine.add("c", PROMPT)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192), ("c", 0, 192)]
    assert engine.requests["c"].num_output_tokens == 4
    engine.assert_idle()


def test_preemption_and_resume(engine: SchedulerUnderTest) -> None:
    engine.add("first", list(range(300, 430)), max_tokens=120)
    engine.add("victim", PROMPT[:100], max_tokens=100)
    engine.run()
    assert engine.requests["victim"].num_preemptions
    probes = [probe for probe in engine.node.sent(hot.Probe) if probe.request == "victim"]
    assert probes[-1].num_tokens > 116
    assert any(name == "victim" and total > 112 for name, _, total in loads_of(engine.node))
    if engine.scheduler.use_v2_model_runner:
        resumed = [
            new
            for output in engine.outputs
            for new in output.scheduled_new_reqs
            if new.req_id == "victim" and len(new.prefill_token_ids or ()) > 100
        ]
        assert resumed
    assert engine.requests["victim"].num_output_tokens == 100
    engine.assert_idle()


def test_abort_with_batches_in_flight(engine: SchedulerUnderTest) -> None:
    engine.node.save_steps = 7
    engine.add("a", PROMPT)
    engine.schedule()
    engine.schedule()
    engine.abort("a")
    engine.add("b", list(range(300, 480)))
    engine.drain()
    engine.run()
    engine.assert_idle()
