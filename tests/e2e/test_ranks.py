"""Real engines of several ranks beside one sidecar: tensor parallel and data parallel."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kvferry_demo.processes import ENGINE_ENVIRONMENT, Child, ChildError, in_environment
from support.books import wait_settled
from support.engine import (
    TWO_RANKS,
    EngineUnderTest,
    Texts,
    ask,
    hit_of,
    model_dir,
    running_engine,
)
from support.group import GroupChild
from support.logs import watch_log
from support.memory import mapped_files
from support.sidecar import SidecarUnderTest, running_sidecar
from support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]  # several engine processes at once


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarUnderTest]:
    with running_sidecar() as one:
        yield one


@contextmanager
def two_ranks(
    sidecar: SidecarUnderTest, model: str = "llama", **arguments: Any
) -> Iterator[EngineUnderTest]:
    with running_engine(
        sidecar.run_dir, model=model, engine_args={**TWO_RANKS, **arguments}
    ) as engine:
        yield engine


def test_two_tensor_parallel_ranks_save_and_load_their_own_halves(
    sidecar: SidecarUnderTest,
) -> None:
    texts = Texts()
    tokens = texts.take(1500)
    with two_ranks(sidecar) as writer:
        cold = writer.run(tokens)
        status = sidecar.wait_idle()
        (session,) = status["sessions"]
        assert (session["ready"], session["ranks"]) == (True, [0, 1])
        assert [half["rank"] for half in session["halves"]] == [-1, 0, 1]
        payloads = [half["payload_bytes"] for half in session["halves"] if half["rank"] >= 0]
        assert payloads[0] == payloads[1] != [0]
        books = status["pipeline"]["ledger"]
        kill_a_rank(writer, sidecar, texts.take(900))
    chunks = len(tokens) // 128
    assert books["saved_bytes"] == 2 * chunks * payloads[0][0]
    with two_ranks(sidecar) as reader:
        warm = reader.run(tokens)
        books = sidecar.wait_idle()["pipeline"]["ledger"]
    assert warm.hit_tokens == hit_of(tokens)
    assert warm.output == cold.output
    assert books["loaded_bytes"] == 2 * chunks * payloads[0][0]
    assert books["failed"] == 0


def kill_a_rank(engine: EngineUnderTest, sidecar: SidecarUnderTest, tokens: list[int]) -> None:
    """End an engine by SIGKILL of one rank with saves under way: nothing of it is left."""
    engine.start(ask(tokens))
    engine.step(2)
    engine.kill_rank(1)
    with pytest.raises(ChildError):
        engine.finish()
    wait_until(lambda: not mapped_files(sidecar.process.pid), "its memory is unmapped")
    wait_until(lambda: not sidecar.status()["sessions"], "its session is gone")
    wait_settled(sidecar.run_dir)


@pytest.mark.long
def test_two_pipeline_stages_with_groups_of_their_own(sidecar: SidecarUnderTest) -> None:
    """Three chunked groups and a full one over two stages: each has two groups without layers."""
    tokens = Texts().take(1500)
    stages = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    with two_ranks(sidecar, "llama4", **stages) as writer:
        cold = writer.run(tokens)
        status = sidecar.wait_idle()
    (session,) = [one for one in status["sessions"] if one["ready"]]
    shares = [half["payload_bytes"] for half in session["halves"] if half["rank"] >= 0]
    assert [[size > 0 for size in share] for share in shares] == [
        [True, True, False, False],
        [False, False, True, True],
    ]
    with two_ranks(sidecar, "llama4", **stages) as reader:
        warm = reader.run(tokens)
        books = sidecar.wait_idle()["pipeline"]["ledger"]
    assert warm.hit_tokens == hit_of(tokens)
    assert warm.output == cold.output
    assert books["failed"] == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "sizes"), [("falconh1", (1, 2)), ("granitehybrid", (2, 1))], ids=["stages", "tensor"]
)
def test_states_over_two_ranks(
    sidecar: SidecarUnderTest, model: str, sizes: tuple[int, int]
) -> None:
    """Each stage has states and attention of its own layers, each tensor rank its own heads'."""
    tokens = Texts().take(1100)
    parallel = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    with two_ranks(sidecar, model, **parallel) as writer:
        cold = writer.run(tokens)
        status = sidecar.wait_idle()
    (session,) = [one for one in status["sessions"] if one["ready"]]
    kinds = [group["kind"] for group in session["geometry"]["groups"]]
    assert sorted(kinds) == ["full", "mamba"]
    shares = [half["payload_bytes"] for half in session["halves"] if half["rank"] >= 0]
    assert len(shares) == 2
    assert all(size > 0 for share in shares for size in share)
    saved, loaded = (status["pipeline"]["ledger"][f"{way}_bytes"] for way in ("saved", "loaded"))
    with two_ranks(sidecar, model, **parallel) as reader:
        warm = reader.run(tokens)
        books = sidecar.wait_idle()["pipeline"]["ledger"]
    assert warm.hit_tokens == hit_of(tokens)
    assert warm.output == cold.output
    assert books["failed"] == 0
    state = kinds.index("mamba")
    moved = sum(share[state] + hit_of(tokens) // 128 * share[1 - state] for share in shares)
    assert books["loaded_bytes"] - loaded == moved, "one state, every chunk of attention"
    assert saved >= moved


@pytest.mark.long
def test_two_data_parallel_engines_share_what_one_saved(tmp_path: Path) -> None:
    tokens = Texts().take(1500)
    log = tmp_path / "dp.log"
    command = [sys.executable, "-m", "support.dp_child"]
    environment = {
        **ENGINE_ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    with running_sidecar() as sidecar, watch_log("data parallel", log):
        command += [str(model_dir("llama")), str(sidecar.run_dir)]
        with GroupChild(in_environment(environment, command), log, pipes=True) as engines:
            assert engines.process.stdout is not None
            assert engines.process.stdout.readline() == b"{}\n", engines.tail()
            sessions = wait_until(lambda: ready_sessions(sidecar), "both engines are ready")
            assert sessions[0]["namespace"] == sessions[1]["namespace"]
            assert [session["ranks"] for session in sessions] == [[0], [0]]
            halves = [(half["dp_rank"], half["host"]) for one in sessions for half in one["halves"]]
            assert sorted(halves) == [(place, os.uname().nodename) for place in (0, 0, 1, 1)]
            cold = answer(engines, 0, tokens)
            ((chunk_bytes,),) = {
                tuple(half["payload_bytes"])
                for half in (*sessions[0]["halves"], *sessions[1]["halves"])
                if half["rank"] >= 0
            }
            whole_bytes = len(tokens) // 128 * chunk_bytes
            wait_until(lambda: ledger(sidecar)["saved_bytes"] == whole_bytes, "rank 0 saved")
            sidecar.wait_idle()
            assert ledger(sidecar)["loaded_bytes"] == 0
            assert answer(engines, 1, tokens) == cold
            books = sidecar.wait_idle()["pipeline"]["ledger"]
            assert engines.process.stdin is not None
            engines.process.stdin.close()
            assert engines.process.wait(60) == 0, engines.tail()
    assert books["loaded_bytes"] == books["saved_bytes"] > 0
    assert books["failed"] == 0


def answer(engines: Child, rank: int, tokens: list[int]) -> list[int]:
    """Run one request on the engine of a data-parallel rank; return its output."""
    process = engines.process
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"rank": rank, "tokens": tokens}).encode() + b"\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, engines.tail()
    output: list[int] = json.loads(line)["output"]
    return output


def ready_sessions(sidecar: SidecarUnderTest) -> list[dict[str, Any]]:
    sessions = [session for session in sidecar.status()["sessions"] if session["ready"]]
    return sessions if len(sessions) == 2 else []


def ledger(sidecar: SidecarUnderTest) -> dict[str, Any]:
    books: dict[str, Any] = sidecar.status()["pipeline"]["ledger"]
    return books
