"""A server of the test's own on one port: stopped, frozen and restarted at will."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from support.waiting import wait_until

Server = TypeVar("Server", bound="ServerProcess")


class ServerProcess(ABC):
    """One process after the other; ``start`` and ``kill`` may follow each other."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def start(self) -> None:
        """Start it and return when it serves."""

    def signal(self, number: int) -> None:
        """Send it; after SIGSTOP no thread of the server runs any more when this returns."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            # The thread that takes the signal stops the others, when its turn comes.
            wait_until(self._stands, "every thread has stopped")

    def _stands(self) -> bool:
        assert self._process is not None
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/stat")
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def kill(self) -> None:
        """End it, also when it is frozen or has not been started."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None


PORTS_FIRST, PORTS = 20_000, 1_000  # for each process that runs tests at the same time
_ports = itertools.count(os.getpid())


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody had a moment ago, and no other test will take.

    Below those that the kernel gives out by itself, which connections of any process may have.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for number in itertools.islice(_ports, PORTS):
        port = PORTS_FIRST + worker % 10 * PORTS + number % PORTS
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Start a server and yield it; it is gone afterwards."""
    try:
        server.start()
        yield server
    finally:
        server.kill()
