"""What may happen to the nodes of one engine (support/two_nodes.py): never a hang, only misses.

The second node reaches the store through a proxy.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from kvferry_demo.processes import unlink_pool
from support.books import read_status, wait_settled
from support.elsewhere import started
from support.kit import Kit
from support.redis_server import RedisServer
from support.server import ServerProcess, serving
from support.sidecar import running_sidecar, set_flags
from support.slow_tiers import POOL_BYTES, is_on, settings_of
from support.tcp_proxy import TcpProxy
from support.two_nodes import TwoNodes, clear_pool, from_store
from support.waiting import wait_until
from vllm.v1.kv_cache_interface import FullAttentionSpec

BLOCK = 64
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float16)
SPECS = {"a": FULL, "b": FULL}
SETTINGS = {"faults__enabled": "true", "limits__copy_ms_max": 300_000}
_fork = multiprocessing.get_context("fork")


def prompt(salt: int, chunks: int = 6) -> list[int]:
    """Whole chunks and one token more: a repeated prompt hits all of them."""
    return [3 + (salt * number) % 450 for number in range(chunks * BLOCK + 1)]


class Nodes(TwoNodes):
    """With the second one's way to the store."""

    way: ServerProcess


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("failures")
    with ExitStack() as stack:
        store = stack.enter_context(serving(RedisServer(folder)))
        way = stack.enter_context(serving(TcpProxy(store.port)))
        urls = (store.url, f"redis://127.0.0.1:{way.port}/0")
        first, second = (
            stack.enter_context(
                running_sidecar(pool_bytes=POOL_BYTES, flags=set_flags(settings_of(url, SETTINGS)))
            )
            for url in urls
        )
        both = Nodes(folder, store, first, second)
        both.way = way
        yield both


@pytest.mark.parametrize("frozen", ["store", "way"])
def test_a_store_that_does_not_answer_a_node_is_a_miss(nodes: Nodes, frozen: str) -> None:
    """Of both nodes, or of one: the other one has all of it. Requests go on, and are served after.

    What is saved meanwhile is a hit from the pools.
    """
    tokens, later = prompt(7 + len(frozen)), prompt(17 + len(frozen))
    server: ServerProcess = getattr(nodes, frozen)
    assert [nodes.run(SPECS, "cold", one) for one in (tokens, later)] == [0, 0]
    for sidecar in (nodes.first, nodes.second):
        clear_pool(sidecar)
    server.signal(signal.SIGSTOP)
    try:
        with nodes.engine(SPECS) as engine:
            assert engine.run("frozen", tokens) == 0
            wait_until(lambda: not is_on(nodes.second), "it is noticed")
            engine.forget()
            assert engine.run("pools", tokens) == 6 * BLOCK
    finally:
        server.signal(signal.SIGCONT)
    for sidecar in (nodes.first, nodes.second):
        wait_until(lambda one=sidecar: is_on(one), "the store is used again")
    nodes.idle()
    assert nodes.run(SPECS, "thawed", later) == 6 * BLOCK


def test_a_store_that_is_away_when_nodes_start(nodes: Nodes) -> None:
    """They serve from their pools, and use it once it is there."""
    tokens = prompt(29)
    nodes.store.kill()
    for sidecar in (nodes.first, nodes.second):
        sidecar.restart()
    with nodes.engine(SPECS) as engine:
        assert engine.run("cold", tokens) == 0
        engine.forget()
        assert engine.run("warm", tokens) == 6 * BLOCK
        nodes.store.start()
        for sidecar in (nodes.first, nodes.second):
            wait_until(lambda one=sidecar: is_on(one), "the store is found")
        engine.forget()
        assert engine.run("another", prompt(31)) == 0
    nodes.idle()
    for sidecar in (nodes.first, nodes.second):
        clear_pool(sidecar)
    assert nodes.run(SPECS, "from the store", prompt(31)) == 6 * BLOCK


def load_for_ever(nodes: TwoNodes, tokens: list[int], pipe: Any) -> None:
    """An engine in a process of its own, until that or one of its ranks ends."""
    with suppress(EOFError, OSError), nodes.engine(SPECS) as engine:
        engine.add("warm", tokens)
        pipe.send([process.pid for process in engine._processes])
        while True:
            engine.step()


@pytest.mark.parametrize("ends", ["the scheduler's node", "a deputy's process"])
def test_an_engine_that_loses_a_node_leaves_nothing_on_the_other(nodes: Nodes, ends: str) -> None:
    """During a load. The next engine loads what the store and the other node's pool have."""
    tokens = prompt(37 + len(ends))
    assert nodes.run(SPECS, "cold", tokens) == 0
    before = read_status(nodes.second.run_dir)["pipeline"]["ledger"]["cancelled"]
    kit = Kit(nodes.second.run_dir)
    kit.rules("hold load")
    ours, theirs = _fork.Pipe()
    engine = _fork.Process(target=load_for_ever, args=(nodes, tokens, theirs))
    engine.start()
    try:
        wait_until(ours.poll, "the engine serves")
        ranks = ours.recv()
        wait_until(lambda: kit.view().met, "the copy is held")
        os.kill(ranks[1], signal.SIGKILL)
        if ends == "the scheduler's node":
            for pid in (engine.pid, ranks[0], nodes.first.process.pid):
                os.kill(pid, signal.SIGKILL)
            nodes.first.process.stop()
            unlink_pool(nodes.first.pool_name)
            nodes.first.start()
        engine.join(90)
        assert engine.exitcode is not None
    finally:
        engine.kill()
        engine.join()
    # The copy ends when it is let go: as one of a rank that is known to be gone.
    wait_until(lambda: not read_status(nodes.second.run_dir)["sessions"], "its end is noticed")
    kit.rules()
    ledger = wait_settled(nodes.second.run_dir)["pipeline"]["ledger"]
    assert ledger["cancelled"] == before + 1
    stored = from_store(nodes.first)
    assert nodes.run(SPECS, "warm", tokens) == 6 * BLOCK
    loaded = 6 * BLOCK if ends == "the scheduler's node" else 0
    assert from_store(nodes.first) == stored + loaded


def test_clocks_of_nodes_need_not_agree(tmp_path: Path) -> None:
    """Nothing that one node tells another is a time."""
    shifted = ("unshare", "--time", "--monotonic", "3000000")
    if subprocess.run([*shifted, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a clock of its own needs root and time namespaces (unshare --time)")
    with (
        serving(RedisServer(tmp_path)) as store,
        started(store.url) as first,
        started(store.url, prefix=shifted) as second,
    ):
        nodes = TwoNodes(tmp_path, store, first, second)
        assert nodes.run(SPECS, "cold", prompt(41)) == 0
        for sidecar in (first, second):
            clear_pool(sidecar)
        assert nodes.run(SPECS, "warm", prompt(41)) == 6 * BLOCK
