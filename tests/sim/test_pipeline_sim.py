"""Seeded simulation of the pipeline between halves, a bad network and random copies."""

from __future__ import annotations

import os

import pytest
from kvferry_native import Pool
from support.sim_world import World

STEPS = 2_500
SEEDS = range(10)
SLAB = 1 << 20

# Each of these must have happened in the runs below, or the simulation tests less than it says.
MUST_FIRE = {
    "done",
    "failed/checksum",
    "failed/copy-failed",
    "failed/copy-deadline",
    "failed/fence",
    "cancelled/cancelled",
    "cancelled/peer-dead",
    "refused/tombstone",
    "refused/lease",
    "refused/jobs-max",
}
MUST_DECLINE = {"version", "absent", "staging", "leases-max"}
MUST_COUNT = {
    *("get_objects", "put_objects", "put_dropped_full", "put_evicted_before"),
    *("errors", "abandoned"),
}


def run(seed: int, steps: int, pool: object | None = None) -> World:
    world = World(seed, pool)
    try:
        for _ in range(steps):
            world.step()
        world.settle()
    except Exception as error:
        error.add_note(f"seed {seed}: repeat with run({seed}, {steps})")
        raise
    return world


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    return [run(seed, STEPS) for seed in SEEDS]


def test_invariants_hold_and_everything_ends(worlds):
    assert sum(world.loaded for world in worlds) > 100


def test_what_the_simulation_must_reach_was_reached(worlds):
    snapshots = [world.pipeline.snapshot() for world in worlds]
    reasons = {reason for s in snapshots for reason in s.ledger.reasons}
    declines = {reason for s in snapshots for reason in s.declines}
    assert reasons >= MUST_FIRE, MUST_FIRE - reasons
    assert declines >= MUST_DECLINE, MUST_DECLINE - declines
    for name in ("need_full", "beat_falls", "idle_falls", "outcomes_resent"):
        assert sum(getattr(s, name) for s in snapshots) > 0, name
    assert sum(s.tombstone_collapses for s in snapshots) > 0
    assert sum(s.admissions_dropped for s in snapshots) > 0
    counts = {name for s in snapshots for tier in s.tiers for name, n in tier.counts.items() if n}
    assert counts >= MUST_COUNT, MUST_COUNT - counts
    assert sum(s.staging.get("asks_held", 0) for s in snapshots) > 100
    for skip in ("stored", "being-written", "pool-full"):
        assert sum(s.skips.get(skip, 0) for s in snapshots) > 0, skip


def test_a_seed_repeats_exactly():
    first, second = run(3, 400), run(3, 400)
    assert first.pipeline.snapshot() == second.pipeline.snapshot()
    assert first.frames == second.frames


@pytest.mark.parametrize("seed", range(100, 103))
def test_invariants_hold_over_the_native_pool(seed):
    size = Pool.segment_bytes_for(24 * SLAB, SLAB, 256)
    fd = os.memfd_create("pool", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        pool = Pool.create(fd, size, SLAB, 256, 1, 1)
        run(seed, STEPS, pool)
        pool.close()
    finally:
        os.close(fd)
