"""Two nodes as network namespaces joined by a cable. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Node:
    """One namespace: ``prefix`` runs a command in it."""

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("nsenter", f"--net=/run/netns/{self.name}")


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Yield two nodes that reach each other and nobody else."""
    if os.geteuid() or not all(shutil.which(tool) for tool in ("ip", "nsenter")):
        pytest.skip("namespaces need root, ip (iproute2) and nsenter (util-linux)")
    tag = f"kvf{os.getpid()}"
    nodes = (Node(f"{tag}a", "10.77.0.1"), Node(f"{tag}b", "10.77.0.2"))
    try:
        for node in nodes:
            _ip("netns", "add", node.name)
        first, second = (node.name for node in nodes)
        _ip("link", "add", "k0", "netns", first, "type", "veth", "peer", "k0", "netns", second)
        for node in nodes:
            _ip("-n", node.name, "link", "set", "lo", "up")
            _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", "k0")
            _ip("-n", node.name, "link", "set", "k0", "up")
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "del", node.name], check=False, capture_output=True)


def cut(node: Node) -> None:
    """Pull the cable."""
    _ip("-n", node.name, "link", "set", "k0", "down")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
