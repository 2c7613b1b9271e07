"""Write-behind: what is written on to slower tiers, when, and what is dropped."""

from __future__ import annotations

from kvferry_connector.wire.hot import Answer, Ask, Release
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.stages.objects import Filter
from kvferry_sidecar.stages.warm import Wanted
from kvferry_sidecar.tiers.runner import Find, Put
from kvferry_sidecar.tiers.store import Whose
from support.pipeline_bed import BLOCK, Bed, make_engine


def ask(bed, engine, admission=1, most=1 << 20):
    """Ask; returns the answer, now or when the tiers have answered."""
    bed.say(engine.scheduler, Ask(admission, 1, 0, most))
    bed.run_stores()
    return bed.take(Answer)[-1]


def test_write_behind_is_bounded_and_drops_the_coldest():
    bed, engine = Bed(sources=("disk",), limits=Limits(write_behind_max=6)), make_engine()
    bed.stored(engine, 1, 4)
    bed.stored(engine, 2, 4)
    bed.pass_s(0)
    assert len(bed.slow[0].of_kind(Put)) >= 1
    bed.run_stores()
    (tier,) = bed.pipeline.snapshot(bed.now_s).tiers
    assert tier.counts["put_dropped_full"] == 2
    assert tier.counts["put_objects"] == 6
    bed.pool.clear()
    bed.probe(engine, 1, 2, 4)  # the newest were kept
    assert ask(bed, engine).hit_tokens == 4 * BLOCK


def test_a_put_leases_what_it_reads_and_that_is_no_reuse():
    bed, engine = Bed(sources=("disk",), slots=4), make_engine()
    bed.stored(engine, 1, 4)
    bed.pass_s(0)
    assert bed.pool.stats().leased == 4
    job, raw = bed.save_job(engine, 2, [1, 2])
    bed.submit(engine.workers[0], job, raw)
    assert bed.pipeline.snapshot(bed.now_s).skips["pool-full"] == 2
    bed.run_stores()
    assert bed.pool.stats().leased == 0


def test_evicted_before_it_was_written_is_counted():
    bed, engine = Bed(sources=("disk",)), make_engine()
    bed.stored(engine, 1, 4)
    bed.pool.clear()
    bed.pass_s(0)
    (tier,) = bed.pipeline.snapshot(bed.now_s).tiers
    assert tier.counts["put_evicted_before"] == 4
    assert not bed.slow[0].open


def test_policy_reused_writes_what_a_load_used():
    bed, engine = Bed(sources=("disk",), policy="reused"), make_engine()
    bed.stored(engine, 1, 3)
    bed.pass_s(0)
    assert not bed.slow[0].open
    bed.probe(engine, 1, 1, 3)
    ask(bed, engine, most=2 * BLOCK)
    job, raw = bed.load_job(engine, 1, [11, 12])
    bed.submit(engine.workers[0], job, raw)
    bed.run_copies()
    bed.pass_s(0)
    bed.run_stores()
    assert len(bed.slow[0].stored) == 2
    assert set(bed.slow[0].whose.values()) == {whose(bed)}


def whose(bed):
    """Return whose all objects of the pool are."""
    (found,) = {
        (one.namespace, one.group) for one in bed.pipeline.objects.page(Filter(), 0, 99).objects
    }
    return Whose(bytes.fromhex(found[0]), found[1])


def test_a_put_says_whose_the_object_is_wherever_it_came_from():
    bed, engine = Bed(sources=("disk", "external")), make_engine()
    bed.stored(engine, 1, 3)
    mine = whose(bed)
    assert any(mine.namespace)
    bed.pass_s(0)
    bed.run_stores()
    disk, external = bed.slow
    objects = [Wanted(*mine, key) for key in disk.stored]
    for fetch in (
        lambda: (bed.probe(engine, 1, 1, 3), ask(bed, engine)),
        lambda: bed.pipeline.warmer.add(objects, bed.now_s, dry_run=False),
    ):
        assert disk.whose == external.whose == dict.fromkeys(disk.stored, mine)
        disk.stored.clear()
        disk.whose.clear()
        bed.say(engine.scheduler, Release([1]))
        bed.pipeline.clear_pool()
        fetch()
        bed.run_stores()
        bed.pass_s(0)
        bed.run_stores()
    assert disk.whose == external.whose == dict.fromkeys(disk.stored, mine)


def test_policy_none_only_reads():
    bed, engine = Bed(sources=("disk",), policy="none"), make_engine()
    bed.stored(engine, 1, 3)
    bed.pass_s(0)
    assert not bed.slow[0].open


def test_two_disks_share_what_is_written_and_one_takes_over():
    bed, engine = Bed(sources=("disk", "disk")), make_engine()
    bed.stored(engine, 1, 16)
    bed.pass_s(0)
    bed.run_stores()
    first, second = (set(slow.stored) for slow in bed.slow)
    assert first
    assert second
    assert not first & second
    assert len(first | second) == 16
    bed.probe(engine, 1, 9, 1)
    (ticket,) = bed.slow[0].of_kind(Find)
    bed.slow[0].finish(ticket, error="gone", final=True)
    bed.pipeline.on_stores(bed.now_s)
    bed.run_stores()
    bed.stored(engine, 2, 4)
    bed.pass_s(0)
    bed.run_stores()
    assert len(bed.slow[1].stored) == len(second) + 4


def test_what_came_from_outside_is_written_to_the_disk():
    bed, engine = Bed(sources=("disk", "external")), make_engine()
    bed.stored(engine, 1, 4)
    bed.pass_s(0)
    bed.run_stores()
    bed.pool.clear()
    disk = bed.slow[0]
    disk.stored.clear()
    bed.probe(engine, 1, 1, 4)
    assert ask(bed, engine).sources == {"external": 4 * BLOCK}
    bed.run_stores()
    assert len(disk.stored) == 4
