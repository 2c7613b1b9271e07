"""A process of vLLM with all that it starts: none of it outlives the test, and no file of its own.

vLLM leaves the workers of an engine that was killed, or whose rank was: they wait for ever. And a
killed rank leaves its memory in /dev/shm.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvferry_demo.processes import Child
from support.waiting import wait_until

_SHARED = re.compile(rb"/dev/shm/vllm_dist\S+")  # of the CPU backend's ranks: nobody else's work


class GroupChild(Child):
    """A child that leads a process group; ``stop`` ends the group, and removes what it left."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, own_group=True, **options)
        self._shared: set[bytes] = set()

    def note_shared(self) -> None:
        """Take down which files in shared memory are the group's: a killed process tells no more.

        Called by itself before ``kill`` and ``stop``.
        """
        for pid in members(self.pid):
            with suppress(ProcessLookupError, FileNotFoundError):
                self._shared.update(_SHARED.findall(Path(f"/proc/{pid}/maps").read_bytes()))

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.note_shared()
        super().kill(number)

    def stop(self) -> int:
        self.note_shared()
        code = super().stop()
        wait_until(self._none_left, "nothing is left of the group", every_s=0.05)
        for name in self._shared:
            Path(os.fsdecode(name)).unlink(missing_ok=True)
        return code

    def _none_left(self) -> bool:
        left = members(self.pid)
        for pid, command in left.items():
            # The tracker removes semaphores and segments once nobody else is left, and ends.
            if b"resource_tracker" not in command:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return not left


def members(group: int) -> dict[int, bytes]:
    """Return the processes of a group with their command lines; none of a zombie."""
    found: dict[int, bytes] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, FileNotFoundError):
            command = (folder / "cmdline").read_bytes()
            if command and os.getpgid(int(folder.name)) == group:
                found[int(folder.name)] = command
    return found
