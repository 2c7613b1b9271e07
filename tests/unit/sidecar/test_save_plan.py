"""A save of full attention, planned as a run of chunks, is what the masks say, chunk by chunk."""

from __future__ import annotations

import os
import random

import numpy as np
from kvferry_connector.wire.hot import SaveJob
from kvferry_sidecar.masks.kinds import Kind
from kvferry_sidecar.masks.rules import GroupRule, Rules
from kvferry_sidecar.outcomes.reasons import Decline
from kvferry_sidecar.plan.shards import StripeShape
from kvferry_sidecar.plan.tables import Table
from kvferry_sidecar.stages.save_plan import _plan_kept, _plan_run
from kvferry_sidecar.stages.shape import GroupShape

HASH = 8  # bytes
NUM_BLOCKS = 50
STRIPE = StripeShape(
    offsets=(0,), shards=(0,), payload_bytes=64, shard_count=1, turns=(slice(0, None, 1),)
)


def test_a_run_is_what_the_masks_keep() -> None:
    rng = random.Random(7)
    planned = declined = 0
    for _ in range(400):
        unit = rng.choice([16, 32])
        block = unit * rng.randint(1, 3)
        rules = Rules((GroupRule(Kind.FULL, block),), unit, block, block)
        shape = GroupShape(0, Kind.FULL, block, block, block // unit, 0, "all", NUM_BLOCKS, STRIPE)
        first, chunks = rng.randint(0, 5), rng.randint(0, 6)
        start, end = first * block, (first + chunks) * block
        first_hash = max(0, start // unit - rng.randint(0, 2))
        job = SaveJob(
            job=1, life=b"", version=b"", request="r", admission=1, step=1, start_tokens=start,
            end_tokens=end, first_hash=first_hash, hash_bytes=HASH, tables=[], prefill_tokens=end,
        )  # fmt: skip
        ids = [rng.randint(0 if rng.random() < 0.1 else 1, NUM_BLOCKS) for _ in range(chunks)]
        covered = chunks - (rng.random() < 0.1)
        table = Table(0, first, np.array(ids[: max(0, covered)], dtype=np.int32))
        bulk = ({0: table}, os.urandom(HASH * (end // unit - first_hash)))
        run = _plan_run(rules, shape, b"n" * 16, job, bulk)
        kept = _plan_kept(rules, shape, b"n" * 16, job, bulk)
        if isinstance(run, Decline) or isinstance(kept, Decline):
            assert run == kept
            declined += 1
            continue
        planned += 1
        assert run.ends.tolist() == kept.ends.tolist()
        assert run.keys.tolist() == kept.keys.tolist()
        assert run.blocks.tolist() == kept.blocks.tolist()
    assert planned > 50
    assert declined > 50
