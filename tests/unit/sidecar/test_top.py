"""`kvferry top` in a pseudo terminal, and where there is none."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from kvferry_sidecar.cli import main
from kvferry_sidecar.errors import ExitCode
from support.hot_engine import HotEngine
from support.raw_half import KvMemory, attach_pair
from support.sidecar import running_sidecar
from support.waiting import wait_until

COMMAND = "import sys; from kvferry_sidecar.cli import main; sys.exit(main())"
LIFE = b"T" * 16


class Terminal:
    """A program in a terminal of 140 columns; ``text`` is all it wrote, without its controls."""

    def __init__(self, *arguments: str, lines: int = 60) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 140, 0, 0))
        # Sizes of another terminal in the environment would be believed before this one's.
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        environment["TERM"] = "xterm"
        command = [sys.executable, "-c", COMMAND, *arguments]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        os.close(slave)
        os.set_blocking(self._master, False)
        self.text = ""

    def shows(self, *words: str) -> None:
        def read():
            try:
                data = os.read(self._master, 1 << 16).decode(errors="replace")
                self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data)
            except (BlockingIOError, OSError):
                pass
            return all(word in self.text for word in words)

        wait_until(read, f"{words} are shown")

    def press(self, key: bytes) -> int:
        """A key, or nothing for what a terminal makes of Ctrl-C."""
        if key:
            os.write(self._master, key)
        else:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(90)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


# A terminal of a few lines shows what happens now and what is stuck; further ones the engines too.
@pytest.mark.parametrize(
    ("key", "lines", "words"),
    [(b"q", 60, "load copy"), (b"\x1b", 24, "q quits"), (b"", 8, "ready")],
)
def test_it_shows_what_happens_and_leaves_with_a_key(key, lines, words):
    with running_sidecar(pool_bytes=8 << 20) as sidecar:
        memory = KvMemory()
        halves = attach_pair(sidecar.run_dir, memory, LIFE)
        engine = HotEngine(*halves, memory, LIFE)
        engine.put("shown", [1, 2, 3])
        assert engine.get("shown", [1, 2, 3]) == 48
        command = ("top", "--run-dir", str(sidecar.run_dir), "--interval", "0.1")
        terminal = Terminal(*command, lines=lines)
        try:
            terminal.shows(words, "ready", "in flight: 0")
            admission, _ = engine.lease("shown", 3)
            job = engine.submit(engine.load_job(admission, [4, 5, 6], step=9))
            terminal.shows("in flight: 1", "raw/one", "0 fence", "tokens/s")
            memory.bound(9)
            assert engine.ended(job).status == "done"
            assert terminal.press(key) == 0
        finally:
            terminal.close()
            for half in halves:
                half.leave()
            memory.close()


def test_without_a_sidecar_it_waits_for_one(tmp_path):
    terminal = Terminal("top", "--run-dir", str(tmp_path), "--interval", "0.1")
    try:
        terminal.shows(f"no sidecar runs in {tmp_path}", "waiting; q quits")
        assert terminal.press(b"q") == 0
    finally:
        terminal.close()


def test_without_a_terminal_it_prints_one_frame(tmp_path, capsys, monkeypatch):
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert main(["top", "--run-dir", str(tmp_path)]) == ExitCode.NO_SIDECAR
    assert "no sidecar runs" in capsys.readouterr().out
