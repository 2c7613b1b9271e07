"""The worker half's bookkeeping of jobs, the scheduler half's pins, and what travels between."""

from __future__ import annotations

import mmap
import multiprocessing
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kvferry_connector import worker_half
from kvferry_connector.config import FerryConfig
from kvferry_connector.jobs import NO_EPOCH, JobOrder, Jobs, Report, cut_tables, pack_ids
from kvferry_connector.link import Link
from kvferry_connector.meta import FerryHandshake, FerryMetadata, FerryWorkerMetadata
from kvferry_connector.stats import FerryStats
from kvferry_connector.wire import hot
from kvferry_connector.wire.names import BOUND_STEP_OFFSET, DONE_STEP_OFFSET, FENCE_PAGE_BYTES
from kvferry_connector.worker_half import WorkerHalf

EPOCH = 5


class ScriptedClient:
    """What a worker half sees of a sidecar."""

    def __init__(self) -> None:
        self.current: Link | None = Link(EPOCH, 1, 1, "", ("all",), ready=True)
        self.dead: set[int] = set()
        self.takes = True
        self.sent: list[tuple[hot.FromHalf, list[bytes]]] = []
        self.inbox: list[hot.FromSidecar] = []
        self.polls = 0
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def close(self) -> None:
        self.calls.append("close")

    def link(self) -> Link | None:
        return self.current

    def is_dead(self, epoch: int) -> bool:
        return epoch in self.dead

    def send(self, link: Link, message: hot.FromHalf, raw: Any = ()) -> bool:
        if self.takes:
            self.sent.append((message, list(raw)))
        return self.takes

    def receive(self, link: Link, wait_us: int = 0) -> list[tuple[hot.FromSidecar, list[bytes]]]:
        self.polls += 1
        taken, self.inbox = self.inbox, []
        return [(message, []) for message in taken]

    def kinds(self, kind: type) -> list[Any]:
        return [message for message, _ in self.sent if isinstance(message, kind)]


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture
def half(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerHalf]:
    monkeypatch.setattr(worker_half, "describe_rank", lambda *_, **__: None)
    monkeypatch.setattr(worker_half, "Client", lambda *_: client)
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=3),
        kv_transfer_config=SimpleNamespace(engine_id="e"),
        instance_id="i",
    )
    half = WorkerHalf(vllm_config, None, FerryConfig(job_ask_ms=1000))
    half.register({})
    yield half
    half.shutdown()
    assert client.calls == ["start", "close"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(worker_half.time, "monotonic", lambda: now.s)
    return now


def order(job: int, epoch: int = EPOCH) -> JobOrder:
    return JobOrder(job, f"req-{job}", epoch, b"body-%d" % job, (b"tables-%d" % job,))


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
    half.unbind()
    assert fence_words(half) == (7, 7)
    assert client.sent[1:] == [(hot.Submit(b"body-2"), [b"tables-2"])]


def test_step_without_jobs_touches_no_socket(half: WorkerHalf, client: ScriptedClient) -> None:
    half.bind(FerryMetadata(7))
    half.end_forward()
    assert not half.results().finished_recving
    assert half.worker_metadata() is None
    assert (client.polls, client.sent) == (0, [])


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
    assert client.kinds(hot.OutcomeAck) == [hot.OutcomeAck([1]), hot.OutcomeAck([1])]


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
    client.current = Link(EPOCH + 1, 1, 1, "", ("all",), ready=True)
    assert not half.results().finished_recving, "nor does a new sidecar"
    client.dead.add(EPOCH)
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


def test_error_ends_nothing_but_asks_at_once(half: WorkerHalf, client: ScriptedClient) -> None:
    load(half, 1)
    client.inbox = [hot.Error("internal", "bug", "report it", job=1)]
    assert not half.results().finished_recving
    assert client.kinds(hot.JobStatus) == [hot.JobStatus(1)]


def test_acknowledgement_that_is_not_taken_is_tried_again(
    half: WorkerHalf, client: ScriptedClient
) -> None:
    load(half, 1)
    client.inbox = [outcome(1)]
    client.takes = False
    assert half.results().finished_recving == {"req-1"}
    client.takes = True
    half.results()
    assert client.kinds(hot.OutcomeAck) == [hot.OutcomeAck([1])]


def test_abandoned_orders_fail_unless_they_went_out(
    half: WorkerHalf, client: ScriptedClient
) -> None:
    load(half, 1)
    half.abandon((order(1), order(2)), is_load=True)
    assert half.results().failed_recving == {"req-2"}
    half.abandon((order(3),), is_load=False)
    meta = half.worker_metadata()
    assert meta is not None
    assert set(meta.reports) == {2, 3}


# --- the scheduler half's job table ----------------------------------------------------------


class CountingPool:
    """The part of vLLM's BlockPool that pins use."""

    def __init__(self, size: int) -> None:
        self.blocks = [
            SimpleNamespace(block_id=number, ref_cnt=1, is_null=number == 0)
            for number in range(size)
        ]
        self.freed: list[int] = []

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            self.freed.append(block.block_id)


def test_pins_fall_when_all_ranks_have_reported_and_only_once() -> None:
    jobs = Jobs(world_size=2, pinned_blocks_max=8)
    jobs.pool = pool = CountingPool(10)
    job = jobs.open_save([4, 5, 5, 6])
    assert [block.ref_cnt for block in pool.blocks[4:7]] == [2, 2, 2], "each once"
    assert (jobs.pinned_blocks, jobs.room) == (3, 5)
    assert jobs.report(job, 0, done=True) is None
    assert jobs.report(job, 0, done=True) is None, "the same rank again"
    assert pool.freed == []
    ended = jobs.report(job, 1, done=False)
    assert ended is not None
    assert not ended.done
    assert pool.freed == [6, 5, 4], "tail first"
    assert jobs.report(job, 1, done=True) is None
    assert (len(jobs), jobs.pinned_blocks) == (0, 0)
    assert jobs.open_load() > job


def test_null_block_is_never_pinned() -> None:
    jobs = Jobs(world_size=1, pinned_blocks_max=8)
    with pytest.raises(ValueError, match="no block can be pinned"):
        jobs.open_save([1])
    jobs.pool = CountingPool(4)
    with pytest.raises(ValueError, match="null block"):
        jobs.open_save([0, 1])
    assert jobs.pinned_blocks == 0
    assert not jobs


def test_tables_are_cut_by_each_groups_own_block_size() -> None:
    rows = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]
    table = [[SimpleNamespace(block_id=number) for number in row] for row in rows]
    slices, ids = cut_tables(table, [16, 32], (0, 1), 32, 64)
    assert slices == [hot.TableSlice(0, 2, 2), hot.TableSlice(1, 1, 1)]
    assert ids == [3, 4, 8]
    assert pack_ids(ids) == struct.pack("<3i", 3, 4, 8)
    with pytest.raises(ValueError, match="group 0"):
        cut_tables(table, [16, 32], (0, 1), 64, 112)


