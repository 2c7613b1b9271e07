"""The worker half around the engine's sleep: what was open ends only when nothing runs any more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvferry_connector.config import FerryConfig
from kvferry_connector.link import Link
from kvferry_connector.meta import FerryMetadata
from kvferry_connector.wire import hot
from kvferry_connector.worker_half import WorkerHalf
from support.parallel import parallel_config
from support.scripted_client import EPOCH, ScriptedClient, order, worker_half_over


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture
def half(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> WorkerHalf:
    return worker_half_over(client, monkeypatch)


def test_what_is_open_when_the_memory_is_back_has_failed(
    half: WorkerHalf, client: ScriptedClient
) -> None:
    half.bind(FerryMetadata(7, (order(1),)))
    half.bind(FerryMetadata(8, (), (order(2),)))
    half.end_forward()
    for _ in range(2):
        half.unregister()
    assert client.calls == ["start", "withdraw"]
    results = half.results()
    assert results.finished_recving == results.failed_recving == {"req-1"}
    metadata = half.worker_metadata()
    assert metadata is not None
    assert {job: report[2] for job, (report,) in metadata.reports.items()} == {
        1: "unregistered", 2: "unregistered",
    }  # fmt: skip
    half.bind(FerryMetadata(9, (order(3),)))
    assert half.worker_metadata().reports[3][0].reason == "unregistered"
    for _ in range(2):
        half.restore()
    assert client.calls == ["start", "withdraw", "lend"]


def test_without_an_answer_jobs_stay_open_until_the_sidecar_does_not_know_them(
    half: WorkerHalf, client: ScriptedClient
) -> None:
    half.bind(FerryMetadata(7, (order(1),)))
    client.gives_back = False
    half.unregister()
    assert half.stats.data["withdraw_s_max"] == 1
    assert not half.results().finished_recving, "its copy may still run"
    half.restore()
    client.current = Link(EPOCH, 2, 2, ("all",), ready=True)
    client.inbox.append(hot.JobState(1, "unknown"))
    half._sweep_at_s = 0.0
    assert half.results().failed_recving == {"req-1"}


def test_without_registered_memory_sleep_does_nothing(client: ScriptedClient) -> None:
    parallel = parallel_config()
    config = SimpleNamespace(parallel_config=parallel)
    half = WorkerHalf(config, None, FerryConfig())
    half.unregister()
    half.restore()
    assert client.calls == []
