"""Reports what a worker holds and how far it is: fingerprints as soon as they are known, and advertisements."""

from __future__ import annotations

import logging
import queue
import statistics
import threading
from collections import deque

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.control.wire import duration, to_proto
from recovery.errors import RecoveryError
from recovery.events import BoundaryStage
from recovery.types import Version
from recovery.worker.context import Context

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 0.7


class Reporter:
    """Owns the thread ``recovery-report``."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._applied: queue.SimpleQueue[tuple[int, Version, bytes] | None] = queue.SimpleQueue()
        self._step_seconds: deque[float] = deque(maxlen=33)
        self._thread = threading.Thread(target=self._run, name="recovery-report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._applied.put(None)
            self._thread.join()

    def inner_step_took(self, seconds: float) -> None:
        """Note the length of one inner step; training thread."""
        self._step_seconds.append(seconds)

    def report_applied(self, epoch: int, version: Version, position: bytes) -> None:
        """Tell the coordinator ``version``'s fingerprint when its digest pass ends, and the data position with it.

        Returns at once.
        """
        self._applied.put((epoch, version, position))

    def wait_for_fingerprint(self, timeout_seconds: float) -> None:
        """Return when the fingerprint of the version in memory is known; training thread."""
        context = self._context
        version = context.standing.read().version
        manifest = context.snapshots.manifest(version, timeout_seconds)
        context.standing.update(fingerprint=manifest.fingerprint)

    def _run(self) -> None:
        clock = self._context.clock
        due = clock.monotonic() + _PERIOD_SECONDS
        while True:
            try:
                job = self._applied.get(timeout=max(due - clock.monotonic(), 0.0))
            except queue.Empty:
                # By the clock and not after each report: phases as long as the period would always show step 0.
                due = clock.monotonic() + _PERIOD_SECONDS
                self._advertise()
                continue
            if job is None:
                return
            try:
                self._report(*job)
            except RecoveryError as error:
                # The version was overwritten before its digests were ready: the other members seal it.
                logger.warning("%s: no fingerprint of %s: %s", self._context.worker, job[1], error)
            self._advertise()

    def _report(self, epoch: int, version: Version, position: bytes) -> None:
        context = self._context
        manifest = context.snapshots.manifest(version, context.config.boundary_timeout_seconds)
        if context.standing.read().version == version:
            context.standing.update(fingerprint=manifest.fingerprint)
        self._pass_stage("reporting", version, epoch)
        context.client.send(
            pb.WorkerMessage(
                applied=pb.Applied(
                    epoch=epoch,
                    version=to_proto(version),
                    fingerprint=manifest.fingerprint,
                    tokens=context.state.run_progress.tokens,
                    data_position=position,
                )
            )
        )
        self._pass_stage("reported", version, epoch)

    def _pass_stage(self, stage: str, version: Version, epoch: int) -> None:
        worker_id = self._context.worker.worker_id
        self._context.events(BoundaryStage(worker_id=worker_id, stage=stage, version=version, epoch=epoch))

    def _advertise(self) -> None:
        context = self._context
        stand = context.standing.read()
        waited = context.clock.monotonic() - stand.waiting_since if stand.waiting_for else 0.0
        stalled = context.snapshots.stall.total_seconds
        context.client.send(
            pb.WorkerMessage(
                advertisement=pb.Advertisement(
                    inner_step=context.state.local_progress.inner_step,
                    inner_steps_per_phase=context.config.inner_steps_per_phase,
                    seconds_per_inner_step=statistics.median(self._step_seconds) if self._step_seconds else 0.0,
                    free_slots=context.standing.read().free_slots,
                    version=to_proto(stand.version),
                    fingerprint=stand.fingerprint,
                    ready=stand.ready,
                    poisoned=stand.poisoned,
                    waiting_for=stand.waiting_for,
                    waited=duration(waited),
                    training_thread_stalled=duration(stalled),
                    trouble=stand.trouble,
                    tokens=context.state.run_progress.tokens,
                )
            )
        )
