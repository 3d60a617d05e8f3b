"""Metrics over HTTP in Prometheus' format: the server that a worker and the coordinator share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from http.server import ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import MetricsHandler
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from recovery.errors import BadConfiguration

PATH = "/metrics"

_CLIENT_SECONDS = 10.0
"""A client that says nothing for so long is cut off: it must not hold a thread for ever."""
_POLL_SECONDS = 0.05


class OnScrape(Collector):
    """Metrics that are read when somebody asks, not kept."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return them as of now; any thread."""
        return self._read()

    def describe(self) -> Iterable[Metric]:
        """Return nothing: their names are known once they are read."""
        return []


class MetricsServer:
    """Serves a registry under ``/metrics``. Owns the thread ``recovery-metrics`` and one thread a request."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Store references.

        Args:
            registry: What is served.
            host: Interface to bind. Metrics are not secret, and not protected.
            port: TCP port.
        """
        self._registry = registry
        self._host = host
        self._port = port
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The bound port; 0 before ``start``."""
        return self._server.server_address[1] if self._server is not None else 0

    def start(self) -> None:
        """Listen; a second call does nothing.

        Raises:
            BadConfiguration: the port is taken, or the host is not this machine's.
        """
        if self._server is not None:
            return
        handler = type("_Handler", (_Handler,), {"registry": self._registry})
        try:
            self._server = _Server((self._host, self._port), handler)
        except (OSError, OverflowError) as error:
            reason = "a port is at most 65535" if isinstance(error, OverflowError) else error.strerror or str(error)
            raise BadConfiguration(
                f"metrics cannot be served on {self._host}:{self._port}: {reason}; take another metrics port, or 0 to "
                "serve none"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="recovery-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving; a second call does nothing."""
        server, self._server = self._server, None
        if server is None:
            return
        server.shutdown()
        server.server_close()
        if self._thread is not None:
            self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a client that hangs must not keep the process from ending
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client that goes away in the middle of an answer is its own affair."""


class _Handler(MetricsHandler):
    timeout = _CLIENT_SECONDS

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.send_error(404, f"metrics are under {PATH}")
            return
        super().do_GET()
