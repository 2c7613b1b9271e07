"""Halves of an engine that speak the wire by hand over real sockets, so that they can misbehave.

Nothing here uses the connector's client: every byte and every descriptor is the test's. The
memory is real (memfds), so what a sidecar copies can be compared.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import zmq
from kvferry_connector.wire import attach, codec
from kvferry_connector.wire.attach import (
    FromPeer,
    Group,
    Hello,
    Memory,
    Placement,
    Ready,
    Registered,
    RegisterEngine,
    RegisterRank,
    Shard,
    ToPeer,
    Welcome,
)
from kvferry_connector.wire.hot import FromHalf, FromSidecar
from kvferry_connector.wire.names import (
    BOUND_STEP_OFFSET,
    DONE_STEP_OFFSET,
    FENCE_PAGE_BYTES,
    NO_VERSION,
    attach_path,
)
from support.memory import sealed_memfd

BLOCK_TOKENS = 16
DEADLINE_S = 90.0
M = TypeVar("M")


class KvMemory:
    """One rank's fence page and KV memory: ``blocks`` blocks of ``layers`` pages each."""

    def __init__(self, blocks: int = 64, page_bytes: int = 1024, layers: int = 2) -> None:
        self.blocks, self.page_bytes, self.layers = blocks, page_bytes, layers
        self.total_bytes = layers * blocks * page_bytes
        self.fence_fd = sealed_memfd(FENCE_PAGE_BYTES)
        self.fd = sealed_memfd(self.total_bytes)
        self._fence = mmap.mmap(self.fence_fd, FENCE_PAGE_BYTES)
        self._pages = mmap.mmap(self.fd, self.total_bytes)

    def offered(self) -> list[Memory]:
        """Return what Hello says of the memory."""
        return [Memory(0, self.total_bytes)]

    def fds(self) -> list[int]:
        """Return the descriptors that go with Hello, after the pidfd."""
        return [self.fence_fd, self.fd]

    def bound(self, step: int) -> None:
        """Write the fence word that loads wait for."""
        self._write_word(BOUND_STEP_OFFSET, step)

    def done(self, step: int) -> None:
        """Write the fence word that saves wait for."""
        self._write_word(DONE_STEP_OFFSET, step)

    def read(self, block: int) -> bytes:
        """Return one block's bytes, its layers one after the other."""
        starts = (self._start(layer, block) for layer in range(self.layers))
        return b"".join(self._pages[start : start + self.page_bytes] for start in starts)

    def write(self, block: int, data: bytes) -> None:
        """Write one block's bytes."""
        for layer in range(self.layers):
            page = data[layer * self.page_bytes : (layer + 1) * self.page_bytes]
            start = self._start(layer, block)
            self._pages[start : start + self.page_bytes] = page

    def registration(self, rank: int, ranks: int, **changes: Any) -> RegisterRank:
        """Return the registration that describes this memory, with fields changed."""
        names = [f"layer.{number}" for number in range(self.layers)]
        layer_stride = self.blocks * self.page_bytes
        fields: dict[str, Any] = {
            "serial": 1,
            "shard": Shard(tp_rank=rank, tp_size=ranks),
            "identity": {"model": "raw", "hash_seed": "0"},
            "num_blocks": self.blocks,
            "layout": "HND",
            "groups": [Group(0, "full", BLOCK_TOKENS, {"dtype": "float32"}, names)],
            "placements": [
                Placement(0, names, 0, 0, layer_stride, self.page_bytes, self.page_bytes)
            ],
            "hash_block_tokens": BLOCK_TOKENS,
        }
        return RegisterRank(**(fields | changes))

    def close(self) -> None:
        """Unmap and close."""
        self._fence.close()
        self._pages.close()
        os.close(self.fence_fd)
        os.close(self.fd)

    def _start(self, layer: int, block: int) -> int:
        return (layer * self.blocks + block) * self.page_bytes

    def _write_word(self, offset: int, step: int) -> None:
        self._fence[offset : offset + 8] = step.to_bytes(8, "little")


