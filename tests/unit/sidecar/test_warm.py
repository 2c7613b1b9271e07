"""Warming: listed objects come from slower tiers into the pool, bounded, tier by tier."""

from __future__ import annotations

import json

import pytest
from kvferry_connector.wire.hot import Release
from kvferry_sidecar.cli import main
from kvferry_sidecar.cli.warm import wanted_objects
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.stages.objects import Filter
from kvferry_sidecar.stages.warm import Wanted
from kvferry_sidecar.tiers.runner import Find, Get
from support.client_half import client_engine
from support.hybrid_bed import assert_loaded, hit, load, probe, save
from support.pipeline_bed import BLOCK, HASH_BYTES, Bed, chain, make_engine
from support.sidecar import running_sidecar, set_flags
from support.slow_tiers import disk_settings, tier, wait_stored
from support.waiting import wait_until


def only_below(bed: Bed, engine: object, chunks: int) -> list[Wanted]:
    """Store a prompt, have it written on, and clear the pool; return its objects."""
    bed.pipeline.on_session_ready(engine.session, bed.now_s)
    bed.probe(engine, 1, 0, 1)
    bed.run_stores()
    bed.stored(engine, 1, chunks)
    bed.pipeline.on_tick(bed.now_s)
    bed.run_stores()
    found = bed.pipeline.objects.page(Filter(), 0, 1000).objects
    assert len(found) == chunks
    bed.pipeline.clear_pool()
    return [
        Wanted(bytes.fromhex(one.namespace), one.group, bytes.fromhex(one.key)) for one in found
    ]


def test_each_object_comes_from_the_first_tier_that_has_it() -> None:
    bed = Bed(sources=("disk", "external"))
    wanted = only_below(bed, make_engine(), 10)
    disk, external = bed.slow
    for one in wanted[3:]:
        del disk.stored[one.key]
    for one in wanted[8:]:
        del external.stored[one.key]
    dry = bed.pipeline.warmer.add(wanted, bed.now_s, dry_run=True)
    assert (dry.taken, dry.there, dry.unknown) == (10, 0, 0)
    assert bed.pipeline.warmer.waiting() == 0
    bed.pipeline.warmer.add(wanted, bed.now_s, dry_run=False)
    while bed.pipeline.warmer.waiting():
        assert sum(len(slow.open) for slow in bed.slow) == 1, "one call at a time"
        bed.run_stores()
    assert dict(+bed.pipeline.warmer.counts) == {"fetched": 8, "absent": 2}
    assert bed.pool.stats().ready == 8
    assert all(one.key in disk.stored for one in wanted[:8]), "written on to the disk"
    again = bed.pipeline.warmer.add(wanted, bed.now_s, dry_run=True)
    assert (again.taken, again.there) == (10, 8)
    bed.pipeline.warmer.add(wanted, bed.now_s, dry_run=False)
    assert bed.pipeline.warmer.waiting() == 2, "what is there is not looked for"
    bed.run_stores()
    assert dict(+bed.pipeline.warmer.counts) == {"fetched": 8, "absent": 4}
    bed.assert_clean()


def test_what_is_being_fetched_is_waited_for() -> None:
    bed = Bed(sources=("disk",))
    bed.pipeline.warmer.add(only_below(bed, make_engine(), 2), bed.now_s, dry_run=False)
    (find,) = bed.slow[0].of_kind(Find)
    bed.slow[0].finish(find)
    bed.pipeline.on_stores(bed.now_s)
    assert (bed.pipeline.warmer.waiting(), len(bed.slow[0].of_kind(Get))) == (2, 1)
    bed.run_stores()
    assert bed.pipeline.warmer.waiting() == 0
    bed.assert_clean()


def test_a_list_is_bounded_and_of_known_namespaces() -> None:
    bed = Bed(sources=("disk",), limits=Limits(warm_objects_max=6))
    wanted = only_below(bed, make_engine(), 10)
    strange = Wanted(b"?" * 16, 0, b"k" * 16)
    taken = bed.pipeline.warmer.add([strange, *wanted], bed.now_s, dry_run=False)
    assert (taken.taken, taken.unknown) == (6, 1)
    assert bed.pipeline.warmer.add(wanted[5:], bed.now_s, dry_run=False).taken == 1
    bed.run_stores()
    assert bed.pipeline.warmer.add(wanted[6:], bed.now_s, dry_run=False).taken == 4
    bed.run_stores()
    assert bed.pipeline.warmer.counts["fetched"] == 10
    bed.assert_clean()


def test_a_tier_that_fails_and_a_drain_end_it() -> None:
    bed = Bed(sources=("disk",))
    wanted = only_below(bed, make_engine(), 10)
    bed.pipeline.warmer.add(wanted, bed.now_s, dry_run=False)
    (find,) = bed.slow[0].of_kind(Find)
    bed.slow[0].finish(find)
    bed.pipeline.on_stores(bed.now_s)
    (get,) = bed.slow[0].of_kind(Get)
    bed.slow[0].finish(get, error="it broke")
    bed.pipeline.on_stores(bed.now_s)
    assert bed.pipeline.warmer.waiting() == 0
    assert dict(+bed.pipeline.warmer.counts) == {"failed": 4, "absent": 6}
    bed.pipeline.drain(bed.now_s)
    assert bed.pipeline.warmer.add(wanted, bed.now_s, dry_run=False).taken == 0
    assert bed.pool.stats().writing == 0


