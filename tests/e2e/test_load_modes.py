"""Loads overlapped and serialized on real engines of both failure policies, broken at their end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engine import LOADING, EngineUnderTest, Texts, ask, hit_of, running_engine
from support.kit import ENABLED, Kit
from support.sidecar import SidecarUnderTest, running_sidecar, set_flags
from support.waiting import wait_until

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarUnderTest]:
    with running_sidecar(flags=ENABLED) as one:
        yield one


@pytest.fixture(scope="module")
def engines(sidecar: SidecarUnderTest) -> Iterator[dict[str, EngineUnderTest]]:
    """One engine for each policy; what one has saved the other has never seen."""
    with (
        running_engine(sidecar.run_dir, load_failure_policy="recompute") as recompute,
        running_engine(sidecar.run_dir, load_failure_policy="fail") as fail,
    ):
        yield {"recompute": recompute, "fail": fail}


@pytest.fixture(scope="module", params=["overlapped", "serialized"])
def in_mode(
    sidecar: SidecarUnderTest, engines: dict[str, EngineUnderTest], request: pytest.FixtureRequest
) -> str:
    """The sidecar serves in this mode, and both engines are attached to it."""
    epoch = engines["fail"].inspect().epoch
    sidecar.restart([*ENABLED, *set_flags({"loads.mode": request.param})])
    for engine in engines.values():
        engine.wait_attached(beyond_epoch=epoch)
    return str(request.param)


@pytest.fixture(autouse=True)
def nothing_left(sidecar: SidecarUnderTest, engines: dict[str, EngineUnderTest]) -> Iterator[None]:
    yield
    Kit(sidecar.run_dir).rules()
    for engine in engines.values():
        engine.settle()
        assert engine.inspect().used_blocks == 0
    sidecar.wait_idle()


@pytest.mark.parametrize("rule", ["break load times=1", "fail load times=1"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_that_breaks_ends_its_request_by_the_policy_and_no_other(
    sidecar: SidecarUnderTest, engines: dict[str, EngineUnderTest], texts: Texts,
    in_mode: str, policy: str, rule: str,
) -> None:  # fmt: skip
    """Two hits and a cold prompt at once; what takes up the end of one load raises."""
    reader = engines[policy]
    (writer,) = (engine for name, engine in engines.items() if name != policy)
    prompts = [texts.take(700), texts.take(900)]
    cold = [writer.run(tokens).output for tokens in prompts]
    unrelated = ask(texts.take(600))
    Kit(sidecar.run_dir).rules(rule)
    results = reader.generate(*[ask(tokens) for tokens in prompts], unrelated)
    assert len(results[2].output) == 8
    ends = [(one.finish, one.output == right) for one, right in zip(results[:2], cold, strict=True)]
    if policy == "recompute":
        assert ends == [("length", True)] * 2
        assert sorted(len(one.admissions) for one in results) == [1, 1, 2], "asked again once"
    else:
        assert sorted(ends) == [("error", False), ("length", True)], in_mode
    reader.settle()
    for tokens, right in zip(prompts, cold, strict=True):
        again = reader.run(tokens)
        assert again.output == right
        assert again.local_tokens + again.hit_tokens == hit_of(tokens), "nothing was lost"


def test_a_delayed_load_holds_up_no_cold_prefill(
    sidecar: SidecarUnderTest, engines: dict[str, EngineUnderTest], texts: Texts, in_mode: str
) -> None:
    """The delay ends when the test says so: the cold prompt is through before."""
    writer, reader = engines["fail"], engines["recompute"]
    tokens, others = texts.take(700), texts.take(600)
    cold = writer.run(tokens).output
    kit = Kit(sidecar.run_dir)
    kit.rules("hold load")
    late, unrelated = ask(tokens), ask(others)
    reader.start(late)
    reader.step_until_status(late.request, LOADING)
    kit.wait_fired()
    reader.start(unrelated)
    wait_until(lambda: unrelated.request in reader.step().finished, "the cold one is through")
    kit.rules()
    results = {one.request: one for one in reader.finish()}
    assert results[late.request].output == cold
    assert results[late.request].hit_tokens == hit_of(tokens), in_mode
