"""The worker half's bookkeeping of jobs: each ends in one report, whatever happens."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kvferry_connector import worker_half
from kvferry_connector.jobs import NO_EPOCH, Report
from kvferry_connector.link import Link
from kvferry_connector.meta import FerryMetadata, FerryWorkerMetadata
from kvferry_connector.wire import hot
from kvferry_connector.wire.names import BOUND_STEP_OFFSET, DONE_STEP_OFFSET, FENCE_PAGE_BYTES
from kvferry_connector.worker_half import WorkerHalf
from support.scripted_client import EPOCH, ScriptedClient, order, worker_half_over


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture
def half(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerHalf]:
    half = worker_half_over(client, monkeypatch)
    yield half
    half.shutdown()
    assert (client.calls[0], client.calls[-1]) == ("start", "close")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(worker_half.time, "monotonic", lambda: now.s)
    return now


def outcome(job: int, status: str = "done") -> hot.Outcome:
    return hot.Outcome(job, 3, status, "why", 10, 0.1, 48)


def load(half: WorkerHalf, *jobs: int) -> None:
    half.bind(FerryMetadata(7, tuple(order(job) for job in jobs)))


def fence_words(half: WorkerHalf) -> tuple[int, int]:
    with mmap.mmap(half._fence.fd, FENCE_PAGE_BYTES, access=mmap.ACCESS_READ) as page:
        (bound,) = struct.unpack_from("<Q", page, BOUND_STEP_OFFSET)
        (done,) = struct.unpack_from("<Q", page, DONE_STEP_OFFSET)
        return bound, done


def test_loads_go_out_at_bind_and_saves_after_the_forward(
    half: WorkerHalf, client: ScriptedClient
) -> None:
    half.bind(FerryMetadata(7, (order(1),), (order(2),)))
    assert fence_words(half) == (7, 0)
    assert client.sent == [(hot.Submit(b"body-1"), [b"tables-1"])]
    half.end_forward()
    assert fence_words(half) == (7, 7)
    assert client.sent[1:] == [(hot.Submit(b"body-2"), [b"tables-2"])]


def test_step_without_jobs_touches_no_socket(half: WorkerHalf, client: ScriptedClient) -> None:
    half.results()
    client.polls = 0
    half.bind(FerryMetadata(7))
    half.end_forward()
    half.end_forward()
    assert not half.results().finished_recving
    assert half.worker_metadata() is None
    assert (client.polls, client.sent) == (0, [])
    assert fence_words(half) == (0, 0), "nobody waits for this step"


def test_the_end_of_a_step_in_doubt_is_told_once(half: WorkerHalf, client: ScriptedClient) -> None:
    half.bind(FerryMetadata(7, doubtful=True))
    half.end_forward()
    half.results()
    meta = half.worker_metadata()
    assert meta == FerryWorkerMetadata(ended_step=7)
    assert meta.aggregate(FerryWorkerMetadata(ended_step=7)).ended_step == 7
    half.bind(FerryMetadata(8))
    half.end_forward()
    assert half.worker_metadata() is None


@pytest.mark.parametrize("after", [FerryMetadata(0), FerryMetadata(8, (), (order(3),))])
def test_a_step_that_was_not_finished_is_not_finished_with_the_next(
    half: WorkerHalf, client: ScriptedClient, after: FerryMetadata
) -> None:
    """As where the forward raised."""
    half.bind(FerryMetadata(7, (), (order(2),)))
    half.bind(after)
    half.end_forward()
    assert client.sent == [(hot.Submit(b"body-3"), [b"tables-3"])][: len(after.saves)]
    meta = half.worker_metadata()
    assert meta is not None, "else its blocks stay pinned for ever"
    assert {job: reports[0].status for job, reports in meta.reports.items()} == {2: "failed"}


def test_an_outcome_that_comes_again_is_acknowledged_with_no_job_open(
    half: WorkerHalf, client: ScriptedClient
) -> None:
    client.inbox.append(outcome(1))  # its acknowledgement was lost
    for _ in range(worker_half._IDLE_STEPS - 1):
        half.results()
    assert client.polls == 0, "now and then is enough"
    half.results()
    assert list(client.acks) == [1]
    assert half.worker_metadata() is None, "and it ends nothing twice"


@pytest.mark.parametrize(
    ("status", "failed"), [("done", set()), ("failed", {"req-1"}), ("cancelled", {"req-1"})]
)
def test_each_outcome_is_reported_once_and_acknowledged(
    half: WorkerHalf, client: ScriptedClient, status: str, failed: set[str]
) -> None:
    load(half, 1)
    assert not half.results().finished_recving
    client.inbox = [outcome(1, status)]
    results = half.results()
    assert (results.finished_recving, results.failed_recving) == ({"req-1"}, failed)
    meta = half.worker_metadata()
    assert meta is not None
    assert meta.reports == {1: [Report(3, status, "why", 48)]}
    load(half, 2)  # only to have something open
    client.inbox = [outcome(1, status)]
    assert not half.results().finished_recving, "sent again"
    assert half.worker_metadata() is None
    assert list(client.acks) == [1, 1]


def test_outcomes_are_acknowledged_by_heartbeats_unless_they_are_many(
    half: WorkerHalf, client: ScriptedClient
) -> None:
    load(half, *range(1, 200))
    client.inbox = [outcome(1)]
    half.results()
    client.inbox = [outcome(2)]
    half.results()
    assert client.kinds(hot.OutcomeAck) == []
    assert list(client.acks) == [1, 2]
    many = list(range(3, 3 + worker_half._ACKS_MAX))
    client.inbox = [outcome(job) for job in many]
    half.results()
    assert client.kinds(hot.OutcomeAck) == [hot.OutcomeAck([1, 2, *many])]
    assert list(client.acks) == []


def test_load_that_a_reset_overtook_failed_whatever_it_brought(
    half: WorkerHalf, client: ScriptedClient
) -> None:
    half.bind(FerryMetadata(7, (order(1), order(2)), (order(3),), rotation=4))
    half.end_forward()
    client.inbox = [outcome(2)]
    assert half.results().failed_recving == set()
    half.bind(FerryMetadata(8, rotation=5))
    client.inbox = [outcome(1), outcome(3)]
    assert half.results().failed_recving == {"req-1"}
    meta = half.worker_metadata()
    assert meta is not None
    assert meta.reports[1] == [Report(3, "failed", "reset", 0)]
    assert meta.reports[3][0].status == "done", "a save goes to its own version"


def test_save_is_reported_to_the_scheduler_half_only(
    half: WorkerHalf, client: ScriptedClient
) -> None:
    half.bind(FerryMetadata(7, (), (order(2),)))
    half.end_forward()
    client.inbox = [outcome(2)]
    assert not half.results().finished_recving
    meta = half.worker_metadata()
    assert meta is not None
    assert meta.reports[2][0].status == "done"


@pytest.mark.parametrize("trouble", ["away", "other epoch", "never", "not taken"])
def test_load_that_cannot_be_submitted_fails_at_once(
    half: WorkerHalf, client: ScriptedClient, trouble: str
) -> None:
    if trouble == "away":
        client.current = None
    client.takes = trouble != "not taken"
    epoch = {"other epoch": EPOCH - 1, "never": NO_EPOCH}.get(trouble, EPOCH)
    half.bind(FerryMetadata(7, (order(1, epoch),)))
    results = half.results()
    assert results.finished_recving == results.failed_recving == {"req-1"}
    assert client.sent == []
    assert half.results().finished_recving == set()


def test_only_the_proof_of_death_ends_an_open_job(
    half: WorkerHalf, client: ScriptedClient, clock: SimpleNamespace
) -> None:
    load(half, 1, 2)
    client.current = None
    clock.s += 3600
    assert not half.results().finished_recving, "no time-out hands memory back"
    client.current = Link(EPOCH + 1, 1, 1, ("all",), ready=True)
    assert not half.results().finished_recving, "nor does a new sidecar"
    client.dead.add(EPOCH)
    clock.s += 0.1
    results = half.results()
    assert results.finished_recving == results.failed_recving == {"req-1", "req-2"}
    assert client.kinds(hot.JobStatus) == [], "another sidecar knows nothing of them"


def test_silent_job_is_asked_for(
    half: WorkerHalf, client: ScriptedClient, clock: SimpleNamespace
) -> None:
    load(half, 1)
    clock.s += 0.9
    half.results()
    assert client.kinds(hot.JobStatus) == []
    clock.s += 0.2
    half.results()
    half.results()
    assert client.kinds(hot.JobStatus) == [hot.JobStatus(1)]
    client.inbox = [hot.JobState(1, "running")]
    assert not half.results().finished_recving
    client.inbox = [hot.JobState(1, "unknown")]
    assert half.results().failed_recving == {"req-1"}


def test_what_the_client_counts_is_told_while_jobs_are_open(
    half: WorkerHalf, client: ScriptedClient
) -> None:
    client.news.update({"receive_max": 2})
    load(half, 1)
    half.results()
    assert half.stats.data["receive_max"] == 2


def test_error_ends_nothing_but_asks_at_once(half: WorkerHalf, client: ScriptedClient) -> None:
    load(half, 1)
    client.inbox = [hot.Error("internal", "bug", "report it", job=1)]
    assert not half.results().finished_recving
    assert client.kinds(hot.JobStatus) == [hot.JobStatus(1)]


def test_acknowledgement_that_is_not_taken_is_tried_again(
    half: WorkerHalf, client: ScriptedClient
) -> None:
    jobs = list(range(1, 3 + worker_half._ACKS_MAX))
    load(half, *jobs, 1000)
    client.takes = False
    client.inbox = [outcome(job) for job in jobs]
    assert len(half.results().finished_recving) == len(jobs)
    assert list(client.acks) == jobs
    client.takes = True
    half.results()
    assert client.kinds(hot.OutcomeAck) == [hot.OutcomeAck(jobs)]


def test_abandoned_orders_fail_unless_they_went_out(
    half: WorkerHalf, client: ScriptedClient
) -> None:
    load(half, 1)
    half._bound = FerryMetadata(8, (order(1), order(2)), (order(3),))
    half.abandon(is_load=True)
    assert half.results().failed_recving == {"req-2"}
    half.abandon(is_load=False)
    meta = half.worker_metadata()
    assert meta is not None
    assert set(meta.reports) == {2, 3}


def test_what_was_reported_after_a_bug_does_not_go_out_later(
    half: WorkerHalf, client: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are no longer pinned."""
    half.bind(FerryMetadata(7, (), (order(1),)))
    monkeypatch.setattr(half._fence, "done", None)
    with pytest.raises(TypeError):
        half.end_forward()
    half.abandon(is_load=False)
    monkeypatch.undo()
    half.end_forward()
    assert client.sent == []
    meta = half.worker_metadata()
    assert meta is not None
    assert meta.reports[1][0].reason == "hook_error"


