"""The attach socket: connections, identities, descriptors, and the order of a half's messages.

A stream says Hello (with its descriptors), then registers, then beats. What does not fit is
answered by Refused and closed; nothing a peer sends ends the server or leaves a descriptor behind.
Owned by the control loop; no call blocks.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from kvferry_connector.wire import attach as wire
from kvferry_connector.wire.attach import Refused, ToPeer, Welcome
from kvferry_connector.wire.codec import WireError
from kvferry_connector.wire.version import LEFT_SINCE
from structlog.typing import FilteringBoundLogger as Log

from kvferry_sidecar.errors import RunDirError
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.locks import inode_of_path, remove_socket, still_at
from kvferry_sidecar.loop import BROKEN, HANG_UP, READ, WRITE, Loop
from kvferry_sidecar.observe.log import Throttle
from kvferry_sidecar.sessions import hello as hello_checks
from kvferry_sidecar.sessions.connection import (
    Connection,
    PeerGoneError,
    SlowReaderError,
    close_all,
)
from kvferry_sidecar.sessions.identity import IdentityError, credentials_of, uid_allowed, verify
from kvferry_sidecar.sessions.liveness import Liveness
from kvferry_sidecar.sessions.model import Peer
from kvferry_sidecar.sessions.registry import Claim, Registry

accepts_per_turn_max = 32
accept_pause_s = 0.2  # out of descriptors: a pause instead of a spinning loop
_backlog_max = 128
_OUT_OF_FDS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REMEDY_FDS = "raise RLIMIT_NOFILE of the sidecar"


class _RefusedError(Exception):
    """Carries the answer to a message that is not accepted."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused


