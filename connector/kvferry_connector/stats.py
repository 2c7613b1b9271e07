"""Counters of one half, in the form vLLM aggregates and logs."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


@dataclass
class FerryStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not followed
    """Counts since the last report: name -> number. Aggregation over ranks and steps is a sum."""

    data: dict[str, int] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget the counts."""
        self.data = {}

    def count(self, name: str, number: int = 1) -> None:
        """Add ``number`` to ``name``."""
        self.data[name] = self.data.get(name, 0) + number

    def aggregate(self, other: KVConnectorStats) -> FerryStats:
        """Return the sums of both."""
        merged = FerryStats(dict(self.data))
        for name, number in other.data.items():
            merged.count(name, number)
        return merged

    def reduce(self) -> dict[str, int | float]:
        """Return the counts as vLLM logs them."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def take(self) -> FerryStats | None:
        """Return what was counted and start anew; None (no object made) when nothing was."""
        if not self.data:
            return None
        taken = FerryStats(self.data)
        self.data = {}
        return taken
