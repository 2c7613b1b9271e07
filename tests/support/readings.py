"""Readings of a pipeline under test, as the control loop takes them."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
from kvferry_sidecar.desk import state_of
from kvferry_sidecar.doctor.finding import ok
from kvferry_sidecar.observe import status
from kvferry_sidecar.observe.reading import LoopView, Reading
from kvferry_sidecar.outcomes.histogram import Histogram
from support.pipeline_bed import Bed

POOL = SimpleNamespace(
    total_bytes=1 << 30, used_bytes=1 << 28, ready=10, writing=1, doomed=0, leased=2,
    keys_max=4096, evictions=3, dropped_before_reuse=1, slabs=64, slabs_free=48,
    quota_evictions=2, pinned_soft=3, pinned_hard=1, pinned_hard_bytes=4096,
)  # fmt: skip


def reading(bed=None, **degraded):
    bed = bed or Bed()
    turns = Histogram((0.001, 1.0))
    turns.observe(0.5)
    snapshot = bed.pipeline.snapshot(bed.now_s)
    view = LoopView(
        7, 0.5, 0, 2, 0, {"uid": 1, "connections-max": 4, "tenant-share": 2}, {"send_full": 3},
        0, turns.reading(), {"Probe": turns.reading()},
    )  # fmt: skip
    document = status.document(5, [], snapshot, POOL, view, {}, bed.now_s)
    state = state_of(draining=False, degraded=degraded)
    document = msgspec.structs.replace(document, state=state, degraded=degraded)
    return Reading(document, snapshot, view, bed.now_s, 1000.0, (ok("kernel", "fine"),))
