"""Counters of one half, in the form vLLM aggregates and logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

_SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK, "p2p": CacheHitSource.P2P}


def split_hit(sources: Mapping[str, int], external_tokens: int) -> dict[CacheHitSource, int]:
    """Return ``external_tokens`` by tier; ``sources``: what the sidecar said they are of."""
    split: Counter[CacheHitSource] = Counter()
    for name, tokens in sources.items():
        split[_SOURCES.get(name, CacheHitSource.EXTERNAL_UNSPECIFIED)] += tokens
    if split.total() != external_tokens:
        split = Counter({CacheHitSource.HOST: external_tokens})
    return dict(+split)


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
        taken, self.data = self.data, {}
        return FerryStats(taken) if taken else None


class FerryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is not followed
    """The same counts in the engine's own /metrics: tokens by name, all else by ``event``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tokens = {
            name: self._counter_cls(f"vllm:kvferry_{name}", text, self._labelnames)
            for name, text in (
                ("loaded_tokens", "Tokens that loads were started for."),
                ("saved_tokens", "Tokens that saves were started for."),
            )
        }
        text = "Events of the connector and the bounds it hit, by name."
        self._events = self._counter_cls("vllm:kvferry_events", text, [*self._labelnames, "event"])

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted since the last report."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, number in transfer_stats_data.items():
            counter = self._tokens.get(name)
            if counter is not None:
                counter.labels(*labels).inc(number)
            else:
                self._events.labels(*labels, name).inc(number)
