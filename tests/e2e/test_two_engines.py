"""Two engines of one model on one sidecar: what one saved the other loads, output identical.

Engines are slow to start, so one pair serves the module; every test takes text of its own.
``writer`` computes and saves, ``reader`` has never seen the text.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvferry_demo import protocol
from support.engine import (
    BLOCK_TOKENS,
    LOADING,
    EngineUnderTest,
    Texts,
    ask,
    hit_of,
    running_engine,
)
from support.http import Http
from support.pages import LAPTOP, NEEDS, PHONE, chromium, fits, listens, opened
from support.sidecar import SidecarUnderTest, running_sidecar
from support.waiting import wait_until

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarUnderTest]:
    with running_sidecar(flags=("--http-listen", "127.0.0.1:0")) as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_left(
    sidecar: SidecarUnderTest, writer: EngineUnderTest, reader: EngineUnderTest
) -> Iterator[None]:
    """After every test: no lease, pin, reservation or open job, and the ledger adds up."""
    yield
    for engine in (writer, reader):
        engine.settle()
        assert engine.inspect().used_blocks == 0
    sidecar.wait_idle()


def test_a_wrong_block_changes_the_output(reader: EngineUnderTest, texts: Texts) -> None:
    """The premise of every comparison below."""
    tokens = texts.take(1500)
    reader.start(ask(tokens, name="premise"))
    blocks: list[int] = []
    while len(blocks) < 5:  # it is admitted once the sidecar has answered
        blocks = [block for request in reader.step(1).running for block in request.blocks]
    (right,) = reader.finish()
    reader.settle()
    reader.call(protocol.ZeroBlocks([blocks[4]]))
    wrong = reader.run(tokens)
    assert wrong.local_tokens == hit_of(tokens)
    assert wrong.output != right.output


@pytest.mark.parametrize("length", [500, 3000, 6000])
def test_what_one_saved_the_other_loads(
    writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts, length: int
) -> None:
    """Also chunked prefill over several steps: 3,000 tokens take six steps of 512."""
    tokens = texts.take(length)
    cold, warm = writer.run(tokens), reader.run(tokens)
    assert cold.hit_tokens == 0
    assert warm.hit_tokens == hit_of(tokens)
    assert warm.output == cold.output


def test_both_requests_are_explained(
    sidecar: SidecarUnderTest, writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts
) -> None:
    tokens = texts.take(1000)
    writer.generate(ask(tokens, name="explained-cold"))
    writer.settle()
    reader.generate(ask(tokens, name="explained-warm"))
    reader.settle()
    api = Http(sidecar.run_dir / "http.sock")
    hit = f"{hit_of(tokens):,}"
    stories = {
        "explained-cold": ["No hit: the next chunk of the prefix is in no tier", "Saved "],
        "explained-warm": [f"Hit {hit} tokens ({hit} from host). Loaded {hit} tokens."],
    }
    for name, sentences in stories.items():
        (told,) = api.get(f"/api/v1/requests/{name}").json()
        assert all(sentence in told["verdict"] for sentence in sentences), told
        assert [event["what"] for event in told["timeline"]][:2] == ["hashes", "hint"]


def test_a_hit_is_continued_over_several_steps(
    writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts
) -> None:
    head, tail = texts.take(1024), texts.take(1700)
    writer.run(head)
    warm = reader.run(head + tail)
    assert warm.hit_tokens == 1024
    assert warm.output == writer.run(head + tail).output


def test_requests_that_share_a_prefix_at_once(
    writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts
) -> None:
    head = texts.take(1100)
    prompts = [head + texts.take(400), head + texts.take(700), head]
    cold = writer.generate(*[ask(tokens) for tokens in prompts])
    writer.settle()
    warm = reader.generate(*[ask(tokens) for tokens in prompts])
    assert [one.output for one in warm] == [one.output for one in cold]
    for tokens, one in zip(prompts, warm, strict=True):
        assert one.local_tokens + one.hit_tokens == hit_of(tokens)
    assert sum(one.hit_tokens for one in warm) > 0


def test_prefix_partly_local_partly_external(
    writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts
) -> None:
    tokens = texts.take(2000)
    cold = writer.run(tokens)
    reader.run(tokens[:700])
    warm = reader.run(tokens)
    assert warm.local_tokens == 5 * BLOCK_TOKENS
    assert warm.hit_tokens == hit_of(tokens) - warm.local_tokens
    assert warm.output == cold.output


def test_prompt_shorter_than_a_block(
    writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts
) -> None:
    tokens = texts.take(BLOCK_TOKENS - 20)
    cold, warm = writer.run(tokens), reader.run(tokens)
    assert warm.hit_tokens == 0
    assert warm.output == cold.output


def test_prompt_that_is_a_whole_hit(
    writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts
) -> None:
    """The last block is computed again: an engine needs one token to compute."""
    tokens = texts.take(8 * BLOCK_TOKENS)
    cold, warm = writer.run(tokens), reader.run(tokens)
    assert warm.hit_tokens == 7 * BLOCK_TOKENS
    assert warm.output == cold.output


def test_generated_tokens_are_saved_too(
    writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts
) -> None:
    """A next turn begins with the previous turn's answer."""
    tokens = texts.take(600)
    first = writer.run(tokens, max_tokens=200)
    turn = tokens + first.output + texts.take(50)
    warm = reader.run(turn)
    assert warm.hit_tokens == (600 + 200 - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert warm.output == writer.run(turn).output


def test_same_request_id_again(
    writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts
) -> None:
    prompts = [texts.take(900), texts.take(1300)]
    cold = [writer.run(tokens) for tokens in prompts]
    for tokens, before in zip(prompts, cold, strict=True):
        (warm,) = reader.generate(ask(tokens, name="the-same"))
        assert warm.hit_tokens == hit_of(tokens)
        assert warm.output == before.output


def test_cache_salt_separates(
    writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts
) -> None:
    tokens = texts.take(1000)
    cold = writer.run(tokens, salt="one tenant")
    assert reader.run(tokens).hit_tokens == 0
    assert reader.run(tokens, salt="another tenant").hit_tokens == 0
    same = reader.run(tokens, salt="one tenant")
    assert same.hit_tokens == hit_of(tokens)
    assert same.output == cold.output


def test_both_compute_the_same_prompt_at_once(
    writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts
) -> None:
    """Both save the same chunks at the same time: one stripe wins, nobody waits or fails."""
    prompts = [texts.take(2500), texts.take(1500)]
    for engine in (writer, reader):
        engine.begin(protocol.Generate([ask(tokens) for tokens in prompts]))
    replies = [engine.reply() for engine in (writer, reader)]
    outputs = []
    for reply in replies:
        assert isinstance(reply, protocol.Finished)
        outputs.append([one.output for one in reply.results])
    assert outputs[0] == outputs[1]


def test_abort_while_loading(
    writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts
) -> None:
    tokens = texts.take(4000)
    cold = writer.run(tokens)
    request = ask(tokens)
    reader.start(request)
    reader.step_until_status(request.request, LOADING)
    reader.abort(request.request)
    reader.settle()
    assert reader.inspect().used_blocks == 0
    reader.finish()
    warm = reader.run(tokens)
    assert warm.hit_tokens + warm.local_tokens == hit_of(tokens)
    assert warm.output == cold.output


def test_abort_while_saving(writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts) -> None:
    """The chunks of the steps that ran are whole and may be hits; the rest is not there."""
    tokens = texts.take(3000)
    request = ask(tokens)
    writer.start(request)
    writer.step(2)
    writer.abort(request.request)
    writer.settle()
    assert writer.inspect().used_blocks == 0
    writer.finish()
    warm = reader.run(tokens)
    assert warm.hit_tokens <= 1024
    assert warm.output == writer.run(tokens).output


def test_a_damaged_object_costs_one_shorter_load(
    sidecar: SidecarUnderTest, writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts
) -> None:
    """Bytes of one chunk change in memory: what lies before it is loaded all the same."""
    tokens = texts.take(3000)
    before = sidecar.segment.read_bytes()
    cold = writer.run(tokens)
    sidecar.damage(before)
    warm = reader.run(tokens)
    assert warm.output == cold.output
    again = warm.admissions[-1]
    assert 0 < again.external_tokens < hit_of(tokens)
    status = sidecar.wait_idle()
    assert status["pipeline"]["ledger"]["reasons"]["failed/checksum"] == 1
    assert status["pipeline"]["damaged_chunks"] > 0


def test_the_costs_of_loading_and_computing_are_measured(
    sidecar: SidecarUnderTest, writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts
) -> None:
    tokens = texts.take(2500)
    writer.run(tokens)
    reader.run(texts.take(700))  # it computes something too

    def known() -> bool:
        costs = sidecar.status()["pipeline"]["breaker"]
        return len(costs) == 2 and all(one["compute_us"] > 0 for one in costs.values())

    wait_until(known, "both engines said what a token costs")
    assert reader.run(tokens).hit_tokens == hit_of(tokens)
    costs = sidecar.wait_idle()["pipeline"]["breaker"].values()
    assert sum(one["loads"] for one in costs) > 0
    assert not any(one["open"] or one["withheld"] for one in costs)


@pytest.mark.parametrize(("scheme", "size"), [("dark", LAPTOP), ("light", PHONE)])
@NEEDS[0]
@NEEDS[1]
def test_the_page_tells_of_real_engines(
    sidecar: SidecarUnderTest,
    writer: EngineUnderTest,
    reader: EngineUnderTest,
    texts: Texts,
    scheme: str,
    size: dict[str, int],
    tmp_path: Path,
) -> None:
    """After the costs were measured: the page shows them, the engines, and a request's story."""
    tokens, name = texts.take(1000), f"on-the-page-{scheme}"
    writer.run(tokens)
    reader.generate(ask(tokens, name=name))
    with (
        chromium() as browser,
        opened(browser, listens(sidecar), color_scheme=scheme, viewport=size) as page,
    ):
        ranks = page.get_by_role("region", name="Engines and ranks").get_by_role("row")
        ranks.filter(has_text="shared memory").nth(1).wait_for()
        assert ranks.count() == 5  # two halves each, and the head
        pace = page.get_by_role("region", name="Break-even").get_by_text("computing a token")
        pace.first.wait_for()
        page.screenshot(path=tmp_path / "overview.png", full_page=True)
        page.goto(f"{page.url.partition('#')[0]}#/requests/{name}")
        page.get_by_text(f"Loaded {hit_of(tokens):,} tokens.").first.wait_for()
        assert page.locator(".timeline rect.copy").count() >= 1
        assert fits(page, size["width"])
        page.screenshot(path=tmp_path / "request.png", full_page=True)
        page.locator('nav a[href="#/namespaces"]').click()
        page.locator("svg.chunks").first.wait_for()


def test_idle_engine_and_a_restarted_sidecar(
    sidecar: SidecarUnderTest, writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts
) -> None:
    """Nothing runs in the engine meanwhile: it attaches again by itself, and the pool lives on."""
    tokens, unseen = texts.take(2200), texts.take(800)
    cold = writer.run(tokens)
    epochs = [engine.inspect().epoch for engine in (writer, reader)]
    sidecar.kill(signal.SIGKILL)
    alone = reader.run(unseen)
    assert alone.hit_tokens == 0
    sidecar.restart()
    for engine, epoch in zip((writer, reader), epochs, strict=True):
        engine.wait_attached(beyond_epoch=epoch)
    warm = reader.run(tokens)
    assert warm.hit_tokens == hit_of(tokens)
    assert warm.output == cold.output
    assert writer.run(unseen).output == alone.output


def test_sidecar_killed_while_loading(
    sidecar: SidecarUnderTest, writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts
) -> None:
    """The load fails by proof of death and the prompt is computed: late, but right."""
    tokens = texts.take(5000)
    cold = writer.run(tokens)
    epochs = [engine.inspect().epoch for engine in (writer, reader)]
    request = ask(tokens)
    reader.start(request)
    reader.step_until_status(request.request, LOADING)
    sidecar.kill(signal.SIGKILL)
    (warm,) = reader.finish()
    assert warm.output == cold.output
    sidecar.restart()
    for engine, epoch in zip((writer, reader), epochs, strict=True):
        engine.wait_attached(beyond_epoch=epoch)


def test_an_engine_killed_while_it_loads(
    sidecar: SidecarUnderTest, writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts
) -> None:
    """Everything of it is reclaimed, and the others go on."""
    tokens = texts.take(5000)
    cold = writer.run(tokens)
    with running_engine(sidecar.run_dir) as victim:
        assert len(sidecar.status()["sessions"]) == 3
        request = ask(tokens)
        victim.start(request)
        victim.step_until_status(request.request, LOADING)
        victim.kill()
        status = wait_until(lambda: _without_a_session(sidecar), "its session is gone")
        assert all(session["ready"] for session in status["sessions"])
        sidecar.wait_idle()
    warm = reader.run(tokens)
    assert (warm.hit_tokens, warm.output) == (hit_of(tokens), cold.output)


def _without_a_session(sidecar: SidecarUnderTest) -> dict[str, Any] | None:
    status = sidecar.status()
    return status if len(status["sessions"]) == 2 else None


def test_reset_prefix_cache(writer: EngineUnderTest, reader: EngineUnderTest, texts: Texts) -> None:
    """After a reset (new weights, say) nothing of before is a hit, here or in the sidecar.

    Last in the module: the reader has a namespace of its own from here on.
    """
    tokens = texts.take(1200)
    cold = writer.run(tokens)
    assert reader.reset_prefix_cache()
    after = reader.run(tokens)
    assert (after.local_tokens, after.hit_tokens) == (0, 0)
    assert after.output == cold.output