def test_what_no_slab_of_this_pool_holds_is_left_where_it_is() -> None:
    """A store may be shared with a node whose slabs are larger."""
    bed = Bed(sources=("external",))
    wanted = only_below(bed, make_engine(), 10)
    bed.pool.slab_bytes = 512
    bed.pipeline.warmer.add(wanted, bed.now_s, dry_run=False)
    bed.run_stores()
    assert bed.pipeline.warmer.waiting() == 0
    assert dict(+bed.pipeline.warmer.counts) == {"failed": 10}
    bed.slow[0].value_bytes_max = 512
    bed.pipeline.warmer.add(wanted, bed.now_s, dry_run=False)
    assert not bed.slow[0].open, "nor is the store asked for what it does not take"
    assert dict(+bed.pipeline.warmer.counts) == {"failed": 10, "absent": 10}
    bed.assert_clean()


def test_a_drain_ends_it_with_the_batch_under_way() -> None:
    bed = Bed(sources=("disk",))
    wanted = only_below(bed, make_engine(), 10)
    bed.pipeline.warmer.add(wanted, bed.now_s, dry_run=False)
    bed.pipeline.drain(bed.now_s)
    bed.run_stores()
    assert bed.pipeline.warmer.waiting() == 0
    assert dict(+bed.pipeline.warmer.counts) == {"fetched": 4, "failed": 6}
    bed.assert_clean()


def test_a_prefix_brings_every_group_of_all_ranks(tmp_path) -> None:
    """Blocks of different sizes and windows, of which objects exist at some hashes only."""
    kinds = [
        {"kind": "full", "block_tokens": 64},
        {"kind": "swa", "window_tokens": 40, "block_tokens": 32, "save_rule": "held"},
        {"kind": "swa", "window_tokens": 40, "save_rule": "held"},
    ]
    bed = Bed(slots=256, sources=("disk",))
    engine = make_engine(kinds=kinds, num_blocks=1000, ranks=2)
    bed.pipeline.on_session_ready(engine.session, bed.now_s)
    save(bed, engine, 1, 257)
    save(bed, engine, 2, 257)
    bed.pass_s(0)
    bed.run_stores()
    below = len(bed.slow[0].stored)
    bed.pipeline.clear_pool()
    raw = chain(1, 256 // BLOCK)
    hashes = [raw[at : at + HASH_BYTES].hex() for at in range(0, len(raw), HASH_BYTES)]
    file = tmp_path / "prefixes"
    file.write_text(json.dumps({"hashes": hashes}))
    known = bed.pipeline.warmer.reading().namespaces
    listed = list(wanted_objects(file, known))
    objects = [
        Wanted(bytes.fromhex(one.namespace), one.group, bytes.fromhex(one.key)) for one in listed
    ]
    bed.pipeline.warmer.add(objects, bed.now_s, dry_run=False)
    bed.run_stores()
    assert bed.pool.stats().ready == below // 2, "all of this prompt, nothing of the other"
    bed.slow[0].stored.clear()
    probe(bed, engine, 1, 1, 257)
    bed.run_stores()
    assert hit(bed, engine, 1, 257) == 256
    assert load(bed, engine, 1, 256)[0].status == "done"
    assert_loaded(engine, 1, 256)


@pytest.fixture
def told(capsys):
    def run(*arguments):
        capsys.readouterr()
        code = main([str(one) for one in arguments])
        found = capsys.readouterr()
        return code, found.out + found.err

    return run


def test_a_list_of_one_pool_warms_the_next(told, tmp_path) -> None:
    with (
        running_sidecar(pool_bytes=8 << 20, flags=set_flags(disk_settings(tmp_path))) as sidecar,
        client_engine(sidecar.run_dir) as engine,
    ):
        place = ("--run-dir", sidecar.run_dir)
        engine.put("one")
        engine.put("two")
        wait_stored(sidecar, 6)
        listed = told("objects", "list", "--json", *place)[1]
        file = tmp_path / "list"
        file.write_text(listed)
        assert told("act", "clear-pool", *place)[0] == 0
        assert "6 would be looked for" in told("warm", file, "--dry-run", *place)[1]
        code, text = told("warm", file, *place)
        assert (code, "6 fetched" in text) == (0, True), text
        assert len(told("objects", "list", *place)[1].splitlines()) == 6
        admission, answer = engine.lease("one", 3)
        assert answer.sources.get("host") == 48
        assert engine.ended(engine.submit(engine.load_job(admission, (7, 8, 9)))).status == "done"
        assert engine.holds("one", (7, 8, 9))
        engine.scheduler.send(Release([admission]))
        assert ": on, 6 objects" in told("objects", "count", *place)[1], "a line for the disk"
        assert told("objects", "drop", "--tier", "slower", "--keys-file", file, *place)[0] == 0
        wait_until(lambda: tier(sidecar)["facts"]["objects"] == 0, "the disk has forgotten them")
        assert engine.get("two") == 48, "the pool has not"
        stranger = json.loads(listed.splitlines()[0]) | {"namespace": "ab" * 16}
        file.write_text(json.dumps(stranger) + "\n")
        code, text = told("warm", file, *place)
        assert (code, "no engine has registered" in text) == (1, True)
