"""Engines that must not share, and an engine that was there before its sidecar, started late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engine import EngineUnderTest, Texts, hit_of, running_engine
from support.sidecar import SidecarUnderTest, make_sidecar

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarUnderTest]:
    with make_sidecar() as one:
        yield one


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return Texts().take(1400)


@pytest.fixture(scope="module")
def llama_output(sidecar: SidecarUnderTest, prompt: list[int]) -> list[int]:
    """What the first llama engine said; it saved the prompt. It started before its sidecar."""
    with running_engine(sidecar.run_dir, attached=False) as engine:
        assert engine.inspect().connector in {"away", "stopped"}
        alone = engine.run(prompt)
        assert alone.hit_tokens == 0
        sidecar.start()
        engine.wait_attached()
        # The prompt is in vLLM's own cache; saving looks at what the sidecar has, not at that.
        assert engine.run(prompt).output == alone.output
        sidecar.wait_idle()
    return alone.output


@pytest.fixture(scope="module")
def second(sidecar: SidecarUnderTest, llama_output: list[int]) -> Iterator[EngineUnderTest]:
    """An engine that started when the first one had ended."""
    with running_engine(sidecar.run_dir) as engine:
        yield engine


def test_engine_before_its_sidecar(
    prompt: list[int], llama_output: list[int], second: EngineUnderTest
) -> None:
    """It served without, attached later, and saved then: a second engine hits."""
    warm = second.run(prompt)
    assert warm.hit_tokens == hit_of(prompt)
    assert warm.output == llama_output


def test_another_model_shares_nothing(
    sidecar: SidecarUnderTest, prompt: list[int], llama_output: list[int]
) -> None:
    """Same block size, same bytes per block, same token ids: only the model differs."""
    stored = sidecar.wait_idle()["pool"]["ready"]
    with running_engine(sidecar.run_dir, model="qwen3") as engine:
        other = engine.run(prompt)
        assert other.hit_tokens == 0
        assert other.output != llama_output
        assert sidecar.wait_idle()["pool"]["ready"] == 2 * stored, "it stores under its own keys"


def test_another_hash_seed_is_reported(
    sidecar: SidecarUnderTest, prompt: list[int], llama_output: list[int], second: EngineUnderTest
) -> None:
    """Hashes of another seed mean nothing here: no hits, and the status says why."""
    with running_engine(sidecar.run_dir, environment={"PYTHONHASHSEED": "1"}) as stranger:
        result = stranger.run(prompt)
        assert result.hit_tokens == 0
        assert result.output == llama_output
        notes = {
            half["pid"]: session["notes"]
            for session in sidecar.status()["sessions"]
            for half in session["halves"]
        }
        for pid in (second.pid, stranger.pid):
            assert any("seed" in note.lower() for note in notes[pid]), notes
