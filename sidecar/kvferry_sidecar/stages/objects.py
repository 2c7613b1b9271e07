"""What the pool holds, for operators: counted by namespace, listed, pinned, dropped and expired.

The pool is read in pages of ``scan_places_max`` places, one a turn: whoever wants all of it asks
again from the place that the answer names. Between two pages objects come and go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry_sidecar.errors import RequestError
from kvferry_sidecar.sessions.admissions import Keys
from kvferry_sidecar.stages.behind import split
from kvferry_sidecar.stages.core import Core
from kvferry_sidecar.stages.stores import StoreDesk
from kvferry_sidecar.tiers.host import Entries, Pin, Scan
from kvferry_sidecar.tiers.runner import CallResult, Drop, List
from kvferry_sidecar.tiers.store import Listed

expiry_step_s = 0.1  # between two pages that are looked at for objects past their time
evict_step = 4096  # objects that one turn evicts to come to a watermark
_Hex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{0,32}$")]
_Key = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
_Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
PinName = Literal["none", "soft", "hard"]
Tiers = Literal["host", "disk", "slower", "all"]
_PINS: tuple[PinName, ...] = ("none", "soft", "hard")  # by Pin


class Filter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which objects; what is left out fits all. ``namespace``: its first digits or all of them."""

    namespace: _Hex = ""
    older_s: _Natural = 0
    younger_s: _Natural = 0  # 0: any
    pin: PinName | None = None
    keys: Annotated[list[_Key], msgspec.Meta(max_length=1000)] = []


class NamespaceView(msgspec.Struct, frozen=True):
    """A namespace that has objects. Facts are known when an engine of it was here since the start.

    ``quota_bytes`` and ``ttl_s``: 0 where there is none.
    """

    namespace: str
    engine: str
    tenant: str
    model: str
    objects: int
    total_bytes: int
    quota_bytes: int
    ttl_s: int


class ObjectView(msgspec.Struct, frozen=True):
    """One object of the pool, ``bytes`` with what its slot rounds up to; or of a disk."""

    key: str
    namespace: str
    group: int
    age_s: int
    bytes: int
    pin: PinName


class ObjectsPage(msgspec.Struct, frozen=True):
    """Objects of one page; ``next``: the place to go on with, None at the end."""

    objects: list[ObjectView]
    next: int | None


class DiskPage(msgspec.Struct, frozen=True):
    """Objects of one page of a disk; ``next``: the key to go on behind, None at the end."""

    objects: list[ObjectView]
    next: str | None


class Changed(msgspec.Struct, frozen=True):
    """What an action did on one page. ``refused``: objects over ``pinned_percent_max``."""

    objects: int
    bytes: int
    refused: int
    next: int | None


