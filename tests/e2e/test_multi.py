"""FerryConnector beside a connector of vLLM's own under MultiConnector, in both orders."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.engine import PATIENCE, EngineUnderTest, Texts, hit_of, running_engine
from support.sidecar import SidecarUnderTest, running_sidecar

pytestmark = [pytest.mark.engine, pytest.mark.long]

PROMPT_TOKENS = 400  # one step: ExampleConnector saves what the first step of a prompt computes
LOADED = "Inject KV cache of"  # what ExampleConnector says when it loads


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarUnderTest]:
    with running_sidecar() as one:
        yield one


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ExampleConnector keeps its files."""
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture(scope="module")
def engines(sidecar: SidecarUnderTest, shelf: Path) -> Iterator[dict[str, EngineUnderTest]]:
    """One engine that asks ours first, and one that asks the other first."""
    ours = {
        "kv_connector": "FerryConnector",
        "kv_connector_module_path": "kvferry_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"run_dir": str(sidecar.run_dir), **PATIENCE},
    }
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(shelf)},
    }
    with ExitStack() as stack:
        made = {}
        for name, order in {"ours": [ours, other], "other": [other, ours]}.items():
            transfer: dict[str, Any] = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": order},
            }
            arguments = {"kv_transfer_config": transfer, "disable_hybrid_kv_cache_manager": True}
            engine = running_engine(
                sidecar.run_dir, engine_args=arguments,
                environment={"VLLM_LOGGING_LEVEL": "INFO"},
            )  # fmt: skip
            made[name] = stack.enter_context(engine)
        yield made


def loads_of_other(engine: EngineUnderTest) -> int:
    return engine.log.read_text().count(LOADED)


def loaded_bytes(sidecar: SidecarUnderTest) -> int:
    return int(sidecar.wait_idle()["pipeline"]["ledger"]["loaded_bytes"])


@pytest.mark.parametrize("first", ["ours", "other"])
def test_the_first_that_hits_loads_and_the_other_is_given_nothing(
    sidecar: SidecarUnderTest, engines: dict[str, EngineUnderTest], texts: Texts, first: str
) -> None:
    """Both have saved the prompt; the lease of ours falls when the other is chosen."""
    reader = engines[first]
    (writer,) = (engine for name, engine in engines.items() if name != first)
    tokens = texts.take(PROMPT_TOKENS)
    cold = writer.run(tokens)
    before = loaded_bytes(sidecar), loads_of_other(reader)
    warm = reader.run(tokens)
    assert warm.hit_tokens == hit_of(tokens)
    assert warm.output == cold.output
    ours, other = loaded_bytes(sidecar) - before[0], loads_of_other(reader) - before[1]
    assert (ours > 0, other) == ((True, 0) if first == "ours" else (False, 1))
    assert reader.inspect().used_blocks == 0


def test_ours_loads_what_the_other_has_lost(
    sidecar: SidecarUnderTest, engines: dict[str, EngineUnderTest], shelf: Path, texts: Texts
) -> None:
    tokens = texts.take(PROMPT_TOKENS)
    cold = engines["ours"].run(tokens)
    for folder in shelf.iterdir():
        shutil.rmtree(folder)
    before = loaded_bytes(sidecar)
    warm = engines["other"].run(tokens)
    assert (warm.hit_tokens, warm.output) == (hit_of(tokens), cold.output)
    assert loaded_bytes(sidecar) > before
