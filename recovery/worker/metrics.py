"""A worker's metrics: counted from its events, read from its standing when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Info
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from recovery.clock import Clock
from recovery.events import (
    BoundaryStage,
    CatchUpRebased,
    CheckpointLoaded,
    CheckpointSaved,
    CheckpointSaveFailed,
    CheckpointSkipped,
    ChunkRefetched,
    CommitReplayed,
    DonorFailed,
    Event,
    LeaseTaken,
    OrderDone,
    StateRestored,
    TrainingThreadWaited,
    TransferEnded,
    TransferProgress,
)
from recovery.metrics import MetricsServer, OnScrape
from recovery.types import NO_VERSION
from recovery.worker.config import AgentConfig
from recovery.worker.context import Context


class WorkerMetrics:
    """An event sink that counts, and serves what it counted where a port is configured."""

    def __init__(self, config: AgentConfig, clock: Clock) -> None:
        """Make the metrics; nothing is opened.

        Args:
            config: Names the run, the worker, the interface and the port.
            clock: Tells how old the newest checkpoint is.
        """
        registry = CollectorRegistry()
        self._clock = clock
        self._context: Context | None = None
        self._server = (
            MetricsServer(registry, config.metrics_host, config.metrics_port) if config.metrics_port else None
        )
        self._last_saved: float | None = None
        self._verified: dict[str, int] = {}
        self._in_epoch = False
        Info("recovery_worker", "Which worker this is", registry=registry).info(
            {"run_id": config.run_id, "worker_id": config.worker_id}
        )

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"recovery_{name}", what, labels, registry=registry)

        self._transfers = counter("transfers", "Attempts to take the run's state from peers, by result", "result")
        self._payload = counter("transfer_payload_bytes", "Bytes that arrived from peers")
        self._reused = counter("transfer_reused_bytes", "Bytes that were here already and were not sent")
        self._verified_bytes = counter("transfer_verified_bytes", "Bytes whose digests were found right")
        self._transfer_seconds = counter("transfer_seconds", "Time spent in transfers")
        self._bad_chunks = counter("transfer_bad_chunks", "Chunks that did not have their digest and were asked again")
        self._donors_failed = counter("transfer_donors_failed", "Donors that were given up during transfers")
        self._replayed = counter("catch_up_commits_replayed", "Commits taken from the run's journal")
        self._rebased = counter("catch_up_rebases", "Bases given up because the run had moved on too far")
        self._restored = counter("states_restored", "Times that this worker took a state, by where from", "source")
        self._leases = counter("leases_taken", "Snapshots lent to joiners and to the checkpoint writer")
        self._boundaries = counter("boundaries", "Boundaries that this worker took part in, by outcome", "outcome")
        self._waited = counter("training_thread_waited_seconds", "Time that training stood still for others", "what")
        self._checkpoints = counter("checkpoints", "Checkpoints, by what became of them", "result")
        self._orders = counter("orders", "Operators' orders that it carried out, by kind and result", "order", "result")
        self._saved_bytes = counter("checkpoint_saved_bytes", "Bytes of the checkpoints that were saved")
        self._saving_seconds = counter("checkpoint_saving_seconds", "Time that the saver spent on them")
        self._saved_at = Gauge(
            "recovery_checkpoint_last_saved_timestamp_seconds", "When the newest one was saved", registry=registry
        )
        for result in ("ok", "failed"):
            self._transfers.labels(result)
        for outcome in ("committed", "aborted"):
            self._boundaries.labels(outcome)
        for result in ("saved", "failed", "skipped", "loaded"):
            self._checkpoints.labels(result)
        registry.register(OnScrape(self._read))

    def start(self, context: Context) -> None:
        """Serve, if a port is configured; at each scrape ``context`` is read.

        Raises:
            BadConfiguration: the port cannot be had.
        """
        self._context = context
        if self._server is not None:
            self._server.start()

    def close(self) -> None:
        """Stop serving; a second call does nothing."""
        if self._server is not None:
            self._server.close()

    def __call__(self, event: Event, /) -> None:
        match event:
            case TransferProgress():
                before = self._verified.get(event.transfer_id, 0)
                self._verified_bytes.inc(max(0, event.verified_bytes - before))
                self._verified[event.transfer_id] = max(before, event.verified_bytes)
            case TransferEnded():
                self._verified.pop(event.transfer_id, None)
                self._transfers.labels("failed" if event.failure else "ok").inc()
                self._payload.inc(event.payload_bytes)
                self._reused.inc(event.reused_bytes)
                self._transfer_seconds.inc(event.took_seconds)
            case ChunkRefetched():
                self._bad_chunks.inc()
            case DonorFailed():
                self._donors_failed.inc()
            case CommitReplayed():
                self._replayed.inc()
            case CatchUpRebased():
                self._rebased.inc()
            case StateRestored():
                self._restored.labels(event.source).inc()
            case LeaseTaken():
                self._leases.inc()
            case BoundaryStage():
                self._boundary(event.stage)
            case TrainingThreadWaited():
                self._waited.labels(event.what).inc(event.waited_seconds)
            case OrderDone():
                self._orders.labels(event.order, "failed" if event.failure else "ok").inc()
            case CheckpointSaved():
                self._checkpoints.labels("saved").inc()
                self._saved_bytes.inc(event.num_bytes)
                self._saving_seconds.inc(event.took_seconds)
                self._last_saved = self._clock.wall()
                self._saved_at.set(self._last_saved)
            case CheckpointSaveFailed():
                self._checkpoints.labels("failed").inc()
            case CheckpointSkipped():
                self._checkpoints.labels("skipped").inc()
            case CheckpointLoaded():
                self._checkpoints.labels("loaded").inc()
            case _:
                pass

    def _boundary(self, stage: str) -> None:
        """Count an epoch once: it is committed when it was applied, aborted when the worker has to arrive again."""
        if stage == "rostered":
            self._in_epoch = True
        elif stage in ("applied", "arriving") and self._in_epoch:
            self._in_epoch = False
            self._boundaries.labels("committed" if stage == "applied" else "aborted").inc()

    def _read(self) -> Iterable[Metric]:
        context = self._context
        if context is None:
            return
        stand, sealed = context.standing.read(), context.inbox.sealed
        gauges: list[tuple[str, str, float]] = [
            ("ready", "1: takes part in the next boundary", stand.ready),
            ("poisoned", "1: holds a state that was not verified", stand.poisoned),
            ("free_slots", "Joiners that could be served beside the present ones", stand.free_slots),
        ]
        if stand.version != NO_VERSION:
            gauges += [
                ("version_lineage", "Lineage of the outer state in memory", stand.version.lineage),
                ("version_outer_step", "Outer step of the outer state in memory", stand.version.outer_step),
            ]
        if stand.version.lineage == sealed.lineage and sealed != NO_VERSION:
            lag = max(0, sealed.outer_step - stand.version.outer_step)
            gauges.append(("catch_up_lag_steps", "Outer steps by which the run is ahead of this worker", lag))
        if self._last_saved is not None:
            age = max(0.0, self._clock.wall() - self._last_saved)
            gauges.append(("checkpoint_age_seconds", "How long ago the newest checkpoint was saved", age))
        for name, what, value in gauges:
            yield GaugeMetricFamily(f"recovery_{name}", what, value=float(value))
        seconds = CounterMetricFamily(
            "recovery_training_thread_stall_seconds",
            "What serving cost the training thread, by cause",
            labels=["cause"],
        )
        copied = CounterMetricFamily(
            "recovery_training_thread_copied_bytes", "Copied on the training thread, by cause", labels=["cause"]
        )
        for cause, stall in context.snapshots.stall.by_cause().items():
            seconds.add_metric([cause], stall.seconds)
            copied.add_metric([cause], stall.num_bytes)
        yield seconds
        yield copied