class RawStream:
    """One attach stream, driven by hand."""

    def __init__(self, run_dir: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(attach_path(run_dir)))  # blocking: waits for a full backlog
        self.socket.settimeout(DEADLINE_S)
        self.fds: list[int] = []
        self._reassembler = attach.Reassembler()
        self._inbox: list[ToPeer] = []

    def send(self, message: FromPeer, fds: Sequence[int] = ()) -> None:
        """Send one message with its descriptors."""
        self.send_bytes(attach.encode(message), fds)

    def send_bytes(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send bytes as they are; a stream that the sidecar has closed swallows them."""
        with suppress(BrokenPipeError, ConnectionResetError):
            if fds:
                data = data[socket.send_fds(self.socket, [data], list(fds)) :]
            self.socket.sendall(data)

    def receive(self) -> ToPeer | None:
        """Return the next message, None at the stream's end. TimeoutError at the deadline."""
        while not self._inbox:
            try:
                data, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, 8)
            except ConnectionResetError:
                return None
            self.fds += fds
            if not data:
                return None
            self._inbox += map(attach.read_to_peer, self._reassembler.feed(data))
        return self._inbox.pop(0)

    def expect(self, kind: type[M]) -> M:
        """Return the next message of this kind; nothing but acks may come before it."""
        while isinstance(message := self.receive(), attach.HeartbeatAck):
            if kind is attach.HeartbeatAck:
                break
        assert isinstance(message, kind), message
        return message

    def readable(self) -> bool:
        """Whether something (or the end) waits."""
        return bool(self._inbox or select.select([self.socket], [], [], 0)[0])

    def close(self) -> None:
        """Close the stream and the descriptors that came over it."""
        self.socket.close()
        while self.fds:
            os.close(self.fds.pop())


