"""The curve of misses by the pool's size: against a plain LRU, sampled, bounded, and in use."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import pytest
from kvferry_connector.wire.hot import Release
from kvferry_sidecar.cli import render
from kvferry_sidecar.observe import metrics
from kvferry_sidecar.stages.curve import SIZES, Curve, window_s
from prometheus_client.parser import text_string_to_metric_families as families
from support.pipeline_bed import BLOCK, Bed, make_engine
from support.readings import reading

UNIT = (16, 100)  # tokens, bytes


def keys_of(numbers):
    """Keys (n, 16); the same number gives the same key."""
    rows = [np.random.default_rng(n).integers(0, 256, 16, dtype=np.uint8) for n in numbers]
    return np.array(rows, dtype=np.uint8).reshape(-1, 16)


def prompts(seed, count, universe, length):
    """Prefixes of chains: block i of chain c is number 1000 * c + i."""
    choice = random.Random(seed)
    for _ in range(count):
        chain = min(int(choice.expovariate(6 / universe)), universe)
        yield [1000 * chain + i for i in range(choice.randint(1, length))]


def played(curve, asked, at_s=0.0):
    """Look every prompt up, then store it; return the wanted tokens."""
    wanted = 0
    for numbers in asked:
        keys = keys_of(numbers)
        curve.looked_up(keys, UNIT, (0, 16 * len(numbers)), 0, at_s)
        curve.stored(keys, 100 * len(numbers))
        wanted += 16 * len(numbers)
    return wanted


def lru_missed(asked, capacity):
    held, missed = OrderedDict(), 0
    for numbers in asked:
        missed += 16 * sum(n not in held for n in numbers)
        for n in reversed(numbers):
            held[n] = None
            held.move_to_end(n)
        while len(held) > capacity:
            held.popitem(last=False)
    return missed


@pytest.mark.parametrize("seed", range(4))
def test_unsampled_it_is_exactly_lru_at_every_size(seed):
    asked = list(prompts(seed, 200, 60, 6))
    curve = Curve(pool_bytes=40 * 100)
    wanted = played(curve, asked)
    told = curve.reading()
    assert (told.wanted_tokens, told.sampled) == (wanted, 1.0)
    assert told.missed_tokens == [lru_missed(asked, int(40 * size)) for size in SIZES]


def test_sampled_it_is_close_and_bounded():
    asked = list(prompts(9, 3000, 600, 8))
    curve = Curve(pool_bytes=600 * 100, tracked_max=512)
    wanted = played(curve, asked)
    told = curve.reading()
    assert told.tracked <= 512
    assert 0 < told.sampled <= 0.5
    for size, missed in zip(SIZES, told.missed_tokens, strict=True):
        assert abs(missed - lru_missed(asked, int(600 * size))) < 0.06 * wanted


def test_long_prompts_are_sampled_from_the_first_on():
    """A pool of many objects: following all of a long prompt would hold the loop."""
    curve = Curve(pool_bytes=1 << 40)
    keys = np.random.default_rng(1).integers(0, 256, (8192, 16), dtype=np.uint8)
    curve.looked_up(keys, (16, 1 << 20), (0, 16 * 8192), 0, 0.0)
    curve.stored(keys, 8192 << 20)
    told = curve.reading()
    assert (told.sampled, told.wanted_tokens) == (1 / 1024, 16 * 8192)
    assert 0 < told.tracked < 32
    assert abs(told.missed_tokens[0] - 16 * 8192) < 16 * 8192


def test_uses_of_few_keys_are_bounded_too():
    curve = Curve(pool_bytes=1400, tracked_max=64)
    played(curve, [[1, 2, 3]] * 500)
    assert curve._counted.uses <= 4 * 64 + 3
    assert curve.reading().missed_tokens == [48.0] * len(SIZES)


def test_what_other_groups_take_counts():
    """States stored between the chunks of a prompt leave less room for chunks."""
    curve = Curve(pool_bytes=1000)
    for numbers in ([1, 2, 3], [4, 5, 6]):
        curve.stored(keys_of([]), 300)  # states only
        curve.stored(keys_of(numbers), 300)
    curve.looked_up(keys_of([1, 2, 3]), UNIT, (0, 48), 0, 0.0)
    # 1,200 bytes in all: of the older 600, those of two chunks still fit.
    assert curve.reading().missed_tokens == [48.0, 48.0, 16.0, 0.0, 0.0]


def test_what_the_pool_had_before_this_start_is_a_hit_of_its_size():
    curve = Curve(pool_bytes=1000)
    curve.looked_up(keys_of([1, 2, 3]), UNIT, (16, 48), 32, 0.0)
    assert curve.reading().missed_tokens == [32.0, 32.0, 16.0, 16.0, 16.0]
    curve.looked_up(keys_of([1, 2]), UNIT, (0, 32), 32, 0.0)
    assert curve.reading().missed_tokens == [32.0, 32.0, 16.0, 16.0, 16.0]


def test_old_windows_leave_the_recent_counts():
    curve = Curve(pool_bytes=1000)
    played(curve, [[1], [1]], at_s=1.0)
    played(curve, [[1]], at_s=2.0 + window_s)
    assert curve.reading().recent_wanted_tokens == 48
    played(curve, [[1]], at_s=3.0 + 2 * window_s)
    told = curve.reading()
    assert (told.recent_wanted_tokens, told.wanted_tokens) == (32, 64)
    assert (told.recent_missed_tokens[2], told.missed_tokens[2]) == (0, 16)


def counted(bed):
    body, _ = metrics.exposition(reading(bed))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families(body.decode())
        for sample in family.samples
    }
    return (
        found["kvferry_pool_curve_tokens_total",],
        found["kvferry_pool_curve_miss_tokens_total", "2"],
    )


def test_a_request_counts_once_and_its_own_saves_are_no_hits():
    bed, engine = Bed(), make_engine()
    bed.pipeline._core.journal.curve = Curve(64 * 1024)  # small enough to follow every key
    bed.probe(engine, 1, 1, 4)  # a hint of nothing is never asked about
    bed.stored(engine, 1, 4)
    bed.say(engine.scheduler, Release([1]))
    assert counted(bed) == (4 * BLOCK, 4 * BLOCK)
    bed.probe(engine, 2, 1, 4)
    bed.ask(engine, 2, most=4 * BLOCK)
    bed.ask(engine, 2, most=4 * BLOCK)
    assert counted(bed) == (8 * BLOCK, 4 * BLOCK)
    told = render.curve({"journal": {"curve": as_told(bed)}})
    assert told.endswith("holds 50% of the tokens, half of it 50%, twice 50%")


def test_nothing_is_said_of_nothing():
    assert render.curve({"journal": {"curve": as_told(Bed())}}) == ""


def as_told(bed):
    curve = bed.pipeline.snapshot(bed.now_s).journal.curve
    return {name: getattr(curve, name) for name in curve.__struct_fields__}
