"""One attachment as the hook thread sees it, and its ZeroMQ socket.

Ownership: the lifeline thread makes a HotSocket and publishes it inside a Link; whoever takes the
link to use it is the hook thread, and from then on only that one touches the socket. Nothing here
locks or blocks, except ``receive`` for at most ``wait_us``.
"""

from __future__ import annotations

import functools
import select
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from kvferry_connector.wire import codec
from kvferry_connector.wire.hot import FromHalf, FromSidecar

frames_queued_max = 4096  # ZeroMQ high-water mark, each way
receive_max = 1024  # messages per receive call: one hook never drains for ever
_SELECT_FD_MAX = 1024  # select(2) cannot watch a descriptor from this number on
_NAP_S = 50e-6
_DESCRIPTORS_SPARE = 8  # ZeroMQ takes five: for two threads and a socket
_THREADS_SPARE = 4  # ZeroMQ takes two
_send, _LAST, _MORE = zmq.backend.Socket.send, int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)  # an enum's ``&`` costs as much as asking for the events
_OPTIONS = {
    zmq.LINGER: 0,  # what is queued for a dead sidecar dies with the socket
    zmq.IMMEDIATE: 1,  # queue only on a live connection, refuse otherwise
    zmq.SNDHWM: frames_queued_max,
    zmq.RCVHWM: frames_queued_max,
    zmq.MAXMSGSIZE: codec.raw_bytes_max,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1000,
}


@dataclass(frozen=True)
class Link:
    """What is agreed with the sidecar of one epoch; a value, safe to keep and to compare.

    ``save_rules`` per group as in wire.attach.Registered; ``ready`` is latched once all local
    ranks of the session are registered.
    """

    epoch: int
    generation: int
    protocol: int
    save_rules: tuple[str, ...]
    ready: bool = False
    hot: HotSocket | None = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> tuple[int, int]:
        """(epoch, generation): what every frame of this link carries."""
        return (self.epoch, self.generation)

    @functools.cached_property
    def stored_groups(self) -> tuple[int, ...]:
        """The groups that are saved block by block, whole or in part."""
        stored = ("all", "held", "tail:")
        return tuple(g for g, rule in enumerate(self.save_rules) if rule.startswith(stored))

    @functools.cached_property
    def state_groups(self) -> tuple[int, ...]:
        """The groups whose states are saved where the engine hands them over."""
        return tuple(g for g, rule in enumerate(self.save_rules) if rule == "hand-offs")

    @functools.cached_property
    def loaded_groups(self) -> tuple[int, ...]:
        """The groups that a load brings."""
        return tuple(sorted(self.stored_groups + self.state_groups))

    @functools.cached_property
    def tails(self) -> dict[int, int]:
        """Of the groups stored near boundaries only, how many blocks before each."""
        rules = enumerate(self.save_rules)
        return {g: int(rule[5:]) for g, rule in rules if rule.startswith("tail:")}


def start_threads(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Have ZeroMQ start its threads. Raises OSError without room for them: try later.

    ZeroMQ itself would abort, and end the engine: so it is tried with what may fail.
    """
    tuple(select.epoll() for _ in range(_DESCRIPTORS_SPARE))  # each is closed as the tuple goes
    over = threading.Event()
    tried = [threading.Thread(target=over.wait, daemon=True) for _ in range(_THREADS_SPARE)]
    try:
        for thread in tried:
            thread.start()
    except RuntimeError as error:
        raise OSError(f"{error}: raise the limit of pids of the container, or ulimit -u") from error
    finally:
        over.set()
        tasks = [Path(f"/proc/self/task/{thread.native_id}") for thread in tried]
        end_s = time.monotonic() + 1  # the kernel counts them a little longer
        while any(task.exists() for task in tasks) and time.monotonic() < end_s:
            time.sleep(_NAP_S)
    context.socket(zmq.DEALER).close()


class HotSocket:
    """The DEALER of one (epoch, generation). Made by the lifeline, used by one other thread."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes
    ) -> None:
        self._socket = context.socket(zmq.DEALER)
        try:
            self._socket.setsockopt(zmq.ROUTING_ID, identity)
            for option, value in _OPTIONS.items():
                self._socket.setsockopt(option, value)
            self._socket.connect(endpoint)
            self._fd = int(self._socket.getsockopt(zmq.FD))
        except zmq.ZMQError:
            self._socket.close()
            raise

    def __del__(self) -> None:
        """Close a socket that was published, but never taken into use."""
        if hasattr(self, "_socket"):  # else: there was none to be had
            self._socket.close()

    def connected_within(self, wait_ms: int) -> bool:
        """Wait until a send would be taken (lifeline thread only, before it is published)."""
        return bool(self._socket.poll(wait_ms, zmq.POLLOUT))

    def close(self) -> None:
        """Close at once; queued frames are dropped."""
        self._socket.close()

    def send(self, frames: Sequence[codec.Frame]) -> bool:
        """Queue one message; False when the peer is not connected or its queue is full.

        Only the first frame can be refused. The base class's send: pyzmq's own adds 1 us a frame.
        """
        try:
            for frame in frames[:-1]:
                _send(self._socket, frame, _MORE)
            _send(self._socket, frames[-1], _LAST)
        except zmq.ZMQError:
            return False
        return True

    def receive(
        self, link: Link, wait_us: int, counts: Counter[str]
    ) -> list[tuple[FromSidecar, list[bytes]]]:
        """Return what has come for ``link``; wait at most ``wait_us`` for a first message.

        The descriptor of a ZeroMQ socket is edge triggered: it is only waited on right after the
        socket has said "nothing", which has emptied its command queue.
        """
        taken: list[tuple[FromSidecar, list[bytes]]] = []
        deadline = time.perf_counter() + wait_us * 1e-6 if wait_us else 0.0
        for _ in range(receive_max):
            frames = self._next(deadline if not taken else 0.0)
            if frames is None:
                return taken
            message = _read(frames, link, counts)
            if message is not None:
                taken.append((message, frames[2:]))
        counts["receive_max"] += 1
        return taken

    def _next(self, deadline: float) -> list[bytes] | None:
        try:
            # Asking for events costs a fraction of a receive that raises Again.
            while not int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN:
                left_s = deadline - time.perf_counter() if deadline else 0.0
                if left_s <= 0.0:
                    return None
                if self._fd < _SELECT_FD_MAX:
                    select.select((self._fd,), (), (), left_s)
                else:  # poll(2) and epoll wait whole milliseconds, which is more than a hook has
                    time.sleep(min(_NAP_S, left_s))
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:
            return None


def _read(frames: list[bytes], link: Link, counts: Counter[str]) -> FromSidecar | None:
    try:
        header = codec.read_header(frames)
        if header.epoch == link.epoch and header.generation == link.generation:
            return codec.read_from_sidecar(frames[1])
    except codec.WireError:
        counts["garbage_dropped"] += 1
        return None
    counts["stale_dropped"] += 1
    return None


def pack(link: Link, message: FromHalf, raw: Sequence[codec.Frame]) -> list[codec.Frame]:
    """Return the frames of one message of this link."""
    return codec.pack(
        message, raw, protocol=link.protocol, epoch=link.epoch, generation=link.generation
    )
