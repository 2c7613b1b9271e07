"""What operators do with the pool's objects: bounds, pins, pages, time to live."""

from __future__ import annotations

import math

import pytest
from kvferry_sidecar import policies
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.stages import objects
from kvferry_sidecar.stages.objects import Filter
from kvferry_sidecar.stages.stores import TierState
from kvferry_sidecar.tiers.runner import Drop
from support.pipeline_bed import Bed, make_engine

RED, BLUE = b"r" * 16, b"b" * 16
PAGES = Limits(scan_places_max=3)


def engines(bed: Bed, *namespaces: bytes) -> list:
    """Engines of one namespace each, known to the pipeline."""
    found = []
    for number, namespace in enumerate(namespaces):
        engine = make_engine(
            f"e{number}", first_generation=10 * number + 1, life=bytes([number]) * 16
        )
        engine.session.namespaces[engine.session.version] = namespace
        engine.workers[0].geometry.identity["tenant"] = chr(namespace[0])
        bed.pipeline.on_session_ready(engine.session, bed.now_s)
        bed.probe(engine, 1, 0, 1)  # its shape is learnt
        found.append(engine)
    return found


def everything(bed: Bed, wanted: Filter, most: int = 1000) -> list:
    found, first, pages = [], 0, 0
    while first is not None:
        page = bed.pipeline.objects.page(wanted, first, most)
        assert len(page.objects) <= most
        found += page.objects
        first, pages = page.next, pages + 1
    assert pages > 1
    return found


def test_objects_are_counted_and_listed_by_namespace() -> None:
    bed = Bed(limits=PAGES)
    red, blue = engines(bed, RED, BLUE)
    bed.stored(red, 1, 5)
    bed.now_s += 100
    bed.stored(blue, 2, 3)
    counted = {one.namespace: one for one in bed.pipeline.objects.namespaces()}
    assert (counted[RED.hex()].objects, counted[RED.hex()].tenant) == (5, "r")
    assert (counted[BLUE.hex()].objects, counted[BLUE.hex()].engine) == (3, "e1/i")
    listed = everything(bed, Filter())
    assert [one.namespace for one in listed].count(RED.hex()) == 5
    assert len({one.key for one in listed}) == 8
    assert len(everything(bed, Filter(), most=2)) == 8, "a short page goes on where it ended"
    assert len(everything(bed, Filter(namespace=RED.hex()[:4]))) == 5
    assert len(everything(bed, Filter(older_s=100))) == 5
    assert len(everything(bed, Filter(younger_s=100))) == 3
    assert len(everything(bed, Filter(older_s=101))) == 0
    some = [one.key for one in listed[:2]]
    assert [one.key for one in everything(bed, Filter(keys=some))] == some


def test_a_quota_makes_a_namespace_evict_its_own() -> None:
    bed = Bed(slots=16)
    red, blue = engines(bed, RED, BLUE)
    bed.pipeline.set_rules(policies.parse("tenant=r bytes=25%"))
    bed.stored(blue, 2, 6)
    for prompt in range(10, 20):
        bed.stored(red, prompt, 2)
    assert {one.namespace: one.objects for one in bed.pipeline.objects.namespaces()} == {
        RED.hex(): 4,
        BLUE.hex(): 6,
    }
    bed.pipeline.set_rules(())
    bed.stored(red, 30, 4)
    assert bed.pipeline.objects.namespaces()[0].objects == 8
    bed.assert_clean()


def test_hard_pins_end_at_their_share_of_the_pool() -> None:
    bed = Bed(slots=10, limits=Limits(pinned_percent_max=30))
    (red,) = engines(bed, RED)
    bed.stored(red, 1, 5)
    dry = bed.pipeline.objects.pin(Filter(), "hard", 0, dry_run=True)
    assert (dry.objects, dry.refused) == (3, 2)
    assert bed.pool.stats().pinned_hard_bytes == 0
    assert bed.pipeline.objects.pin(Filter(), "hard", 0, dry_run=False) == dry
    assert bed.pipeline.objects.pin(Filter(), "hard", 0, dry_run=False).objects == 0
    assert bed.pipeline.objects.pin(Filter(pin="none"), "soft", 0, dry_run=False).objects == 2
    for prompt in range(2, 8):
        bed.stored(red, prompt, 5)
    kept = [one for one in bed.pipeline.objects.page(Filter(), 0, 100).objects if one.pin != "none"]
    assert [one.pin for one in kept].count("hard") == 3
    assert bed.pipeline.clear_pool() == 7
    assert bed.pipeline.objects.pin(Filter(), "none", 0, dry_run=False).objects == 3
    assert bed.pipeline.clear_pool() == 3
    bed.assert_clean()


