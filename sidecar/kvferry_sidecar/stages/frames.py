"""Whether a probe's body and its raw frame belong together."""

from __future__ import annotations

from kvferry_connector.wire.hot import Probe

_hash_bytes_max = 64


def frame_fault(probe: Probe, raw: list[bytes]) -> str | None:
    """Return why body and raw frame do not belong together, or None."""
    if len(raw) != 1:
        return f"a probe has 1 raw frame, {len(raw)} came"
    if not 1 <= probe.hash_bytes <= _hash_bytes_max:
        return f"hash_bytes {probe.hash_bytes} is not in 1..{_hash_bytes_max}"
    if not 0 <= probe.start <= probe.total:
        return f"hashes {probe.start}..{probe.total} are no range"
    predecessor_bytes = probe.hash_bytes if probe.start else 0
    if len(probe.predecessor) != predecessor_bytes:  # it is kept: never more than a hash
        return f"a predecessor of {len(probe.predecessor)} bytes; it has {predecessor_bytes}"
    expected = (probe.total - probe.start) * probe.hash_bytes
    if len(raw[0]) != expected:
        return f"{len(raw[0])} bytes of hashes came, {expected} were announced"
    return None
