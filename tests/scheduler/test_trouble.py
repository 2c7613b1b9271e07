"""FerryConnector in vLLM's real Scheduler: aborts, failures, preemption, resets, absence."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvferry_connector.meta import FerryHandshake
from kvferry_connector.requests import Phase
from kvferry_connector.wire import hot
from support.scheduler_harness import SchedulerUnderTest, loads_of, saves_of
from support.waiting import wait_until
from vllm.v1.request import RequestStatus

PROMPT = list(range(10, 210))


def make(folder: Path, **options: Any) -> SchedulerUnderTest:
    """An engine whose store holds PROMPT's 192 tokens while it has nothing itself."""
    engine = SchedulerUnderTest(folder, **options)
    engine.warm_up(PROMPT)
    return engine


def test_abort_during_a_load_keeps_its_blocks_until_the_outcome(tmp_path: Path) -> None:
    engine = make(tmp_path)
    engine.node.load_steps = 100
    engine.add("b", PROMPT)
    engine.step(3)
    assert engine.requests["b"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    held = engine.pool.get_num_free_blocks()
    engine.abort("b")
    assert engine.pool.get_num_free_blocks() == held
    assert [cancel.job for cancel in engine.node.sent(hot.Cancel)] == [engine.node.jobs[0].job]
    engine.run()
    engine.assert_idle()


def test_abort_during_a_save_keeps_the_pins(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path)
    engine.node.save_steps = 20
    engine.add("a", PROMPT)
    engine.step(2)
    engine.abort("a")
    assert engine.half._jobs.pinned_blocks == 8
    assert engine.pool.get_num_free_blocks() == engine.free_at_start - 8
    assert engine.connector.has_pending_push_work()
    engine.add("other", list(range(300, 480)))  # would overwrite what is not pinned
    engine.run()
    assert engine.node.sent(hot.Cancel) == []
    engine.assert_idle()


def test_failed_load_is_recomputed_once_and_saved_anew(tmp_path: Path) -> None:
    engine = make(tmp_path)
    engine.node.load_fails = True
    engine.node.saved.clear()
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192)]
    assert len(engine.node.sent(hot.Ask)) == 1, "the failed request is not even asked for again"
    assert [name for name, *_ in saves_of(engine.node)] == ["b", "b", "b"]
    assert len(engine.node.saved) == 12
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle()


def test_failed_load_with_policy_fail_ends_the_request(tmp_path: Path) -> None:
    engine = make(tmp_path, policy="fail")
    engine.node.load_fails = True
    engine.add("b", PROMPT)
    engine.run()
    assert engine.requests["b"].status is RequestStatus.FINISHED_ERROR
    engine.assert_idle()


def test_sidecar_that_restarts_between_promise_and_submit_fails_the_load(tmp_path: Path) -> None:
    engine = make(tmp_path)
    engine.add("b", PROMPT)
    engine.schedule()
    engine.node.restart()
    engine.process()
    engine.run()
    assert loads_of(engine.node) == []
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle()


def test_saves_wait_while_pins_are_at_their_bound(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, pinned_blocks_max=5)
    engine.node.save_steps = 4
    engine.add("a", PROMPT, max_tokens=60)
    highest = 0
    while engine.scheduler.has_requests():
        engine.step()
        highest = max(highest, engine.half._jobs.pinned_blocks)
    assert highest == 5
    ends = [(start, end) for _, start, end in saves_of(engine.node)]
    assert ends[:2] == [(0, 64), (64, 80)]
    assert ends[-1][1] == 256, "what had to wait is saved after all"
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends)), "no hole"
    engine.assert_idle()


@pytest.mark.parametrize("state", ["away", "silent", "not ready", "full queue"])
def test_sidecar_that_cannot_be_asked_is_a_miss(tmp_path: Path, state: str) -> None:
    engine = make(tmp_path)
    engine.node.away = state == "away"
    engine.node.is_silent = state == "silent"
    engine.node.ready = state != "not ready"
    engine.node.takes_sends = state != "full queue"
    engine.add("b", PROMPT)
    engine.run()
    assert engine.node.messages == []
    assert loads_of(engine.node) == []
    assert engine.requests["b"].num_output_tokens == 4
    engine.assert_idle()


