"""A collector of traces: a real HTTP server that takes OTLP and decodes it."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Keeps every span. ``status`` is what it answers; ``headers`` are the last request's."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.endpoint = f"http://{address[0]}:{address[1]}/v1/traces"
        self.status = 200
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.refused = 0

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for one in request.resource_spans:
            self.resources.append({a.key: a.value.string_value for a in one.resource.attributes})
            for scope in one.scope_spans:
                self.spans += scope.spans

    def trace(self, request: str) -> dict[str, Any]:
        """Return the spans of a request's trace by name; {} while there is none."""
        roots = [s for s in list(self.spans) if facts(s).get("kvferry.request") == request]
        if not roots:
            return {}
        return {s.name: s for s in list(self.spans) if s.trace_id == roots[0].trace_id}


def facts(span: Any) -> dict[str, Any]:
    """Return a span's attributes."""
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        found[attribute.key] = getattr(attribute.value, kind)
    return found


@contextmanager
def running_collector() -> Iterator[Collector]:
    """Yield a collector that listens on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if collector.status == 200:
                collector.take(body)
            else:
                collector.refused += 1
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(server.server_address[:2])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
