"""The page and its API with 64 ranks and a full ring of 10,000 requests, which really came in."""

from __future__ import annotations

import signal
from contextlib import ExitStack

import pytest
from kvferry_connector.wire import hot
from kvferry_connector.wire.attach import Ready
from support.hot_engine import HotEngine
from support.http import Http
from support.pages import LAPTOP, NEEDS, PHONE, fits, is_live, listens, opened
from support.raw_half import KvMemory, RawHalf, engine_registration
from support.sidecar import running_sidecar

ENGINES, RANKS = 4, 16  # limits.ranks_max of one engine
REQUESTS = 10_400
RECORDS = 10_000  # limits.records_max
AT_ONCE = 400

pytestmark = NEEDS


def attach_engine(stack, run_dir, number, memory):
    """Attach one engine of 16 ranks; return its scheduler half and rank 0."""
    name = f"engine-{number}"
    ranks = list(range(RANKS))
    halves = [RawHalf(run_dir, engine_id=name)]
    halves += [RawHalf(run_dir, rank, engine_id=name, memory=memory) for rank in ranks]
    for half in halves:
        stack.callback(half.close)
        half.attach()
    halves[0].register(engine_registration(ranks, bytes([65 + number]) * 16))
    for rank in ranks:
        halves[1 + rank].register(memory.registration(rank, RANKS))
    halves[0].stream.expect(Ready)
    return halves[0], halves[1]


@pytest.fixture(scope="module")
def sidecar():
    with (
        running_sidecar(pool_bytes=8 << 20, flags=("--http-listen", "127.0.0.1:0")) as one,
        ExitStack() as stack,
    ):
        memory = KvMemory()
        stack.callback(memory.close)
        for number in range(ENGINES):
            pair = attach_engine(stack, one.run_dir, number, memory)
        engine = HotEngine(*pair, memory, bytes([65 + ENGINES - 1]) * 16)
        for _ in range(REQUESTS // AT_ONCE):
            numbers = [engine.next_admission() for _ in range(AT_ONCE)]
            for number in numbers:
                engine.probe(number, f"request {number}", 4)
            engine.hint(numbers[-1], 4)
            engine.scheduler.send(hot.Release(numbers))
            engine.scheduler.drain()
        engine.scheduler.beat(engine.asked)  # all of it was handled
        yield one


def test_answers_stay_bounded(sidecar):
    http = Http(sidecar.run_dir / "http.sock")
    status = http.get("/api/v1/status")
    document = status.json()
    assert len(document["sessions"]) == ENGINES
    assert sum(len(session["halves"]) for session in document["sessions"]) == ENGINES * (RANKS + 1)
    assert document["pipeline"]["journal"]["records"] == RECORDS
    assert document["pipeline"]["journal"]["records_dropped"] > 0
    assert len(status.body) < 128 << 10
    listed = http.get("/api/v1/requests?limit=500")
    assert len(listed.json()) == 500
    assert len(listed.body) < 512 << 10
    assert http.get("/api/v1/requests?limit=501").status == 400
    assert len(http.get("/api/v1/requests/request").json()) == 20  # of the many that begin so
    assert len(http.get("/api/v1/slow").json()) <= 50
    assert http.get("/metrics").text.count("\n") < 2000


@pytest.mark.parametrize(("scheme", "size"), [("light", LAPTOP), ("dark", PHONE)])
def test_the_page_shows_them(browser, sidecar, scheme, size, tmp_path):
    address = listens(sidecar)
    with opened(browser, address, color_scheme=scheme, viewport=size) as page:
        ranks = page.get_by_role("region", name="Engines and ranks")
        ranks.get_by_role("row").nth(ENGINES * (RANKS + 1)).wait_for()  # the last, after the head
        assert ranks.get_by_role("row").count() == 1 + ENGINES * (RANKS + 1)
        assert is_live(page)
        assert fits(page, size["width"])
        page.screenshot(path=tmp_path / "ranks.png", full_page=True)
        page.locator('nav a[href="#/requests"]').click()
        page.get_by_role("link", name=f"request {REQUESTS}").wait_for()
        assert page.locator("main tbody tr").count() == 200
        assert fits(page, size["width"])
        page.get_by_role("link", name=f"request {REQUESTS}").focus()
        page.keyboard.press("Enter")
        page.get_by_role("img", name="timeline").wait_for()  # the list has the same words
        page.get_by_text("No hit: the next chunk of the prefix is in no tier").wait_for()
        assert fits(page, size["width"])


def test_a_sidecar_that_stands_still_is_not_shown_as_live(browser, sidecar):
    with opened(browser, listens(sidecar)) as page:
        strip = page.get_by_role("status")
        strip.get_by_text("ready", exact=True).wait_for()
        page.clock.install()
        sidecar.process.process.send_signal(signal.SIGSTOP)
        try:
            page.clock.fast_forward(60_000)
            strip.get_by_text("no word from the sidecar for").wait_for()
        finally:
            sidecar.process.process.send_signal(signal.SIGCONT)
        strip.get_by_text("ready", exact=True).wait_for()
