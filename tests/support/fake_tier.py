"""A slower tier over symbolic memory: calls return when the test says so, and as it says.

Objects are values as in fake_copies.py, one per shard, at the payload's address.
"""

from __future__ import annotations

from kvferry_sidecar.tiers.runner import Call, CallResult, Drop, Find, Get, Put
from kvferry_sidecar.tiers.store import Item, Whose
from support.fake_copies import FakeCopies, checksum


class FakeTier:
    def __init__(
        self,
        copies: FakeCopies,
        pool_address: int,
        *,
        source: str = "disk",
        threads: int = 4,
        running_max: int | None = None,
    ) -> None:
        self.name = f"{source} under test"
        self.source = source
        self.value_bytes_max = 1 << 20
        self.batch_max = 4
        self.threads = threads
        self.stored: dict[bytes, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # values, crcs
        self.whose: dict[bytes, Whose] = {}  # as last put
        self.open: dict[int, Call] = {}  # as submitted
        self.answering = True  # False: every call fails as a whole
        self._copies = copies
        self._address = pool_address
        self._results: list[CallResult] = []
        self._running_max = threads if running_max is None else running_max

    # --- SlowTier ---------------------------------------------------------------------------

    def submit(self, ticket: int, call: Call) -> None:
        self.open[ticket] = call

    def take_back(self) -> None:
        for ticket in list(self.open)[self._running_max :]:
            del self.open[ticket]
            self._results.append(CallResult(ticket, False, 0.0))

    def collect(self) -> list[CallResult]:
        results, self._results = self._results, []
        return results

    def facts(self) -> dict[str, str | int]:
        return {"objects": len(self.stored)}

    # --- what the test says -----------------------------------------------------------------

    def finish(self, ticket: int, *, error: str = "", final: bool = False) -> None:
        """Let a call return."""
        call = self.open.pop(ticket)
        if error or not self.answering:
            error = error or "it is away"
            self._results.append(CallResult(ticket, True, 0.0, error, final))
            return
        result = CallResult(ticket, True, 0.0)
        match call:
            case Find():
                found = tuple(tuple(key in self.stored for key in keys) for keys in call.lists)
                result = CallResult(ticket, True, 0.0, found=found)
            case Get():
                crcs = tuple(self._get(item) for item in call.items)
                result = CallResult(ticket, True, 0.0, crcs=crcs)
            case Put():
                for item in call.items:
                    values = tuple(self._copies.memory[at] for at in self._places(item))
                    self.stored[item.key] = (values, item.crcs)
                    self.whose[item.key] = item.whose
                result = CallResult(ticket, True, 0.0, stored=(True,) * len(call.items))
            case Drop():
                for key in call.keys:
                    self.stored.pop(key, None)
        self._results.append(result)

    def finish_all(self) -> None:
        for ticket in list(self.open):
            self.finish(ticket)

    def of_kind(self, kind: type) -> list[int]:
        """Tickets of the open calls of one kind."""
        return [ticket for ticket, call in self.open.items() if isinstance(call, kind)]

    def _get(self, item: Item) -> tuple[int, ...] | None:
        if item.key not in self.stored:
            return None
        values, crcs = self.stored[item.key]
        assert len(values) == len(item.form.shard_bytes)
        if crcs != tuple(checksum(value, item.seed) for value in values):
            del self.stored[item.key]  # the runner would find out
            return None
        for at, value in zip(self._places(item), values, strict=True):
            self._copies.memory[at] = value
        return crcs

    def _places(self, item: Item) -> list[int]:
        at = item.address - self._address
        places = []
        for size in item.form.shard_bytes:
            places.append(at)
            at += size
        return places
