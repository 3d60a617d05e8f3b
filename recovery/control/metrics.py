"""The coordinator's metrics: counted from the run's events, read from its status when somebody asks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError

from prometheus_client import CollectorRegistry, Counter, Info
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from protos.recovery.v1 import operations_pb2
from recovery.control.owner import RunOwner
from recovery.control.wire import from_proto
from recovery.events import (
    EpochEnded,
    Event,
    FingerprintDiverged,
    LineageStarted,
    OrderDone,
    VersionSealed,
    WorkerAttached,
    WorkerLost,
    WorkerRejected,
    WorkerStalled,
)
from recovery.metrics import MetricsServer, OnScrape
from recovery.types import NO_VERSION

STATUS_SECONDS = 5.0
"""For a scrape; an owner that is busier than that answers without the run's numbers."""


class RunMetrics:
    """An event sink that counts. ``registry`` is what a ``MetricsServer`` serves."""

    def __init__(self, run_id: str, status: Callable[[], operations_pb2.ListResponse | None]) -> None:
        """Make the metrics.

        Args:
            run_id: Said by ``recovery_run_info``.
            status: The run as operators see it, or None if it cannot be had now; called from the server's threads.
        """
        self.registry = registry = CollectorRegistry()
        self._status = status
        Info("recovery_run", "Which run this is", registry=registry).info({"run_id": run_id})

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"recovery_run_{name}", what, labels, registry=registry)

        self._epochs = counter("epochs", "Boundaries that ended, by verdict", "verdict")
        self._sealed = counter("versions_sealed", "Versions whose fingerprint is agreed on")
        self._diverged = counter("fingerprints_diverged", "Reports that differed from the sealed fingerprint")
        self._lineages = counter("lineages_started", "Beginnings of history, by cause", "cause")
        self._workers = counter("worker_changes", "Workers that came, went, were refused or stood still", "change")
        self._orders = counter("orders", "Operators' orders, by kind and result", "order", "result")
        for verdict in ("committed", "aborted"):
            self._epochs.labels(verdict)
        for change in ("attached", "lost", "rejected", "stalled"):
            self._workers.labels(change)
        registry.register(OnScrape(self._read))

    def __call__(self, event: Event, /) -> None:
        match event:
            case EpochEnded():
                self._epochs.labels(event.verdict).inc()
            case VersionSealed():
                self._sealed.inc()
            case FingerprintDiverged():
                self._diverged.inc()
            case LineageStarted():
                self._lineages.labels(event.cause).inc()
            case WorkerAttached():
                self._workers.labels("attached").inc()
            case WorkerLost():
                self._workers.labels("lost").inc()
            case WorkerRejected():
                self._workers.labels("rejected").inc()
            case WorkerStalled():
                self._workers.labels("stalled").inc()
            case OrderDone():
                self._orders.labels(event.order, "failed" if event.failure else "ok").inc()
            case _:
                pass

    def _read(self) -> Iterable[Metric]:
        status = self._status()
        if status is None:
            return
        sealed = from_proto(status.sealed)
        gauges = [
            ("workers_alive", "Workers whose streams are open", status.alive),
            ("workers_ready", "Workers that take part in the next boundary", status.ready),
            ("roster_size_workers", "Members of the newest roster", status.participating),
            ("paused", "1: an operator has to choose", bool(status.paused)),
        ]
        if sealed != NO_VERSION:
            gauges += [
                ("sealed_lineage", "Lineage of the newest sealed version", sealed.lineage),
                ("sealed_outer_step", "Outer step of the newest sealed version", sealed.outer_step),
            ]
        for name, what, value in gauges:
            yield GaugeMetricFamily(f"recovery_run_{name}", what, value=float(value))
        behind = GaugeMetricFamily(
            "recovery_run_worker_behind_steps",
            "Outer steps from a worker's version to the sealed one",
            labels=["worker_id"],
        )
        for worker in status.workers:
            held = from_proto(worker.version)
            if worker.alive and held.lineage == sealed.lineage and sealed != NO_VERSION:
                behind.add_metric([worker.worker.worker_id], max(0, sealed.outer_step - held.outer_step))
        yield behind


class ServedMetrics:
    """A run's metrics on a port of their own. ``start``, ``ask``, ``stop``: on the coordinator's event loop."""

    def __init__(self, run_id: str, host: str, port: int) -> None:
        self._run_id = run_id
        self._metrics = RunMetrics(run_id, self._status)
        self._server = MetricsServer(self._metrics.registry, host, port)
        self._owner: RunOwner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, event: Event, /) -> None:
        self._metrics(event)

    def start(self) -> None:
        """Serve.

        Raises:
            BadConfiguration: the port cannot be had.
        """
        self._loop = asyncio.get_running_loop()
        self._server.start()

    def ask(self, owner: RunOwner) -> None:
        """Take the run's numbers from ``owner`` from now on."""
        self._owner = owner

    async def stop(self) -> None:
        """End; twice without harm."""
        self._owner = None
        await asyncio.to_thread(self._server.close)

    def _status(self) -> operations_pb2.ListResponse | None:
        owner, loop = self._owner, self._loop
        if owner is None or loop is None or loop.is_closed():
            return None
        request = operations_pb2.ListRequest(run_id=self._run_id)
        asked = asyncio.run_coroutine_threadsafe(owner.operate(f"metrics-{secrets.token_hex(8)}", request), loop)
        try:
            answer = asked.result(STATUS_SECONDS)
        except (TimeoutError, CancelledError):
            asked.cancel()
            return None
        return answer if isinstance(answer, operations_pb2.ListResponse) else None
