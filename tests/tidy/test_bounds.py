"""Every bound of the sidecar is read by something, and something tells when it was reached."""

from __future__ import annotations

import ast

from kvferry_sidecar.limits import Limits
from support.sources import ROOT, python_files

SIDECAR = "sidecar/kvferry_sidecar/"
DECLARED = (f"{SIDECAR}limits.py", f"{SIDECAR}config.py")
REASONS = "outcomes/reasons.py"
SAMPLES, GEOMETRY = "observe/samples.py", "geometry/checks.py"
# What tells that a bound was reached: a file, and the reason, count or state it has there.
TOLD: dict[str, tuple[str, str]] = {
    "connections_max": (SAMPLES, "connections-max"),
    "hello_ms_max": (SAMPLES, "hello_ms_max"),
    "attach_out_bytes_max": (SAMPLES, "attach_out_bytes_max"),
    "versions_max": (REASONS, "version"),
    "sessions_max": (SAMPLES, "sessions-max"),
    "ranks_max": (SAMPLES, "ranks-max"),
    "admissions_max": (REASONS, "admissions-max"),
    "hashes_max": (REASONS, "hashes-max"),
    "key_bytes_max": (REASONS, "key-bytes-max"),
    "leases_max": (REASONS, "leases-max"),
    "lease_idle_ms_max": ("observe/table.py", "idle"),
    "stage_ms_max": ("stages/staging.py", "asks_out_of_time"),
    "stage_bytes_max": ("stages/staging.py", "stage_bytes_max"),
    "store_ms_max": ("stages/stores.py", "abandoned"),
    "abandoned_calls_max": ("stages/stores.py", "OFF"),
    "write_behind_max": ("stages/behind.py", "put_dropped_full"),
    "pinned_percent_max": ("stages/objects.py", "refused"),
    "warm_objects_max": ("stages/warm.py", "Taken"),
    "jobs_max": (REASONS, "jobs-max"),
    "tombstones_max": (SAMPLES, "tombstones_max"),
    "outcomes_unacked_max": (REASONS, "outcomes-max"),
    "fence_ms_max": (REASONS, "fence"),
    "copy_ms_max": (REASONS, "copy-deadline"),
    "ranks_wait_ms_max": (REASONS, "late"),
    "stall_ms_max": ("errors.py", "STALLED"),
    "loop_stall_ms_max": ("front.py", "Window"),
    "drain_ms_max": (REASONS, "drained"),
    "records_max": (SAMPLES, "records_max"),
    "announced_keys_max": ("stages/announce.py", "announced_keys_max"),
    "groups_max": (GEOMETRY, "groups_max"),
    "layers_max": (GEOMETRY, "layers_max"),
    "runs_max": ("geometry/validate.py", "raise limits.runs_max"),
    "facts_max": (GEOMETRY, "facts_max"),
    "text_chars_max": (GEOMETRY, "FieldRefusal"),
}
# Nothing is refused or lost at these: they are the size of one turn, call or page.
PACES = frozenset(
    {
        "stage_calls_max",
        "store_call_bytes_max",
        "scan_places_max",
        "save_copies_max",
        "messages_per_turn_max",
    }
)
BOUNDS = {name for name in Limits.__struct_fields__ if name.endswith("_max")}


def test_every_bound_is_read_by_what_it_bounds() -> None:
    read = {
        node.attr
        for source in python_files()
        if source.path.startswith(SIDECAR) and source.path not in DECLARED
        for node in ast.walk(source.tree())
        if isinstance(node, ast.Attribute)
    }
    assert read >= BOUNDS, f"nothing reads {sorted(BOUNDS - read)}"


def test_every_bound_tells_when_it_was_reached() -> None:
    assert TOLD.keys() | PACES == BOUNDS, "name what tells of a new bound"
    for bound, (path, told) in TOLD.items():
        tree = ast.parse((ROOT / SIDECAR / path).read_text())
        words = {
            node.value if isinstance(node, ast.Constant) else getattr(node, "id", None) or node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant | ast.Name | ast.Attribute)
        }
        assert told in words, f"{bound}: {path} has no {told!r}"
