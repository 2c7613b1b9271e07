"""What the attach stream makes of a sidecar that refuses before it has read anything."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvferry_connector.stream import AttachStream, StreamClosedError, UntrustedError
from kvferry_connector.wire import attach
from support.mounts import NEEDS_ROOT
from support.other_users import as_user


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "attach.sock"))
        listener.listen()
        yield listener


@pytest.mark.parametrize("with_descriptors", [True, False])
def test_a_refusal_is_read_although_nothing_can_be_sent_any_more(
    listener: socket.socket, with_descriptors: bool
) -> None:
    stream = AttachStream(Path(listener.getsockname()))
    refused = attach.Refused("uid", "nobody of that name")
    peer, _ = listener.accept()
    peer.sendall(attach.encode(refused))
    peer.close()
    pidfd = os.pidfd_open(os.getpid())
    stream.send(attach.Bye(), [pidfd] if with_descriptors else [])
    os.close(pidfd)
    assert not stream.unsent
    assert stream.receive() == [refused]
    with pytest.raises(StreamClosedError):
        stream.receive()
    stream.close()


@NEEDS_ROOT
def test_who_may_not_connect_is_told_whose_it_has_to_be(listener: socket.socket) -> None:
    with as_user(4711, 4711), pytest.raises(UntrustedError, match="uid 4711 may not connect"):
        AttachStream(Path(listener.getsockname()))
