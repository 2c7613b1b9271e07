"""FerryConnector under vLLM's MultiConnector, before and after another connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvferry_connector.wire import hot
from support.other_connector import OtherHandshake
from support.scheduler_harness import SchedulerUnderTest, loads_of, saves_of
from vllm.v1.request import RequestStatus

PROMPT = list(range(10, 210))
ORDERS = pytest.mark.parametrize("beside", ["before", "after"])


def make(folder: Path, beside: str, **options: Any) -> SchedulerUnderTest:
    """Our store holds PROMPT's 192 tokens; the other connector offers what a test says."""
    engine = SchedulerUnderTest(folder, beside=beside, **options)
    engine.warm_up(PROMPT)
    return engine


@ORDERS
def test_ours_loads_when_the_other_has_nothing(tmp_path: Path, beside: str) -> None:
    engine = make(tmp_path, beside)
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192)]
    assert engine.other.given["b"] == [0, 0], "real blocks, and no tokens of its own"
    engine.assert_idle()


@ORDERS
def test_the_first_with_a_hit_loads_and_the_other_lets_go(tmp_path: Path, beside: str) -> None:
    engine = make(tmp_path, beside)
    engine.other.offers["b"] = 96
    engine.add("b", PROMPT)
    while "b" not in engine.other.given:
        engine.step()
    released = [number for one in engine.node.sent(hot.Release) for number in one.admissions]
    engine.run()
    if beside == "before":
        assert loads_of(engine.node) == []
        assert len(released) == 1, "the lease of what was not chosen, at once"
        assert engine.other.given["b"] == [96, 0]
    else:
        assert loads_of(engine.node) == [("b", 0, 192)]
        assert engine.other.given["b"] == [0, 0]
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle()


def test_what_the_other_loaded_is_saved_to_ours(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, beside="before")
    engine.other.offers["a"] = 96
    engine.add("a", PROMPT)
    engine.run()
    assert saves_of(engine.node)[0][1] == 0
    assert len(engine.node.store) == 12
    engine.forget_local()
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192)]
    engine.assert_idle()


@pytest.mark.parametrize("again", [False, True], ids=["new", "preempted"])
def test_what_the_other_has_not_loaded_yet_is_no_save_when_its_request_ends(
    tmp_path: Path, again: bool
) -> None:
    """vLLM counts the tokens as computed while they are still being loaded."""
    engine = SchedulerUnderTest(tmp_path, beside="before")
    engine.add("a", PROMPT, max_tokens=9)
    if again:
        engine.step(6)
        assert len(saves_of(engine.node)) == 3
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.other.offers["a"] = 96
    engine.schedule()
    assert engine.requests["a"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.requests["a"].num_computed_tokens == 96
    engine.abort("a")
    engine.run()
    assert len(saves_of(engine.node)) == 3 * again
    engine.assert_idle()


@ORDERS
def test_the_others_later_delays_and_keeps_our_lease(tmp_path: Path, beside: str) -> None:
    engine = make(tmp_path, beside)
    engine.other.offers["b"] = None
    engine.add("b", PROMPT)
    engine.step(5)
    assert len(engine.node.sent(hot.Ask)) == (0 if beside == "before" else 1)
    engine.other.offers["b"] = 0
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192)]
    engine.assert_idle()


@ORDERS
def test_our_failed_load_is_ours_alone(tmp_path: Path, beside: str) -> None:
    engine = make(tmp_path, beside)
    engine.node.load_fails = True
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192)]
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle()


@ORDERS
def test_resets_reach_us(tmp_path: Path, beside: str) -> None:
    engine = make(tmp_path, beside)
    assert engine.scheduler.reset_prefix_cache()
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == []
    engine.assert_idle()


def test_handshakes_of_another_connector_leave_ours_off_and_say_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = SchedulerUnderTest(tmp_path, beside="before")
    client, engine.half._lookup.client = engine.half._lookup.client, None
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): OtherHandshake()})
    assert engine.half._lookup.client is None
    assert "before connectors that shake hands" in caplog.text
    engine.half._lookup.client = client
    engine.assert_idle()


# --- another connector that loads in the step that computes with it, and may fail ----------------


