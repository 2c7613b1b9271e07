"""What the scheduler half makes of several nodes: whom it tells what, and when they agree."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from kvferry_connector import nodes as module
from kvferry_connector.config import FerryConfig
from kvferry_connector.deputy import Deputy
from kvferry_connector.half import Half
from kvferry_connector.jobs import NO_EPOCH, JobOrder
from kvferry_connector.meta import FerryHandshake, FerryWorkerMetadata, Heard, NodeState
from kvferry_connector.nodes import HERE, Nodes, by_node, spread
from kvferry_connector.wire.attach import RegisterEngine
from kvferry_connector.wire.hot import Answer, Release
from support.clients import Serve
from support.waiting import wait_until

ENGINE = RegisterEngine(
    bytes(16), bytes(16), [], 16, 16, 16, "recompute", kv_events=True, use_eagle=True
)
RULES = ("all",)
QUIET = ((0, ()), 0)
WORKER = Half("worker", "engine", "instance", 2)


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


@pytest.fixture
def nodes(counts: Counter[str]) -> Nodes:
    """Ranks 2 and 3 on one further node, rank 4 on another one."""
    _, *further = spread(ENGINE, [[0, 1], [2, 3], [4]])
    return Nodes(further, lambda name: counts.update([name]))


def met(nodes: Nodes) -> Nodes:
    for rank, epoch in ((2, 20), (4, 40)):
        assert nodes.note(rank, NodeState(epoch, RULES))
    return nodes


def answer(seq: int, hit: int, **sources: int) -> Answer:
    return Answer(1, seq, hit, sources)


def test_ranks_are_told_apart_by_host_run_directory_and_start_of_vllm() -> None:
    ids, others = ("engine", "one"), ("engine", "two")
    here = FerryHandshake(-1, "host", "/run/a", ids)
    shakes = [
        FerryHandshake(3, "other", "/run/a", ids),
        FerryHandshake(1, "host", "/run/a", ids),
        FerryHandshake(2, "host", "/run/b", ids),
        FerryHandshake(4, "host", "/run/a", others),
        FerryHandshake(0, "host", "/run/a", ids),
    ]
    assert by_node(shakes, here) == [[0, 1], [2], [3], [4]]
    assert by_node(shakes[:1], here) == [[], [3]], "none beside the scheduler half"


def test_every_node_registers_the_same_engine_for_its_ranks() -> None:
    """KV events are told once."""
    first, second = spread(ENGINE, [[0, 1], [2]])
    assert (first.ranks, first.nodes, first.kv_events) == ([0, 1], 2, True)
    assert (second.ranks, second.nodes, second.kv_events) == ([2], 2, False)
    assert (second.life, second.use_eagle) == (ENGINE.life, True)
    assert [engine.nodes for engine in spread(ENGINE, [[0]])] == [1]


def test_deputies_are_told_once_and_after_a_reset_again(nodes: Nodes) -> None:
    assert nodes.pending()
    relay = nodes.take(QUIET)
    assert relay is not None
    assert {rank: engine.ranks for rank, engine in relay.engines.items()} == {2: [2, 3], 4: [4]}
    assert nodes.take(QUIET) is None
    nodes.rotate(b"v" * 16)
    relay = nodes.take(QUIET)
    assert relay is not None
    assert {engine.version for engine in relay.engines.values()} == {b"v" * 16}


def test_heartbeats_of_deputies_say_what_those_here_say(
    serve: Serve, tmp_path: Path, nodes: Nodes
) -> None:
    """Told when it is news: else a lease there would fall while its request waits for blocks."""
    sidecar = serve(1)
    first = nodes.take(QUIET)
    assert first is not None
    deputy = Deputy(FerryConfig(run_dir=str(tmp_path)), WORKER, first.engines[2])
    try:
        beat = ((17, (3, 4)), 250)
        relay = nodes.take(beat)
        assert relay is not None
        assert nodes.take(beat) is None
        deputy.obey(relay)
        said = (17, [3, 4], 250)
        wait_until(
            lambda: any((b["as_of"], b["live"], b["pace"]) == said for b in sidecar.events("beat")),
            "a heartbeat says it",
        )
    finally:
        deputy.close()


def test_an_engine_steps_for_nodes_it_has_not_met_in_a_bounded_time(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.take(QUIET)
    nodes.note(4, NodeState(0, (), "no shared store"))
    assert nodes.pending(), "of rank 2 nothing is known"
    now_s = module.time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s + 6.0)
    assert not nodes.pending()
    nodes.relay(Release([1]))
    assert nodes.pending(), "there is something to tell"


def test_a_step_carries_a_bounded_number_of_messages(nodes: Nodes, counts: Counter[str]) -> None:
    assert all(nodes.relay(Release([n])) for n in range(module.relayed_max))
    assert not nodes.relay(Release([0]))
    assert counts == {"relayed_max": 1}
    relay = nodes.take(QUIET)
    assert relay is not None
    assert len(relay.messages) == module.relayed_max
    assert nodes.relay(Release([0]))


def test_nodes_may_be_asked_when_all_save_the_same(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    assert not nodes.ready(RULES)
    met(nodes)
    assert nodes.ready(RULES)
    assert nodes.is_current(2, 20)
    assert not nodes.note(2, NodeState(20, RULES)), "the same as before"
    for _ in range(2):
        assert not nodes.ready(("tail:2",))
    assert caplog.text.count("nodes save different things") == 1
    assert nodes.note(4, NodeState(0, (), "it has no shared store"))
    assert "the node of rank 4 is not served: it has no shared store" in caplog.text
    assert not nodes.ready(RULES)
    assert not nodes.is_current(4, 40)


def test_a_job_goes_to_each_ranks_own_sidecar_or_to_none(nodes: Nodes) -> None:
    orders = [JobOrder(1, "a", 10, b"", ()), JobOrder(2, "b", NO_EPOCH, b"", ())]
    good, failing = met(nodes).address(orders)
    assert [good.epoch_for(rank) for rank in range(5)] == [10, 10, 20, 20, 40]
    assert {failing.epoch_for(rank) for rank in range(5)} == {NO_EPOCH}


def test_answers_are_one_when_all_nodes_gave_theirs(nodes: Nodes) -> None:
    """Those to an older question, or to none, are not counted."""
    assert nodes.answered(1, HERE, answer(7, 64), 64) is None
    nodes.asked(1, 7, anew=True)
    assert nodes.answered(1, HERE, answer(7, 64, disk=64), 64) is None
    assert nodes.answered(1, 2, answer(6, 48), 48) is None
    assert nodes.answered(1, 4, answer(7, 32, host=32), 32) is None
    found = nodes.answered(1, 2, answer(7, 64, host=64), 64)
    assert found is not None
    hits, sources = found
    assert (sorted(hits), sources) == ([32, 64, 64], {"disk": 64})
    nodes.forget(1)
    assert nodes.answered(1, 2, answer(7, 64), 64) is None


def test_hints_bound_the_hit_and_say_what_all_have(nodes: Nodes) -> None:
    assert nodes.hinted(1, 2, 64) == (64, 0)
    assert nodes.hinted(1, HERE, 48) == (48, 0)
    assert nodes.hinted(1, 4, 80) == (48, 48)
    assert nodes.hinted(1, HERE, 96) == (64, 64), "of a later probe"


def test_time_is_not_over_before_answers_could_come(nodes: Nodes) -> None:
    nodes.asked(1, 1, anew=True)
    for _ in range(module.answer_steps_min - 1):
        nodes.take(QUIET)
        assert nodes.early(1)
    nodes.asked(1, 2, anew=False)
    nodes.take(QUIET)
    assert not nodes.early(1), "asked again within the same question"
    nodes.asked(1, 3, anew=True)
    assert nodes.early(1)
    assert not nodes.early(2), "of which nothing was asked"


def test_what_deputies_learned_is_merged() -> None:
    one = FerryWorkerMetadata({}, {2: NodeState(20)}, [Heard(2, 20, answer(1, 16))])
    other = FerryWorkerMetadata({}, {4: NodeState(0)}, [Heard(4, 40, answer(1, 32))])
    merged = one.aggregate(other)
    assert merged.nodes == {2: NodeState(20), 4: NodeState(0)}
    assert [heard.rank for heard in merged.heard] == [2, 4]
