"""An engine whose ranks live on two nodes (support/two_nodes.py), under vLLM's real Scheduler.

Each rank is a process beside its node's own sidecar; every block that a step reads is compared byte
by byte on every rank.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kvferry_connector.requests import Limits
from support.books import read_status
from support.four_ranks import EngineOfRanks, engine_of_ranks
from support.kit import Kit
from support.sidecar import SidecarUnderTest, running_sidecar
from support.two_nodes import (
    TwoNodes,
    asks,
    clear_pool,
    faults,
    from_store,
    loaded_bytes,
    saved_bytes,
    two_nodes,
    wait_served,
)
from support.waiting import wait_until
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus

BLOCK = 64
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float16)
SWA = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float16, sliding_window=100
)
MLA = MLAAttentionSpec(
    block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float16, max_tp_shards=1
)
STATE = MambaSpec(
    block_size=BLOCK, shapes=((2, 8), (4, 4)), dtypes=(torch.float16, torch.float32),
    mamba_cache_mode="align", page_size_padded=FULL.page_size_bytes,
)  # fmt: skip
DENSE = {"a": FULL, "b": FULL}
WINDOWED = {"a": FULL, "b": SWA}
STATES = {"a": FULL, "m": STATE}
DRAFTED_STATES = {"a": FULL, "m": replace(STATE, num_speculative_blocks=2)}
DRAFTER = {"draft_tokens": 2, "eagle": True}
NODE_1 = "the node of rank 1 is not served"


def prompt(chunks: int, salt: int = 7) -> list[int]:
    """Whole chunks and one token more: a repeated prompt hits all of them."""
    return [3 + (salt * number) % 450 for number in range(chunks * BLOCK + 1)]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    # A held copy is held for as long as the test wants it.
    settings = {"faults__enabled": "true", "limits__copy_ms_max": 300_000}
    with two_nodes(tmp_path_factory.mktemp("nodes"), **settings) as both:
        yield both


@pytest.mark.parametrize(
    ("specs", "options"),
    [
        (DENSE, {}),
        (WINDOWED, {"ranks": 4}),
        ({"a": MLA, "b": MLA}, {}),
        ({**DENSE, "c": FULL, "d": FULL}, {"ranks": 4, "stages": 2}),
        (DENSE, {"stages": 2}),
        (DENSE, {"dcp": 2}),
        (STATES, {}),
        ({**DENSE, "m": STATE, "n": STATE}, {"ranks": 4, "stages": 2}),
        (STATES, {"dcp": 2}),
    ],
    ids=["tensor parallel", "windows", "replicas", "both", "pipeline", "context", "states",
         "states in stages", "states and context"],
)  # fmt: skip
def test_what_all_nodes_saved_is_a_hit_on_all(
    nodes: TwoNodes, specs: dict[str, Any], options: dict[str, int]
) -> None:
    """From the store alone: neither node's pool has anything any more."""
    tokens = prompt(6)
    assert nodes.run(specs, "cold", tokens, **options) == 0
    before = [from_store(one) for one in (nodes.first, nodes.second)]
    for sidecar in (nodes.first, nodes.second):
        clear_pool(sidecar)
    assert nodes.run(specs, "warm", tokens, **options) == 6 * BLOCK
    after = [from_store(one) for one in (nodes.first, nodes.second)]
    assert after == [count + 6 * BLOCK for count in before]


@pytest.mark.parametrize(
    ("specs", "options", "chunks"),
    [
        (DENSE, {"draft_tokens": 5}, 6),
        (DENSE, DRAFTER, 5),
        (WINDOWED, DRAFTER, 5),
        (DRAFTED_STATES, DRAFTER, 5),
    ],
    ids=["guesses", "a drafter", "a drafter and windows", "a drafter and states"],
)
def test_with_a_drafter_nodes_hit_what_one_node_does(
    nodes: TwoNodes, specs: dict[str, Any], options: dict[str, Any], chunks: int
) -> None:
    """EAGLE and MTP match one block more and drop it; what was guessed is nowhere."""
    tokens = prompt(6, 47)
    assert nodes.run(specs, "cold", tokens, max_tokens=BLOCK, **options) == 0
    assert nodes.run(specs, "warm", tokens, max_tokens=BLOCK, **options) == chunks * BLOCK


