"""Sessions: generations, who may take whose place, agreement of ranks, readiness."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from kvferry_connector.wire.attach import (
    Bye,
    Heartbeat,
    HeartbeatAck,
    Left,
    Memory,
    Ready,
    Refused,
    Registered,
    Welcome,
)
from kvferry_connector.wire.version import LEFT_SINCE
from kvferry_native import Layout, Mapping
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.sessions.model import Peer
from kvferry_sidecar.sessions.registry import Claim, Offer
from support.halves import Child
from support.memory import mapped_files, sealed_memfd
from support.node import Node, digest
from support.node_messages import VERSION, engine_registration, rank_registration
from support.sessions import (
    attached,
    close_all,
    only_session,
    ready_session,
    registered,
)


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as made:
        yield made
        assert not made.errors, made.errors


@pytest.fixture
def children() -> Iterator[list[Child]]:
    made: list[Child] = []
    yield made
    for child in made:
        child.close()


# --- readiness -----------------------------------------------------------------------------------


def test_ready_is_pushed_to_every_half_when_the_last_rank_registered(node: Node) -> None:
    scheduler, _ = attached(node)
    first, _ = attached(node, 0)
    second, _ = attached(node, 1)
    assert registered(scheduler, engine_registration([1, 0])) == Registered("", [])
    assert registered(second, rank_registration(1)) == Registered("", ["all"])
    node.loop.turn(0.0)
    assert not only_session(node).ready
    assert registered(first, rank_registration(0)) == Registered("", ["all"])
    session = only_session(node)
    geometries = [session.workers[rank].geometry for rank in (0, 1)]
    namespace = digest([one for one in geometries if one is not None], VERSION)
    for half in (scheduler, first, second):
        assert half.receive() == Ready(namespace.hex(), [0, 1], ["all"])
    assert node.pipeline.named("ready") == [session]
    assert session.namespaces == {VERSION: namespace}
    close_all([scheduler, first, second])


def test_a_half_that_attaches_again_hears_ready_after_its_registration(node: Node) -> None:
    halves = ready_session(node)
    again, _ = attached(node, 0)
    answer = registered(again, rank_registration(0))
    assert isinstance(answer, Registered)
    assert len(answer.namespace) == 32
    assert isinstance(again.receive(), Ready)
    assert len(node.pipeline.named("ready")) == 1, "ready is latched"
    close_all([*halves, again])


def test_nothing_is_pushed_between_welcome_and_registered(node: Node) -> None:
    scheduler, _ = attached(node)
    worker, _ = attached(node, 0)
    registered(scheduler, engine_registration([0]))
    again, _ = attached(node)  # has not registered on this stream yet
    assert registered(worker, rank_registration(0)) == Registered("", ["all"])
    assert isinstance(worker.receive(), Ready)
    assert isinstance(registered(again, engine_registration([0])), Registered)
    assert isinstance(again.receive(), Ready)
    close_all([scheduler, worker, again])


def test_heartbeats_reach_the_pipeline_and_are_answered(node: Node) -> None:
    half, _ = attached(node)
    assert registered(half, Heartbeat(5, 0, [])) == HeartbeatAck(5)
    assert node.pipeline.named("beat") == [only_session(node).scheduler]
    half.close()


# --- generations -------------------------------------------------------------------------------


def test_each_half_has_its_own_generation(node: Node) -> None:
    one, first = attached(node)
    two, second = attached(node, 0)
    assert first.generation != second.generation
    assert node.registry.find(first.identity) is only_session(node).scheduler
    assert node.registry.find(b"K" + bytes(8)) is None
    close_all([one, two])


def test_the_same_process_attaching_again_keeps_its_generation_and_peer(node: Node) -> None:
    halves = ready_session(node, 1)
    before = only_session(node).workers[0]
    halves[1].close()
    node.pump(lambda: not before.connected, "the closed stream is noticed")
    assert only_session(node).ready, "the end of a stream proves nothing"
    again, welcome = attached(node, 0)
    assert welcome.generation == before.generation
    assert only_session(node).workers[0] is before
    assert before.connected
    assert not node.pipeline.named("dead")
    close_all([halves[0], again])


def test_the_newest_stream_replaces_an_open_one(node: Node) -> None:
    old, first = attached(node)
    registered(old, engine_registration())
    new, second = attached(node)
    assert first.generation == second.generation
    old.wait_end()
    peer = only_session(node).scheduler
    assert peer is not None
    assert peer.connected
    assert registered(new, Heartbeat(1, 0, [])) == HeartbeatAck(1)
    close_all([old, new])


def test_another_process_is_refused_while_alive_and_accepted_after_kill(
    node: Node, children: list[Child]
) -> None:
    children += [Child(node, 0)]
    first = children[0].answer()
    assert first["kind"] == "Welcome"
    assert children[0].answer()["kind"] == "Registered"
    half = node.half(0)
    answer = half.say_hello()
    assert isinstance(answer, Refused)
    assert answer.code == "taken"
    assert f"live process (pid {children[0].process.pid})" in answer.message
    half.close()
    assert not node.pipeline.named("dead")
    children[0].kill()
    half, welcome = attached(node, 0)  # at once: the proof is asked for, not waited for
    assert welcome.generation > int(str(first["generation"]))
    (dead,) = node.pipeline.named("dead")
    assert isinstance(dead, Peer)
    assert dead.generation == first["generation"]
    half.close()


def test_a_death_the_loop_has_not_come_to_yet_frees_the_place(
    node: Node, children: list[Child]
) -> None:
    children += [Child(node, 0)]
    children[0].answer()
    children[0].answer()
    before = only_session(node).workers[0]
    half = node.half(0)
    children[0].kill()
    peer = node.registry.attach(Claim(half.hello(), 1, 1, Offer()), 0.0)  # no turn in between
    assert isinstance(peer, Peer)
    assert peer.generation > before.generation
    assert node.pipeline.named("dead") == [before]
    half.close()


def test_death_is_noticed_by_the_loop_and_the_session_dropped(
    node: Node, children: list[Child]
) -> None:
    children += [Child(node, -1), Child(node, 0)]
    for child in children:
        assert child.answer()["kind"] == "Welcome"
        assert child.answer()["kind"] == "Registered"
    for child in children:
        assert child.answer()["kind"] == "Ready"
    session = only_session(node)
    halves = [session.scheduler, session.workers[0]]
    children[1].kill()
    node.pump(lambda: node.pipeline.named("dead") == halves[1:], "the worker's death")
    assert not session.ready
    assert node.registry.sessions == [session]
    children[0].kill()
    node.pump(lambda: node.pipeline.named("dead") == halves[::-1], "the scheduler's death")
    assert node.registry.sessions == []
    assert all(half is not None and node.registry.find(half.routing_id) is None for half in halves)


def test_a_stopped_process_keeps_its_place(node: Node, children: list[Child]) -> None:
    children += [Child(node, 0)]
    children[0].answer()
    children[0].answer()
    children[0].process.send_signal(signal.SIGSTOP)
    half = node.half(0)
    answer = half.say_hello()
    assert isinstance(answer, Refused)
    assert answer.code == "taken"
    half.close()


def test_bye_retires_the_generation_although_the_process_lives(node: Node) -> None:
    half, first = attached(node)
    registered(half, engine_registration())
    peer = only_session(node).scheduler
    half.send(Bye())
    half.wait_end()
    assert node.pipeline.named("bye") == [peer]
    assert node.registry.sessions == []
    again, second = attached(node)
    assert second.generation > first.generation
    close_all([half, again])


def test_a_half_that_never_registered_leaves_with_its_stream(node: Node) -> None:
    half, _ = attached(node, 0)
    half.close()
    node.pump(lambda: not node.registry.sessions, "the session is dropped")
    assert not node.pipeline.calls


# --- memory ------------------------------------------------------------------------------------


def test_a_bye_counts_although_the_answer_to_a_word_before_it_finds_nobody(node: Node) -> None:
    half, _ = attached(node)
    registered(half, engine_registration())
    half.send(Heartbeat(1, 0, []))
    half.send(Bye())
    half.stream.close()
    node.pump(lambda: not node.registry.sessions, "it has left")
    assert len(node.pipeline.named("bye")) == 1


def test_mappings_stay_until_the_copies_have_stopped(node: Node, children: list[Child]) -> None:
    gc.collect()
    before = len(mapped_files())
    children += [Child(node, 0)]
    children[0].answer()
    children[0].answer()
    assert len(mapped_files()) == before + 1
    node.pipeline.busy_sessions = True
    children[0].kill()
    node.pump(lambda: node.pipeline.named("dead"), "the death")
    node.loop.turn(0.0)
    assert node.registry.leaving == 1
    assert len(mapped_files()) == before + 1
    node.pipeline.busy_sessions = False
    node.pump(lambda: not node.registry.leaving, "the mappings are closed")
    assert len(mapped_files()) == before


@pytest.mark.parametrize("protocol", [LEFT_SINCE - 1, LEFT_SINCE])
def test_a_bye_is_answered_once_the_memory_is_closed(node: Node, protocol: int) -> None:
    before = len(mapped_files())
    half = node.half(0)
    assert isinstance(half.say_hello(protocol_max=protocol), Welcome)
    registered(half, rank_registration(0))
    node.pipeline.busy_sessions = True
    half.send(Bye())
    if protocol < LEFT_SINCE:
        half.wait_end()
        node.pipeline.busy_sessions = False
        node.pump(lambda: not node.registry.leaving, "the memory is closed")
    else:
        node.pump(lambda: node.pipeline.named("bye"), "Bye is heard")
        again, welcome = attached(node, 0)  # the next life of the half does not wait for that
        assert welcome.generation == 2
        half._poll()
        assert not half.inbox, "copies still run"
        again.close()
        assert node.registry.leaving
        node.pipeline.busy_sessions = False
        assert half.receive() == Left()
        node.pump(lambda: not node.registry.sessions, "the other has gone, too")
    assert len(mapped_files()) == before
    half.close()


@pytest.mark.parametrize("memory_bytes", [8192, 65 << 20])
def test_a_bye_is_answered_only_when_nothing_is_mapped(node: Node, memory_bytes: int) -> None:
    before = len(mapped_files())
    fds = [os.pidfd_open(os.getpid()), sealed_memfd(4096), sealed_memfd(memory_bytes)]
    half = node.half(0)
    half.send(half.hello(protocol_max=LEFT_SINCE, memories=[Memory(0, memory_bytes)]), fds)
    assert isinstance(half.receive(), Welcome)
    registered(half, rank_registration(0))
    memory, one = only_session(node).workers[0].memories[0], np.array([4096])
    assert isinstance(memory, Mapping)
    used = Layout(memory, np.array([0]), one, one, 1)
    half.send(Bye())
    node.pump(lambda: node.pipeline.named("bye"), "Bye is heard")
    node.registry.tick(0.0)
    half._poll()
    assert (node.registry.leaving, half.inbox) == (1, [])
    assert len(mapped_files()) == before + 2
    del used
    assert half.receive() == Left()
    assert len(mapped_files()) == before
    assert memory.let_go()
    half.close()
    for fd in fds:
        os.close(fd)


# --- bounds ------------------------------------------------------------------------------------


def test_sessions_are_bounded_and_places_come_back() -> None:
    with Node(Limits(sessions_max=2)) as node:
        one, _ = attached(node, engine="a")
        two, _ = attached(node, engine="b")
        third = node.half(engine="c")
        answer = third.say_hello()
        assert isinstance(answer, Refused)
        assert answer.code == "sessions-max"
        third.close()
        again, _ = attached(node, engine="a")  # a known one needs no place
        one.close()
        two.send(Bye())
        two.wait_end()
        third, _ = attached(node, engine="c")
        close_all([two, again, third])


def test_ranks_are_bounded() -> None:
    with Node(Limits(ranks_max=2)) as node:
        halves = [attached(node, rank)[0] for rank in (-1, 0, 1)]
        third = node.half(2)
        answer = third.say_hello()
        assert isinstance(answer, Refused)
        assert answer.code == "ranks-max"
        close_all([*halves, third])
