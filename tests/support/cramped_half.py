"""Halves in a process with little room: ``python cramped_half.py RUN_DIR WHAT ROOM_MAX``.

WHAT is ``descriptors`` or ``threads``. One after the other starts with room for 0, 1, ... of them,
and then with plenty. Prints the rooms in which one was served at once. A library that ends the
process ends this one. Threads are not counted for root: see support.other_users.COUNTED.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

from kvferry_connector.client import Client, Half
from kvferry_connector.config import FerryConfig
from support.clients import ENGINE, ready_link
from support.waiting import wait_until


def main(run_dir: str, what: str, rooms: int) -> None:
    kind = resource.RLIMIT_NPROC if what == "threads" else resource.RLIMIT_NOFILE
    hard, threads, served = resource.getrlimit(kind)[1], _threads(), []
    for room in range(rooms):
        client = Client(
            FerryConfig(run_dir=run_dir), Half("scheduler", f"engine-{room}", "one"), ENGINE
        )
        wait_until(lambda: _threads() == threads, "the former's threads have ended")
        # What ``start`` itself takes: the half's pidfd, and an eventfd.
        held = threads if what == "threads" else _lowest() + 3
        resource.setrlimit(kind, (held + room, hard))
        try:
            client.start()
        except RuntimeError:  # not even the half's own thread
            resource.setrlimit(kind, (hard, hard))
            client.start()
        else:
            wait_until(
                lambda one=client: one.counts["attach_failures"] or one.link(), "it has tried"
            )
            if client.link():
                served.append(room)
            resource.setrlimit(kind, (hard, hard))
        ready_link(client, 1)
        client.close()
    print(json.dumps(served))


def _threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _lowest() -> int:
    lowest = os.dup(0)
    os.close(lowest)
    return lowest


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