def test_chunks_missed_while_the_sidecar_was_away_are_saved_on_its_return(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path)
    engine.node.away = True
    engine.add("a", PROMPT, max_tokens=60)
    engine.step(5)
    engine.node.away = False
    engine.run()
    assert len(engine.node.store) == 16
    engine.assert_idle()


def test_late_answer_is_a_miss_and_its_lease_is_released(tmp_path: Path) -> None:
    engine = make(tmp_path, probe_ms_max=400, lookup_wait_us_max=0)
    engine.node.answers = False
    asked_s = time.monotonic()
    engine.add("b", PROMPT)
    engine.step()
    assert engine.requests["b"].status is RequestStatus.WAITING
    assert engine.outputs[-1].num_scheduled_tokens == {}

    def started() -> bool:
        engine.step()
        return bool(engine.outputs[-1].num_scheduled_tokens)

    wait_until(started, "b is computed without the store")
    assert time.monotonic() - asked_s >= 0.4
    ask = engine.node.unanswered[0]
    assert [release.admissions for release in engine.node.sent(hot.Release)] == [[ask.admission]]
    engine.node.answer_all()
    engine.run()
    assert loads_of(engine.node) == []
    engine.assert_idle()


def test_answer_of_a_later_step_is_taken(tmp_path: Path) -> None:
    engine = make(tmp_path, probe_ms_max=60_000, lookup_wait_us_max=0)
    engine.node.answers = False
    engine.add("b", PROMPT)
    engine.step(4)
    assert len(engine.node.sent(hot.Ask)) == 1
    engine.node.answer_all()
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192)]
    engine.assert_idle()


def test_new_epoch_and_need_full_are_answered_with_the_full_probe(tmp_path: Path) -> None:
    engine = make(tmp_path, probe_ms_max=60_000, lookup_wait_us_max=0)
    engine.node.answers = False
    engine.add("b", PROMPT)
    engine.step(2)
    engine.node.restart()
    engine.step(2)
    assert len(engine.node.sent(hot.Probe)) == 2
    engine.node.known.clear()  # the sidecar forgot: it answers NeedFull
    engine.node.answers = True
    engine.node.answer_all()
    engine.run()
    assert [probe.start for probe in engine.node.sent(hot.Probe)] == [0, 0, 0]
    assert loads_of(engine.node) == [("b", 0, 192)]
    engine.assert_idle()


def test_a_hint_from_before_need_full_is_not_believed(tmp_path: Path) -> None:
    engine = make(tmp_path, probe_ms_max=60_000, lookup_wait_us_max=0)
    engine.node.answers = False
    engine.add("b", PROMPT)
    engine.step(2)
    ask = engine.node.unanswered[0]
    engine.node.known.clear()
    engine.node.answers = True
    engine.node.answer_all()
    engine.node.inbox.append(hot.Hint(ask.admission, 0, 0))
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192)]
    engine.assert_idle()


def test_failed_local_reset_leaves_the_namespace_all_the_same(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path)
    engine.node.save_steps = 30
    engine.add("a", PROMPT)
    engine.step(2)
    assert not engine.scheduler.reset_prefix_cache(reset_connector=False)
    assert len(engine.node.rotations) == 1
    engine.run()
    assert saves_of(engine.node) == [("a", 0, 64), ("a", 64, 128)]  # old stamp: nothing more
    engine.forget_local()
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == []
    assert {job.version for job in engine.node.jobs if job.request == "b"} == set(
        engine.node.rotations
    )
    engine.assert_idle()


def test_waiting_request_is_of_the_version_it_starts_under(tmp_path: Path) -> None:
    engine = make(tmp_path)
    engine.add("b", PROMPT)
    engine.connector.reset_cache()
    engine.run()
    assert loads_of(engine.node) == []
    assert {job.version for job in engine.node.jobs} == {engine.node.rotations[-1]}
    assert saves_of(engine.node)[-1] == ("b", 128, 192)
    engine.assert_idle()


@pytest.mark.parametrize("loads", [True, False])
def test_preempted_request_that_never_loads_is_saved_under_the_new_version(
    tmp_path: Path, loads: bool
) -> None:
    engine = SchedulerUnderTest(tmp_path, loads=loads, pinned_blocks_max=64)
    engine.add("a", PROMPT, max_tokens=30, skip_reading_prefix_cache=loads)
    engine.step(6)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.node.jobs.clear()
    engine.run()
    assert {job.version for job in engine.node.jobs} == {engine.node.rotations[-1]}
    assert next(job.start_tokens for job in engine.node.jobs) == 0
    engine.assert_idle()


