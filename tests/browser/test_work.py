"""Long work in the log, the status and the page: of a sidecar that has all kinds of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kvferry_connector.wire.hot import Release
from kvferry_sidecar.cli import main
from support.fake_cuda import FakeGpu, GpuKvMemory, as_driver
from support.hot_engine import HotEngine
from support.http import Http
from support.pages import LEASES_STAY, NEEDS, listens, opened
from support.raw_half import attach_pair
from support.sidecar import SidecarUnderTest, running_sidecar, set_flags
from support.waiting import wait_until

pytestmark = NEEDS
LIFE = b"W" * 16


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SidecarUnderTest, HotEngine]]:
    """A sidecar that has scanned its pool, pinned and warmed it, and the engine at it."""
    settings = {
        "tiers.disk.paths": tmp_path_factory.mktemp("work"), "tiers.disk.bytes": 32 << 20,
        "tiers.disk.free_bytes_min": 0, "copy.gpu": "true", "http.listen": "127.0.0.1:0",
        "limits.drain_ms_max": 600_000,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in as_driver().items():
            patch.setenv(name, value)
        with running_sidecar(
            pool_bytes=64 << 20, flags=[*set_flags(settings), *LEASES_STAY]
        ) as running:
            with engine_at(running) as engine:
                engine.put("kept")
                wait_until(lambda: written(running) == 3, "it was written to the disk")
            running.restart()
            with engine_at(running) as engine:
                engine.put("another, or its namespace would not be known")
                warm(running, 6)
                yield running, engine


@contextmanager
def engine_at(sidecar: SidecarUnderTest) -> Iterator[HotEngine]:
    memory = GpuKvMemory(FakeGpu())
    halves = attach_pair(sidecar.run_dir, memory, LIFE)
    yield HotEngine(*halves, memory, LIFE)
    for half in halves:
        half.leave()
    memory.close()


def written(sidecar: SidecarUnderTest) -> int:
    return int(sidecar.status()["pipeline"]["tiers"][0]["counts"].get("put_objects", 0))


def warm(sidecar: SidecarUnderTest, count: int) -> None:
    http = Http(sidecar.run_dir / "http.sock")
    objects = http.get("/api/v1/objects").json()["objects"]
    wait_until(lambda: written(sidecar) == count - 3, "what is new was written too")
    http.post("/api/v1/actions/clear-pool")
    wanted = [(one["namespace"], one["group"], one["key"]) for one in objects]
    assert http.post("/api/v1/actions/warm", {"objects": wanted}).json()["taken"] == count


@pytest.mark.parametrize(
    ("name", "amount"), [("restart scan", "3 keys"), ("pinning", "64"), ("warm", "6 objects")]
)
def test_work_that_ended_is_in_the_log_the_status_and_the_page(
    browser: Any, rig: tuple[SidecarUnderTest, HotEngine], capsys: pytest.CaptureFixture[str],
    name: str, amount: str,
) -> None:  # fmt: skip
    sidecar, _ = rig
    wait_until(
        lambda: name in [work["name"] for work in sidecar.status()["ended"]], f"{name} ended"
    )
    line = f"name={name!r} " if " " in name else f"name={name} "
    wait_until(lambda: line in sidecar.log.read_text(), f"{name} is in the log")
    capsys.readouterr()
    assert main(["status", "--run-dir", str(sidecar.run_dir)]) == 0
    assert f"{name}: " in capsys.readouterr().out
    with opened(browser, listens(sidecar)) as page:
        panel = page.get_by_role("region", name="Long work")
        panel.get_by_text(name, exact=True).wait_for()
        panel.get_by_text(amount).first.wait_for()
        tiers = page.get_by_role("region", name="Slower tiers")
        tiers.get_by_text("regions free").wait_for()  # what a tier says of itself


def test_a_drain_is_in_the_log_the_status_and_the_page(
    browser: Any, rig: tuple[SidecarUnderTest, HotEngine]
) -> None:
    sidecar, engine = rig
    admission, _ = engine.lease("another, or its namespace would not be known", 3)
    with opened(browser, listens(sidecar)) as page:
        Http(sidecar.run_dir / "http.sock").post("/api/v1/actions/drain")
        panel = page.get_by_role("region", name="Long work")
        panel.get_by_text("drain", exact=True).wait_for()
        panel.get_by_text("0 jobs, leases and writes of 1").wait_for()
    assert [work["name"] for work in sidecar.status()["progress"]] == ["drain"]
    engine.scheduler.send(Release([admission]))
    wait_until(lambda: "name=drain " in sidecar.log.read_text(), "the drain is in the log")
