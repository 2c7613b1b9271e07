"""Ask a running sidecar for its status over the attach socket."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from kvferry_connector.wire import attach
from kvferry_connector.wire.codec import WireError
from kvferry_connector.wire.names import attach_path

from kvferry_sidecar.errors import NoSidecarError, ProtocolError

if TYPE_CHECKING:
    from kvferry_sidecar.observe.status import Document

answer_s_max = 5.0
_VERSION_CODES = ("malformed", "order", "protocol")  # what an older or newer sidecar would say
_REMEDIES = {
    "connections-max": "try again when streams were closed, or raise limits.connections_max",
    "internal": "see the sidecar's log",
}


def ask_status(run_dir: Path, deadline_s: float = answer_s_max) -> bytes:
    """Return the status document as JSON.

    Raises NoSidecarError when nothing listens there or answers in time, ProtocolError when the
    answer is not one.
    """
    path = attach_path(run_dir)
    end = time.monotonic() + deadline_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as stream:
        stream.settimeout(deadline_s)
        try:
            stream.connect(str(path))
            with contextlib.suppress(BrokenPipeError):  # refused and closed already: read why
                stream.sendall(attach.encode(attach.StatusQuery()))
            reply = _receive(stream, end)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NoSidecarError(
                f"no sidecar runs in {run_dir}",
                "start one with `kvferry serve`, or name its directory with --run-dir",
            ) from error
        except TimeoutError as error:
            raise NoSidecarError(
                f"the sidecar in {run_dir} did not answer within {deadline_s:g} s",
                "look at its log; if it is stopped or stuck, restart it: engines go on without",
            ) from error
        except OSError as error:
            raise NoSidecarError(
                f"cannot talk to {path}: {error.strerror}",
                "run this command as the sidecar's user, on its node",
            ) from error
    if isinstance(reply, attach.StatusReply):
        return reply.document
    if isinstance(reply, attach.Refused) and reply.code not in _VERSION_CODES:
        raise ProtocolError(
            f"the sidecar refused to answer ({reply.code}): {reply.message}",
            _REMEDIES.get(reply.code, "change what the refusal names, then try again"),
        )
    text = reply.message if isinstance(reply, attach.Refused) else type(reply).__name__
    raise ProtocolError(
        f"the sidecar answered {text!r} instead of its status",
        "use the kvferry command of the sidecar's own version",
    )


def read_status(body: bytes) -> Document:
    """Return the status document. Raises ProtocolError when it is none of this version."""
    from kvferry_sidecar.observe.status import read  # noqa: PLC0415 - loads the native module

    try:
        return read(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(
            f"the status document cannot be read: {error}",
            "use --json, or the kvferry command of the sidecar's own version",
        ) from error


def _receive(stream: socket.socket, end_s: float) -> attach.ToPeer:
    reassembler = attach.Reassembler()
    try:
        while True:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            stream.settimeout(left_s)
            data = stream.recv(1 << 16)
            if not data:
                raise ProtocolError(
                    "the sidecar closed the connection without an answer",
                    "it may be shutting down, or at limits.connections_max: try again",
                )
            for body in reassembler.feed(data):
                return attach.read_to_peer(body)
    except WireError as error:
        raise ProtocolError(
            str(error), "use the kvferry command of the sidecar's own version"
        ) from error