# --- what travels through vLLM ---------------------------------------------------------------


def test_metadata_travels_as_vllm_sends_it() -> None:
    near, far = multiprocessing.Pipe()
    with near, far:
        near.send(FerryMetadata(9, (order(1),), (order(2),)))
        meta = far.recv()
        assert (meta.step, meta.loads, meta.saves) == (9, (order(1),), (order(2),))
        reports = FerryWorkerMetadata({1: [Report(0, "done", "")]})
        far.send(reports)
        assert near.recv() == reports


def test_reports_of_ranks_are_put_together() -> None:
    zero = FerryWorkerMetadata({1: [Report(0, "done", "")], 2: [Report(0, "done", "")]})
    one = FerryWorkerMetadata({1: [Report(1, "failed", "crc")]})
    merged = zero.aggregate(one)
    assert merged.reports == {
        1: [Report(0, "done", ""), Report(1, "failed", "crc")],
        2: [Report(0, "done", "")],
    }
    with pytest.raises(TypeError, match="kvferry"):
        zero.aggregate(SimpleNamespace())


def test_ranks_are_beside_each_other_in_one_run_dir_of_one_boot() -> None:
    here = FerryHandshake.of(0, FerryConfig(run_dir="/run/a"))
    assert here.beside(FerryHandshake.of(1, FerryConfig(run_dir="/run/a")))
    assert not here.beside(FerryHandshake.of(1, FerryConfig(run_dir="/run/b")))
    assert not here.beside(FerryHandshake(1, "another boot", "/run/a"))


def test_stats_add_up() -> None:
    stats = FerryStats()
    assert stats.take() is None
    stats.count("saves", 2)
    taken = stats.take()
    assert taken is not None
    assert taken.aggregate(FerryStats({"saves": 1, "loads": 1})).reduce() == {
        "saves": 3,
        "loads": 1,
    }
    assert stats.is_empty()
    assert not taken.is_empty()
