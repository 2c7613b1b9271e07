"""Job ids that must not start, bounded by a watermark."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvferry_sidecar.outcomes.tombstones import Tombstones


def test_only_the_half_and_job_named_is_refused():
    graves = Tombstones(8)
    graves.add(1, 5)
    assert graves.refuses(1, 5)
    assert not graves.refuses(1, 4)
    assert not graves.refuses(2, 5)
    graves.drop(1)
    assert not graves.refuses(1, 5)
    assert graves.count() == 0


def test_a_full_table_becomes_a_watermark():
    graves = Tombstones(4)
    for job in (10, 20, 30, 40, 50):
        graves.add(1, job)
    assert graves.collapses == 1
    assert graves.count() <= 4
    assert graves.refuses(1, 15)  # below the watermark: a very late first submit
    assert not graves.refuses(1, 45)
    assert all(graves.refuses(1, job) for job in (10, 20, 30, 40, 50))


@given(st.lists(st.integers(-(2**40), 2**40), max_size=200), st.integers(1, 8))
def test_nothing_added_is_ever_forgotten_and_nothing_grows(jobs, bound):
    graves = Tombstones(bound)
    for job in jobs:
        graves.add(1, job)
        assert graves.count() <= bound
    assert all(graves.refuses(1, job) for job in jobs)
