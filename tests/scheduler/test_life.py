"""FerryConnector in vLLM's real Scheduler: the ordinary lives of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvferry_connector.wire import hot
from support.scheduler_harness import SchedulerUnderTest, loads_of, saves_of
from vllm.v1.metrics.cache_hit_source import CacheHitSource

PROMPT = list(range(10, 210))  # 200 tokens: 12 blocks of 16 and 8 tokens


@pytest.fixture
def engine(tmp_path: Path) -> SchedulerUnderTest:
    return SchedulerUnderTest(tmp_path)


@pytest.fixture
def warm(engine: SchedulerUnderTest) -> SchedulerUnderTest:
    """The store holds PROMPT's 192 tokens, the engine nothing."""
    engine.warm_up(PROMPT)
    return engine


def test_chunked_prefill_saves_each_chunk_once(engine: SchedulerUnderTest) -> None:
    engine.add("a", PROMPT)
    engine.run()
    assert saves_of(engine.node) == [("a", 0, 64), ("a", 64, 128), ("a", 128, 192)]
    assert set(engine.node.saved.values()) == {1}
    assert len(engine.node.store) == 12
    engine.assert_idle()


def test_what_no_pin_was_left_for_is_saved_as_soon_as_one_is(tmp_path: Path) -> None:
    """Each prefill step finds the pins of the one before; the request ends soon after the last."""
    engine = SchedulerUnderTest(tmp_path, pinned_blocks_max=4)
    engine.node.save_steps = 2
    engine.add("a", PROMPT, max_tokens=6)
    engine.run()
    assert len(engine.node.store) == 12
    engine.assert_idle()


def test_generated_tokens_are_saved_when_their_block_is_full(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, gather_tokens=0)
    engine.add("a", PROMPT[:30], max_tokens=40)
    engine.run()
    assert saves_of(engine.node) == [("a", 0, 16), ("a", 16, 32), ("a", 32, 48), ("a", 48, 64)]
    engine.assert_idle()


def test_generated_tokens_are_gathered_and_the_rest_is_saved_at_the_end(tmp_path: Path) -> None:
    """The prompt is not: neither at once computed nor in parts. The last step's token is no KV."""
    engine = SchedulerUnderTest(tmp_path, gather_tokens=48)
    engine.add("a", PROMPT[:100], max_tokens=100)
    engine.add("b", PROMPT[:16], max_tokens=17)
    engine.run()
    ends = {name: [save[1:] for save in saves_of(engine.node) if save[0] == name] for name in "ab"}
    assert ends["a"] == [(0, 64), (64, 96), (96, 144), (144, 192)]
    assert ends["b"] == [(0, 16), (16, 32)]
    engine.assert_idle()


def test_what_an_aborted_request_had_gathered_is_saved(engine: SchedulerUnderTest) -> None:
    engine.add("a", PROMPT[:16], max_tokens=100)
    while engine.requests["a"].num_tokens < 50:
        engine.step()
    engine.abort("a")
    engine.run()
    assert [save[1:] for save in saves_of(engine.node)] == [(0, 16), (16, 48)]
    engine.assert_idle()


def test_prompt_shorter_than_a_block_says_nothing(engine: SchedulerUnderTest) -> None:
    engine.add("a", PROMPT[:15], max_tokens=1)
    engine.run()
    assert engine.node.messages == []
    assert engine.node.jobs == []
    engine.assert_idle()


def test_steps_with_nothing_to_do_share_what_they_carry(engine: SchedulerUnderTest) -> None:
    engine.add("a", PROMPT[:8], max_tokens=4)
    engine.run()
    assert len(engine.outputs) >= 4
    assert len({id(output.kv_connector_metadata) for output in engine.outputs}) == 1
    engine.assert_idle()


def test_a_trace_context_travels_with_the_hashes(engine: SchedulerUnderTest) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    headers = {"traceparent": parent, "tracestate": "x=1"}
    engine.add("a", PROMPT, extras={"trace_headers": headers})
    engine.add("b", PROMPT[16:])
    engine.run()
    traces = {probe.request: probe.trace for probe in engine.node.sent(hot.Probe)}
    assert traces == {"a": parent, "b": ""}


def test_hit_is_loaded_and_not_saved_again(warm: SchedulerUnderTest) -> None:
    warm.add("b", PROMPT)
    warm.run()
    assert loads_of(warm.node) == [("b", 0, 192)]
    assert saves_of(warm.node) == []
    assert len(warm.node.sent(hot.Ask)) == 1
    warm.assert_idle()