class RawHalf:
    """One half: its stream, and once it is welcomed its DEALER. ``memory``: of a worker half."""

    def __init__(
        self,
        run_dir: Path,
        rank: int = -1,
        *,
        engine_id: str = "raw",
        instance_id: str = "one",
        memory: KvMemory | None = None,
    ) -> None:
        self.run_dir, self.rank = run_dir, rank
        self.engine_id, self.instance_id = engine_id, instance_id
        self.memory = memory
        self.stream = RawStream(run_dir)
        self.welcome: Welcome | None = None
        self.heard: list[FromSidecar] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer: zmq.Socket[bytes] | None = None
        self._beats = 0

    @property
    def welcomed(self) -> Welcome:
        """The Welcome of this half. AssertionError when it was not welcomed."""
        assert self.welcome is not None, "attach() first"
        return self.welcome

    # --- attach ------------------------------------------------------------------------------

    def hello(self, **changes: Any) -> Hello:
        """Return this half's Hello, with fields changed."""
        fields: dict[str, Any] = {
            "protocol_min": 1,
            "protocol_max": 1,
            "role": "scheduler" if self.rank < 0 else "worker",
            "engine_id": self.engine_id,
            "instance_id": self.instance_id,
            "rank": self.rank,
            "pid": os.getpid(),
            "fence": self.memory is not None,
            "memories": self.memory.offered() if self.memory else [],
            "host": "engine-pod-1",
        }
        return Hello(**(fields | changes))

    def attach(self) -> Welcome:
        """Say Hello as a well-behaved half does; connect the DEALER that Welcome names."""
        pidfd = os.pidfd_open(os.getpid())
        self.stream.send(self.hello(), [pidfd, *(self.memory.fds() if self.memory else ())])
        os.close(pidfd)
        self.welcome = self.stream.expect(Welcome)
        self.reconnect()
        return self.welcome

    def register(self, message: RegisterEngine | RegisterRank) -> Registered:
        """Register; the answer must be Registered."""
        self.stream.send(message)
        return self.stream.expect(Registered)

    def beat(self, as_of: int, live: Sequence[int] = ()) -> None:
        """Send a heartbeat and wait until the sidecar has handled it."""
        self._beats += 1
        self.stream.send(attach.Heartbeat(self._beats, as_of, list(live)))
        assert self.stream.expect(attach.HeartbeatAck).seq == self._beats

    # --- hot channel -------------------------------------------------------------------------

    def dealer(self, identity: bytes, queued_max: int = 1000) -> zmq.Socket[bytes]:
        """Return a DEALER of any routing id, connected to the endpoint of this epoch."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, queued_max)
        dealer.setsockopt(zmq.ROUTING_ID, identity)
        dealer.connect(self.welcomed.endpoint)
        return dealer

    def reconnect(self, queued_max: int = 1000) -> None:
        """Replace the DEALER by a new one of the same routing id, which holds few unread."""
        if self._dealer is not None:
            self._dealer.close()
        self._dealer = self.dealer(self.welcomed.identity, queued_max)

    def frames(self, message: FromHalf, raw: Sequence[bytes] = (), **changes: int) -> list[bytes]:
        """Return a message's frames; ``epoch``, ``generation``, ``protocol`` may be changed."""
        fields = {
            "protocol": 1,
            "epoch": self.welcomed.epoch,
            "generation": self.welcomed.generation,
        }
        return [bytes(frame) for frame in codec.pack(message, raw, **(fields | changes))]

    def send(self, message: FromHalf, *raw: bytes) -> None:
        """Send one well-formed message."""
        self.send_frames(self.frames(message, raw))

    def send_frames(self, frames: Sequence[bytes]) -> None:
        """Send any frames."""
        assert self._dealer is not None, "attach() first"
        self._dealer.send_multipart(frames)

    def receive(
        self, kind: type[M], which: Callable[[M], bool] = lambda _: True, what: str = ""
    ) -> M:
        """Wait for a message of this kind, and keep the others in ``heard``."""
        end_s = time.monotonic() + DEADLINE_S
        while True:
            self._take(20)
            for at, message in enumerate(self.heard):
                if isinstance(message, kind) and which(message):
                    del self.heard[at]
                    return message
            assert time.monotonic() < end_s, f"no {kind.__name__} {what}; heard {self.heard[-9:]}"

    def drain(self) -> list[FromSidecar]:
        """Return and forget what has come so far."""
        self._take(0)
        heard, self.heard = self.heard, []
        return heard

    def _take(self, wait_ms: int) -> None:
        assert self._dealer is not None, "attach() first"
        while self._dealer.poll(wait_ms, zmq.POLLIN):
            frames = self._dealer.recv_multipart()
            codec.read_header(frames)  # within the bounds of the wire, in this direction too
            self.heard.append(codec.read_from_sidecar(frames[1]))
            wait_ms = 0

    def leave(self) -> None:
        """Say Bye, wait for the end of the stream, and close."""
        self.stream.send(attach.Bye())
        while self.stream.receive() is not None:
            pass
        self.close()

    def close(self) -> None:
        """Close without a word."""
        self.stream.close()
        self._context.destroy(linger=0)


def engine_registration(ranks: Sequence[int], life: bytes, **changes: Any) -> RegisterEngine:
    """Return a scheduler half's registration that fits KvMemory's, with fields changed."""
    fields: dict[str, Any] = {
        "life": life,
        "version": NO_VERSION,
        "ranks": list(ranks),
        "hash_block_tokens": BLOCK_TOKENS,
        "scheduler_block_tokens": BLOCK_TOKENS,
        "alignment_tokens": BLOCK_TOKENS,
        "load_failure_policy": "recompute",
    }
    return RegisterEngine(**(fields | changes))


def attach_pair(
    run_dir: Path, memory: KvMemory, life: bytes, engine_id: str = "raw"
) -> tuple[RawHalf, RawHalf]:
    """Return the scheduler half and rank 0 of an engine that is ready."""
    scheduler = RawHalf(run_dir, engine_id=engine_id)
    worker = RawHalf(run_dir, 0, engine_id=engine_id, memory=memory)
    scheduler.attach()
    worker.attach()
    scheduler.register(engine_registration([0], life))
    worker.register(memory.registration(0, 1))
    scheduler.stream.expect(Ready)
    worker.stream.expect(Ready)
    return scheduler, worker
