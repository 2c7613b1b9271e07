"""A sidecar's sessions without its pipeline: loop, attach socket, registry, hot channel.

Everything runs in the test's own thread: ``pump`` turns the loop. Clients are real sockets.
"""

from __future__ import annotations

import hashlib
import os
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import structlog
import zmq
from kvferry_connector.wire import attach
from kvferry_connector.wire.attach import RegisterRank, ToPeer
from kvferry_connector.wire.hot import FromHalf
from kvferry_connector.wire.names import FENCE_PAGE_BYTES, control_endpoint
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.loop import Loop
from kvferry_sidecar.sessions.attach import AttachServer
from kvferry_sidecar.sessions.liveness import Liveness
from kvferry_sidecar.sessions.model import Peer, RankGeometry, RankGroup, Session
from kvferry_sidecar.sessions.registry import Registry
from kvferry_sidecar.transport import Transport
from support.fake_cuda import no_device
from support.memory import sealed_memfd

T = TypeVar("T")
EPOCH = 0x1122334455667788


class RecordingPipeline:
    """Takes the registry's and transport's calls and keeps them as (name, subject)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Peer | Session]] = []
        self.messages: list[tuple[Peer, FromHalf, list[bytes]]] = []
        self.busy_sessions = False
        self.fail_with: Exception | None = None

    def on_message(self, peer: Peer, message: FromHalf, raw: list[bytes], now_s: float) -> None:
        if self.fail_with is not None:
            raise self.fail_with
        self.messages.append((peer, message, raw))

    def on_session_ready(self, session: Session, now_s: float) -> None:
        self.calls.append(("ready", session))

    def on_peer_dead(self, peer: Peer, now_s: float) -> None:
        self.calls.append(("dead", peer))

    def on_bye(self, peer: Peer, now_s: float) -> None:
        self.calls.append(("bye", peer))

    def on_beat(self, peer: Peer, beat: attach.Heartbeat, now_s: float) -> None:
        self.calls.append(("beat", peer))

    def on_version(self, session: Session, now_s: float) -> None:
        self.calls.append(("version", session))

    def busy(self, session: Session) -> bool:
        return self.busy_sessions

    def named(self, name: str) -> list[Peer | Session]:
        """Return the subjects of the calls of one name."""
        return [subject for called, subject in self.calls if called == name]


def validate(register: RegisterRank, memories: object) -> RankGeometry | list[attach.FieldRefusal]:
    """Stand in for geometry validation: no layouts, a digest over identity, layout and layers."""
    if register.layout == "bad":
        return [attach.FieldRefusal("layout", "bad", "HND", "use HND")]
    layers = [one.layers for one in register.groups]
    facts = repr((sorted(register.identity.items()), register.layout, layers)).encode()
    return RankGeometry(
        serial=register.serial,
        groups=tuple(
            RankGroup(
                group=one.group,
                kind=one.kind,
                block_tokens=one.block_tokens,
                layout=None,
                payload_bytes=16 * len(one.layers),
                num_blocks=register.num_blocks,
                save_rule="all" if one.kind == "full" else "held",
                window_tokens=one.window_tokens,
                chunk_tokens=one.chunk_tokens,
                eagle=one.eagle,
            )
            for one in register.groups
        ),
        identity=register.identity,
        digest=hashlib.blake2b(facts, digest_size=16).digest(),
        hash_block_tokens=register.hash_block_tokens,
        position=(register.shard.tp_rank, register.shard.pp_rank, register.shard.dcp_rank),
    )


def digest(geometries: list[RankGeometry], version: bytes) -> bytes:
    """Stand in for the namespace digest."""
    return hashlib.blake2b(
        b"".join(one.digest for one in geometries) + version, digest_size=16
    ).digest()


class Node:
    """The sidecar's side, with its own run directory; a context manager."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.run_dir = Path(tempfile.mkdtemp(prefix="kvf-"))
        self.path = self.run_dir / "attach.sock"
        self.errors: list[BaseException] = []
        self.loop = Loop(lambda error, _what: self.errors.append(error))
        self.pipeline = RecordingPipeline()
        log = structlog.get_logger()
        self.liveness = Liveness(self.loop, self._on_dead)
        self.registry = Registry(
            limits=self.limits,
            events=self.pipeline,
            liveness=self.liveness,
            validate=validate,
            digest=digest,
            push=self._push,
            log=log,
            shared_store=True,
        )
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.transport = Transport(
            self.context,
            control_endpoint(self.run_dir, EPOCH),
            epoch=EPOCH,
            limits=self.limits,
            find=self.registry.find,
            on_message=self.pipeline.on_message,
            log=log,
        )
        self.loop.watch_pending(
            self.transport.fd, self.transport.on_readable, self.transport.pending
        )
        self.server = AttachServer(
            self.path,
            loop=self.loop,
            registry=self.registry,
            liveness=self.liveness,
            limits=self.limits,
            epoch=EPOCH,
            endpoint=self.transport.endpoint,
            status=lambda _turn_s: b"{}",
            open_device=no_device,
            log=log,
        )
        self.loop.add_ticker("sessions", self.registry.tick)
        self.loop.add_ticker("attach", self.server.tick)

    def _on_dead(self, peer: Peer, now_s: float) -> None:
        self.registry.dead(peer, now_s)

    def _push(self, peer: Peer, message: ToPeer) -> None:
        self.server.push(peer, message)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()
        self.transport.close()
        self.context.destroy(linger=0)  # a failed test leaves its sockets open
        self.liveness.close()
        self.loop.close()
        shutil.rmtree(self.run_dir)

    def pump(self, condition: Callable[[], T], what: str, deadline_s: float = 90.0) -> T:
        """Turn the loop until ``condition`` holds; fail naming ``what`` at the deadline."""
        end = time.monotonic() + deadline_s
        while True:
            self.loop.turn(0.002)
            value = condition()
            if value:
                return value
            assert time.monotonic() < end, f"after {deadline_s} s still not: {what}"

    def half(self, rank: int = -1, engine: str = "engine", instance: str = "one") -> HalfClient:
        """Return a connected half of this process that has said nothing yet."""
        return HalfClient(self, rank, engine, instance)


