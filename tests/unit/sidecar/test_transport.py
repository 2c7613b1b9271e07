"""The hot channel: frames that are stale, foreign, malformed or too many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
import zmq
from kvferry_connector.wire import codec
from kvferry_connector.wire.attach import Bye, Welcome
from kvferry_connector.wire.codec import HEADER, MAGIC, Frame
from kvferry_connector.wire.hot import (
    Ask,
    Cancel,
    Error,
    Hint,
    JobStatus,
    OutcomeAck,
    Probe,
    SaveJob,
    Submit,
)
from kvferry_sidecar.errors import RunDirError
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.sessions.attach import AttachServer
from kvferry_sidecar.sessions.model import Peer
from kvferry_sidecar.transport import Transport
from support.fake_cuda import no_device
from support.node import EPOCH, HalfClient, Node


class Dealer:
    """A half with an attach stream and its hot socket."""

    def __init__(self, node: Node, rank: int = -1) -> None:
        self.node = node
        self.half: HalfClient = node.half(rank)
        welcome = self.half.say_hello()
        assert isinstance(welcome, Welcome)
        self.welcome = welcome
        peer = node.registry.find(welcome.identity)
        assert peer is not None
        self.peer: Peer = peer
        self.socket = connect(node, welcome.identity)

    def frames(self, message: object, **changes: int) -> list[Frame]:
        header = {"protocol": 1, "epoch": EPOCH, "generation": self.welcome.generation} | changes
        return codec.pack(message, (), **header)  # type: ignore[arg-type]  # any message

    def send(self, message: object, **changes: int) -> None:
        self.socket.send_multipart(self.frames(message, **changes))

    def error(self) -> Error:
        """Return the next answer, which is an Error frame of this epoch and generation."""
        return receive_error(self.node, self.socket, self.welcome.generation)

    def close(self) -> None:
        self.socket.close(linger=0)
        self.half.close()


def connect(node: Node, identity: bytes) -> zmq.Socket[bytes]:
    socket = node.context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(node.transport.endpoint)
    return socket


def receive(node: Node, socket: zmq.Socket[bytes]) -> list[bytes]:
    node.pump(lambda: socket.poll(0), "an answer on the hot channel")
    return socket.recv_multipart()


def receive_error(node: Node, socket: zmq.Socket[bytes], generation: int) -> Error:
    frames = receive(node, socket)
    header = codec.read_header(frames)
    assert (header.epoch, header.generation) == (EPOCH, generation)
    message = codec.read_from_sidecar(frames[1])
    assert isinstance(message, Error)
    return message


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as made:
        yield made
        assert not made.errors, made.errors


@pytest.fixture
def dealer(node: Node) -> Iterator[Dealer]:
    made = Dealer(node)
    yield made
    made.close()


def test_a_message_reaches_the_pipeline_with_its_raw_frames(node: Node, dealer: Dealer) -> None:
    probe = Probe("r", 1, bytes(16), 0, 2, 32, 32, b"")
    frames = codec.pack(
        probe, [b"h" * 64], protocol=1, epoch=EPOCH, generation=dealer.welcome.generation
    )
    dealer.socket.send_multipart(frames)
    node.pump(lambda: node.pipeline.messages, "the message")
    assert node.pipeline.messages == [(dealer.peer, probe, [b"h" * 64])]
    assert not node.transport.counters


def test_the_socket_file_is_private_and_goes_with_it(node: Node) -> None:
    (path,) = node.run_dir.glob("ctl-*.sock")
    assert path.name == f"ctl-{EPOCH:016x}.sock"
    assert path.stat().st_mode & 0o777 == 0o600
    node.transport.close()
    assert not path.exists()


def test_a_socket_that_cannot_be_bound_is_an_error_of_the_run_directory(node: Node) -> None:
    def bind(context: zmq.Context[zmq.Socket[bytes]], place: str) -> None:
        Transport(
            context,
            place,
            epoch=EPOCH,
            limits=Limits(),
            find=node.registry.find,
            on_message=node.pipeline.on_message,
            log=structlog.get_logger(),
        )

    with pytest.raises(RunDirError, match="cannot be bound: No such file") as caught:
        bind(node.context, f"ipc://{node.run_dir}/none/ctl.sock")
    assert "run_dir" in caught.value.remedy
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 1)
        first = context.socket(zmq.ROUTER)
        with pytest.raises(RunDirError, match="Too many open files") as caught:
            bind(context, f"ipc://{node.run_dir}/ctl.sock")
        assert "RLIMIT_NOFILE" in caught.value.remedy
        first.close(linger=0)


def test_a_path_that_cannot_be_bound_is_an_error_of_the_run_directory(node: Node) -> None:
    with pytest.raises(RunDirError, match="cannot be bound"):
        AttachServer(
            node.path,
            loop=node.loop,
            registry=node.registry,
            liveness=node.liveness,
            limits=node.limits,
            epoch=EPOCH,
            endpoint="",
            status=lambda _turn_s: b"{}",
            open_device=no_device,
            log=structlog.get_logger(),
        )
    assert node.server.owns_path()


def test_stale_frames_are_refused_with_both_values(node: Node, dealer: Dealer) -> None:
    for changes in ({"epoch": EPOCH - 1}, {"generation": dealer.welcome.generation + 1}):
        dealer.send(JobStatus(1), **changes)
        error = dealer.error()
        assert error.code == "stale"
        assert f"{EPOCH:016x}" in error.message
        assert "attach again" in error.remedy
    assert node.transport.counters["stale"] == 2
    assert not node.pipeline.messages


def test_a_generation_of_a_former_life_is_foreign(node: Node, dealer: Dealer) -> None:
    dealer.half.send(Bye())
    dealer.half.wait_end()
    dealer.send(Cancel(1))
    node.pump(lambda: node.transport.counters["foreign"], "the frame is counted")
    successor = Dealer(node)
    successor.send(Cancel(2), generation=dealer.welcome.generation)
    assert successor.error().code == "stale"
    assert not node.pipeline.messages
    successor.close()


def test_an_unknown_routing_id_is_dropped_and_counted(node: Node, dealer: Dealer) -> None:
    stranger = connect(node, b"K" + bytes(8))
    stranger.send_multipart(dealer.frames(JobStatus(1)))
    node.pump(lambda: node.transport.counters["foreign"] == 1, "the frame is counted")
    assert not stranger.poll(0)
    stranger.close(linger=0)


def test_another_protocol_is_refused(node: Node, dealer: Dealer) -> None:
    dealer.send(JobStatus(1), protocol=2)
    assert dealer.error().code == "protocol"


def good_header(dealer: Dealer, raw_frames: int = 0) -> bytes:
    return HEADER.pack(MAGIC, 1, raw_frames, EPOCH, dealer.welcome.generation)


def test_malformed_frames_are_answered(node: Node, dealer: Dealer) -> None:
    header = good_header(dealer)
    bad: list[list[bytes]] = [
        [b""],
        [header],
        [b"short", b"x"],
        [b"XXXX" + header[4:], b"x"],
        [header, b"\xc1"],
        [header, b""],
        [header, b"\x92\xa1z\x01"],
        [header, b"x", b"raw that was not announced"],
        [good_header(dealer, 2), b"x", b"raw"],
        [good_header(dealer, 3), b"x", b"1", b"2", b"3"],
        [header, bytes(codec.body_bytes_max + 1)],
    ]
    for frames in bad:
        dealer.socket.send_multipart(frames)
        assert dealer.error().code == "malformed", frames
    assert node.transport.counters["malformed"] == len(bad)
    dealer.send(JobStatus(1))
    node.pump(lambda: node.pipeline.messages, "a good frame still arrives")


def test_a_frame_over_the_bound_ends_the_connection_only(
    node: Node, dealer: Dealer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "raw_bytes_max", 1 << 16)
    with Node() as small:
        half = Dealer(small)
        half.socket.send_multipart([good_header(half, 1), b"x", bytes(1 << 17)])
        other = Dealer(small, rank=0)
        other.send(JobStatus(7))
        small.pump(lambda: small.pipeline.messages, "the other half's frame")
        assert [peer for peer, _, _ in small.pipeline.messages] == [other.peer]
        half.close()
        other.close()


def test_a_failing_handler_is_answered_with_what_it_was_about(node: Node, dealer: Dealer) -> None:
    node.pipeline.fail_with = ValueError("broken on purpose")
    job = SaveJob(77, bytes(16), bytes(16), "r", 9, 1, 0, 16, 0, 32, [])
    cases = [
        (Cancel(5), 5, 0),
        (JobStatus(6), 6, 0),
        (Ask(8, 1, 0, 16), 0, 8),
        (Submit(codec.encode_job(job)), 77, 9),
        (Submit(b"no job"), 0, 0),
        (OutcomeAck([1]), 0, 0),
    ]
    for message, job_id, admission in cases:
        dealer.send(message)
        error = dealer.error()
        assert (error.code, error.job, error.admission) == ("internal", job_id, admission)
        assert "broken on purpose" in error.message
    node.pipeline.fail_with = None
    dealer.send(Cancel(5))
    node.pump(lambda: node.pipeline.messages, "the loop went on")
    assert node.transport.counters["handler_failed"] == len(cases)


def test_one_turn_handles_a_bounded_number_of_messages() -> None:
    with Node(Limits(messages_per_turn_max=3)) as node:
        dealer = Dealer(node)
        for number in range(1, 11):
            dealer.send(Cancel(number))
        node.pump(node.transport.pending, "messages wait")
        before = len(node.pipeline.messages)
        node.loop.turn(0.0)
        assert 0 < len(node.pipeline.messages) - before <= 3
        node.pump(lambda: len(node.pipeline.messages) == 10, "all messages")
        assert [message.job for _, message, _ in node.pipeline.messages] == list(range(1, 11))
        dealer.close()


def test_sends_never_block_and_drops_are_counted() -> None:
    with Node(Limits(router_hwm=4)) as node:
        dealer = Dealer(node)
        unconnected = node.half(0)
        welcome = unconnected.say_hello()
        assert isinstance(welcome, Welcome)
        peer = node.registry.find(welcome.identity)
        assert peer is not None
        node.transport.send(peer, Hint(1, 0, 0))
        assert node.transport.counters["send_unreachable"] == 1
        unconnected.close()
        dealer.socket.setsockopt(zmq.RCVHWM, 1)
        dealer.send(Cancel(1))
        node.pump(lambda: node.pipeline.messages, "the socket is known")
        text = "x" * 100_000
        for _ in range(4000):
            node.transport.send(dealer.peer, Error("a", text, ""))
            if node.transport.counters["send_full"]:
                break
        assert node.transport.counters["send_full"] == 1

        def served() -> bool:
            node.transport.send(dealer.peer, Hint(2, 0, 0))
            if not dealer.socket.poll(0):
                return False
            return codec.read_from_sidecar(dealer.socket.recv_multipart()[1]) == Hint(2, 0, 0)

        node.pump(served, "a reader that catches up is served again")
        dealer.close()


def test_a_reconnected_half_takes_its_routing_id_over(node: Node, dealer: Dealer) -> None:
    dealer.send(Cancel(1))
    node.pump(lambda: node.pipeline.messages, "the first socket is known")
    second = connect(node, dealer.welcome.identity)
    second.send_multipart(dealer.frames(Cancel(2)))
    node.pump(lambda: len(node.pipeline.messages) == 2, "the second socket's frame")
    node.transport.send(dealer.peer, Hint(3, 0, 0))
    assert codec.read_from_sidecar(receive(node, second)[1]) == Hint(3, 0, 0)
    second.close(linger=0)
