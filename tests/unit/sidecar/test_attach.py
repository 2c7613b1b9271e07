"""The attach socket: identity, descriptors, and peers that misbehave."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import subprocess
from collections.abc import Iterator

import pytest
from kvferry_connector.wire import attach
from kvferry_connector.wire.attach import Memory, Refused, StatusQuery, StatusReply, Welcome
from kvferry_connector.wire.names import FENCE_PAGE_BYTES
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.sessions import identity
from structlog.testing import capture_logs
from support.halves import Child
from support.memory import mapped_files, open_descriptors, sealed_memfd
from support.node import EPOCH, HalfClient, Node
from support.node_messages import engine_registration, rank_registration


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as made:
        yield made
        assert not made.errors, made.errors


@pytest.fixture
def children(node: Node) -> Iterator[list[Child]]:
    made: list[Child] = []
    yield made
    for child in made:
        child.close()


# --- who may attach ----------------------------------------------------------------------------


def test_a_half_is_welcomed_with_epoch_generation_and_the_sidecars_pidfd(node: Node) -> None:
    half = node.half()
    welcome = half.say_hello()
    assert isinstance(welcome, Welcome)
    assert welcome.epoch == EPOCH
    assert welcome.endpoint == node.transport.endpoint
    assert welcome.identity.startswith(b"K" + welcome.generation.to_bytes(8, "big"))
    assert welcome.heartbeat_ms == node.limits.heartbeat_ms
    (pidfd,) = half.fds
    assert identity.is_pidfd(pidfd)
    assert os.fstat(pidfd).st_ino == os.fstat(node.server._pidfd).st_ino
    half.close()


def test_the_socket_is_private(node: Node) -> None:
    assert node.path.stat().st_mode & 0o777 == 0o660
    assert node.run_dir.stat().st_mode & 0o777 == 0o700


def test_a_path_of_another_is_noticed_and_left_alone(node: Node) -> None:
    assert node.server.owns_path()
    node.path.unlink()
    assert not node.server.owns_path()
    node.path.write_text("another sidecar's")
    assert not node.server.owns_path()
    node.server.close()
    assert node.path.exists()
    node.server.close = lambda: None  # type: ignore[method-assign]  # done


def test_many_refusals_are_one_line_a_second(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(node.loop, "now_s", lambda: now_s)
    with capture_logs() as logged:
        for round_number in range(6):
            now_s += 2.0 if round_number == 5 else 0.1
            half = node.half()
            half.send(attach.Bye())
            assert isinstance(half.receive(), Refused)
            half.close()
    refusals = [event for event in logged if event["event"] == "attach refused"]
    assert [event["not_logged"] for event in refusals] == [0, 4]
    assert node.server.counters["order"] == 6


def test_the_pidfd_of_another_process_is_refused(node: Node, children: list[Child]) -> None:
    children.append(Child(node, 0, pidfd_of=os.getpid()))
    answer = children[0].answer()
    assert (answer["kind"], answer["code"]) == ("Refused", "identity")
    assert "another process" in str(answer["text"])
    assert not node.registry.sessions


@pytest.mark.parametrize("has_option", [True, False], ids=["peerpidfd", "no-peerpidfd"])
def test_what_is_no_pidfd_is_refused(
    node: Node, monkeypatch: pytest.MonkeyPatch, has_option: bool
) -> None:
    if not has_option:
        monkeypatch.setattr(identity, "SO_PEERPIDFD", 9999)
    half = node.half()
    memfd = sealed_memfd(FENCE_PAGE_BYTES)
    half.send(half.hello(), [memfd])
    answer = half.receive()
    assert isinstance(answer, Refused)
    assert (answer.code, answer.message) == ("identity", "the first descriptor is no pidfd")
    os.close(memfd)
    half.close()


def test_without_peerpidfd_a_pidfd_and_our_uid_are_enough(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "SO_PEERPIDFD", 9999)
    half = node.half()
    assert isinstance(half.say_hello(), Welcome)
    half.close()


def test_another_uid_is_refused_before_it_speaks(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry_sidecar.sessions.attach.uid_allowed", lambda uid: False)
    half = node.half()
    answer = half.receive()
    assert isinstance(answer, Refused)
    assert answer.code == "uid"
    assert f"uid {os.geteuid()}" in answer.message
    half.wait_end()
    half.close()


def test_only_a_readable_pidfd_proves_an_end() -> None:
    child = subprocess.Popen(["sleep", "100"])
    pidfd = os.pidfd_open(child.pid)
    assert not identity.proven_dead(pidfd)
    child.kill()
    child.wait()
    assert identity.proven_dead(pidfd)
    os.close(pidfd)


# --- what comes with Hello ---------------------------------------------------------------------


def test_memory_is_mapped_and_no_descriptor_stays(node: Node) -> None:
    before = len(open_descriptors())
    half = node.half(rank=0)
    fds = [os.pidfd_open(os.getpid()), sealed_memfd(4096), sealed_memfd(1 << 16)]
    half.send(half.hello(memories=[Memory(3, 1 << 16)]), fds)
    for fd in fds:
        os.close(fd)
    assert isinstance(half.receive(), Welcome)
    half.send(rank_registration(0))
    half.receive()
    (session,) = node.registry.sessions
    peer = session.workers[0]
    assert peer.memories[3].total_bytes == 1 << 16
    assert peer.fence is not None
    assert peer.fence.load_u64(0) == 0
    # The two ends of the stream, the half's pidfd, and the sidecar's pidfd that the half got.
    assert len(open_descriptors()) - before == 4
    half.close()


BAD_HELLOS = {
    "no descriptors": ({}, 0, "descriptors"),
    "one descriptor too many": ({}, 3, "descriptors"),
    "all that fit": ({}, 18, "descriptors"),
    "protocol": ({"protocol_min": 7, "protocol_max": 9}, 2, "protocol"),
    "role": ({"role": "boss"}, 2, "role"),
    "rank": ({"rank": -1}, 2, "rank"),
    "rank below": ({"rank": -5}, 2, "rank"),
    "empty engine": ({"engine_id": ""}, 2, "engine_id"),
    "long instance": ({"instance_id": "x" * 513}, 2, "instance_id"),
    "long host": ({"host": "x" * 513}, 2, "host"),
    "data-parallel rank": ({"dp_rank": -1}, 2, "host"),
    "no fence": ({"fence": False}, 1, "fence"),
    "memory too large": ({"memories": [Memory(0, 8192)]}, 3, "memory-size"),
    "memory of no size": ({"memories": [Memory(0, 0)]}, 3, "memory-size"),
    "memory kind": ({"memories": [Memory(0, 4096, "tape")]}, 3, "memory-kind"),
    "memory of a GPU without one": ({"memories": [Memory(0, 4096, "cuda")]}, 2, "cuda"),
    "same buffer": ({"memories": [Memory(0, 4096), Memory(0, 4096)]}, 4, "memories"),
}


@pytest.mark.parametrize("name", BAD_HELLOS)
def test_a_bad_hello_is_refused_and_leaks_nothing(node: Node, name: str) -> None:
    changes, count, code = BAD_HELLOS[name]
    gc.collect()
    before, mapped = open_descriptors(), len(mapped_files())
    half = node.half(rank=0)
    fds = [os.pidfd_open(os.getpid()), *(sealed_memfd(4096) for _ in range(17))]
    half.send(half.hello(**changes), fds[:count])
    for fd in fds:
        os.close(fd)
    answer = half.receive()
    assert isinstance(answer, Refused)
    assert answer.code == code, answer
    half.wait_end()
    half.close()
    assert not node.registry.sessions
    gc.collect()
    assert open_descriptors().keys() == before.keys()
    assert len(mapped_files()) == mapped


def test_memory_that_could_shrink_is_refused(node: Node) -> None:
    half = node.half(rank=0)
    fds = [os.pidfd_open(os.getpid()), sealed_memfd(4096), sealed_memfd(4096, seals=0)]
    half.send(half.hello(memories=[Memory(0, 4096)]), fds)
    answer = half.receive()
    assert isinstance(answer, Refused)
    assert (answer.code, "F_SEAL_SHRINK" in answer.message) == ("memory", True)
    for fd in fds:
        os.close(fd)
    half.close()


# --- peers that misbehave ----------------------------------------------------------------------


def test_garbage_ends_only_its_own_stream(node: Node) -> None:
    good = node.half()
    assert isinstance(good.say_hello(), Welcome)
    before = open_descriptors()
    dice = random.Random(7)
    for round_number in range(60):
        half = node.half()
        fds = [sealed_memfd(64) for _ in range(dice.randrange(3))]
        size = dice.randrange(1, 400)
        body = dice.randbytes(size)
        if round_number % 2:
            body = attach.LENGTH.pack(size) + body  # well framed, no message
        half.send_bytes(body, fds)
        half.stream.close() if round_number % 3 else node.loop.turn(0.0)
        for fd in fds:
            os.close(fd)
        half.close()
    node.pump(lambda: node.server.connections == 1, "all bad streams are gone")
    assert open_descriptors().keys() == before.keys()
    good.send(attach.Heartbeat(1, 0, []))
    assert isinstance(good.receive(), attach.HeartbeatAck)
    good.close()


def test_a_message_over_its_bound_is_refused(node: Node) -> None:
    half = node.half()
    half.send_bytes(attach.LENGTH.pack(attach.attach_bytes_max + 1))
    answer = half.receive()
    assert isinstance(answer, Refused)
    assert answer.code == "malformed"
    half.wait_end()
    half.close()


def test_a_message_in_pieces_is_put_together(node: Node) -> None:
    half = node.half()
    pidfd = os.pidfd_open(os.getpid())
    data = attach.encode(half.hello())
    half.send_bytes(data[:1], [pidfd])
    os.close(pidfd)
    for byte in data[1:]:
        node.loop.turn(0.0)
        half.send_bytes(bytes([byte]))
    assert isinstance(half.receive(), Welcome)
    half.close()


@pytest.mark.parametrize(
    "message",
    [engine_registration(), attach.Heartbeat(1, 0, []), attach.Bye(), attach.Rotate(bytes(16))],
    ids=lambda message: type(message).__name__,
)
def test_nothing_comes_before_hello(node: Node, message: attach.FromPeer) -> None:
    half = node.half()
    half.send(message)
    answer = half.receive()
    assert isinstance(answer, Refused)
    assert answer.code == "order"
    half.close()


def test_a_second_hello_is_refused(node: Node) -> None:
    half = node.half()
    half.say_hello()
    assert isinstance(answer := half.say_hello(), Refused)
    assert answer.code == "order"
    half.close()


def test_status_needs_no_hello(node: Node) -> None:
    half = node.half()
    for _ in range(2):
        half.send(StatusQuery())
        assert half.receive() == StatusReply(b"{}")
    half.close()


def test_who_says_nothing_is_closed_at_the_deadline() -> None:
    with Node(Limits(hello_ms_max=60_000)) as node:
        silent = node.half()
        unregistered = node.half()
        assert isinstance(unregistered.say_hello(), Welcome)
        node.pump(lambda: node.server.connections == 2, "both are accepted")
        node.server.tick(1e12)  # seconds: long after it
        silent.wait_end()
        unregistered.wait_end()
        assert node.server.counters["hello_ms_max"] == 2
        assert not node.registry.sessions
        registered = node.half()
        registered.say_hello()
        registered.send(engine_registration())
        registered.receive()
        assert node.server._deadlines == {}
        silent.close()
        unregistered.close()
        registered.close()


def test_connections_are_bounded() -> None:
    with Node(Limits(connections_max=3)) as node:
        halves = [node.half() for _ in range(3)]
        node.pump(lambda: node.server.connections == 3, "three streams are open")
        further = node.half()
        answer = further.receive()
        assert isinstance(answer, Refused)
        assert answer.code == "connections-max"
        further.wait_end()
        halves[0].close()
        node.pump(lambda: node.server.connections == 2, "one stream is closed")
        again = node.half()
        assert isinstance(again.say_hello(), Welcome)
        for half in [*halves[1:], further, again]:
            half.close()


def test_a_slow_reader_is_closed_at_its_bound() -> None:
    with Node(Limits(attach_out_bytes_max=1 << 16)) as node:
        half = node.half()
        query = attach.encode(StatusQuery())
        sent = 0
        while not node.server.counters["attach_out_bytes_max"]:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                sent += half.stream.send(query * 100)
            node.loop.turn(0.0)
            assert sent < 64 << 20
        assert node.server.connections == 0
        half.close()


@pytest.mark.parametrize("where", ["_peer_pidfd", "has_pidfs"])
def test_a_hello_that_finds_no_free_descriptor_is_told_the_remedy(
    node: Node, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(identity, where, fail)
    half = node.half()
    answer = half.say_hello()
    assert isinstance(answer, Refused)
    assert answer.code == "out-of-descriptors"
    assert "RLIMIT_NOFILE" in answer.message
    assert "bug" not in answer.message
    half.close()


def test_no_descriptor_for_the_peers_pidfd_says_nothing_about_the_peer() -> None:
    class Full:
        def getsockopt(self, *_: int) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

    with pytest.raises(OSError, match="Too many open files"):
        identity._peer_pidfd(Full())  # type: ignore[arg-type]  # all it uses


def test_a_sidecar_out_of_descriptors_goes_on_accepting_later(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    half = HalfClient(node, -1, "engine", "one")
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        turns = node.loop.stats().turns
        node.loop.turn(0.0)
        wait_s = node.loop.turn(0.0)
        assert node.server.counters["out_of_descriptors"] == 1
        assert 0.0 < wait_s <= 0.2, "the loop must not spin"
        assert node.loop.stats().turns == turns + 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert isinstance(half.say_hello(), Welcome)
    half.close()
