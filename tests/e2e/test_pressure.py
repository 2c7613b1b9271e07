"""Too little room: a KV cache that preempts, and a pool smaller than one prompt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvferry_demo import protocol
from support.engine import BLOCK_TOKENS, EngineUnderTest, Texts, ask, running_engine
from support.sidecar import SidecarUnderTest, running_sidecar

pytestmark = pytest.mark.engine

BLOCK_BYTES = 2048 * BLOCK_TOKENS  # the tiny llama's KV bytes of a block, all layers
TINY_BLOCKS = 10  # one of them is vLLM's null block


@pytest.fixture(scope="module")
def alone() -> Iterator[EngineUnderTest]:
    """An engine with plenty of room and no connector: what the output should be."""
    with running_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarUnderTest]:
    with running_sidecar() as one:
        yield one


@pytest.fixture(scope="module")
def tiny(sidecar: SidecarUnderTest) -> Iterator[EngineUnderTest]:
    """An engine whose KV cache cannot hold two long requests."""
    with running_engine(
        sidecar.run_dir,
        kv_cache_bytes=TINY_BLOCKS * BLOCK_BYTES,
        max_model_len=(TINY_BLOCKS - 1) * BLOCK_TOKENS,
        connector_extra={"gather_tokens": 0},  # what is preempted is saved block by block
    ) as engine:
        assert engine.facts.num_blocks == TINY_BLOCKS
        assert engine.facts.token_bytes * BLOCK_TOKENS == BLOCK_BYTES
        yield engine


def test_preempted_requests_resume_from_the_sidecar(
    tiny: EngineUnderTest, alone: EngineUnderTest, sidecar: SidecarUnderTest, texts: Texts
) -> None:
    """Two requests grow until one is preempted; what it had generated is a hit when it resumes.

    Each wants seven blocks of the nine. The survivor takes the victim's blocks, so vLLM has lost
    its tail, and the resumed request's hit reaches beyond its prompt into generated tokens.
    """
    asks = [ask(texts.take(300), max_tokens=500) for _ in range(2)]
    results = tiny.generate(*asks)
    tiny.settle()
    expected = [alone.generate(one)[0] for one in asks]
    assert [one.output for one in results] == [one.output for one in expected]
    preempted = [one for one in results if one.preemptions]
    assert preempted, "nothing was preempted: the test shows nothing"
    resumed = [again for one in preempted for again in one.admissions[1:]]
    assert any(
        again.external_tokens > 0
        and again.local_tokens + again.external_tokens > again.prompt_tokens
        for again in resumed
    ), resumed
    assert tiny.inspect().used_blocks == 0
    sidecar.wait_idle()


def test_many_requests_in_a_tiny_cache(
    tiny: EngineUnderTest, alone: EngineUnderTest, sidecar: SidecarUnderTest, texts: Texts
) -> None:
    """Saves pin blocks and loads wait for room: the engine still serves everybody."""
    head = texts.take(400)
    asks = [ask(head + texts.take(150 + 40 * number), max_tokens=60) for number in range(6)]
    for _ in range(2):
        results = tiny.generate(*asks)
        tiny.settle()
        assert [one.output for one in results] == [alone.generate(one)[0].output for one in asks]
    assert tiny.inspect().used_blocks == 0
    sidecar.wait_idle()


def test_pool_smaller_than_one_prompt(alone: EngineUnderTest, texts: Texts) -> None:
    """Some chunks are stored, more never fit: that is counted, and costs no request anything."""
    with (
        running_sidecar(pool_bytes=4 << 20) as sidecar,
        running_engine(sidecar.run_dir) as engine,
    ):
        tokens = texts.take(6000)
        assert len(tokens) * engine.facts.token_bytes > 2 * (4 << 20)
        expected = alone.generate(ask(tokens))[0].output
        assert engine.run(tokens).output == expected
        # vLLM's own cache must not answer: another engine process would be the same, but slower.
        assert engine.reset_prefix_cache()
        again = engine.run(tokens)
        assert again.output == expected
        assert engine.inspect().used_blocks == 0
        pool = sidecar.wait_idle()["pool"]
        assert 0 < pool["used_bytes"] <= pool["total_bytes"]


def test_kv_bytes_are_what_the_tests_assume(alone: EngineUnderTest) -> None:
    state = alone.call(protocol.Inspect())
    assert isinstance(state, protocol.State)
    assert state.connector == ""
    assert alone.facts.block_tokens == BLOCK_TOKENS