def test_the_end_of_a_step_in_doubt_is_never_told_with_another_output(half: WorkerHalf) -> None:
    """A later one does not say which blocks of it were invalid."""
    half.bind(FerryMetadata(7, doubtful=True))
    half._deputy = deputy = SimpleNamespace(take=None, close=lambda: None)
    with pytest.raises(TypeError):
        half.worker_metadata()
    deputy.take = lambda: ({}, [])
    half.bind(FerryMetadata(0))
    assert half.worker_metadata() is None


# --- what may stand between a promised load and its report -----------------------------------


def test_load_in_a_link_that_was_swapped_is_asked_for_and_ends(
    half: WorkerHalf, client: ScriptedClient, clock: SimpleNamespace
) -> None:
    """The same sidecar, another generation: it does not know the job, and says so."""
    load(half, 1)
    client.current = Link(EPOCH, 2, 1, ("all",), ready=True)
    assert not half.results().finished_recving
    clock.s += 1.1
    half.results()
    assert client.kinds(hot.JobStatus) == [hot.JobStatus(1)]
    client.inbox = [hot.JobState(1, "unknown")]
    assert half.results().failed_recving == {"req-1"}


def test_question_that_is_not_taken_is_put_again(
    half: WorkerHalf, client: ScriptedClient, clock: SimpleNamespace
) -> None:
    load(half, 1)
    client.takes = False
    clock.s += 1.1
    half.results()
    client.takes = True
    clock.s += 1.1
    half.results()
    assert client.kinds(hot.JobStatus) == [hot.JobStatus(1)]


