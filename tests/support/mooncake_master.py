"""A real Mooncake master of the test's own, stopped, frozen and restarted at will."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest
from support.server import ServerProcess, free_port
from support.waiting import wait_until


def need_mooncake() -> str:
    """Return the master's program; the test is skipped where the library cannot be loaded."""
    try:
        import mooncake.store
    except ImportError as error:
        pytest.skip(f"no Mooncake client ({error}); it needs the package libibverbs1")
    return str(Path(mooncake.store.__file__).parent / "mooncake_master")


class MooncakeMaster(ServerProcess):
    """One port of 127.0.0.1 (or of ``host``), and further options of the master's."""

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        prefix: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self._program = need_mooncake()
        self._log = folder / "master.log"
        self._options = options
        self._prefix = prefix  # to run it in a network namespace
        self.host = host
        self.url = f"mooncake://{host}:{self.port}"

    def start(self) -> None:
        """Start it and return when it listens."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(*self._prefix, self._program, "-rpc_address", self.host),
                    *("-rpc_port", str(self.port), "-metrics_host", "127.0.0.1"),
                    *("-metrics_port", str(free_port())),
                    *self._options,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if not self._prefix:
            wait_until(self._listens, "the master listens")

    def _listens(self) -> bool:
        try:
            socket.create_connection((self.host, self.port), 1).close()
        except OSError:
            return False
        return True
