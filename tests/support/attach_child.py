"""A half in its own process: ``python attach_child.py SOCKET RANK [PIDFD_OF]``.

Says Hello, registers, prints one JSON line per answer, and stays until it is killed.
PIDFD_OF: pass the pidfd of that process instead of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys

from kvferry_connector.wire import attach
from kvferry_connector.wire.attach import Hello
from kvferry_connector.wire.names import FENCE_PAGE_BYTES
from support.memory import sealed_memfd
from support.node_messages import engine_registration, rank_registration


def main() -> None:
    path, rank = sys.argv[1], int(sys.argv[2])
    shown_pid = int(sys.argv[3]) if len(sys.argv) > 3 else os.getpid()
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.connect(path)
    fds = [os.pidfd_open(shown_pid)]
    if rank >= 0:
        fds.append(sealed_memfd(FENCE_PAGE_BYTES))
    hello = Hello(
        1,
        1,
        "scheduler" if rank < 0 else "worker",
        "engine",
        "one",
        rank,
        os.getpid(),
        fence=rank >= 0,
    )
    socket.send_fds(stream, [attach.encode(hello)], fds)
    registration = engine_registration() if rank < 0 else rank_registration(rank)
    with contextlib.suppress(BrokenPipeError):  # refused already: the answer is still to be read
        stream.sendall(attach.encode(registration))
    reassembler = attach.Reassembler()
    while data := stream.recv(1 << 16):
        for body in reassembler.feed(data):
            message = attach.read_to_peer(body)
            facts = {
                "kind": type(message).__name__,
                "code": getattr(message, "code", ""),
                "text": getattr(message, "message", ""),
                "generation": getattr(message, "generation", 0),
            }
            print(json.dumps(facts), flush=True)
    print(json.dumps({"kind": "end"}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
