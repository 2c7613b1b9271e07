"""The scheduler half's open jobs and their pins, and what travels between the halves."""

from __future__ import annotations

import multiprocessing
import struct
from types import SimpleNamespace
from typing import Any

import pytest
from kvferry_connector.config import FerryConfig
from kvferry_connector.jobs import CompactTableError, JobOrder, Jobs, Report, cut_tables, pack_ids
from kvferry_connector.meta import FerryHandshake, FerryMetadata, FerryWorkerMetadata
from kvferry_connector.nodes import by_node
from kvferry_connector.stats import FerryStats
from kvferry_connector.wire import hot
from support.clients import SCHEDULER

ORDERS = [JobOrder(job, f"req-{job}", 5, b"body-%d" % job, (b"tables",)) for job in (1, 2)]

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
    assert jobs.report(job, Report(0, "done", "")) is None
    assert jobs.report(job, Report(0, "done", "")) is None, "the same rank again"
    assert pool.freed == []
    ended = jobs.report(job, Report(1, "failed", "why", 32))
    assert ended is not None
    assert not ended.done
    assert pool.freed == [6, 5, 4], "tail first"
    assert jobs.report(job, Report(1, "done", "")) is None
    assert (len(jobs), jobs.pinned_blocks) == (0, 0)
    assert jobs.open_load("r") > job


@pytest.mark.parametrize(
    ("ends", "shorter"),
    [
        ([("done", 0), ("failed", 64)], 64),
        ([("failed", 96), ("failed", 64)], 64),
        ([("failed", 96), ("cancelled", 0)], 0),
        ([("done", 0), ("done", 0)], None),
    ],
)
def test_what_is_left_of_a_load_is_what_every_failed_rank_found_whole(
    ends: list[tuple[str, int]], shorter: int | None
) -> None:
    jobs = Jobs(world_size=2, pinned_blocks_max=8)
    number = jobs.open_load("r")
    ended = [
        jobs.report(number, Report(rank, status, "why", tokens))
        for rank, (status, tokens) in enumerate(ends)
    ]
    assert ended[0] is None
    assert ended[1] is not None
    assert ended[1].shorter_tokens == shorter


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
    with pytest.raises(CompactTableError, match="group 0"):
        cut_tables(table, [16, 32], (0, 1), 64, 112)
    slices, ids = cut_tables(table, [16, 16], (0, 1), 32, 64, compact=True)
    assert slices == [hot.TableSlice(0, 2, 2), hot.TableSlice(1, 0, 3)], "not cut where it is short"
    assert ids == [3, 4, 7, 8, 9]


# --- what travels through vLLM ---------------------------------------------------------------


def test_metadata_travels_as_vllm_sends_it() -> None:
    near, far = multiprocessing.Pipe()
    with near, far:
        near.send(FerryMetadata(9, (ORDERS[0],), (ORDERS[1],)))
        meta = far.recv()
        assert (meta.step, meta.loads, meta.saves) == (9, (ORDERS[0],), (ORDERS[1],))
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


def test_ranks_of_one_run_dir_of_one_boot_share_a_sidecar() -> None:
    here, beside, apart = (
        FerryHandshake.of(rank, FerryConfig(run_dir=run_dir), SCHEDULER)
        for rank, run_dir in enumerate(("/run/a", "/run/a", "/run/b"))
    )
    again = FerryHandshake(3, "another boot", "/run/a", here.session)
    assert by_node([beside, apart, again], here) == [[1], [2], [3]]


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
