"""A process with a client that forks: exit 0 when the child's client is one of its own."""

from __future__ import annotations

import os
import sys

from kvferry_connector.client import Client, Half, Link
from kvferry_connector.config import FerryConfig
from kvferry_connector.wire import hot
from kvferry_connector.wire.attach import RegisterEngine
from support.waiting import wait_until

ENGINE = RegisterEngine(bytes(16), bytes(16), [0], 16, 16, 16, "recompute")


def child(client: Client, parents: Link) -> int:
    if client.link() is not None or not client.silent():
        return 1
    if client.send(parents, hot.Release([1])) or client.receive(parents):
        return 2
    client.start()
    own = wait_until(client.link, "the child's own link")
    client.close()
    return 0 if own.generation != parents.generation else 3


def main() -> int:
    client = Client(FerryConfig(run_dir=sys.argv[1]), Half("scheduler", "e", "i"), ENGINE)
    client.start()
    parents = wait_until(client.link, "the parent's link")
    pid = os.fork()
    if not pid:
        os._exit(child(client, parents))
    _, status = os.waitpid(pid, 0)
    unharmed = client.link() == parents or client.link() is not None
    client.close()
    return os.waitstatus_to_exitcode(status) if unharmed else 4


if __name__ == "__main__":
    sys.exit(main())
