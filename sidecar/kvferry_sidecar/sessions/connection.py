"""One attach stream: bytes and descriptors in, framed messages out, both bounded."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry_connector.wire import attach
from kvferry_connector.wire.codec import WireError

from kvferry_sidecar.sessions.model import Peer

_read_bytes_max = 64 << 10  # per turn and stream: one talker never holds up the others
_FD_BYTES = array.array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(attach.attach_fds_max * _FD_BYTES)


class PeerGoneError(Exception):
    """The stream is closed or broken; a hint, never a proof of anyone's death."""


class SlowReaderError(Exception):
    """What the peer has not read yet is over its bound."""


@dataclass(slots=True)
class _Outgoing:
    data: memoryview
    fds: tuple[int, ...]  # borrowed; sent with the first byte


class Connection:
    """Owns the socket and every received descriptor until ``take_fds`` or ``close``."""

    def __init__(self, stream: socket.socket, out_bytes_max: int) -> None:
        stream.setblocking(False)
        self.stream = stream
        self.fd = stream.fileno()
        self.peer: Peer | None = None
        self.tenants: Sequence[str] = ()  # of another user than the sidecar's
        self.registered = False  # its registration was answered: pushes may follow
        self.closing = False  # a refusal is on its way out; nothing is read any more
        self._out_bytes_max = out_bytes_max
        self._out: deque[_Outgoing] = deque()
        self._out_bytes = 0
        self._received_fds: list[int] = []
        self._reassembler = attach.Reassembler()

    @property
    def unsent_bytes(self) -> int:
        """Bytes queued because the peer does not read."""
        return self._out_bytes

    def read(self) -> list[bytes]:
        """Receive once; returns the complete message bodies.

        Raises PeerGoneError, and WireError for too many descriptors or a message over its bound.
        """
        try:
            data, ancillary, flags, _ = self.stream.recvmsg(
                _read_bytes_max, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise PeerGoneError(str(error)) from error
        for level, kind, body in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(body[: len(body) - len(body) % _FD_BYTES])
                self._received_fds.extend(fds)
        # The kernel has closed what did not fit (or this process is out of descriptors).
        if flags & socket.MSG_CTRUNC or len(self._received_fds) > attach.attach_fds_max:
            raise WireError(
                f"descriptors were cut off: a message carries at most {attach.attach_fds_max}, "
                "and the sidecar needs as many free ones (RLIMIT_NOFILE)"
            )
        if not data:
            raise PeerGoneError("end of stream")
        return self._reassembler.feed(data)

    def take_fds(self) -> list[int]:
        """Hand over the descriptors received so far, in order; they are the caller's now."""
        taken, self._received_fds = self._received_fds, []
        return taken

    def send(self, message: attach.ToPeer, fds: Sequence[int] = ()) -> None:
        """Queue one message and send what the socket takes; ``fds`` stay the caller's.

        Raises PeerGoneError, SlowReaderError.
        """
        data = attach.encode(message)
        if self._out_bytes + len(data) > self._out_bytes_max:
            raise SlowReaderError(
                f"{self._out_bytes} bytes wait unread; a stream may have {self._out_bytes_max}"
            )
        self._out.append(_Outgoing(memoryview(data), tuple(fds)))
        self._out_bytes += len(data)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now; what a peer that has closed cannot take is dropped.

        That is no end yet: what it said before is still to be read, a Bye above all. Raises
        PeerGoneError.
        """
        while self._out:
            first = self._out[0]
            rights = array.array("i", first.fds)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if first.fds else []
            try:
                sent = self.stream.sendmsg([first.data], ancillary, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            except (BrokenPipeError, ConnectionResetError):
                self._out.clear()
                self._out_bytes = 0
                return
            except OSError as error:
                raise PeerGoneError(str(error)) from error
            self._out_bytes -= sent
            first.data, first.fds = first.data[sent:], ()
            if not first.data:
                self._out.popleft()

    def close(self) -> None:
        """Close the stream and every descriptor that nobody took."""
        close_all(self.take_fds())
        self._out.clear()
        self._out_bytes = 0
        self.stream.close()


def close_all(fds: Sequence[int]) -> None:
    """Close received descriptors that were not adopted."""
    for fd in fds:
        os.close(fd)
