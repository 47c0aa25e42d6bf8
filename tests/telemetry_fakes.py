"""Telemetry with chosen values, and a server of a page of metrics."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from optimizer.core.endpoint import Endpoint
from optimizer.core.resource_usage import ResourceUsage


@dataclass(frozen=True)
class FixedTelemetry:
    """Telemetry that records the same usage on each server."""

    usage: ResourceUsage

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
        yield replace(self.usage)  # a wrapper adds its metrics to the record


@contextlib.contextmanager
def metrics_server(page: Callable[[], str]) -> Iterator[str]:
    """Serve the current ``page`` at /metrics, and yield the address of the server."""

    class MetricsHandler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(page().encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), MetricsHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
