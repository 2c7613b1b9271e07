"""The metrics in Prometheus' and OpenMetrics' text, from one Reading: nothing is counted twice."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvferry_sidecar.observe.reading import Reading
from kvferry_sidecar.observe.table import COUNTERS, GAUGES, HISTOGRAMS, Row
from kvferry_sidecar.outcomes.histogram import HistogramReading


class Collection(Collector):
    """The table read from one Reading, in the form prometheus-client encodes."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        for row in COUNTERS:
            counter = CounterMetricFamily(f"kvferry_{row.name}", row.help, labels=row.labels)
            yield self._filled(row, counter)
        for row in GAUGES:
            yield self._filled(
                row, GaugeMetricFamily(f"kvferry_{row.name}", row.help, labels=row.labels)
            )
        for bars in HISTOGRAMS:
            family = HistogramMetricFamily(f"kvferry_{bars.name}", bars.help, labels=bars.labels)
            for labels, one in bars.read(self._reading):
                family.add_metric(labels, _cumulative(one), one.sum)
            yield family

    def _filled(self, row: Row, family: CounterMetricFamily | GaugeMetricFamily) -> Metric:
        for labels, number in row.read(self._reading):
            family.add_metric(labels, float(number))
        return family


def exposition(reading: Reading, accept: str = "") -> tuple[bytes, str]:
    """Return the metrics and their content type, as OpenMetrics where ``accept`` asks for it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collection(reading))
    ProcessCollector(registry=registry)
    encode, kind = choose_encoder(accept)
    return encode(registry), kind


def _cumulative(reading: HistogramReading) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip((*reading.bounds, math.inf), reading.counts, strict=True):
        total += count
        name = "+Inf" if bound == math.inf else repr(bound)
        buckets.append((name, float(total)))
    return buckets
