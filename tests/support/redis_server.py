"""A real Redis server of the test's own, stopped, frozen and restarted at will."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from support.server import ServerProcess
from support.waiting import wait_until


def need_redis() -> str:
    """Return the server's path; the test is skipped where there is none."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        pytest.skip("no redis-server or valkey-server is installed")
    return found


class RedisServer(ServerProcess):
    """One port of 127.0.0.1, and further options of the server's."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__()
        self._program = need_redis()
        self._folder = folder
        self._options = options
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it and return when it answers."""
        self._process = subprocess.Popen(
            [
                *(self._program, "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--save", "", "--appendonly", "no", "--dir", str(self._folder)),
                *self._options,
            ],
            stdout=subprocess.DEVNULL,
        )
        wait_until(self._answers, "redis answers")

    def flush(self) -> None:
        """Drop everything it holds."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as peer:
            peer.sendall(b"FLUSHALL\r\n")
            assert peer.recv(16).startswith(b"+OK")

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as peer:
                peer.sendall(b"PING\r\n")
                return peer.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False
