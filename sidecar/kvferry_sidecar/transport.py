"""The hot channel's ROUTER side: frames in and out, refused before anyone acts on them.

One endpoint and one socket per epoch. A frame is handed on only when its routing id belongs to a
known half and its header carries this epoch and that half's generation; the rest is counted and,
where we know whom to tell, answered by an Error frame. Nothing depends on delivery: what matters
is kept until acknowledged elsewhere (outcomes), so a send that does not fit is dropped and counted.
"""

from __future__ import annotations

import errno
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
from kvferry_connector.wire import codec
from kvferry_connector.wire.codec import WireError
from kvferry_connector.wire.hot import (
    Ask,
    Cancel,
    Error,
    FromHalf,
    FromSidecar,
    JobStatus,
    Probe,
    Submit,
)
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar.errors import RunDirError
from kvferry_sidecar.faults.frames import FrameFaults
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.locks import inode_of_path, remove_socket, still_at
from kvferry_sidecar.outcomes.histogram import SECONDS, Histogram, HistogramReading
from kvferry_sidecar.sessions.model import Peer

# The base class's calls: pyzmq's own add a microsecond a frame. Constants as plain numbers, as
# arithmetic with an enum costs more than the call.
_receive, _send, _get = zmq.backend.Socket.recv, zmq.backend.Socket.send, zmq.backend.Socket.get
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)

_REMEDY_STALE = "attach again: the sidecar or this half has a new epoch or generation"
_REMEDY_WIRE = "connector and sidecar must be of compatible versions"
_REMEDY_BUG = "this is a bug of the sidecar: see its log"