class HalfClient:
    """One attach stream, driven by hand."""

    def __init__(self, node: Node, rank: int, engine: str, instance: str) -> None:
        self.node = node
        self.rank = rank
        self.stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.stream.connect(str(node.path))
        self.stream.setblocking(False)
        self._reassembler = attach.Reassembler()
        self.inbox: list[ToPeer] = []
        self.fds: list[int] = []
        self.ended = False
        self._engine = engine
        self._instance = instance

    def hello(self, **changes: object) -> attach.Hello:
        """Return this half's Hello, with fields changed."""
        fields: dict[str, object] = {
            "protocol_min": 1,
            "protocol_max": 1,
            "role": "scheduler" if self.rank < 0 else "worker",
            "engine_id": self._engine,
            "instance_id": self._instance,
            "rank": self.rank,
            "pid": os.getpid(),
            "fence": self.rank >= 0,
        }
        return attach.Hello(**(fields | changes))  # type: ignore[arg-type]  # fields by name

    def send(self, message: attach.FromPeer, fds: Sequence[int] = ()) -> None:
        """Send one message with its descriptors."""
        self.send_bytes(attach.encode(message), fds)

    def send_bytes(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send bytes as they are, turning the sidecar's loop while the socket is full."""
        if fds:
            sent = socket.send_fds(self.stream, [data], list(fds))
            data = data[sent:]
        while data:
            try:
                data = data[self.stream.send(data) :]
            except BlockingIOError:
                self.node.pump(self._has_room, "room in the stream")

    def _has_room(self) -> bool:
        return bool(select.select([], [self.stream], [], 0)[1])

    def say_hello(self, **changes: object) -> attach.Welcome | attach.Refused:
        """Say Hello as a well-behaved half does and return the answer."""
        pidfd = os.pidfd_open(os.getpid())
        fds = [pidfd]
        if self.rank >= 0:
            fds.append(sealed_memfd(FENCE_PAGE_BYTES))
        try:
            self.send(self.hello(**changes), fds)
        finally:
            for fd in fds:
                os.close(fd)
        answer = self.receive()
        assert isinstance(answer, attach.Welcome | attach.Refused)
        return answer

    def receive(self) -> ToPeer:
        """Return the next message, turning the sidecar's loop meanwhile."""
        self.node.pump(lambda: self._poll() or self.inbox, "an answer on the attach stream")
        return self.inbox.pop(0)

    def wait_end(self) -> None:
        """Wait until the sidecar closed the stream."""
        self.node.pump(lambda: self._poll() or self.ended, "the end of the stream")

    def _poll(self) -> None:
        while not self.ended:
            try:
                data, fds, _, _ = socket.recv_fds(self.stream, 1 << 16, 8)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data, fds = b"", []
            self.fds += fds
            self.ended = not data
            self.inbox += map(attach.read_to_peer, self._reassembler.feed(data))

    def close(self) -> None:
        """Close the stream and what came over it."""
        self.stream.close()
        while self.fds:
            os.close(self.fds.pop())