@pytest.mark.parametrize("specs", [DENSE, WINDOWED, DRAFTED_STATES], ids=["one", "window", "state"])
def test_with_a_drafter_unequal_nodes_agree_on_what_both_have(
    nodes: TwoNodes, specs: dict[str, Any]
) -> None:
    """One block below the shorter one's end: the drop is made once, not anew with each question."""
    short, long = prompt(4, 67), prompt(6, 67)
    assert nodes.run(specs, "cold", short, **DRAFTER) == 0
    nodes.run(specs, "more", long, **DRAFTER)
    nodes.store.flush()
    clear_pool(nodes.second)
    assert nodes.run(specs, "one node only", short, **DRAFTER) == 0
    assert nodes.run(specs, "agreed", long, **DRAFTER) == 3 * BLOCK


def test_ranks_of_all_nodes_sleep_and_wake_up(nodes: TwoNodes) -> None:
    """While one still sleeps a lookup is a miss; afterwards what was saved before is a hit."""
    tokens, between = prompt(6, 59), prompt(4, 61)
    with nodes.engine(DENSE) as engine:
        assert engine.run("cold", tokens) == 0
        nodes.idle()
        engine.tell("sleep", [0, 1])
        assert [workers(one) for one in (nodes.first, nodes.second)] == [[], []]
        engine.forget()
        engine.tell("wake", [0])
        wait_until(lambda: serials(nodes.first) == [2], "it has the first rank's memory again")
        assert engine.run("one sleeps", tokens) == engine.run("nothing", between) == 0
        engine.forget()
        engine.tell("wake", [1])
        wait_until(lambda: serials(nodes.second) == [2], "it has the second rank's as well")
        wait_served(engine)
        assert engine.run("warm", tokens) == 6 * BLOCK
        nodes.idle()


def serials(sidecar: SidecarUnderTest) -> list[int]:
    """Under which serials ranks have registered."""
    sessions = read_status(sidecar.run_dir)["sessions"]
    return [half["serial"] for one in sessions for half in one["halves"] if half["rank"] >= 0]


def workers(sidecar: SidecarUnderTest) -> list[int]:
    """The ranks whose memory a sidecar has."""
    sessions = read_status(sidecar.run_dir)["sessions"]
    return [half["rank"] for one in sessions for half in one["halves"] if half["rank"] >= 0]


