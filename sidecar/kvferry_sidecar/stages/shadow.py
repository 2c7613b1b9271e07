"""Shadow verification: some hits are computed all the same, and compared with what is stored.

A watched hit is answered with 0, so that the engine computes it; one of its objects stays leased
here. When the request saves that chunk, which it would skip as stored, the engine's block is
gathered into a slot of its own as well and compared. Equal numbers are not expected: other batch
shapes round differently. What differs by more than rounding is not this prompt's KV, and every
object of its namespace is suspect: the namespace is quarantined (no hit, no save) until an operator
has looked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from kvferry_connector.wire.attach import RegisterRank
from numpy.typing import NDArray

from kvferry_sidecar.masks.kinds import FULL_FAMILY
from kvferry_sidecar.masks.objects import Objects
from kvferry_sidecar.sessions.admissions import Admission, Keys
from kvferry_sidecar.sessions.leases import LeaseKey
from kvferry_sidecar.sessions.model import Session
from kvferry_sidecar.stages.hits import keys_of
from kvferry_sidecar.stages.shape import SessionShape
from kvferry_sidecar.tiers.host import Entries, HostTier

checks_max = 64  # hits watched at a time
error_max = 0.1  # of the numbers, in norm: rounding gives a few per cent, another prompt about 1.4
equal_bytes_min = 0.5  # of packed formats, whose numbers are not read here
_FLOATS = {"torch.float16": np.float16, "torch.float32": np.float32}
_BFLOAT = "torch.bfloat16"


class ShadowReading(msgspec.Struct, frozen=True):
    """``dropped``: watched hits whose chunk was never saved; ``quarantined``: namespaces in hex."""

    watched: int
    open: int
    compared: int
    differed: int
    dropped: int
    quarantined: list[str]


@dataclass(frozen=True, slots=True)
class Check:
    """One object of a watched hit, leased here until it was compared."""

    engine: str
    namespace: bytes
    group: int
    key: Keys  # (1, 16)
    entries: Entries  # (1,)
    payload_bytes: int
    dtype: str


class Shadows:
    """Owned by the control loop. ``on_difference`` takes the namespace and what was seen."""

    def __init__(
        self,
        pool: HostTier,
        percent: int,
        quarantined: Sequence[bytes],
        on_difference: Callable[[bytes, str], None],
    ) -> None:
        self._pool = pool
        self._share = percent / 100
        self._on_difference = on_difference
        self._checks: dict[LeaseKey, Check] = {}
        self._claimed: set[LeaseKey] = set()
        self.quarantined = set(quarantined)
        self._due = 0.0
        self._watched = self._compared = self._differed = self._dropped = 0

    def watches(
        self,
        session: Session,
        shape: SessionShape,
        admission: Admission,
        wanted: Sequence[Objects],
    ) -> bool:
        """Whether this hit is to be computed instead; ``wanted``: its objects, per stored group."""
        key = LeaseKey(session.life, admission.number)
        if key in self._checks:
            return True
        self._due += self._share
        if self._due < 1.0 or len(self._checks) >= checks_max:
            return False
        self._due -= 1.0
        check = self._pick(session, shape, admission, wanted)
        if check is not None:
            self._checks[key] = check
            self._watched += 1
        return check is not None

    def find(self, key: LeaseKey) -> Check | None:
        """Return what is to be compared of this admission, unless a save does so already."""
        return None if key in self._claimed else self._checks.get(key)

    def claim(self, key: LeaseKey) -> None:
        """A save compares it: its end calls ``settle``, and the request's end drops nothing."""
        self._claimed.add(key)

    def settle(self, key: LeaseKey, scratch: Entries, *, whole: bool) -> None:
        """The engine's own block lies in ``scratch`` (1,), or does not: compare, let both go."""
        self._claimed.discard(key)
        check = self._checks.pop(key, None)
        try:
            if check is not None and whole:
                self._compare(check, scratch)
        finally:
            self._pool.abort(scratch)
            if check is not None:
                self._pool.release(check.entries)

    def drop(self, key: LeaseKey) -> None:
        """Its request has ended, or can be compared no more."""
        check = self._checks.pop(key, None) if key not in self._claimed else None
        if check is not None:
            self._dropped += 1
            self._pool.release(check.entries)

    def drop_life(self, life: bytes) -> None:
        """The engine is gone."""
        for key in [key for key in self._checks if key.life == life]:
            self.drop(key)

    def suspects(self, session: Session) -> bool:
        """Whether the session's namespace is quarantined."""
        return session.namespaces.get(session.version) in self.quarantined

    def reading(self) -> ShadowReading:
        """Return the counts so far."""
        return ShadowReading(
            watched=self._watched,
            open=len(self._checks),
            compared=self._compared,
            differed=self._differed,
            dropped=self._dropped,
            quarantined=sorted(namespace.hex() for namespace in self.quarantined),
        )

    def _compare(self, check: Check, scratch: Entries) -> None:
        self._compared += 1
        stored, computed = (
            self._pool.payload(entries, check.payload_bytes) for entries in (check.entries, scratch)
        )
        difference = differs(stored, computed, check.dtype)
        if difference:
            self._differed += 1
            self.quarantined.add(check.namespace)
            text = f"group {check.group} of {check.engine}: {difference}"
            self._on_difference(check.namespace, text)

    def _pick(
        self,
        session: Session,
        shape: SessionShape,
        admission: Admission,
        wanted: Sequence[Objects],
    ) -> Check | None:
        """Lease an object that the engine is sure to save: of full attention, another each time."""
        namespace = session.namespaces.get(admission.version)
        places = [
            (group, objects, keys)
            for group, objects, keys in zip(
                shape.stored_groups(), wanted, admission.keys, strict=True
            )
            if group.kind in FULL_FAMILY and len(objects.ends)
        ]
        if not places or namespace is None:
            return None
        group, objects, keys = places[self._watched % len(places)]
        row = self._watched % len(objects.ends)
        key = np.ascontiguousarray(keys_of(group, keys, objects)[row : row + 1])
        entries = self._pool.lease(key)
        if not len(entries):
            return None
        size, engine = group.stripe.payload_bytes, "/".join(session.key)
        dtype = _dtype_of(session, group.group)
        return Check(engine, namespace, group.group, key, entries, size, dtype)


