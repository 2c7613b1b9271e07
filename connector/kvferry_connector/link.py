"""One attachment as the hook thread sees it, and its ZeroMQ socket.

Ownership: the lifeline thread makes a HotSocket and hands it over through a deque (whose append
and pop are atomic); from then on only the hook thread touches it. Nothing here locks or blocks,
except ``receive`` for at most ``wait_us``.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from kvferry_connector.wire import codec
from kvferry_connector.wire.hot import FromHalf, FromSidecar

frames_queued_max = 4096  # ZeroMQ high-water mark, each way
receive_max = 1024  # messages per receive call: one hook never drains for ever
_SELECT_FD_MAX = 1024  # select(2) cannot watch a descriptor from this number on
_NAP_S = 50e-6


@dataclass(frozen=True, slots=True)
class Link:
    """What is agreed with the sidecar of one epoch; a value, safe to keep and to compare.

    ``namespace`` is the hex digest of Registered; ``save_rules`` has one of "all", "hand-offs",
    "none" per group; ``ready`` is latched once all ``ranks`` of the session are registered.
    ``serial`` is the registration it belongs to (0 for the scheduler half).
    """

    epoch: int
    generation: int
    protocol: int
    namespace: str
    save_rules: tuple[str, ...]
    ready: bool = False
    ranks: tuple[int, ...] = ()
    serial: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """(epoch, generation): what every frame of this link carries."""
        return (self.epoch, self.generation)


@dataclass(slots=True)
class Counters:
    """What was refused, dropped or retried, since start; read without a lock."""

    sent: int = 0
    sends_refused: int = 0
    received: int = 0
    stale_dropped: int = 0
    garbage_dropped: int = 0
    receive_max_hits: int = 0
    attaches: int = 0
    attach_failures: int = 0
    refusals: int = 0
    heartbeats_skipped: int = 0
    deaths: int = 0


class HotSocket:
    """The DEALER of one (epoch, generation). Made by the lifeline, used by one other thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        identity: bytes,
        key: tuple[int, int],
    ) -> None:
        self.key = key
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)  # what is queued for a dead sidecar dies with the socket
        socket.setsockopt(zmq.IMMEDIATE, 1)  # queue only on a live connection, refuse otherwise
        socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.setsockopt(zmq.SNDHWM, frames_queued_max)
        socket.setsockopt(zmq.RCVHWM, frames_queued_max)
        socket.setsockopt(zmq.MAXMSGSIZE, codec.raw_bytes_max)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket = socket
        try:
            socket.connect(endpoint)
            self._fd = int(socket.getsockopt(zmq.FD))
        except zmq.ZMQError:
            socket.close()
            raise

    def connected_within(self, wait_ms: int) -> bool:
        """Wait until a send would be taken (lifeline thread only, before the hand-over)."""
        return bool(self._socket.poll(wait_ms, zmq.POLLOUT))

    def close(self) -> None:
        """Close at once; queued frames are dropped."""
        self._socket.close()

    def send(self, frames: Sequence[codec.Frame]) -> bool:
        """Queue one message; False when the peer is not connected or its queue is full."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(
        self, link: Link, wait_us: int, counters: Counters
    ) -> list[tuple[FromSidecar, list[bytes]]]:
        """Return what has come for ``link``; wait at most ``wait_us`` for a first message.

        The descriptor of a ZeroMQ socket is edge triggered: it is only waited on right after a
        receive has said "nothing", which has emptied the socket's command queue.
        """
        taken: list[tuple[FromSidecar, list[bytes]]] = []
        deadline = time.perf_counter() + wait_us * 1e-6 if wait_us else 0.0
        for _ in range(receive_max):
            frames = self._next(deadline if not taken else 0.0)
            if frames is None:
                return taken
            message = _read(frames, link, counters)
            if message is not None:
                counters.received += 1
                taken.append((message, frames[2:]))
        counters.receive_max_hits += 1
        return taken

    def _next(self, deadline: float) -> list[bytes] | None:
        while True:
            try:
                return self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                if not self._wait(deadline):
                    return None
            except zmq.ZMQError:
                return None

    def _wait(self, deadline: float) -> bool:
        left_s = deadline - time.perf_counter() if deadline else 0.0
        if left_s <= 0.0:
            return False
        if self._fd < _SELECT_FD_MAX:
            select.select((self._fd,), (), (), left_s)
        else:  # poll(2) and epoll wait whole milliseconds, which is more than a hook has
            time.sleep(min(_NAP_S, left_s))
        return True


def _read(frames: list[bytes], link: Link, counters: Counters) -> FromSidecar | None:
    try:
        header = codec.read_header(frames)
        if (header.epoch, header.generation) != link.key:
            counters.stale_dropped += 1
            return None
        if header.protocol != link.protocol:
            counters.garbage_dropped += 1
            return None
        return codec.read_from_sidecar(frames[1])
    except codec.WireError:
        counters.garbage_dropped += 1
        return None


def pack(link: Link, message: FromHalf, raw: Sequence[codec.Frame]) -> list[codec.Frame]:
    """Return the frames of one message of this link."""
    return codec.pack(
        message, raw, protocol=link.protocol, epoch=link.epoch, generation=link.generation
    )
