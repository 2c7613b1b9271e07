"""The two cache servers, started, killed and started again on the same address."""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Protocol

from kvferry_demo.processes import (
    SHARED_MEMORY,
    Child,
    Sidecar,
    in_environment,
    new_pool_name,
    unlink_pool,
)
from kvferry_sidecar.cli.query import ask_status
from kvferry_sidecar.errors import KvferryError

from bench.peer.peer_env import peer_python

START_S = 120.0
_LMCACHE_ENVIRONMENT = {
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "PYTHONHASHSEED": "0",
}


class Server(Protocol):
    """What a row needs of a server. ``options``: what the engine's side must know of it."""

    options: dict[str, object]

    @property
    def pid(self) -> int:
        """Process id of the server that runs now."""

    def start(self) -> None:
        """Start it, on the same address as before, and return when it serves."""

    def kill(self) -> None:
        """SIGKILL it and wait for its end."""

    def close(self) -> None:
        """End it and remove what it leaves."""


class FerryServer:
    """``kvferry serve``: one copy thread, checksums on."""

    def __init__(self, folder: Path, pool_bytes: int) -> None:
        self._folder, self._pool_bytes = folder, pool_bytes
        self._pool_name = new_pool_name("peer")
        run_dir = folder / "run"
        run_dir.mkdir(mode=0o700)
        self.options: dict[str, object] = {"run_dir": os.fspath(run_dir)}
        self._child: Sidecar | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None, "started"
        return self._child.pid

    def start(self) -> None:
        flags = ("--copy-threads", "1", "--log-level", "warning")
        if self._pool_bytes >= 512 << 20:  # one block may be 8 MiB here
            flags += ("--slab-bytes", "64MiB")
        self._child = Sidecar(
            self._folder / "run", self._folder / "kvferry.log",
            pool_name=self._pool_name, pool_bytes=self._pool_bytes, flags=flags,
        )  # fmt: skip
        end_s = time.monotonic() + START_S
        while not _answers(self._folder / "run"):
            if self._child.process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"the sidecar does not serve:\n{self._child.tail()}")
            time.sleep(0.02)

    def kill(self) -> None:
        assert self._child is not None, "started"
        self._child.kill(signal.SIGKILL)

    def close(self) -> None:
        if self._child is not None:
            self._child.stop()
        unlink_pool(self._pool_name)


class LMCacheServer:
    """``lmcache server``, one worker thread per pool (its default), LRU, lmcache_driven transfer.

    In that mode the server maps the engine's KV memory and copies by itself, as kvferry's does.
    """

    def __init__(self, folder: Path, pool_bytes: int) -> None:
        self._folder, self._pool_bytes = folder, pool_bytes
        self._ports = free_ports(2)
        self.options: dict[str, object] = {"port": self._ports[0]}
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None, "started"
        return self._child.pid

    def start(self) -> None:
        code = "import sys; from lmcache.cli.main import main; sys.exit(main())"
        flags = {
            "--host": "localhost",
            "--port": self._ports[0],
            "--http-port": self._ports[1],
            "--l1-size-gb": self._pool_bytes / (1 << 30),
            "--eviction-policy": "LRU",
            "--supported-transfer-mode": "lmcache_driven",
        }
        command = [peer_python(), "-c", code, "server"]
        command += [str(part) for flag in flags.items() for part in flag]
        self._child = Child(
            in_environment(_LMCACHE_ENVIRONMENT, command), self._folder / "lmcache.log"
        )
        end_s = time.monotonic() + START_S
        while not self._serves():
            if self._child.process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"the LMCache server does not serve:\n{self._child.tail()}")
            time.sleep(0.02)

    def _serves(self) -> bool:
        url = f"http://127.0.0.1:{self._ports[1]}/healthcheck"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        assert self._child is not None, "started"
        self._child.kill(signal.SIGKILL)

    def close(self) -> None:
        if self._child is not None:
            self._child.stop()


def _answers(run_dir: Path) -> bool:
    try:
        return bool(ask_status(run_dir))
    except KvferryError:
        return False


def remove_kv_segments(engine_pid: int) -> None:
    """Remove the KV memory that an LMCache engine left in /dev/shm; the engine has ended."""
    for segment in SHARED_MEMORY.glob(f"lmcache_kv_{engine_pid}_*"):
        segment.unlink(missing_ok=True)


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback that nothing listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