class Objects:
    """Owned by the control loop."""

    def __init__(self, core: Core, desk: StoreDesk) -> None:
        self._core = core
        self._desk = desk
        self._expire_at_s = 0.0
        self._expire_from = 0
        self._evict_to_bytes: int | None = None  # while the pool is brought to a watermark
        self.expired = 0

    # --- questions ----------------------------------------------------------------------------

    def namespaces(self) -> list[NamespaceView]:
        """Return what every namespace has, most bytes first."""
        found = []
        for held in self._core.pool.holdings():
            known = self._core.journal.namespaces.find(held.namespace)
            facts = known.identity if known is not None else {}
            bounds = self._core.bounds_of(held.namespace)
            found.append(
                NamespaceView(
                    held.namespace.hex(),
                    known.engine if known is not None else "",
                    facts.get("tenant", ""),
                    facts.get("model", ""),
                    held.objects,
                    held.total_bytes,
                    bounds.quota_bytes,
                    bounds.ttl_s,
                )
            )
        return sorted(found, key=lambda one: -one.total_bytes)

    def page(self, wanted: Filter, first: int, most: int) -> ObjectsPage:
        """Return up to ``most`` objects of the page that begins at place ``first``."""
        names = {held.number: held.namespace.hex() for held in self._core.pool.holdings()}
        scan = self._scan(first)
        rows = self._rows(scan, wanted)
        next_place = scan.next if scan.next >= 0 else None
        if len(rows) > most:
            rows = rows[:most]
            next_place = int(scan.entries[rows[-1]]) + 1
        views = [
            ObjectView(
                scan.keys[row].tobytes().hex(),
                names.get(int(scan.owners[row]), ""),
                int(scan.groups[row]),
                int(scan.ages_s[row]),
                int(scan.bytes[row]),
                _PINS[scan.pins[row]],
            )
            for row in rows.tolist()
        ]
        return ObjectsPage(views, next_place)

    def on_disk(
        self, name: str, after: bytes, most: int, now_s: float
    ) -> Future[tuple[Listed, ...]]:
        """Ask a disk for its objects behind the key ``after``. Raises RequestError.

        So does the future, which ends when the disk has answered.
        """
        tier = next((one for one in self._desk.tiers if one.name == name), None)
        if tier is None or tier.source != "disk":
            raise RequestError(
                f"{name!r} is no disk of this sidecar",
                "see `kvferry objects count`; what remote stores hold is only counted",
            )
        if not tier.on:
            raise RequestError(f"{name} is {tier.state}: {tier.reason}", "mend it, or wait")
        asked: Future[tuple[Listed, ...]] = Future()

        def done(result: CallResult, _now_s: float) -> None:
            if not asked.set_running_or_notify_cancel():
                return  # whoever asked has given up
            if result.error or not result.started:
                text = f"{name} did not answer: {result.error or tier.reason}"
                asked.set_exception(RequestError(text, "see its state in `kvferry status`"))
            else:
                asked.set_result(result.listed)

        self._desk.send(tier, List(after, most), now_s, done)
        return asked

    # --- actions ------------------------------------------------------------------------------

    def pin(self, wanted: Filter, pin: PinName, first: int, *, dry_run: bool) -> Changed:
        """Pin what fits on one page. Hard pins stay within ``pinned_percent_max`` of the pool."""
        scan = self._scan(first)
        level = Pin(_PINS.index(pin))
        rows = self._rows(scan, wanted)
        rows = rows[scan.pins[rows] != level]
        refused = 0
        if level is Pin.HARD:
            stats = self._core.pool.stats()
            most = stats.total_bytes * self._core.limits.pinned_percent_max // 100
            room = np.cumsum(scan.bytes[rows]) <= max(0, most - stats.pinned_hard_bytes)
            refused = int(len(rows) - room.sum())
            rows = rows[room]
        if not dry_run and len(rows):
            self._core.pool.pin(scan.entries[rows], level)
        return _changed(scan, rows, refused)

    def drop(
        self, wanted: Filter, tiers: Tiers, first: int, now_s: float, *, dry_run: bool
    ) -> Changed:
        """Forget what fits on one page: in the pool, on the disks, in all slower tiers, or in all.

        Explicit keys are forgotten by slower tiers whether the pool has them or not.
        """
        scan = self._scan(first)
        rows = self._rows(scan, wanted)
        if not dry_run:
            if tiers != "host" and (first == 0 or not wanted.keys):
                named = [bytes.fromhex(key) for key in wanted.keys]
                keys = named or split(scan.keys[rows])
                self._drop_below(keys, now_s, disks_only=tiers == "disk")
            if tiers in ("host", "all"):
                self._drop(scan.entries[rows], scan.keys[rows])
        return _changed(scan, rows, 0)

    def evict(self, to_percent: int, *, dry_run: bool) -> int:
        """Evict the coldest from the next turn on, until so much of the pool is used.

        Returns the bytes that are to go. What is leased, being written or pinned stays.
        """
        stats = self._core.pool.stats()
        to_bytes = stats.total_bytes * to_percent // 100
        if not dry_run:
            self._evict_to_bytes = to_bytes
        return max(0, stats.used_bytes - to_bytes)

    def over_bytes(self) -> int:
        """Bytes that are still to go; 0 when nothing more can."""
        if self._evict_to_bytes is None:
            return 0
        return max(0, self._core.pool.stats().used_bytes - self._evict_to_bytes)

    def tick(self, now_s: float) -> float:
        """Make room and drop what is too old; returns seconds until wanted again."""
        return min(self._evict_some(), self._expire_some(now_s))

    def _evict_some(self) -> float:
        if self._evict_to_bytes is None:
            return math.inf
        evicted = self._core.pool.evict_to(self._evict_to_bytes, evict_step)
        self._core.note_evictions()
        if evicted == evict_step:
            return 0.0
        self._evict_to_bytes = None
        return math.inf

    def _expire_some(self, now_s: float) -> float:
        if not any(rule.ttl_s for rule in self._core.rules):
            return math.inf
        if now_s >= self._expire_at_s:
            self._expire_at_s = now_s + expiry_step_s
            self._expire(now_s)
        return self._expire_at_s - now_s

    def _expire(self, now_s: float) -> None:
        ttl_of = {
            held.number: self._core.bounds_of(held.namespace).ttl_s
            for held in self._core.pool.holdings()
        }
        if not any(ttl_of.values()):
            return
        scan = self._scan(self._expire_from)
        self._expire_from = max(scan.next, 0)
        ttls = np.zeros(max(ttl_of) + 1, np.int64)
        for number, ttl_s in ttl_of.items():
            ttls[number] = ttl_s
        of_each = ttls[scan.owners]
        late = (of_each > 0) & (scan.ages_s >= of_each) & (scan.pins != Pin.HARD)
        if late.any():
            self.expired += int(late.sum())
            self._drop_below(split(scan.keys[late]), now_s)
            self._drop(scan.entries[late], scan.keys[late])

    # --- parts --------------------------------------------------------------------------------

    def _scan(self, first: int) -> Scan:
        return self._core.pool.scan(first, self._core.limits.scan_places_max)

    def _rows(self, scan: Scan, wanted: Filter) -> NDArray[np.int64]:
        fits = np.ones(len(scan.entries), np.bool_)
        if wanted.namespace:
            numbers = [
                held.number
                for held in self._core.pool.holdings()
                if held.namespace.hex().startswith(wanted.namespace)
            ]
            fits &= np.isin(scan.owners, np.array(numbers, np.uint32))
        if wanted.older_s:
            fits &= scan.ages_s >= wanted.older_s
        if wanted.younger_s:
            fits &= scan.ages_s < wanted.younger_s
        if wanted.pin is not None:
            fits &= scan.pins == _PINS.index(wanted.pin)
        if wanted.keys:
            names = {bytes.fromhex(key) for key in wanted.keys}
            fits &= np.array([key in names for key in split(scan.keys)], np.bool_)
        return np.flatnonzero(fits)

    def _drop(self, entries: Entries, keys: Keys) -> None:
        if len(entries):
            self._core.pool.doom(np.ascontiguousarray(entries))
            self._core.announcer.left(keys.tobytes())

    def _drop_below(self, keys: list[bytes], now_s: float, *, disks_only: bool = False) -> None:
        """Have the slower tiers forget these keys; one that cannot be called keeps them."""

        def done(_result: CallResult, _now_s: float) -> None:
            """Nobody waits for it."""

        for tier in self._desk.tiers if keys else ():
            if tier.on and (tier.source == "disk" or not disks_only):
                self._desk.send(tier, Drop(tuple(keys)), now_s, done)


def disk_page(found: Sequence[Listed], wanted: Filter, most: int, wall_s: float) -> DiskPage:
    """Return those objects that fit of a page that was asked for ``most``. Raises RequestError."""
    if wanted.pin is not None or wanted.keys:
        raise RequestError("a disk has no pins, and a list cannot be listed", "leave them out")
    views = []
    for one in found:
        age_s = max(0, int(wall_s) - one.stored_s)
        namespace = one.whose.namespace.hex()
        young = not wanted.younger_s or age_s < wanted.younger_s
        if namespace.startswith(wanted.namespace) and age_s >= wanted.older_s and young:
            views.append(
                ObjectView(
                    one.key.hex(), namespace, one.whose.group, age_s, one.payload_bytes, "none"
                )
            )
    return DiskPage(views, found[-1].key.hex() if len(found) == most else None)


def _changed(scan: Scan, rows: NDArray[np.int64], refused: int) -> Changed:
    next_place = scan.next if scan.next >= 0 else None
    return Changed(len(rows), int(scan.bytes[rows].sum()), refused, next_place)