@pytest.mark.parametrize(
    ("tiers", "told"),
    [
        ({"host": 128, "disk": 64}, {CacheHitSource.HOST: 128, CacheHitSource.DISK: 64}),
        ({"remote": 192}, {CacheHitSource.EXTERNAL_UNSPECIFIED: 192}),
        ({}, {CacheHitSource.HOST: 192}),
    ],
)
def test_vllm_counts_a_hit_by_the_tiers_that_the_sidecar_named(
    tmp_path: Path, tiers: dict[str, int], told: dict[CacheHitSource, int]
) -> None:
    engine = SchedulerUnderTest(tmp_path, probe_ms_max=60_000)
    engine.warm_up(PROMPT)
    engine.node.answers = False
    engine.add("b", PROMPT)
    engine.step()
    engine.node.answer_all()
    (answer,) = engine.node.inbox
    engine.node.inbox = [msgspec.structs.replace(answer, sources=tiers)]
    heard: list[dict[CacheHitSource, int]] = []
    hook = engine.connector.get_external_cache_hit_sources

    def hears(request: Any, tokens: int) -> dict[CacheHitSource, int]:
        heard.append(hook(request, tokens))
        return heard[-1]

    engine.connector.get_external_cache_hit_sources = hears
    engine.run()
    assert heard == [told]
    assert loads_of(engine.node) == [("b", 0, 192)]
    engine.assert_idle()


def test_whole_prompt_hit_is_capped_below_its_length(warm: SchedulerUnderTest) -> None:
    warm.add("b", PROMPT[:192])
    warm.run()
    assert warm.node.sent(hot.Ask)[0].max_tokens == 176
    assert loads_of(warm.node) == [("b", 0, 176)]
    warm.assert_idle()


def test_only_what_is_not_local_is_loaded(warm: SchedulerUnderTest) -> None:
    warm.add("b", PROMPT[:65])
    warm.run()
    warm.add("c", PROMPT)
    warm.run()
    assert loads_of(warm.node) == [("b", 0, 64), ("c", 64, 192)]
    warm.assert_idle()


def test_local_hit_that_covers_the_stores_loads_nothing(warm: SchedulerUnderTest) -> None:
    warm.add("b", PROMPT)
    warm.run()
    warm.add("c", PROMPT)
    warm.run()
    assert loads_of(warm.node) == [("b", 0, 192)]
    warm.assert_idle()


def test_fresh_hint_of_no_more_than_local_saves_the_ask(engine: SchedulerUnderTest) -> None:
    engine.node.hints = True
    engine.add("a", PROMPT)
    engine.run()
    assert engine.node.sent(hot.Ask) == []
    assert len(engine.node.store) == 12
    engine.assert_idle()


def test_request_id_is_reused_at_once(warm: SchedulerUnderTest) -> None:
    warm.node.save_steps = 3
    for _ in range(3):
        warm.add("same", [*PROMPT, *range(30)])
        warm.run()
        warm.forget_local()
    assert loads_of(warm.node) == [("same", 0, 192), ("same", 0, 224), ("same", 0, 224)]
    numbers = [probe.admission for probe in warm.node.sent(hot.Probe)]
    assert len(set(numbers)) == 3
    warm.assert_idle()


def test_two_requests_share_a_prefix_at_once(warm: SchedulerUnderTest) -> None:
    warm.add("b", PROMPT)
    warm.add("c", [*PROMPT[:128], *range(300, 380)])
    warm.run()
    assert loads_of(warm.node) == [("b", 0, 192), ("c", 0, 128)]
    warm.assert_idle()


def test_request_that_skips_the_prefix_cache_loads_nothing_and_is_saved(
    engine: SchedulerUnderTest,
) -> None:
    engine.add("a", PROMPT, skip_reading_prefix_cache=True)
    engine.run()
    assert engine.node.sent(hot.Ask) == []
    assert len(engine.node.store) == 12
    engine.assert_idle()


def test_groups_of_two_block_sizes(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path, (16, 32), num_blocks=128)
    engine.add("a", PROMPT)
    engine.run()
    assert saves_of(engine.node) == [("a", 0, 64), ("a", 64, 128), ("a", 128, 192)]
    assert len(engine.node.store) == 12 + 6
    engine.forget_local()
    engine.add("b", PROMPT)
    engine.run()
    assert loads_of(engine.node) == [("b", 0, 192)]
    engine.assert_idle()


def test_saved_prefix_survives_the_sidecars_restart(warm: SchedulerUnderTest) -> None:
    warm.node.restart()
    warm.add("b", PROMPT)
    warm.run()
    assert loads_of(warm.node) == [("b", 0, 192)]
    warm.assert_idle()


def test_lookup_costs_no_allocation_while_blocks_are_short(tmp_path: Path) -> None:
    """A request that cannot be admitted is asked for each step and keeps one lease."""
    engine = SchedulerUnderTest(tmp_path, num_blocks=20)
    engine.add("a", PROMPT)
    engine.run()
    engine.forget_local()
    engine.add("busy", list(range(1, 120)), max_tokens=30)
    engine.step(3)
    engine.node.messages.clear()
    engine.add("b", PROMPT)
    engine.step(10)
    assert len(engine.node.sent(hot.Ask)) == 1
    assert engine.node.live[1] == [engine.node.sent(hot.Ask)[0].admission]
    engine.run()
    assert loads_of(engine.node)[-1] == ("b", 0, 192)
    engine.assert_idle()