def test_death_is_reported_although_nothing_new_is_loaded(
    half: WorkerHalf, client: ScriptedClient
) -> None:
    """Also while the link still stands: the proof may come before the hook thread sees it go."""
    load(half, 1)
    half.bind(FerryMetadata(8))
    client.dead.add(EPOCH)
    client.current = None
    assert half.results().failed_recving == {"req-1"}
    meta = half.worker_metadata()
    assert meta is not None
    assert meta.reports == {1: [Report(3, "failed", "sidecar_died")]}


def test_bug_while_polling_loses_nothing(
    half: WorkerHalf, client: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(half, 1, 2)
    client.inbox = [outcome(1), outcome(2)]
    monkeypatch.setattr(half, "_acks", None)
    with pytest.raises(AttributeError):
        half.results()
    monkeypatch.undo()
    client.inbox = [outcome(1), outcome(2)]  # not acknowledged: they come again
    assert half.results().finished_recving == {"req-1", "req-2"}


@pytest.mark.parametrize("bug_at", [0, 1])
def test_bug_while_submitting_fails_what_did_not_go_out(
    half: WorkerHalf, client: ScriptedClient, monkeypatch: pytest.MonkeyPatch, bug_at: int
) -> None:
    sends = iter(range(10))

    def send(link: Link, message: hot.FromHalf, raw: Any = ()) -> bool:
        if next(sends) == bug_at:
            raise RuntimeError("a bug")
        return True

    monkeypatch.setattr(client, "send", send)
    with pytest.raises(RuntimeError):
        load(half, 1, 2)
    half.abandon(is_load=True)
    gone = {f"req-{job}" for job in (1, 2)[bug_at:]}
    assert half.results().failed_recving == gone
    client.dead.add(EPOCH)
    client.current = None
    assert half.results().failed_recving == {"req-1", "req-2"} - gone