class Transport:
    """The ROUTER socket of one epoch. Owned by the control loop.

    ``find``: routing id -> the half it belongs to, None for a foreign one. ``on_message`` gets
    (peer, message, raw frames, now_s). ``counters``: refused and dropped frames by reason.
    ``faults``: what stands in a frame's way in tests.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        epoch: int,
        limits: Limits,
        find: Callable[[bytes], Peer | None],
        on_message: Callable[[Peer, FromHalf, list[bytes], float], None],
        log: Log,
        socket_mode: int = 0o600,
        faults: FrameFaults | None = None,
    ) -> None:
        self._faults = faults
        self._epoch = epoch
        self._find = find
        self._on_message = on_message
        self._log = log
        self._messages_per_turn_max = limits.messages_per_turn_max
        self.endpoint = endpoint
        self.path = Path(endpoint.removeprefix("ipc://"))
        self.counters: Counter[str] = Counter()
        self._seconds: dict[type, Histogram] = {k: Histogram(SECONDS) for k in (Probe, Ask, Submit)}
        self._timers = {kind: (one.begin, one.end) for kind, one in self._seconds.items()}
        try:
            self._socket = context.socket(zmq.ROUTER)
        except zmq.ZMQError as error:
            raise _bind_error(endpoint, error) from error
        try:
            self._configure(limits)
            self._socket.bind(endpoint)
            self._inode = inode_of_path(self.path)  # not reused while it is bound
            self.path.chmod(socket_mode)
        except (zmq.ZMQError, OSError) as error:
            self._socket.close(linger=0)
            raise _bind_error(endpoint, error) from error
        except BaseException:
            self._socket.close(linger=0)
            raise

    def _configure(self, limits: Limits) -> None:
        self._socket.setsockopt(zmq.LINGER, 0)
        # The same half reconnecting takes its routing id over at once.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Without it a full or vanished peer is dropped silently; with it the drop can be counted.
        # Sends never block either way.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, limits.router_hwm)
        self._socket.setsockopt(zmq.RCVHWM, limits.router_hwm)
        # ZeroMQ closes the connection of a peer that announces a larger frame.
        self._socket.setsockopt(zmq.MAXMSGSIZE, codec.raw_bytes_max)

    @property
    def fd(self) -> int:
        """The descriptor that becomes readable when the socket's state may have changed."""
        return int(self._socket.getsockopt(zmq.FD))

    def owns_path(self) -> bool:
        """Whether who connects to the path still reaches this socket."""
        return still_at(self.path, self._inode)

    def pending(self) -> bool:
        """Whether a message waits (also takes in what the descriptor announced)."""
        return bool(int(_get(self._socket, _EVENTS)) & _POLLIN)

    def on_readable(self, _events: int, now_s: float) -> None:
        """Handle at most ``messages_per_turn_max`` waiting messages."""
        for _ in range(self._messages_per_turn_max):
            try:
                frame = _receive(self._socket, _LAST, False)
            except zmq.Again:
                return
            routing_id, rest = frame.bytes, []
            while frame.more:  # part of the frame: asking the socket costs as much as receiving
                frame = _receive(self._socket, _LAST, False)
                rest.append(frame.bytes)
            if self._faults is None:
                self._received(routing_id, rest, now_s)
            else:
                self._faults.up(rest, functools.partial(self._received, routing_id))

    def send(self, peer: Peer, message: FromSidecar) -> None:
        """Send without blocking; a half that is gone or full misses it, which is counted."""
        frames = codec.pack(
            message, (), protocol=peer.protocol, epoch=self._epoch, generation=peer.generation
        )
        if self._faults is None:
            self._put(peer.routing_id, frames)
        else:
            on = functools.partial(self._put, peer.routing_id)
            self._faults.down(type(message).__name__, list(map(bytes, frames)), on)

    def _put(self, routing_id: bytes, frames: Sequence[codec.Frame], _now_s: float = 0.0) -> None:
        try:
            _send(self._socket, routing_id, _MORE)  # only the first frame can be refused
            for frame in frames[:-1]:
                _send(self._socket, frame, _MORE)
            _send(self._socket, frames[-1], _LAST)
        except zmq.Again:
            self.counters["send_full"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.counters["send_unreachable"] += 1

    def seconds(self) -> dict[str, HistogramReading]:
        """Handling one message of the kinds that matter: lookups and submits."""
        return {kind.__name__: one.reading() for kind, one in self._seconds.items()}

    def close(self) -> None:
        """Close the socket; its file goes with it."""
        self._socket.close(linger=0)
        remove_socket(self.path)

    def _received(self, routing_id: bytes, frames: list[bytes], now_s: float) -> None:
        peer = self._find(routing_id)
        if peer is None:
            self.counters["foreign"] += 1
            return
        try:
            header = codec.read_header(frames)
            if (header.epoch, header.generation) != (self._epoch, peer.generation):
                self._refuse(peer, "stale", _stale_text(header, self._epoch, peer), _REMEDY_STALE)
                return
            if header.protocol != peer.protocol:
                text = f"frame of protocol {header.protocol}; {peer.protocol} was agreed at attach"
                self._refuse(peer, "protocol", text, _REMEDY_WIRE)
                return
            message = codec.read_from_half(frames[1])
        except WireError as error:
            self._refuse(peer, "malformed", str(error), _REMEDY_WIRE)
            return
        peer.last_message_s = now_s
        timer = self._timers.get(type(message))
        if timer is not None:
            timer[0]()
        try:
            self._on_message(peer, message, frames[2:], now_s)
        except Exception as error:  # noqa: BLE001 - answered and logged; other halves go on
            self._failed(peer, message, error)
        if timer is not None:
            timer[1]()

    def _refuse(self, peer: Peer, code: str, text: str, remedy: str) -> None:
        self.counters[code] += 1
        self.send(peer, Error(code=code, message=text, remedy=remedy))

    def _failed(self, peer: Peer, message: FromHalf, error: Exception) -> None:
        self.counters["handler_failed"] += 1
        self._log.exception(
            "handler failed",
            message=type(message).__name__,
            engine=peer.session.key.engine_id,
            rank=peer.rank,
        )
        job, admission = _subject(message)
        text = f"{type(message).__name__} failed: {type(error).__name__}: {error}"
        self.send(
            peer,
            Error(code="internal", message=text, remedy=_REMEDY_BUG, job=job, admission=admission),
        )


def _bind_error(endpoint: str, error: zmq.ZMQError | OSError) -> RunDirError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "raise RLIMIT_NOFILE of the sidecar (ulimit -n, LimitNOFILE=)"
    else:
        remedy = (
            "set run_dir to a directory on a local file system where this user may make sockets"
        )
    return RunDirError(f"hot channel {endpoint} cannot be bound: {error.strerror}", remedy)


def _stale_text(header: codec.Header, epoch: int, peer: Peer) -> str:
    return (
        f"frame of epoch {header.epoch:016x} generation {header.generation}; "
        f"this is epoch {epoch:016x} generation {peer.generation}"
    )


def _subject(message: FromHalf) -> tuple[int, int]:
    """Return (job, admission) a message is about, 0 where it is about none."""
    match message:
        case Cancel(job=job) | JobStatus(job=job):
            return job, 0
        case Probe(admission=admission) | Ask(admission=admission):
            return 0, admission
        case Submit(job=body):
            try:
                job_read = codec.read_job(body)
            except WireError:
                return 0, 0
            return job_read.job, job_read.admission
        case _:
            return 0, 0