def test_reset_with_running_requests_starts_them_anew_under_the_new_version(
    tmp_path: Path,
) -> None:
    engine = make(tmp_path)
    engine.add("b", PROMPT, max_tokens=30)
    engine.step(6)
    assert engine.requests["b"].num_output_tokens
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert len(engine.node.rotations) == 2
    engine.node.jobs.clear()
    engine.run()
    assert loads_of(engine.node) == []
    assert {job.version for job in engine.node.jobs} == {engine.node.rotations[-1]}
    engine.assert_idle()


def test_engine_is_kept_awake_for_reports_within_the_bound(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, awake_ms_max=0)
    engine.node.save_steps = 1000
    engine.add("a", PROMPT, max_tokens=1)
    engine.step(4)
    engine.step()  # tells the workers of the finished request
    assert engine.half._jobs.pinned_blocks == 12
    assert not engine.scheduler.has_requests()
    assert len(engine.node.rotations) == 1
    for running in engine.node.running:
        running.steps_left = 0
    engine.step(2)
    engine.assert_idle()


def test_load_that_outlasts_the_bound_is_stepped_for_until_its_report(tmp_path: Path) -> None:
    engine = make(tmp_path)
    engine.half._config = msgspec.structs.replace(engine.half._config, awake_ms_max=0)
    engine.node.load_steps = 50
    request = engine.add("b", PROMPT)
    for _ in range(45):
        engine.step()
        assert engine.scheduler.has_requests()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.run()
    assert request.num_output_tokens == 4
    engine.assert_idle()


def test_engine_that_gave_up_on_a_load_learns_its_end_when_it_wakes(tmp_path: Path) -> None:
    engine = make(tmp_path)
    engine.half._config = msgspec.structs.replace(engine.half._config, awake_ms_max=0)
    engine.node.load_steps = 1000
    engine.add("b", PROMPT)
    engine.step(2)
    (load,) = engine.node.running
    engine.abort("b")
    load.cancelled = False  # a sidecar that does not hear
    engine.step()
    assert not engine.connector.has_pending_push_work()
    load.cancelled = True
    engine.add("c", list(range(300, 480)))
    engine.run()
    engine.assert_idle()


def test_unchosen_child_of_a_multi_connector_releases_its_lease(tmp_path: Path) -> None:
    engine = make(tmp_path)
    request = engine.add("b", PROMPT)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (192, True)
    assert engine.connector.get_loaded_kv_cache_group_ids(request) == (0,)
    blocks = engine.scheduler.kv_cache_manager.get_blocks("b")
    engine.connector.update_state_after_alloc(request, blocks, 0)
    assert engine.half._requests["b"].admission.phase is Phase.NONE
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.run()
    assert loads_of(engine.node) == []
    engine.assert_idle()


def test_rank_beside_another_sidecar_leaves_the_cache_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = SchedulerUnderTest(tmp_path)
    client, engine.half._lookup.client = engine.half._lookup.client, None
    elsewhere = FerryHandshake(0, "another host", "/run/x", ("engine", "instance"))
    engine.connector.set_xfer_handshake_metadata({0: elsewhere})
    assert engine.half._lookup.client is None
    assert "the cache stays off" in caplog.text
    engine.add("a", PROMPT)
    engine.run()
    assert engine.node.messages == []
    assert engine.counts["ranks_missing"] == 1
    engine.half._lookup.client = client
    engine.connector.shutdown()
    assert engine.node.closed


def test_what_the_client_counts_is_told_after_a_question(tmp_path: Path) -> None:
    engine = make(tmp_path)
    engine.node.news["stale_dropped"] = 3
    engine.add("b", PROMPT)
    engine.run()
    assert engine.counts["stale_dropped"] == 3


def test_refused_question_is_a_miss_at_once(tmp_path: Path) -> None:
    engine = make(tmp_path, probe_ms_max=60_000)
    engine.node.answers = False
    engine.add("b", PROMPT)
    engine.step()
    (ask,) = engine.node.unanswered
    engine.node.unanswered = []
    engine.node.inbox.append(hot.Error("leases-max", "", "", admission=ask.admission))
    engine.step()
    assert engine.outputs[-1].num_scheduled_tokens == {"b": 64}
    engine.run()
    engine.assert_idle()
