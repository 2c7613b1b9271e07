"""`kvferry serve` as a process, and a client whose peer runs elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kvferry_sidecar.cli.query import ask_status
from kvferry_sidecar.errors import NoSidecarError
from support.node import HalfClient
from support.waiting import wait_until

T = TypeVar("T")
COMMAND = "import sys; from kvferry_sidecar.cli import main; sys.exit(main())"
POOL_BYTES = 8 << 20


class Serving:
    """One run directory and one pool; also what HalfClient needs of a node."""

    def __init__(self, folder: Path, pool_name: str, *flags: str) -> None:
        self.run_dir = folder
        self.path = folder / "attach.sock"
        self.pool_name = pool_name
        self.flags = flags
        self.http = ("--http-listen", "")
        self.prefix: tuple[str, ...] = ()  # a command that runs it elsewhere: unshare
        self.command = COMMAND
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        """Start the process and return without waiting."""
        self.process = subprocess.Popen(
            [
                *(*self.prefix, sys.executable, "-c", self.command, "serve"),
                *("--run-dir", str(self.run_dir)),
                *("--pool-bytes", str(POOL_BYTES), "--pool-name", self.pool_name),
                *("--log-format", "json", *self.http, *self.flags),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def start_ready(self) -> subprocess.Popen[str]:
        """Start the process and return when it answers."""
        process = self.start()
        self.wait_ready()
        return process

    def wait_ready(self) -> None:
        """Wait until the process answers."""
        process = self.process
        assert process is not None
        wait_until(lambda: process.poll() is not None or self._answers(), "the sidecar answers")
        assert process.poll() is None, self.ended()

    def _answers(self) -> bool:
        try:
            shown = self.status()["pid"]
            assert self.process is not None
            return bool(self.prefix) or shown == self.process.pid
        except NoSidecarError:
            return False

    def status(self) -> dict[str, Any]:
        """Return the status document."""
        document: dict[str, Any] = json.loads(ask_status(self.run_dir, deadline_s=90.0))
        return document

    def ended(self) -> tuple[int, str]:
        """Wait for the process's end and return (exit code, what it wrote)."""
        assert self.process is not None
        _, text = self.process.communicate(timeout=120)
        return self.process.returncode, text

    def half(self, rank: int) -> HalfClient:
        """Return a half of this process, connected to the serving one."""
        return HalfClient(self, rank, "engine", "one")  # type: ignore[arg-type]  # same methods

    def pump(self, condition: Callable[[], T], what: str) -> T:
        """Wait: the sidecar's loop turns in its own process."""
        return wait_until(condition, what)


@contextmanager
def servings(count: int, *, pools: int = 1, flags: tuple[str, ...] = ()) -> Iterator[list[Serving]]:
    """Yield that many run directories over that many pools; nothing of them stays."""
    folders = [Path(tempfile.mkdtemp(prefix="kvf-")) for _ in range(count)]
    names = [f"kvferry-test-{os.urandom(6).hex()}" for _ in range(pools)]
    made = [Serving(folder, names[number % pools], *flags) for number, folder in enumerate(folders)]
    try:
        yield made
    finally:
        for one in made:
            if one.process is not None and one.process.poll() is None:
                one.process.kill()
                one.process.communicate()
        for folder in folders:
            shutil.rmtree(folder)
        for name in names:
            Path("/dev/shm", name).unlink(missing_ok=True)
