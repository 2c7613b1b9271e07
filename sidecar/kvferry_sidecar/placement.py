"""The NUMA nodes of the pool's memory and of the copy threads: ``tiers.host.numa``.

Both are properties of a thread that the threads it starts inherit, and memory is placed when it is
touched first. So the pool and the copy threads are made in a thread of their own, and nothing has
to be put back. Pages that a former sidecar left stay where they are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvferry_native import place_memory

from kvferry_sidecar.errors import ConfigError

T = TypeVar("T")
INTERLEAVE = "interleave"
_NODES = Path("sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class Placement:
    """Which nodes. ``interleaved``: page by page over them, and threads run anywhere."""

    nodes: tuple[int, ...]
    interleaved: bool


def placement(setting: str, pool_bytes: int, root: Path = Path("/")) -> Placement | None:
    """Return what ``tiers.host.numa`` asks for; None for "", which leaves it to the kernel.

    Raises ConfigError for nodes that are not there for this process, or smaller than the pool.
    """
    if not setting:
        return None
    there = _allowed(root)
    nodes = there if setting == INTERLEAVE else processors(setting)
    if not nodes or not nodes <= there:
        known = ", ".join(map(str, sorted(there))) or "none that are known"
        raise ConfigError(
            f"tiers.host.numa = {setting!r} names nodes that are not there for this process; "
            f"there are: {known}",
            f"name some of these, or {INTERLEAVE!r}, or leave it empty; a container's nodes are "
            "those of its cpuset",
        )
    total_bytes = sum(_memory_bytes(root / _NODES / f"node{node}") for node in nodes)
    if 0 < total_bytes < pool_bytes:
        raise ConfigError(
            f"tiers.host.numa = {setting!r}: these nodes have {total_bytes} bytes of memory, the "
            f"pool is to have {pool_bytes}",
            "name more nodes or lower tiers.host.bytes: the kernel would kill this process",
        )
    return Placement(tuple(sorted(nodes)), setting == INTERLEAVE)


def with_memory(placed: Placement | None, make: Callable[[], T]) -> T:
    """Call ``make`` so that what it touches first lies on the nodes. Raises ConfigError."""
    return _apart(placed, _place_memory, make)


def with_threads(placed: Placement | None, make: Callable[[], T]) -> T:
    """Call ``make`` so that the threads it starts keep to the processors of the nodes.

    Nodes without a processor that this process may use (memory alone) leave them anywhere.
    """
    return _apart(placed, _keep_near, make)


def _apart(
    placed: Placement | None, prepare: Callable[[Placement], None], make: Callable[[], T]
) -> T:
    if placed is None:
        return make()
    made: Future[T] = Future()

    def work() -> None:
        try:
            prepare(placed)
            made.set_result(make())
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            made.set_exception(error)

    thread = threading.Thread(target=work, name="kvferry-placed")
    thread.start()
    thread.join()
    return made.result()


def _place_memory(placed: Placement) -> None:
    try:
        place_memory(placed.nodes, placed.interleaved)
    except OSError as error:
        remedy = "leave tiers.host.numa empty and bind the sidecar from outside (numactl --membind)"
        if error.errno == errno.EPERM:
            remedy = "give the container CAP_SYS_NICE (its seccomp profile refuses), or " + remedy
        raise ConfigError(f"memory cannot be placed on NUMA nodes: {error}", remedy) from error


def _keep_near(placed: Placement, root: Path = Path("/")) -> None:
    if placed.interleaved:
        return
    near: set[int] = set()
    for node in placed.nodes:
        with contextlib.suppress(OSError, ValueError):
            near |= processors((root / _NODES / f"node{node}" / "cpulist").read_text())
    if near := near & os.sched_getaffinity(0):
        os.sched_setaffinity(0, near)


def _allowed(root: Path) -> set[int]:
    try:
        status = (root / "proc/self/status").read_text()
        return processors(status.partition("Mems_allowed_list:")[2].split("\n")[0])
    except (OSError, ValueError):
        return set()


def _memory_bytes(node: Path) -> int:
    """Return a node's memory, used or not; 0 where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((node / "meminfo").read_text().partition("MemTotal:")[2].split()[0]) << 10
    return 0


def processors(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8". Raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return found
