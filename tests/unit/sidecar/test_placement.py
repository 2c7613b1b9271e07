"""NUMA: what may be named, where memory and threads then are, and what is refused."""

from __future__ import annotations

import mmap
import os
import re
import threading
from pathlib import Path

import pytest
from kvferry_sidecar import placement as placements
from kvferry_sidecar.errors import ConfigError
from kvferry_sidecar.placement import Placement, placement, with_memory, with_threads
from support.sidecar import running_sidecar, set_flags

GIB = 1 << 30


def machine(root: Path, allowed: str, **cpus: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text(f"Name:\tx\nMems_allowed_list:\t{allowed}\nx:\t1\n")
    for name, text in cpus.items():
        node = root / "sys/devices/system/node" / name
        node.mkdir(parents=True)
        (node / "cpulist").write_text(text)
        (node / "meminfo").write_text(f"{name} MemTotal:       {4 << 20} kB\n")
    return root


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("", None),
        ("1", Placement((1,), interleaved=False)),
        ("0-1,3", Placement((0, 1, 3), interleaved=False)),
        ("interleave", Placement((0, 1, 3), interleaved=True)),
    ],
)
def test_settings(tmp_path: Path, setting: str, found: Placement | None) -> None:
    assert placement(setting, GIB, machine(tmp_path, "0-1,3")) == found


def test_nodes_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are: 0, 1; name some of these"):
        placement("1-2", GIB, machine(tmp_path, "0-1"))
    with pytest.raises(ConfigError, match="none that are known"):
        placement("interleave", GIB, tmp_path / "empty")


def test_nodes_smaller_than_the_pool(tmp_path: Path) -> None:
    root = machine(tmp_path, "0-1", node0="0", node1="1")
    with pytest.raises(ConfigError, match=f"have {4 * GIB} bytes of memory, .* {5 * GIB}"):
        placement("1", 5 * GIB, root)
    assert placement("0-1", 5 * GIB, root) is not None


@pytest.mark.parametrize(("interleaved", "policy"), [(False, "bind:0"), (True, "interleave:0")])
def test_what_is_touched_first_is_placed(interleaved: bool, policy: str) -> None:
    made: list[str] = []

    def work() -> str:
        helper = threading.Thread(target=lambda: made.append(policy_here()))
        helper.start()
        helper.join()
        return policy_here()

    assert with_memory(Placement((0,), interleaved), work) == policy
    assert made == [policy], "threads that it starts too"
    assert policy_here() == "default", "only there"


def policy_here() -> str:
    """Return the policy of new memory of this thread, as the kernel tells it."""
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[0] = 1
        text = Path("/proc/thread-self/numa_maps").read_text()
    found = re.search(r"^[0-9a-f]+ (\S+)", text, re.MULTILINE)
    assert found
    return found[1]


def test_threads_keep_to_their_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = sorted(os.sched_getaffinity(0))
    root = machine(tmp_path, "0-2", node0=str(own[-1]), node1="", node2="9999")
    keep_near = placements._keep_near
    monkeypatch.setattr(placements, "_keep_near", lambda placed: keep_near(placed, root))

    def where(*nodes: int) -> list[int]:
        return sorted(with_threads(Placement(nodes, False), lambda: os.sched_getaffinity(0)))

    assert where(0, 1) == [own[-1]]
    assert where(1) == where(2) == own, "no processor of theirs is ours"
    assert sorted(os.sched_getaffinity(0)) == own


def test_a_failure_is_raised_where_it_was_asked_for() -> None:
    with pytest.raises(ZeroDivisionError):
        with_threads(Placement((0,), False), lambda: 1 // 0)
    with pytest.raises(ConfigError, match=r"cannot be placed .*Invalid argument.*numactl"):
        with_memory(Placement((1000,), False), lambda: None)


def test_a_sidecar_on_node_0() -> None:
    with running_sidecar(pool_bytes=8 << 20, flags=set_flags({"tiers.host.numa": "0"})) as sidecar:
        assert sidecar.status()["pool"]["total_bytes"] == 8 << 20
