"""A request that vLLM preempted: what its next admission sends, and what it loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvferry_connector.wire import hot
from support.scheduler_harness import SchedulerUnderTest, loads_of


def preempted(folder: Path) -> SchedulerUnderTest:
    """An engine in which "victim" generated tokens and just lost its blocks to "first"."""
    engine = SchedulerUnderTest(folder, num_blocks=24, gather_tokens=0)
    engine.add("first", list(range(300, 430)), max_tokens=120)
    engine.add("victim", list(range(10, 110)), max_tokens=100)
    while not engine.requests["victim"].num_preemptions:
        engine.step()
    return engine


def test_preempted_request_resumes_from_its_own_saves(tmp_path: Path) -> None:
    """The hit of the new admission reaches into the generated tokens."""
    engine = preempted(tmp_path)
    generated = engine.requests["victim"].num_output_tokens
    assert generated > 16
    engine.run()
    probes = [probe for probe in engine.node.sent(hot.Probe) if probe.request == "victim"]
    assert [probe.num_tokens for probe in probes] == [100, 100 + generated]
    assert probes[0].admission < probes[1].admission
    assert (probes[1].start, probes[1].former) == (6, probes[0].admission), "only new hashes"
    assert probes[1].predecessor == bytes(engine.requests["victim"].block_hashes[5])
    loads = [load for load in loads_of(engine.node) if load[0] == "victim"]
    assert loads
    assert loads[0][2] > 112
    engine.assert_idle()


@pytest.mark.parametrize(
    ("event", "starts"),
    [
        ("forgets", [0, 6, 0]),
        ("restarts", [0, 0]),
        ("cut", [0, 0]),
        ("reset", [0, 0]),
        ("not ready", [0]),
    ],
)
def test_preempted_request_sends_everything_to_whom_its_former_hashes_lack(
    tmp_path: Path, event: str, starts: list[int]
) -> None:
    engine = preempted(tmp_path)
    if event == "forgets":  # or never had them: a first probe is lost where a queue is full
        engine.node.known.clear()
    elif event == "restarts":
        engine.node.restart()
    elif event == "cut":  # streamed input took hashes back
        engine.half._requests["victim"].admission.hashes = 100
    elif event == "reset":
        engine.connector.reset_cache()
    else:
        engine.node.ready = False
    engine.run()
    probes = [probe for probe in engine.node.sent(hot.Probe) if probe.request == "victim"]
    assert [probe.start for probe in probes] == starts
    loads = [load for load in loads_of(engine.node) if load[0] == "victim"]
    assert bool(loads) == (event not in ("reset", "not ready"))
    engine.assert_idle()
    engine.step()
    assert not engine.node.known, "every admission was released, the former too"
