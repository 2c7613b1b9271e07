"""Traces by OTLP over HTTP, with OpenTelemetry's own exporter. Imported only where traces are on.

The exporter reads its further settings from OpenTelemetry's variables: headers for a collector
that wants a key, certificates, compression (OTEL_EXPORTER_OTLP_TRACES_HEADERS and its kin).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from kvferry_sidecar.observe.spans import flat, parent_of, spans_of, trace_id_of
from kvferry_sidecar.outcomes.records import Record

export_s_max = 5.0  # one call, its repetitions included
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Otlp:
    """One collector. Every method runs in the traces' thread."""

    def __init__(self, endpoint: str, facts: Mapping[str, str]) -> None:
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        logging.getLogger("opentelemetry").propagate = False  # traces.py says what failed
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=export_s_max)
        self._resource = Resource({"service.name": "kvferry", **facts})
        self._scope = InstrumentationScope("kvferry")

    def export(self, records: list[Record], wall_ns: int) -> bool:
        """Send the traces of records; ``wall_ns``: what the monotonic clock's 0 was in time."""
        spans = [span for record in records for span in self._spans(record, wall_ns)]
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Give up what is being sent."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call] # of their library

    def _spans(self, record: Record, wall_ns: int) -> list[ReadableSpan]:
        trace_id, parent = trace_id_of(record), parent_of(record)
        above = None
        if parent is not None:
            above = _context(trace_id, parent.span_id, remote=True)
        contexts: list[SpanContext] = []
        found = []
        for span, number in flat(spans_of(record)):
            name = f"{trace_id}/{record.admission}/{len(contexts)}/{record.at_s!r}"
            own = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
            contexts.append(_context(trace_id, own))
            found.append(
                ReadableSpan(
                    name=f"kvferry.{span.name}",
                    context=contexts[-1],
                    parent=above if number is None else contexts[number],
                    resource=self._resource,
                    attributes=span.facts,
                    kind=SpanKind.SERVER if number is None else SpanKind.INTERNAL,
                    status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                    start_time=wall_ns + int(span.start_s * 1e9),
                    end_time=wall_ns + int(span.end_s * 1e9),
                    instrumentation_scope=self._scope,
                )
            )
        return found


def _context(trace_id: str, span_id: str, *, remote: bool = False) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), remote, _SAMPLED)
