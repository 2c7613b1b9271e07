"""The metrics in Prometheus' and OpenMetrics' text, from one Reading: nothing is counted twice."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as Encoded

from kvferry_sidecar.observe.reading import Reading
from kvferry_sidecar.observe.table import COUNTERS, GAUGES, HISTOGRAMS, Row
from kvferry_sidecar.observe.traces import Exemplar
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
                # Traces know the stages of jobs only.
                known = self._exemplars("/".join(labels)) if "stage" in bars.labels else ()
                family.add_metric(labels, _cumulative(one, known), one.sum)
            yield family

    def _exemplars(self, name: str) -> tuple[Exemplar, ...]:
        traces = self._reading.traces
        return traces.exemplars.get(name, ()) if traces is not None else ()

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


def _cumulative(
    reading: HistogramReading, known: Sequence[Exemplar]
) -> list[tuple[str, float] | tuple[str, float, Encoded]]:
    """Return the buckets, each with the newest known value that lies in it."""
    latest = {bisect_left(reading.bounds, one.value): one for one in known}
    total = 0
    buckets: list[tuple[str, float] | tuple[str, float, Encoded]] = []
    for number, (bound, count) in enumerate(
        zip((*reading.bounds, math.inf), reading.counts, strict=True)
    ):
        total += count
        name = "+Inf" if bound == math.inf else repr(bound)
        if one := latest.get(number):
            shown = Encoded({"trace_id": one.trace_id}, one.value, one.at_s)
            buckets.append((name, float(total), shown))
        else:
            buckets.append((name, float(total)))
    return buckets