def lost(folder: Path, **options: Any) -> SchedulerUnderTest:
    """Request "a" begins with 96 tokens that the other connector promised and does not bring."""
    engine = SchedulerUnderTest(folder, beside="before", **options)
    engine.other.synchronous = True
    engine.other.offers["a"] = 96
    engine.other.lost.add("a")
    engine.add("a", PROMPT)
    return engine


IN_FLIGHT = pytest.mark.parametrize("asynchronous", [False, True], ids=["one batch", "two"])


@IN_FLIGHT
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_what_was_computed_upon_blocks_that_another_did_not_load_is_no_save(
    tmp_path: Path, asynchronous: bool, policy: str
) -> None:
    """vLLM tells it with the step's output, when that step's saves have long been ordered."""
    engine = lost(tmp_path, asynchronous=asynchronous, policy=policy)
    engine.add("short", PROMPT[:110], max_tokens=1)
    engine.run()
    assert saves_of(engine.node) == []
    assert engine.counts["saves_stopped"] == 1
    assert engine.counts["saves_given_up"] > 0
    engine.assert_idle()


@IN_FLIGHT
def test_nothing_is_saved_until_the_engines_own_cache_is_reset(
    tmp_path: Path, asynchronous: bool
) -> None:
    """Others hit the blocks there before they are computed anew, and compute upon them."""
    engine = lost(tmp_path, asynchronous=asynchronous)
    engine.step(3)
    engine.add("b", [*PROMPT, *range(500, 600)])
    engine.run()
    engine.add("c", [*PROMPT, *range(500, 700)])
    engine.run()
    assert saves_of(engine.node) == []
    assert engine.scheduler.reset_prefix_cache()
    engine.add("d", PROMPT)
    engine.run()
    assert saves_of(engine.node)[0][:2] == ("d", 0)
    engine.assert_idle()


def test_a_reset_that_vllm_refuses_changes_nothing(tmp_path: Path) -> None:
    engine = lost(tmp_path)
    engine.step(4)
    assert not engine.scheduler.reset_prefix_cache()
    engine.add("b", PROMPT)
    engine.run()
    assert saves_of(engine.node) == []
    engine.assert_idle()


@IN_FLIGHT
def test_what_another_loads_in_the_step_is_saved_once_its_output_is_good(
    tmp_path: Path, asynchronous: bool
) -> None:
    engine = SchedulerUnderTest(
        tmp_path, beside="before", asynchronous=asynchronous, batch=512, num_blocks=128
    )
    engine.other.synchronous = True
    engine.other.offers = dict.fromkeys("abcd", 96)
    for number, name in enumerate("abcd"):
        engine.add(name, [number, *PROMPT])
        assert engine.schedule().has_sync_kv_loads
        saves = engine._in_flight[-1][1].saves
        assert not [one for one in saves if one.request == name], "not with its own step"
        if len(engine._in_flight) >= engine._depth:
            engine.process()
    assert saves_of(engine.node), "those of the first steps, although the next are in doubt"
    engine.run()
    assert {name for name, _, _ in saves_of(engine.node)} == set("abcd")
    assert len(engine.node.store) == 4 * 12
    engine.assert_idle()


@IN_FLIGHT
def test_an_output_in_doubt_that_never_came_is_noticed_with_the_next_one(
    tmp_path: Path, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Else saves would wait for it for ever, with their blocks pinned."""
    engine = SchedulerUnderTest(tmp_path, beside="before", asynchronous=asynchronous, batch=512)
    engine.other.synchronous = True
    engine.other.offers["a"] = 96
    engine.add("a", PROMPT, max_tokens=8)
    engine.node.tells_ends = False
    assert engine.schedule().has_sync_kv_loads
    engine.process()
    engine.node.tells_ends = True
    engine.run()
    assert saves_of(engine.node) == []
    assert engine.counts["saves_stopped"] == 1
    assert engine.counts["saves_given_up"] == 1
    assert "what came of it is lost" in caplog.text
    engine.assert_idle()
    assert engine.scheduler.reset_prefix_cache()
    engine.add("b", PROMPT)
    engine.run()
    assert saves_of(engine.node)[0][:2] == ("b", 0)
    engine.assert_idle()