def _dtype_of(session: Session, group: int) -> str:
    """Return what a group's pages hold, as a rank registered it: "" where that is not one dtype."""
    for peer in session.workers.values():
        if isinstance(peer.registration, RegisterRank):
            facts = peer.registration.groups[group].spec
            return "" if "members" in facts else facts.get("dtype", "")
    return ""


def differs(stored: NDArray[np.uint8], computed: NDArray[np.uint8], dtype: str) -> str:
    """Return how two payloads differ by more than rounding, "" when they do not."""
    if np.array_equal(stored, computed):
        return ""
    if dtype not in _FLOATS and dtype != _BFLOAT:
        share = float(np.mean(stored == computed))
        return "" if share >= equal_bytes_min else f"{share:.0%} of the bytes are equal"
    one, two = _numbers(stored, dtype), _numbers(computed, dtype)
    if not np.array_equal(np.isfinite(one), np.isfinite(two)):
        return "numbers that are not finite"
    one, two = np.nan_to_num(one, posinf=0, neginf=0), np.nan_to_num(two, posinf=0, neginf=0)
    norm = max(float(np.linalg.norm(one)), float(np.linalg.norm(two)))
    error = float(np.linalg.norm(one - two)) / norm if norm else 0.0
    return "" if error <= error_max else f"relative error {error:.2f}"


def _numbers(payload: NDArray[np.uint8], dtype: str) -> NDArray[np.float64]:
    if dtype == _BFLOAT:
        words = payload.view(np.uint16).astype(np.uint32) << 16
        return words.view(np.float32).astype(np.float64)
    return payload.view(_FLOATS[dtype]).astype(np.float64)
