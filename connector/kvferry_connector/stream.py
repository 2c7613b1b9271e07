"""The attach stream: framed messages and descriptors over AF_UNIX, never blocking."""

from __future__ import annotations

import array
import os
import socket
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvferry_connector.wire import attach
from kvferry_connector.wire.codec import WireError

_READ_BYTES = 64 << 10
_unsent_bytes_max = 2 * attach.attach_bytes_max
_UCRED = struct.Struct("iII")  # pid, uid, gid
_UNMAPPED_UID = 65534


class StreamClosedError(ConnectionError):
    """The sidecar closed the stream: a hint of its end, not a proof."""


class UntrustedError(Exception):
    """Another user could be behind this socket; the text has what, why and the remedy."""


def check_folder(folder: Path) -> None:
    """Raise UntrustedError when others may have put a socket there, OSError when it is missing."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise UntrustedError(
            f"{folder} is no directory (a link to one can be turned elsewhere); set run_dir to "
            "the directory itself"
        )
    _check_uid(status.st_uid, "the run directory belongs to")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedError(
            f"the run directory has mode {stat.S_IMODE(status.st_mode):04o}, so that others could "
            f"put their own socket there; chmod 0700 {folder}"
        )


def peer_uid(connection: socket.socket) -> int:
    """Return the uid that listens at the other end, as this user namespace sees it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(raw)[1])


def _check_uid(uid: int, what: str) -> None:
    if uid in (os.geteuid(), 0):
        return
    remedy = f"run the sidecar as uid {os.geteuid()}, or set run_dir to the one of its own sidecar"
    if uid == _UNMAPPED_UID:
        remedy += f" ({uid} may stand for a uid of another user namespace: share the namespace)"
    raise UntrustedError(
        f"{what} uid {uid}, the engine is uid {os.geteuid()} and gives its memory to nobody but "
        f"its own user and root; {remedy}"
    )


class AttachStream:
    """One connection to ``attach.sock``; used by the lifeline thread only.

    Descriptors that arrive are ours until ``take_pidfd`` hands one out; ``close`` closes the rest.
    """

    def __init__(self, path: Path) -> None:
        """Connect. Raises OSError when nobody listens there (or its backlog is full).

        Raises UntrustedError when it is not certain that our own user or root listens there, or
        when only others may connect there.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._unsent = bytearray()
        self._reassembler = attach.Reassembler()
        self._fds: list[int] = []
        try:
            check_folder(path.parent)
            self._socket.connect(os.fspath(path))
            _check_uid(peer_uid(self._socket), f"{path} is served by")
        except (OSError, UntrustedError) as error:
            self._socket.close()
            if isinstance(error, PermissionError):
                raise UntrustedError(
                    f"uid {os.geteuid()} may not connect to {path}; run engine and sidecar as one "
                    "uid, or bind a tenant to this one (namespaces.bound)"
                ) from error
            raise

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """True while earlier messages wait for room: poll for writing, then ``flush``."""
        return bool(self._unsent)

    def send(self, message: attach.FromPeer, fds: Sequence[int] = ()) -> None:
        """Send one message; what the socket does not take now is kept for ``flush``.

        A stream that the sidecar has closed swallows it: what was said before its end (a refusal)
        is still to be received, and then the end. Raises OSError, WireError when too much waits.
        """
        data = attach.encode(message)
        if fds:  # go with the first message of a stream, so nothing waits before it
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            with suppress(BrokenPipeError, ConnectionResetError):
                data = data[self._socket.sendmsg([data], rights) :]
        self._unsent += data
        if len(self._unsent) > _unsent_bytes_max:
            raise WireError(f"the sidecar reads nothing: {len(self._unsent)} bytes wait for it")
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it. Raises OSError."""
        while self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._unsent.clear()

    def receive(self) -> list[attach.ToPeer]:
        """Return the complete messages that have arrived, maybe none.

        Raises StreamClosedError at the end of the stream, OSError when it is broken, WireError when
        it carries anything else than messages of ours.
        """
        room = socket.CMSG_SPACE(attach.attach_fds_max * array.array("i").itemsize)
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                _READ_BYTES, room, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return []
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC or len(self._fds) > attach.attach_fds_max:
            raise WireError("the sidecar sent more descriptors than the protocol has")
        if not data:
            raise StreamClosedError("the sidecar closed the attach stream")
        return [attach.read_to_peer(body) for body in self._reassembler.feed(data)]

    def take_pidfd(self) -> int:
        """Hand out the sidecar's pidfd. Raises WireError when no pidfd came: it proves its death.

        Any other descriptor would be readable too early, or never.
        """
        kind = str(Path(f"/proc/self/fd/{self._fds[0]}").readlink()) if self._fds else "nothing"
        if not kind.startswith(("anon_inode:[pidfd]", "pidfd:")):
            raise WireError(f"the sidecar's Welcome came with {kind} instead of its pidfd")
        return self._fds.pop(0)

    def close(self) -> None:
        """Close the stream and every descriptor that was not taken."""
        self._socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
