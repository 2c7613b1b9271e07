"""Halves in a process with room for few descriptors: ``python cramped_half.py RUN_DIR ROOM_MAX``.

One after the other attaches with room for 0, 1, ... descriptors, and then with plenty. Prints the
rooms in which one was served at once. A library that ends the process ends this one.
"""

from __future__ import annotations

import json
import os
import resource
import sys

from kvferry_connector.client import Client, Half
from kvferry_connector.config import FerryConfig
from support.clients import ENGINE, ready_link
from support.waiting import wait_until


def main(run_dir: str, rooms: int) -> None:
    served = []
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for room in range(rooms):
        client = Client(
            FerryConfig(run_dir=run_dir), Half("scheduler", f"engine-{room}", "one"), ENGINE
        )
        lowest = os.dup(0)
        os.close(lowest)
        # What ``start`` itself takes: the half's pidfd, and an eventfd.
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 3 + room, hard))
        client.start()
        wait_until(lambda one=client: one.counts["attach_failures"] or one.link(), "it has tried")
        if client.link():
            served.append(room)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        ready_link(client, 1)
        client.close()
    print(json.dumps(served))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
