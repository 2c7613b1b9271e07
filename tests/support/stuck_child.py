"""A sidecar that can be made to hang: ``python -m support.stuck_child KIND [FLAGS OF SERVE]``.

SIGUSR1 hangs its control loop: "loop" waits without the GIL, as in a system call that does not
return; "gil" waits with it, as native code that does not return, so that no thread of Python runs.
"""

from __future__ import annotations

import ctypes
import select
import signal
import sys

from kvferry_sidecar import cli

HANGS_S = 10_000


def hang_loop(*_: object) -> None:
    select.select([], [], [], HANGS_S)


def hang_gil(*_: object) -> None:
    ctypes.PyDLL(None).sleep(HANGS_S)  # PyDLL calls with the GIL held


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, {"loop": hang_loop, "gil": hang_gil}[sys.argv[1]])
    sys.exit(cli.main(["serve", *sys.argv[2:]]))
