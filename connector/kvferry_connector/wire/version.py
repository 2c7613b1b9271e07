"""The protocol range and how it may grow.

Evolution rule (tests/unit/wire/test_golden.py holds the bytes):

* Structs are encoded as arrays with a one-letter tag. A field is only ever appended, always
  with a default, and is never removed, reordered or given another meaning. An older reader
  ignores trailing fields it does not know; a newer reader fills missing ones from the default.
* A new message kind, or any change an older peer would misread, raises ``PROTOCOL_MAX``.
* A peer announces the range it speaks at attach; the sidecar picks the highest common number.
  No common number is a refusal that names both ranges.
"""

from __future__ import annotations

PROTOCOL_MIN = 1
PROTOCOL_MAX = 2
LEFT_SINCE = 2  # a Bye is answered


def negotiate(peer_min: int, peer_max: int) -> int | None:
    """Return the highest protocol both sides speak, or None when the ranges are disjoint."""
    best = min(peer_max, PROTOCOL_MAX)
    return best if best >= max(peer_min, PROTOCOL_MIN) else None
