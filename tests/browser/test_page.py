"""The page of /ui/ in a real Chromium, against a real sidecar that served real jobs."""

from __future__ import annotations

import json
import re
import subprocess

import httpx
import pytest
from kvferry_demo.processes import kvferry_command
from support.hot_engine import HotEngine
from support.pages import DEADLINE_MS, LEASES_STAY, NEEDS, PHONE, fits, is_live, listens, opened
from support.raw_half import KvMemory, attach_pair
from support.sidecar import running_sidecar

VIEWS = ("", "requests", "flight", "namespaces", "events", "doctor", "settings", "actions")
PANELS = (
    "Engines and ranks", "Hits, in tokens", "Why tokens missed", "Host pool",
    "Hits by the size of the pool", "Tokens looked up",
    "Throughput", "Latency by stage", "Break-even", "Evictions",
    "Failures and refusals", "Queues", "Control loop", "Hottest prefixes", "Slower tiers",
    "Paths of the bytes", "Long work",
)  # fmt: skip
TOKEN = "token-of-the-page-0123456789"

pytestmark = NEEDS


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A sidecar with hits, misses, an open lease, and an engine that is attached."""
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(TOKEN)
    flags = ("--http-listen", "127.0.0.1:0", "--set", f"http.token_file={file}", *LEASES_STAY)
    with running_sidecar(pool_bytes=8 << 20, flags=flags) as sidecar:
        memory = KvMemory()
        halves = attach_pair(sidecar.run_dir, memory, b"U" * 16)
        engine = HotEngine(*halves, memory, b"U" * 16)
        engine.put("hot prompt", [1, 2, 3])
        for _ in range(3):
            assert engine.get("hot prompt", [4, 5, 6]) == 48
        assert engine.get("cold prompt", [4, 5, 6]) == 0
        engine.lease("hot prompt", 3)
        yield listens(sidecar)
        for half in halves:
            half.leave()  # else a drain would wait for its lease
        memory.close()


@pytest.fixture
def page(browser, address, request):
    """A page whose every request and every complaint is looked at."""
    with opened(browser, address, color_scheme=getattr(request, "param", "light")) as one:
        yield one


both_schemes = pytest.mark.parametrize("page", ["light", "dark"], indirect=True)


@both_schemes
def test_every_panel_is_there_and_live(page, address, tmp_path):
    for title in PANELS:
        page.get_by_role("region", name=title, exact=True).wait_for()
    funnel = page.get_by_role("region", name="Hits, in tokens")
    funnel.filter(has_text="192 (80 %)").wait_for()  # offered, the open lease too
    funnel.filter(has_text="144 (60 %)").wait_for()  # loaded
    funnel.filter(has_text="from host").wait_for()
    paths = page.get_by_role("region", name="Paths of the bytes")
    paths.get_by_text(re.compile(r"node \d+: |move_pages")).first.wait_for()
    for nic in httpx.get(f"http://{address}/api/v1/paths").json()["nics"]:
        paths.get_by_text(nic["name"], exact=True).first.wait_for()
    curve = page.get_by_role("region", name="Hits by the size of the pool")
    curve.filter(has_text="% of the tokens").wait_for()
    page.wait_for_function("document.querySelectorAll('canvas').length >= 3")
    assert is_live(page)
    page.screenshot(path=tmp_path / "overview.png", full_page=True)


# What an operator looks for: (view, panel, words), in the order of weight.
WANTED = (
    ("", "Engines and ranks", "in flight"), ("", "Engines and ranks", "last message"),
    ("", "Engines and ranks", "memory mapped"), ("", "Engines and ranks", "engine-pod-1"),
    ("", "Engines and ranks", "dp 0"), ("", "Hits, in tokens", "from host"),
    ("", "Why tokens missed", "absent"), ("", "Host pool", "pinned"), ("", "Host pool", "leased"),
    ("", "Throughput", "save"), ("", "Latency by stage", "load copy"),
    ("", "Break-even", "computing a token"), ("", "Evictions", "half stayed"),
    ("", "Failures and refusals", "None since this start."), ("", "Queues", "loads waiting"),
    ("", "Paths of the bytes", "engines' KV memory"), ("", "Control loop", "p99 of a turn"),
    ("", "Control loop", "Copied, p99"), ("", "Paths of the bytes", "memory still mapped"),
    ("", "Hottest prefixes", "last use"), ("", "Hottest prefixes", "raw/one"),
    ("namespaces", "Held in the pool", "quota"),
    ("", "Slower tiers", "None is configured."), ("", "Paths of the bytes", "RDMA"),
    ("", "Paths of the bytes", "pool on NUMA nodes"), ("events", "Events", "session ready"),
    ("flight", "Slowest jobs", "fence"), ("settings", "Settings in effect", "tiers.host.bytes"),
    ("settings", "Not as on disk", "Nothing: what runs is what is written."),
    ("actions", "Actions", "pause-saves"), ("actions", "Actions", "log-level"),
    ("doctor", "Doctor", "Download a support bundle"), ("doctor", "Doctor", "ready; vLLM"),
)  # fmt: skip


def test_what_an_operator_looks_for_is_there(page):
    page.get_by_role("status").get_by_text("1 of 1 engines ready").wait_for()
    for word in ("kvferry ", "up ", "epoch ", "pid "):
        page.get_by_role("status").get_by_text(word).first.wait_for()
    at = ""
    for view, panel, words in sorted(WANTED):
        if view != at:
            page.locator(f'nav a[href="#/{view}"]').click()
            at = view
        region = page.get_by_role("region", name=panel, exact=True)
        region.get_by_text(words).first.wait_for()


def test_what_is_not_well_is_said_on_every_view(page, address):
    act = f"http://{address}/api/v1/actions/"
    headers = {"authorization": f"Bearer {TOKEN}"}
    httpx.post(f"{act}pause-saves", headers=headers, json={}).raise_for_status()
    page.locator('nav a[href="#/settings"]').click()
    page.get_by_role("status").get_by_text("paused by an operator").wait_for()
    httpx.post(f"{act}resume-saves", headers=headers, json={}).raise_for_status()
    page.get_by_role("status").get_by_text("ready", exact=True).wait_for()


def test_what_seldom_happens_is_shown(browser, address):
    """A status of this sidecar with a store that is down, saves that found no room, and bounds."""
    status = httpx.get(f"http://{address}/api/v1/status").json()
    tier = {
        "name": "redis cache:6379", "state": "paused", "reason": "connection refused",
        "calls_open": 7, "calls_late": 0, "counts": {"put_bytes": 3 << 20},
        "facts": {"transport": "tcp"},
    }  # fmt: skip
    more = {"skips": {"pool-full": 5}, "staging": {"stage_bytes_max": 2}, "admissions_dropped": 9}
    status["pipeline"] |= {"tiers": [tier], **more}
    body = f"event: status\ndata: {json.dumps(status)}\n\n"
    page = browser.new_page()
    page.set_default_timeout(DEADLINE_MS)
    page.route(
        "**/api/v1/stream", lambda route: route.fulfill(body=body, content_type="text/event-stream")
    )
    page.goto(f"http://{address}/ui/")
    page.get_by_role("status").get_by_text("redis cache:6379 paused").wait_for()
    tiers = page.get_by_role("region", name="Slower tiers")
    for words in ("connection refused", "transport tcp", "put 3.0 MiB"):
        tiers.get_by_text(words).wait_for()
    failures = page.get_by_role("region", name="Failures and refusals")
    for words in ("not saved: pool-full, objects", "bound hit: admissions_max", "stage_bytes_max"):
        failures.get_by_text(words).wait_for()
    page.close()


def test_what_is_not_known_is_not_said_to_be_none(page):
    body = json.dumps({"message": "busy", "remedy": "try again"})
    page.route("**/api/v1/leases", lambda route: route.fulfill(status=503, body=body))
    page.locator('nav a[href="#/flight"]').click()
    leases = page.get_by_role("region", name="Leases")
    leases.get_by_text("busy; try again").wait_for()
    assert leases.get_by_text("Not known yet.").count() == 1


def test_a_stream_that_a_proxy_refused_is_asked_for_again(browser, address):
    """Browsers do so after a broken connection, not after an answer such as 502."""
    page = browser.new_page()
    page.route("**/api/v1/stream", lambda route: route.fulfill(status=502), times=1)
    page.goto(f"http://{address}/ui/")
    page.get_by_role("status").get_by_text("does not answer; trying again").wait_for()
    page.get_by_role("status").get_by_text("ready", exact=True).wait_for(timeout=DEADLINE_MS)
    page.close()


def test_every_view_opens_by_its_link(page):
    for view in VIEWS:
        page.locator(f'nav a[href="#/{view}"]').click()
        page.locator("main section").first.wait_for()
        assert page.locator("main section h2").first.inner_text()


def test_a_request_is_told_in_words_with_its_timeline(page, tmp_path):
    page.goto(page.url.partition("#")[0] + "#/requests?reason=absent")
    page.get_by_role("link", name="cold prompt").click()
    page.get_by_role("img", name="timeline").wait_for()  # the list has the same words
    page.get_by_text("No hit: the next chunk of the prefix is in no tier").wait_for()
    page.goto(page.url.partition("#")[0] + "#/requests/hot%20prompt")
    page.get_by_text("Loaded 48 tokens").first.wait_for()
    page.locator(".timeline rect").nth(4).wait_for(state="attached")  # five at least
    page.screenshot(path=tmp_path / "request.png", full_page=True)


def test_leases_have_owners_and_geometry_is_drawn(page):
    page.locator('nav a[href="#/flight"]').click()
    page.get_by_role("region", name="Leases").get_by_text("raw/one").wait_for()
    page.locator('nav a[href="#/namespaces"]').click()
    page.get_by_text(re.compile("group 0: full, blocks of 16 tokens")).wait_for()
    page.locator("svg.chunks").wait_for()


def test_a_namespace_has_its_bytes_and_is_dropped_after_a_plan(page):
    page.locator('nav a[href="#/namespaces"]').click()
    held = page.get_by_role("region", name="Held in the pool").get_by_role("row").nth(1)
    held.get_by_text(re.compile(r"\d KiB")).first.wait_for()
    page.locator('nav a[href="#/actions"]').click()
    page.locator("input[type=password]").fill(TOKEN)
    page.get_by_label("namespace").select_option(index=1)
    page.get_by_role("button", name="drop").click()
    page.get_by_text('"objects":3').wait_for()
    page.get_by_role("button", name="Leave it").click()
    page.get_by_label("pin").select_option("soft")
    page.get_by_role("button", name="pin").click()
    page.get_by_role("button", name="Do it").click()
    page.get_by_text('done: {"action":"pin-objects"').wait_for()


@pytest.fixture(scope="module")
def several(address):
    """`kvferry ui` over the same sidecar by two of its names."""
    targets = f"{address},localhost:{address.rpartition(':')[2]}"
    command = [*kvferry_command(), "ui", "--target", targets, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process.stdout.readline().partition("http://")[2].partition("/")[0]
        process.terminate()


def test_several_nodes_have_one_page(browser, several, address):
    with opened(browser, several, "/ui/#/nodes", viewport=PHONE) as page:
        for name in (address, f"localhost:{address.rpartition(':')[2]}"):
            row = page.get_by_role("region", name="Nodes").get_by_role("row").filter(has_text=name)
            row.filter(has_text="1 of 1").wait_for()
        page.locator("header select").select_option(name)
        page.wait_for_url(re.compile("node=localhost%3A"))
        page.locator('nav a[href="#/"]').click()
        page.get_by_role("region", name="Engines and ranks").get_by_text("raw/one").first.wait_for()
        assert fits(page, PHONE["width"])


def test_an_action_is_planned_first_and_needs_the_token(page):
    page.locator('nav a[href="#/actions"]').click()
    page.locator("input[type=password]").fill(TOKEN)
    page.get_by_role("button", name="clear-pool").click()
    page.get_by_text('"dry_run":true').wait_for()
    page.get_by_role("button", name="Leave it").click()
    page.get_by_role("button", name="reload").click()
    page.get_by_role("button", name="Do it").click()
    page.get_by_text('done: {"action":"reload"').wait_for()
    page.get_by_label("percent to be used").fill("100")
    page.get_by_role("button", name="evict").click()
    page.get_by_text('{"action":"evict","dry_run":true,"bytes":0}').wait_for()
    page.get_by_role("button", name="Do it").click()
    page.get_by_text('done: {"action":"evict","dry_run":false,"bytes":0}').wait_for()


def test_the_keyboard_reaches_the_views_and_decides_on_an_action(page):
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_function("location.hash === '#/requests'")
    page.locator('nav a[href="#/actions"]').press("Enter")
    page.get_by_role("region", name="Actions").wait_for()
    page.keyboard.press("Tab")
    page.keyboard.type(TOKEN)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_text('{"action":"release-stale","dry_run":true').wait_for()
    page.keyboard.press("Enter")  # at "Leave it"
    page.get_by_text('{"action":"release-stale"').wait_for(state="detached")
    at = page.get_by_role("button", name="release-stale")
    page.wait_for_function("one => document.activeElement === one", arg=at.element_handle())


@both_schemes
def test_a_phone_does_not_scroll_sideways(page, tmp_path):
    page.set_viewport_size(PHONE)
    for view in VIEWS:
        page.locator(f'nav a[href="#/{view}"]').click()
        page.locator("main section").first.wait_for()
        assert fits(page, PHONE["width"]), view
    page.screenshot(path=tmp_path / "phone.png")
