"""Events of the snapshot storey, told to the worker's sink."""

from __future__ import annotations

from collections.abc import Mapping

from recovery.events import (
    EventSink,
    GuardCopied,
    LeaseEnded,
    LeaseTaken,
    SnapshotCaptured,
    TrainingThreadStalled,
    TrainingThreadWaited,
)
from recovery.snapshot.capture_records import Captured
from recovery.snapshot.stall import Stall
from recovery.types import Version, WorkerRef


class Reports:
    """Says what happened, in whose name. May be called from any thread."""

    def __init__(self, events: EventSink, worker: WorkerRef) -> None:
        self._events = events
        self._worker_id = worker.worker_id

    def lease_taken(self, holder: str, version: Version, *, until_boundary: bool) -> None:
        self._events(
            LeaseTaken(worker_id=self._worker_id, holder=holder, version=version, until_boundary=until_boundary)
        )

    def lease_ended(self, holder: str, version: Version, reason: str) -> None:
        self._events(LeaseEnded(worker_id=self._worker_id, holder=holder, version=version, reason=reason))

    def captured(self, captured: Captured) -> None:
        self._events(
            SnapshotCaptured(
                worker_id=self._worker_id,
                cut=captured.cut,
                num_bytes=sum(part.bytes.num_bytes for part in captured.parts),
                copied_on_training_thread_bytes=captured.copied_on_training_thread_bytes,
                training_thread_seconds=captured.training_thread_seconds,
            )
        )

    def guard_copied(self, version: Version, copied_bytes: int, void_pulls: int, seconds: float) -> None:
        self._events(
            GuardCopied(
                worker_id=self._worker_id,
                version=version,
                copied_bytes=copied_bytes,
                void_pulls=void_pulls,
                training_thread_seconds=seconds,
            )
        )

    def stalled(self, version: Version, by_cause: Mapping[str, Stall]) -> None:
        """What the training thread spent on snapshots up to the publication of ``version``, since the one before."""
        if not by_cause:
            return
        self._events(
            TrainingThreadStalled(
                worker_id=self._worker_id,
                version=version,
                causes=tuple(by_cause),
                seconds=tuple(stall.seconds for stall in by_cause.values()),
                copied_bytes=tuple(stall.num_bytes for stall in by_cause.values()),
            )
        )

    def waited(self, seconds: float, for_whom: str) -> None:
        self._events(
            TrainingThreadWaited(
                worker_id=self._worker_id,
                what="the copy of private parts",
                for_whom=for_whom,
                waited_seconds=seconds,
            )
        )
