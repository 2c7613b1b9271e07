"""A real engine of two tensor-parallel ranks on two nodes, each with a sidecar, over one Redis.

The second node is vLLM's own headless one; run directories stand for the nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kvferry_demo import protocol
from kvferry_demo.models import engine_settings
from kvferry_demo.processes import ENGINE_ENVIRONMENT, in_environment
from support.engine import (
    PATIENCE,
    EngineUnderTest,
    Texts,
    hit_of,
    model_dir,
    running_engine,
)
from support.group import GroupChild
from support.logs import watch_log
from support.server import free_port
from support.two_nodes import TwoNodes, clear_pool, from_store, two_nodes
from support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long]

MODEL = "llama"


@contextmanager
def engine_on(nodes: TwoNodes, folder: Path, name: str) -> Iterator[EngineUnderTest]:
    """Yield an engine with rank 0 on the first node and rank 1 on the second one."""
    arguments: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "worker_cls": "kvferry_demo.worker.SpreadWorker",
        "nnodes": 2,
        "master_addr": "127.0.0.1",
        "master_port": free_port(),
    }
    settings = engine_settings(MODEL, model_dir(MODEL))
    further = protocol.EngineSetup(
        model_dir=str(model_dir(MODEL)),
        run_dir=str(nodes.second.run_dir),
        connector_extra=dict(PATIENCE),
        engine_args={**settings, **arguments, "node_rank": 1},
    )
    setup, log = folder / f"{name}.json", folder / f"{name}.log"
    setup.write_bytes(protocol.encoder.encode(further))
    environment = {**ENGINE_ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = in_environment(
        environment, [sys.executable, "-m", "support.headless_node", str(setup)]
    )
    with (
        watch_log(f"further node of the {name}", log),
        GroupChild(command, log),
        running_engine(
            nodes.first.run_dir, model=MODEL, attached=False, engine_args=arguments
        ) as engine,
    ):
        wait_served(engine)
        yield engine


def wait_served(engine: EngineUnderTest, wanted: bool = True) -> None:
    """Run prompts too short for a hit until hits are possible: what nodes say comes with steps."""

    def reached() -> bool:
        engine.run([3, 4, 5], max_tokens=1)
        return (engine.inspect().connector == "ready") == wanted

    wait_until(reached, f"both nodes serve: {wanted}", every_s=0.05)


def test_a_real_engine_on_two_nodes_loads_what_both_saved(tmp_path: Path) -> None:
    """By the next engine, of new processes on both nodes, from the store alone.

    Meanwhile the second node's sidecar is killed: the engine goes on without a cache, and uses the
    next one.
    """
    texts = Texts()
    before, without, after = (texts.take(count) for count in (1500, 700, 900))
    with two_nodes(tmp_path, pool_bytes=64 << 20) as nodes:
        with engine_on(nodes, tmp_path, "writer") as writer:
            cold = [writer.run(before)]
            nodes.idle()
            nodes.second.kill()
            wait_served(writer, False)  # or it would take the node for there when it is not yet
            missed = writer.run(without)
            assert (missed.hit_tokens, missed.finish) == (0, "length")
            nodes.second.start()
            wait_served(writer)
            cold.append(writer.run(after))
            nodes.idle()
        for sidecar in (nodes.first, nodes.second):
            clear_pool(sidecar)
        with engine_on(nodes, tmp_path, "reader") as reader:
            warm = [reader.run(tokens) for tokens in (before, after)]
            computed = reader.run(without)
            nodes.idle()
        hits = [hit_of(tokens) for tokens in (before, after)]
        assert [one.hit_tokens for one in (*cold, *warm, computed)] == [0, 0, *hits, 0]
        assert [one.output for one in warm] == [one.output for one in cold]
        assert computed.output == missed.output
        assert [from_store(one) for one in (nodes.first, nodes.second)] == [sum(hits)] * 2
