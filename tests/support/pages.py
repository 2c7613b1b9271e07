"""The page in a real Chromium: what it asked for, and what it complained of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from kvferry_sidecar.observe.http.ui import PAGE
from support.http import Http
from support.sidecar import SidecarUnderTest
from support.waiting import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NEEDS = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (Debian package chromium)"),
    pytest.mark.skipif(not (PAGE / "index.html").is_file(), reason="the page: make ui, with npm"),
]
PHONE = {"width": 390, "height": 844}
LAPTOP = {"width": 1280, "height": 800}
DEADLINE_MS = 90_000
# An open lease of these tests is confirmed by nobody.
LEASES_STAY = ("--set", "limits.lease_idle_ms_max=3600000")


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser that asks nobody by itself."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-background-networking", "--disable-gpu"]
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, address: str, path: str = "/", **context: Any) -> Iterator[Any]:
    """Yield a page; afterwards it has asked its own address only, and complained of nothing."""
    with_context = browser.new_context(**context)
    with_context.set_default_timeout(DEADLINE_MS)
    page = with_context.new_page()
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda r: asked.append(r.url))
    page.on("console", lambda m: complaints.append(m.text) if _is_fault(m) else 0)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"http://{address}{path}")
    page.get_by_text("ready", exact=True).first.wait_for()
    yield page
    with_context.close()
    assert complaints == []
    assert {urlsplit(url).netloc for url in asked} == {address}


def _is_fault(message: Any) -> bool:
    """Whether a message of the console counts: a busy loop may be late, which the page bears.

    Only an answer of the API may be late: no stream, no action, and no file of the page.
    """
    url = str(message.location["url"])
    asked = "/api/v1/" in url and "/actions/" not in url and not url.endswith("/stream")
    late = asked and "a status of 503" in message.text
    return message.type in ("error", "warning") and not late


def listens(sidecar: SidecarUnderTest) -> str:
    """Return the address that a sidecar with a free port serves."""
    events = Http(sidecar.run_dir / "http.sock").get("/api/v1/events").json()
    return next(e["address"] for e in events if e.get("setting") == "http.listen")


def fits(page: Any, width: int) -> bool:
    """Wait until nothing makes the page scroll sideways: charts get their sizes late."""
    page.wait_for_function("max => document.documentElement.scrollWidth <= max", arg=width)
    return True


def is_live(page: Any) -> bool:
    """Wait until the loop's turns are seen to grow."""
    ticks = page.get_by_role("region", name="Control loop").locator("dd").first
    before = ticks.inner_text()
    return wait_until(lambda: ticks.inner_text() != before, "the page is live", every_s=0.1)