def test_two_starts_of_vllm_that_share_a_sidecar_are_refused(
    nodes: TwoNodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever registers second: leases and jobs of one engine's life would meet in it."""
    first, told = nodes.first.run_dir, "give each start (each pod) a sidecar with a run directory"
    with engine_of_ranks(tmp_path, first, DENSE, ranks=2, apart=first) as engine:
        wait_until(lambda: stepped(engine) and told in caplog.text, "one of them is told")
        assert [engine.run(name, prompt(3, 71)) for name in ("cold", "again")] == [0, 0]
    nodes.idle()


def test_a_hit_is_what_every_node_has(nodes: TwoNodes) -> None:
    """And what one node lacks is saved there again, whatever the other one has."""
    long, short = prompt(6, 11), prompt(3, 11)
    assert nodes.run(DENSE, "cold", long) == 0
    nodes.store.flush()
    clear_pool(nodes.second)
    assert nodes.run(DENSE, "one node only", short) == 0
    assert nodes.run(DENSE, "half", long) == 3 * BLOCK
    assert nodes.run(DENSE, "all", long) == 6 * BLOCK


@pytest.mark.parametrize("specs", [WINDOWED, STATES], ids=["window", "states"])
def test_nodes_agree_on_what_both_have(nodes: TwoNodes, specs: dict[str, Any]) -> None:
    """A window or a state that only one node has at that length is no hit: both settle for less."""
    long, short = prompt(6, 13), prompt(4, 13)
    assert nodes.run(specs, "cold", short) == 0
    assert nodes.run(specs, "more", long) == 4 * BLOCK
    nodes.store.flush()
    clear_pool(nodes.second)
    assert nodes.run(specs, "one node only", short) == 0
    assert nodes.run(specs, "agreed", long) == 4 * BLOCK


def test_a_reset_is_one_on_all_nodes(nodes: TwoNodes) -> None:
    tokens = prompt(5, 17)
    with nodes.engine(DENSE) as engine:
        assert engine.run("cold", tokens) == 0
        assert engine.scheduler.reset_prefix_cache()
        wait_served(engine)
        before = [saved_bytes(one) for one in (nodes.first, nodes.second)]
        assert engine.run("after", tokens) == 0, "of another version"
        after = [saved_bytes(one) for one in (nodes.first, nodes.second)]
        assert all(new > old for new, old in zip(after, before, strict=True))
    assert nodes.run(DENSE, "warm", tokens) == 5 * BLOCK, "an engine that was not reset"


def test_engine_on_nodes_without_a_shared_store_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the reason, and what to set; it runs without a cache."""
    told = ("the scheduler was refused", NODE_1)
    with running_sidecar() as first, running_sidecar() as second:
        start = (tmp_path, first.run_dir, DENSE)
        with engine_of_ranks(*start, ranks=2, apart=second.run_dir) as engine:
            wait_until(
                lambda: stepped(engine) and all(who in caplog.text for who in told), "both are told"
            )
            assert [engine.run(name, prompt(3)) for name in ("cold", "again")] == [0, 0]
            assert engine.connector.attachment()[0] == "refused"
    for who in told:
        (line,) = {line for line in caplog.messages if who in line}
        assert "engine 2 nodes, sidecar no shared store (set tiers.remote.url" in line


def stepped(engine: EngineOfRanks) -> bool:
    engine.step()
    return True


def phase_of(engine: EngineOfRanks, name: str) -> str:
    return str(engine.connector._scheduler._requests[name].admission.phase.name)


def load(engine: EngineOfRanks, name: str, tokens: list[int]) -> None:
    """Step until the request's load is under way."""
    engine.add(name, tokens)
    wait_until(lambda: stepped(engine) and phase_of(engine, name) == "LOADING", "it loads")


def ended(engine: EngineOfRanks) -> bool:
    engine.step()
    return not engine.scheduler.has_requests()


@pytest.mark.parametrize("dies", ["first", "second"])
def test_a_node_that_dies_during_a_load_fails_it_and_comes_back(nodes: TwoNodes, dies: str) -> None:
    """The request waits until each rank has stopped; then it is computed, and asked for no more."""
    tokens, more = prompt(6, 21 + len(dies)), prompt(4, 31 + len(dies))
    dying, other = nodes.first, nodes.second
    if dies == "second":
        dying, other = other, dying
    assert nodes.run(DENSE, "cold", tokens) == 0
    faults(dying, "hold load")
    with nodes.engine(DENSE) as engine:
        before = loaded_bytes(other)
        load(engine, "warm", tokens)
        wait_until(lambda: stepped(engine) and loaded_bytes(other) > before, "one has loaded")
        asked = asks(other)
        for _ in range(20):
            engine.step()
        assert phase_of(engine, "warm") == "LOADING", "the other one has not stopped"
        dying.kill(signal.SIGKILL)
        wait_until(lambda: ended(engine), "it is computed", every_s=0.0)
        assert engine.counts["loads_failed"] == 1
        assert asks(other) == asked, "nothing shorter is whole on a dead node"
        dying.start()
        wait_served(engine)
        assert engine.run("more", more) == 0
    nodes.idle()
    assert nodes.run(DENSE, "back", more) == 4 * BLOCK


def test_a_request_that_is_aborted_during_a_load_leaves_nothing_on_any_node(
    nodes: TwoNodes,
) -> None:
    tokens = prompt(6, 41)
    assert nodes.run(DENSE, "cold", tokens) == 0
    kit = Kit(nodes.second.run_dir)
    kit.rules("hold load")
    with nodes.engine(DENSE) as engine:
        load(engine, "warm", tokens)
        wait_until(lambda: stepped(engine) and kit.view().met, "the copy is held")
        engine.scheduler.finish_requests("warm", RequestStatus.FINISHED_ABORTED)
        assert engine.scheduler.has_requests(), "its blocks belong to the copies"
        wait_until(lambda: ended(engine), "every copy has stopped", every_s=0.0)
    kit.rules()
    nodes.idle()
    assert read_status(nodes.second.run_dir)["pipeline"]["ledger"]["cancelled"] == 1


@pytest.mark.parametrize("hangs", ["first", "second"])
def test_a_node_that_hangs_is_a_miss(nodes: TwoNodes, hangs: str) -> None:
    """In its time, and its answer that comes later is of no use to anybody."""
    tokens, hung = prompt(6, 37 + len(hangs)), getattr(nodes, hangs)
    assert nodes.run(DENSE, "cold", tokens) == 0
    with nodes.engine(DENSE) as engine:
        engine.connector._scheduler._lookup._limits = Limits(0.05, 0.05)
        os.kill(hung.process.pid, signal.SIGSTOP)
        try:
            engine.add("warm", tokens)
            wait_until(
                lambda: stepped(engine) and "warm" not in engine.scheduler.requests, "it ends"
            )
            assert engine.counts["loads"] == 0
        finally:
            os.kill(hung.process.pid, signal.SIGCONT)
        wait_until(lambda: ended(engine), "its saves are reported", every_s=0.0)
        nodes.idle()
