"""How long objects stay: a sample by their keys, from entering the pool to their eviction."""

from __future__ import annotations

import numpy as np
from kvferry_sidecar.stages import residence
from kvferry_sidecar.stages.residence import Residence, one_in
from support.pipeline_bed import Bed, make_engine


def keys(count, seed=1):
    return np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)


def test_one_in_so_many_is_told_with_its_time():
    told, some = Residence(), keys(4096)
    told.entered(some, 100.0)
    told.left(some[:2048].tobytes(), 130.0)
    told.left(some[2048:].tobytes(), 500.0)
    told.left(some.tobytes(), 900.0)  # gone already
    reading = told.reading()
    assert 0.7 < reading.count / (4096 / one_in) < 1.3
    assert 0.3 < reading.counts[reading.bounds.index(60.0)] / reading.count < 0.7
    assert reading.counts[reading.bounds.index(900.0)] == reading.count - reading.counts[2]


def test_who_enters_again_begins_again_and_strangers_are_not_told():
    told, some = Residence(), keys(512)
    told.entered(some, 100.0)
    told.entered(some, 1000.0)
    told.left(some.tobytes() + keys(512, seed=2).tobytes(), 1005.0)
    assert told.reading().counts[1] == told.reading().count > 0


def test_marks_are_bounded(monkeypatch):
    monkeypatch.setattr(residence, "marks_max", 8)
    told, some = Residence(), keys(4096)
    told.entered(some, 100.0)
    told.left(some.tobytes(), 101.0)
    assert told.reading().count == 8


def test_what_a_full_pool_evicts_is_told(monkeypatch):
    monkeypatch.setattr(residence, "one_in", 1)
    bed, engine = Bed(slots=4), make_engine()
    bed.stored(engine, 1, 4)
    bed.now_s += 45.0
    bed.stored(engine, 2, 4)
    found = bed.pipeline.snapshot().residence_seconds
    assert found.counts[found.bounds.index(60.0)] == found.count == 4