class AttachServer:
    """Listens on ``path``. ``status`` builds the document that answers StatusQuery.

    ``counters``: refused and closed streams by reason.
    """

    def __init__(
        self,
        path: Path,
        *,
        loop: Loop,
        registry: Registry,
        liveness: Liveness,
        limits: Limits,
        epoch: int,
        endpoint: str,
        status: Callable[[float], bytes],
        open_device: hello_checks.OpenDevice,
        log: Log,
    ) -> None:
        self._loop = loop
        self._registry = registry
        self._liveness = liveness
        self._limits = limits
        self._epoch = epoch
        self._endpoint = endpoint
        self._status = status
        self._open_device = open_device
        self._log = log
        self.path = path
        self._connections: dict[int, Connection] = {}
        self._of_peer: dict[Peer, Connection] = {}
        self._parting: dict[Peer, Connection] = {}  # said Bye, and wait for Left
        # Streams that must come to something, oldest first: fd -> when they are closed.
        self._deadlines: dict[int, float] = {}
        self._resume_accept_s = math.inf
        self.counters: Counter[str] = Counter()
        self._throttle = Throttle()
        self._pidfd = os.pidfd_open(os.getpid())
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(str(path))
            self._inode = inode_of_path(path)  # not reused while the listener is open
            path.chmod(0o660)
            self._listener.listen(_backlog_max)
        except OSError as error:
            self._listener.close()
            os.close(self._pidfd)
            raise RunDirError(f"{path} cannot be bound: {error}", "set another run_dir") from error
        loop.watch(self._listener.fileno(), READ, self._on_accept)

    @property
    def connections(self) -> int:
        """Open streams."""
        return len(self._connections)

    def owns_path(self) -> bool:
        """Whether who connects to the path still reaches this server."""
        return still_at(self.path, self._inode)

    def push(self, peer: Peer, message: ToPeer) -> None:
        """Send on a half's stream; a half without a registered stream learns it when it attaches.

        (Before its registration is answered, a half expects that answer and nothing else.)
        """
        if isinstance(message, wire.Left):
            connection = self._parting.pop(peer, None)
            if connection is not None and self._is_open(connection):
                self._restart_deadline(connection)  # the half closes it now
                with self._closing_on_failure(connection):
                    self._send(connection, message)
            return
        connection = self._of_peer.get(peer)
        if connection is not None and connection.registered:
            with self._closing_on_failure(connection):
                self._send(connection, message)

    def tick(self, now_s: float) -> float:
        """Close streams that came to nothing; returns seconds until the next one may have to go."""
        while self._deadlines:
            fd, deadline_s = next(iter(self._deadlines.items()))
            if deadline_s > now_s:
                break
            self.counters["hello_ms_max"] += 1
            self._end(self._connections[fd])
        if now_s >= self._resume_accept_s:
            self._resume_accept_s = math.inf
            self._loop.rearm(self._listener.fileno(), READ)
        next_s = next(iter(self._deadlines.values()), math.inf)
        return min(next_s, self._resume_accept_s) - now_s

    def close(self) -> None:
        """Close every stream and the socket, and remove its file if it is still ours."""
        for connection in list(self._connections.values()):
            self._close(connection)
        self._loop.unwatch(self._listener.fileno())
        if self.owns_path():
            remove_socket(self.path)
        self._listener.close()
        os.close(self._pidfd)

    # --- connections -------------------------------------------------------------------------

    def _on_accept(self, _events: int, now_s: float) -> None:
        for _ in range(accepts_per_turn_max):
            try:
                stream, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_FDS:
                    raise
                self.counters["out_of_descriptors"] += 1
                self._log.error("attach cannot accept", error=error.strerror, remedy=_REMEDY_FDS)
                self._resume_accept_s = now_s + accept_pause_s
                self._loop.rearm(self._listener.fileno(), 0)
                return
            self._accepted(stream, now_s)

    def _accepted(self, stream: socket.socket, now_s: float) -> None:
        connection = Connection(stream, self._limits.attach_out_bytes_max)
        self._connections[connection.fd] = connection
        self._deadlines[connection.fd] = now_s + self._limits.hello_ms_max / 1000
        self._loop.watch(
            connection.fd, READ, lambda events, now: self._on_events(connection, events, now)
        )
        with self._closing_on_failure(connection):
            if len(self._connections) > self._limits.connections_max:
                raise _RefusedError(hello_checks.refused_stream(self._limits))
            who = credentials_of(stream)
            if not uid_allowed(who.uid):
                others = [other.tenants for other in self._connections.values()]
                tenants = self._registry.tenants
                if refused := hello_checks.refused_tenant(who, tenants, others, self._limits):
                    raise _RefusedError(refused)
                connection.tenants = tenants.of(who)

    def _on_events(self, connection: Connection, events: int, now_s: float) -> None:
        with self._closing_on_failure(connection):
            if events & WRITE:
                connection.flush()
                if not connection.unsent_bytes:
                    if connection.closing:
                        raise PeerGoneError("refusal delivered")
                    self._loop.rearm(connection.fd, READ)
            if connection.closing:
                if events & (HANG_UP | BROKEN):
                    raise PeerGoneError("left before the refusal")
                return
            if events & (READ | HANG_UP | BROKEN):
                self._read(connection, now_s)

    def _read(self, connection: Connection, now_s: float) -> None:
        try:
            for body in connection.read():
                self._on_message(connection, wire.read_from_peer(body), now_s)
                if not self._is_open(connection):
                    return
        except WireError as error:
            raise _RefusedError(Refused("malformed", str(error))) from error

    def _on_message(self, connection: Connection, message: wire.FromPeer, now_s: float) -> None:
        peer = connection.peer
        match message:
            case wire.StatusQuery():
                if peer is None:
                    self._restart_deadline(connection)
                if not uid_allowed(credentials_of(connection.stream).uid):
                    raise _RefusedError(Refused("uid", "the status is the sidecar's own user's"))
                self._send(connection, wire.StatusReply(self._status(now_s)))
            case wire.Hello():
                if peer is not None:
                    raise _RefusedError(Refused("order", "Hello came twice on one stream"))
                self._on_hello(connection, message, now_s)
            case _ if peer is None:
                raise _RefusedError(Refused("order", f"{type(message).__name__} came before Hello"))
            case wire.RegisterEngine():
                reply = self._registry.register_engine(peer, message, now_s)
                self._registered(connection, peer, reply, now_s)
            case wire.RegisterRank():
                reply = self._registry.register_rank(peer, message, now_s)
                self._registered(connection, peer, reply, now_s)
            case wire.Rotate():
                self._answer(connection, self._registry.rotate(peer, message, now_s))
            case wire.Heartbeat():
                self._answer(connection, self._registry.beat(peer, message, now_s))
            case wire.Bye():
                self._on_bye(connection, peer, now_s)

    def _on_bye(self, connection: Connection, peer: Peer, now_s: float) -> None:
        """The half has left; its stream stays until its memory is closed, which ``push`` says."""
        connection.peer, connection.registered = None, False
        self._of_peer.pop(peer, None)
        self._deadlines.pop(connection.fd, None)
        answered = peer.protocol >= LEFT_SINCE
        if answered:
            self._parting[peer] = connection
        self._registry.bye(peer, now_s)
        if not answered:
            raise PeerGoneError("bye")

    # --- hello and registration --------------------------------------------------------------

    def _on_hello(self, connection: Connection, message: wire.Hello, now_s: float) -> None:
        fds = connection.take_fds()
        try:
            protocol = hello_checks.check(message, len(fds))
            life = verify(connection.stream, fds[0], message.pid, self._registry.tenants)
            offer = hello_checks.map_offer(message, fds[1:], life.inode, self._open_device)
            claim = Claim(message, protocol, life.inode, offer, life.who)
            peer = self._registry.attach(claim, now_s)
            if isinstance(peer, Refused):
                raise _RefusedError(peer)
            if not self._liveness.watches(peer):
                self._liveness.adopt(peer, fds.pop(0))
        except hello_checks.HelloError as error:
            raise _RefusedError(error.refused) from error
        except IdentityError as error:
            raise _RefusedError(Refused("identity", str(error))) from error
        finally:
            close_all(fds)  # mapped memory needs no descriptor
        self._replace_stream(peer, connection)
        self._restart_deadline(connection)
        self._log.info(
            "half attached",
            engine=message.engine_id,
            role=message.role,
            rank=message.rank,
            generation=peer.generation,
            pid=message.pid,
        )
        welcome = Welcome(
            protocol=protocol,
            epoch=self._epoch,
            generation=peer.generation,
            endpoint=self._endpoint,
            identity=peer.routing_id,
            heartbeat_ms=self._limits.heartbeat_ms,
        )
        self._send(connection, welcome, (self._pidfd,))

    def _replace_stream(self, peer: Peer, connection: Connection) -> None:
        """The newest stream of a half is its stream; the older one says nothing any more."""
        older = self._of_peer.get(peer)
        self._of_peer[peer] = connection
        connection.peer = peer
        if older is not None:
            self._end(older)

    def _registered(self, connection: Connection, peer: Peer, reply: ToPeer, now_s: float) -> None:
        self._answer(connection, reply)
        connection.registered = True
        self._deadlines.pop(connection.fd, None)
        self._registry.settle(peer, now_s)

    def _answer(self, connection: Connection, reply: ToPeer) -> None:
        if isinstance(reply, Refused):
            raise _RefusedError(reply)
        self._send(connection, reply)

    # --- ends --------------------------------------------------------------------------------

    def _send(self, connection: Connection, message: ToPeer, fds: tuple[int, ...] = ()) -> None:
        connection.send(message, fds)
        if connection.unsent_bytes:
            self._loop.rearm(connection.fd, READ | WRITE)

    @contextlib.contextmanager
    def _closing_on_failure(self, connection: Connection) -> Iterator[None]:
        """Whatever goes wrong on a stream ends that stream, and nothing else."""
        try:
            yield
        except _RefusedError as error:
            self._refuse(connection, error.refused)
        except PeerGoneError:
            self._end(connection)
        except SlowReaderError as error:
            self.counters["attach_out_bytes_max"] += 1
            self._log.warning("attach stream closed: its reader is too slow", error=str(error))
            self._end(connection)
        except Exception as error:  # noqa: BLE001 - a bug ends one stream, not the loop
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                text = f"the sidecar is out of descriptors; {_REMEDY_FDS}"
                self._refuse(connection, Refused("out-of-descriptors", text))
                return
            self._log.exception("attach handler failed")
            text = f"{type(error).__name__}: {error}; this is a bug of the sidecar, see its log"
            self._refuse(connection, Refused("internal", text))

    def _refuse(self, connection: Connection, refused: Refused) -> None:
        """Answer and close, at the latest when the deadline of the stream comes."""
        refused = hello_checks.readable(refused)
        self.counters[refused.code] += 1
        held_back = self._throttle.passes(refused.code, self._loop.now_s())
        if held_back is not None:
            self._log.warning(
                "attach refused",
                code=refused.code,
                text=refused.message,
                fields=[f"{f.field}: {f.theirs} against {f.ours}" for f in refused.fields],
                not_logged=held_back,  # of this code, since the last line of it
            )
        self._detach(connection)
        try:
            connection.send(refused)
        except (PeerGoneError, SlowReaderError):
            self._close(connection)
            return
        if connection.unsent_bytes:
            connection.closing = True
            self._restart_deadline(connection)
            self._loop.rearm(connection.fd, WRITE)
        else:
            self._close(connection)

    def _restart_deadline(self, connection: Connection) -> None:
        self._deadlines.pop(connection.fd, None)  # the newest deadline stands last
        self._deadlines[connection.fd] = self._loop.now_s() + self._limits.hello_ms_max / 1000

    def _detach(self, connection: Connection) -> None:
        """Part a stream from its half: for the registry that is a hint, nothing more."""
        peer, connection.peer, connection.registered = connection.peer, None, False
        if peer is not None and self._of_peer.get(peer) is connection:
            del self._of_peer[peer]
            self._registry.lost(peer, self._loop.now_s())

    def _end(self, connection: Connection) -> None:
        self._detach(connection)
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        if self._is_open(connection):
            del self._connections[connection.fd]
            self._deadlines.pop(connection.fd, None)
            self._loop.unwatch(connection.fd)
            connection.close()

    def _is_open(self, connection: Connection) -> bool:
        return self._connections.get(connection.fd) is connection
