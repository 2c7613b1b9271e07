"""Halves in processes of their own, to be killed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from support.node import Node

CHILD = Path(__file__).with_name("attach_child.py")


class Child:
    """A half in its own process."""

    def __init__(self, node: Node, rank: int, pidfd_of: int | None = None) -> None:
        arguments = [str(node.path), str(rank), *([str(pidfd_of)] if pidfd_of else [])]
        self.node = node
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(CHILD.parents[1])},
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._text = b""

    def answer(self) -> dict[str, object]:
        """Return the next answer the child printed."""
        self.node.pump(lambda: self._read() or b"\n" in self._text, "a line of the child")
        line, _, self._text = self._text.partition(b"\n")
        answer: dict[str, object] = json.loads(line)
        return answer

    def kill(self) -> None:
        """Kill it the hard way and reap it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self._text += os.read(self.process.stdout.fileno(), 1 << 16) if self._readable() else b""

    def _readable(self) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0)[0])