def test_a_drop_reaches_the_tiers_that_it_names() -> None:
    bed = Bed(sources=("disk", "external"))
    (red,) = engines(bed, RED)
    bed.run_stores()
    bed.stored(red, 1, 4)
    bed.pipeline.on_tick(bed.now_s)
    bed.run_stores()
    assert [len(slow.stored) for slow in bed.slow] == [4, 4]
    drop = bed.pipeline.objects.drop
    assert drop(Filter(), "host", 0, bed.now_s, dry_run=True).objects == 4
    keys = [one.key for one in bed.pipeline.objects.page(Filter(), 0, 10).objects]
    assert drop(Filter(keys=keys[:1]), "all", 0, bed.now_s, dry_run=False).objects == 1
    bed.run_stores()
    assert [len(slow.stored) for slow in bed.slow] == [3, 3]
    assert drop(Filter(keys=keys[1:2]), "slower", 0, bed.now_s, dry_run=False).objects == 1
    bed.run_stores()
    assert [len(slow.stored) for slow in bed.slow] == [2, 2]
    assert bed.pool.stats().ready == 3
    assert drop(Filter(), "host", 0, bed.now_s, dry_run=False).objects == 3
    bed.run_stores()
    assert bed.pool.stats().ready == 0
    assert [len(slow.stored) for slow in bed.slow] == [2, 2]
    assert drop(Filter(keys=keys[1:]), "slower", 0, bed.now_s, dry_run=False).objects == 0
    bed.run_stores()
    assert [len(slow.stored) for slow in bed.slow] == [0, 0], "by their keys alone"
    bed.assert_clean()


def test_named_keys_go_down_once_and_only_to_tiers_that_are_on() -> None:
    bed = Bed(limits=PAGES, sources=("disk",))
    (red,) = engines(bed, RED)
    bed.run_stores()
    bed.stored(red, 1, 6)
    bed.run_stores()
    names = Filter(keys=[one.key for one in everything(bed, Filter())])

    def told() -> list[str]:
        first: int | None = 0
        while first is not None:
            done = bed.pipeline.objects.drop(names, "slower", first, bed.now_s, dry_run=False)
            first = done.next
        calls = [bed.slow[0].open[ticket] for ticket in bed.slow[0].of_kind(Drop)]
        return [key.hex() for call in calls for key in call.keys]

    bed.tiers[0].state = TierState.PAUSED
    assert told() == []
    bed.tiers[0].state = TierState.ON
    assert told() == names.keys
    bed.run_stores()
    bed.assert_clean()


def test_objects_past_their_time_are_dropped_but_for_hard_pins() -> None:
    bed = Bed(limits=PAGES, sources=("disk",))
    red, blue = engines(bed, RED, BLUE)
    bed.run_stores()
    bed.pipeline.set_rules(policies.parse("tenant=r ttl_s=60"))
    bed.stored(red, 1, 6)
    bed.stored(blue, 2, 4)
    bed.run_stores()
    first = bed.pipeline.objects.page(Filter(namespace=RED.hex()), 0, 2).objects
    held = Filter(keys=[one.key for one in first])
    assert bed.pipeline.objects.pin(held, "hard", 0, dry_run=False).objects == len(first) > 0
    for _ in range(20):
        bed.pass_s(1)
        bed.run_stores()
    assert bed.pipeline.objects.expired == 0
    bed.now_s += 60
    for _ in range(20):
        assert bed.pass_s(1) <= 0.1
        bed.run_stores()
    left = {one.namespace: one.objects for one in bed.pipeline.objects.namespaces()}
    assert left == {RED.hex(): len(first), BLUE.hex(): 4}
    assert bed.pipeline.objects.expired == 6 - len(first)
    assert len(bed.slow[0].stored) == 4 + len(first)
    bed.assert_clean()


def test_room_is_made_over_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn evicts more than its step, and what is lacking then is said."""
    monkeypatch.setattr(objects, "evict_step", 2)
    bed = Bed(slots=10)
    (red,) = engines(bed, RED)
    bed.stored(red, 1, 8)
    room, slot = bed.pipeline.objects, bed.pool.slab_bytes
    assert room.evict(30, dry_run=True) == 5 * slot
    assert room.tick(bed.now_s) == math.inf
    assert room.over_bytes() == 0
    assert room.evict(30, dry_run=False) == 5 * slot
    for left in (3, 1):
        assert room.tick(bed.now_s) == 0.0, "again at once"
        assert room.over_bytes() == left * slot
    assert room.tick(bed.now_s) == math.inf
    assert bed.pool.stats().ready == 3
    bed.stored(red, 2, 4)
    assert room.tick(bed.now_s) == math.inf
    assert bed.pool.stats().ready == 7, "it was for once"
