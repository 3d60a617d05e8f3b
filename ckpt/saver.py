"""Saving in the background: the training thread hands over leases and goes on; failures come back to it, loudly."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from ckpt.background import Background
from ckpt.catalog import Catalog
from ckpt.reader import Checkpoint, open_checkpoint
from ckpt.retention import Retention
from ckpt.saving import OnFailure, SaveCallbacks, SaverConfig, SaverStatus, SaveSource, SaveTicket, WhenFull
from ckpt.storage import Storage
from ckpt.writer import WriteReport, write_checkpoint
from recovery.clock import Clock, SystemClock
from recovery.errors import CheckpointFailed, CheckpointRejected, MisuseError, RecoveryError
from recovery.events import CheckpointSaved, CheckpointSaveFailed, CheckpointSkipped, EventSink, TrainingThreadWaited
from recovery.types import RunId, Version, WorkerRef

__all__ = [
    "OnFailure",
    "SaveCallbacks",
    "SaveSource",
    "SaveTicket",
    "Saver",
    "SaverConfig",
    "SaverStatus",
    "WhenFull",
]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(slots=True)
class _Task:
    ticket: SaveTicket
    sources: Sequence[SaveSource]
    records: Mapping[str, object]


class Saver:
    """Writes checkpoints on a thread of its own, one after the other.

    ``save`` and ``close`` belong to one thread, usually the training thread; everything else may be called from any.
    """

    def __init__(
        self,
        storage: Storage,
        config: SaverConfig,
        *,
        run_id: RunId,
        worker: WorkerRef,
        events: EventSink,
        clock: Clock | None = None,
        callbacks: Sequence[SaveCallbacks] = (),
        then: Callable[[Version], None] | None = None,
    ) -> None:
        """Store references.

        Args:
            storage: The root.
            config: Behaviour.
            run_id: Whose steps retention may touch.
            worker: Who saves; for events and log lines.
            events: Where saves, failures and skips are told.
            clock: Measures.
            callbacks: Called around saves, in this order.
            then: Told each saved version, on the saver's thread; the uploader's ``upload``, for example.
        """
        self._storage = storage
        self._config = config
        self._worker = worker
        self._run_id = run_id
        self._events = events
        self._clock = clock or SystemClock()
        self._callbacks = tuple(callbacks)
        self._then = then
        self._retention = Retention(storage, run_id, config.retention, worker.worker_id) if config.retention else None
        self._lock = threading.Lock()
        self._jobs = Background("ckpt-saver", self._save, done=lambda task: task.ticket.end())
        self._saved = self._failed = self._skipped = self._in_a_row = 0
        self._unseen: CheckpointFailed | None = None
        self._last_failure = ""
        self._last_saved: Version | None = None
        self._last_of: dict[bool, Version] = {}

    def start(self) -> None:
        """Start the thread; a second call does nothing."""
        self._jobs.start()

    def __enter__(self) -> Saver:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def status(self) -> SaverStatus:
        """What happened so far."""
        in_flight = self._jobs.in_flight
        with self._lock:
            return SaverStatus(
                saved=self._saved,
                failed=self._failed,
                skipped=self._skipped,
                in_flight=in_flight,
                failures_in_a_row=self._in_a_row,
                last_failure=self._last_failure,
                last_saved=self._last_saved,
            )

    def save(self, sources: Sequence[SaveSource], records: Mapping[str, object] | None = None) -> SaveTicket | None:
        """Have the sources written in the background; return at once, unless full and told to wait.

        The sources belong to the saver from here on, whatever happens: it releases each.

        Args:
            sources: Leases or copies, all of one version of this worker.
            records: Side records, JSON values by name.

        Returns:
            The save, or None if it was skipped.

        Raises:
            CheckpointFailed: earlier saves failed, as often as the policy allows. This one was not begun.
            MisuseError: not started, or closed.
        """
        version = sources[0].manifest.cut.version if sources else None
        taken = False
        try:
            if version is None:
                raise MisuseError("save() needs at least one source")
            if not self._jobs.running:
                raise MisuseError("save() on a saver that is not running")
            self._surface()
            extra: dict[str, object] = dict(records or {})
            if not self._admit(version):
                return None
            for callback in self._callbacks:
                if callback.before is not None:
                    extra.update(callback.before([source.manifest for source in sources]) or {})
            task = _Task(SaveTicket(version), tuple(sources), extra)
            self._jobs.put(task)
            taken = True
            return task.ticket
        finally:
            if not taken:
                for source in sources:
                    source.release("not saved")

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Return whether no save is under way within the time."""
        return self._jobs.wait_below(1, timeout_seconds)

    def close(self) -> None:
        """End the thread after the saves under way; a second call does nothing.

        Raises:
            CheckpointFailed: a save failed that no call has reported yet and the policy does not only warn, or a save
                has not ended in time.
        """
        ended = self._jobs.end(self._config.close_timeout_seconds)
        if ended is None:
            return
        if not ended:
            raise CheckpointFailed(
                f"{self._worker}: a save to {self._storage.url} has not ended within "
                f"{self._config.close_timeout_seconds:g} s of close; the process may end without it"
            )
        if self._config.on_failure is OnFailure.FAIL_AFTER and self._unseen is not None:
            raise CheckpointFailed(f"the last save failed: {self._unseen}") from self._unseen
        self._surface()

    def _surface(self) -> None:
        with self._lock:
            failure, in_a_row = self._unseen, self._in_a_row
            enough = {
                OnFailure.WARN: False,
                OnFailure.FAIL: True,
                OnFailure.FAIL_AFTER: in_a_row >= self._config.fail_after,
            }[self._config.on_failure]
            if failure is None or not enough:
                return
            self._unseen = None
        raise CheckpointFailed(
            f"{self._worker}: {in_a_row} saves in a row failed, the last one: {failure}"
        ) from failure

    def _admit(self, version: Version) -> bool:
        limit, began = self._config.max_in_flight, self._clock.monotonic()
        if self._jobs.wait_below(limit, 0):
            return True
        if self._config.when_full is WhenFull.SKIP:
            with self._lock:
                self._skipped += 1
            reason = f"{self._jobs.in_flight} saves are under way and max_in_flight is {limit}"
            logger.warning("%s: checkpoint %s is skipped: %s", self._worker, version, reason)
            url = self._storage.url_of(f"step_{version.lineage}_{version.outer_step}")
            self._events(CheckpointSkipped(worker_id=self._worker.worker_id, url=url, reason=reason))
            return False
        self._jobs.wait_below(limit)
        self._events(
            TrainingThreadWaited(
                worker_id=self._worker.worker_id,
                what="checkpoint",
                for_whom=self._storage.url,
                waited_seconds=self._clock.monotonic() - began,
            )
        )
        return True

    def _save(self, task: _Task) -> None:
        began = self._clock.monotonic()
        outcome = "not saved"
        try:
            task.ticket.reports = self._write(task)
            outcome = "saved"
        except Exception as error:  # the thread's root: one save must not take the next with it
            failure = error if isinstance(error, CheckpointFailed) else _failure_of(error)
            # One line for what storage does to us, which may come at every step; a traceback for what is our own fault.
            unexpected = None if isinstance(error, RecoveryError | OSError) else error
            logger.error("%s: %s", self._worker, failure, exc_info=unexpected)
            task.ticket.failure = failure
            self._note_failure(task, failure)
        finally:
            for source in task.sources:
                source.release(outcome)
        if outcome == "saved":
            self._note_success(task, self._clock.monotonic() - began)

    def _write(self, task: _Task) -> list[WriteReport]:
        with ExitStack() as opened:
            previous = self._previous(opened) if self._config.link_unchanged else []
            reports = write_checkpoint(
                self._storage, task.sources, records=task.records, previous=previous, clock=self._clock
            )
        if self._config.verify_after:
            for report in reports:
                with self._open(report.manifest.cut.version, private=not _is_replicated(report)) as checkpoint:
                    try:
                        checkpoint.verify()
                    except CheckpointRejected as error:
                        raise CheckpointFailed(f"what was just saved does not verify: {error}") from error
        return reports

    def _previous(self, opened: ExitStack) -> list[Checkpoint]:
        found: list[Checkpoint] = []
        newest = None if len(self._last_of) == 2 else Catalog(self._storage, self._run_id).newest()
        for private in (False, True):
            version = self._last_of.get(private, newest.version if newest is not None else None)
            if version is not None:
                try:
                    found.append(opened.enter_context(self._open(version, private=private)))
                except CheckpointRejected as error:
                    logger.debug("nothing to link to: %s", error)
        return found

    def _open(self, version: Version, *, private: bool) -> Checkpoint:
        return open_checkpoint(
            self._storage,
            version,
            run_id=self._run_id,
            worker_id=self._worker.worker_id if private else None,
            local_rank=self._worker.local_rank,
            num_local_ranks=self._worker.num_local_ranks,
        )

    def _retain(self, reports: Sequence[WriteReport]) -> None:
        assert self._retention is not None
        replicated = [report for report in reports if _is_replicated(report)]
        # Where somebody else saves the replicated parts, it is for that one to retain, unless they are not here at all.
        if not replicated and Catalog(self._storage, self._run_id).newest() is not None:
            return
        if self._config.verify_after and self._worker.num_local_ranks == 1:
            for report in replicated:
                self._retention.trust(report.manifest.cut.version, report.manifest.fingerprint)
        self._retention.run()

    def _note_failure(self, task: _Task, failure: CheckpointFailed) -> None:
        with self._lock:
            self._failed += 1
            self._in_a_row += 1
            self._unseen = failure
            self._last_failure = str(failure)
        self._events(CheckpointSaveFailed(worker_id=self._worker.worker_id, url=self._storage.url, reason=str(failure)))
        for callback in self._callbacks:
            if callback.failed is not None:
                _guarded(callback.failed, failure)

    def _note_success(self, task: _Task, took_seconds: float) -> None:
        version = task.ticket.version
        with self._lock:
            self._saved += 1
            self._in_a_row = 0
            self._unseen = None
            self._last_saved = version
            for report in task.ticket.reports:
                self._last_of[not _is_replicated(report)] = version
        for report in task.ticket.reports:
            logger.info(
                "%s (rank %d of %d): saved %s, %d bytes, %d of them linked, in %.2f s",
                self._worker,
                self._worker.local_rank,
                self._worker.num_local_ranks,
                report.url,
                report.num_bytes,
                report.linked_bytes,
                took_seconds,
            )
            self._events(
                CheckpointSaved(
                    worker_id=self._worker.worker_id,
                    url=report.url,
                    cut=report.manifest.cut,
                    num_bytes=report.num_bytes,
                    took_seconds=took_seconds,
                )
            )
        for callback in self._callbacks:
            if callback.saved is not None:
                _guarded(callback.saved, task.ticket.reports)
        if self._retention is not None:
            _guarded(self._retain, task.ticket.reports)
        if self._then is not None:
            _guarded(self._then, version)


def _is_replicated(report: WriteReport) -> bool:
    return report.manifest.parts[0].part_class.value == "replicated"


def _failure_of(error: Exception) -> CheckpointFailed:
    failure = CheckpointFailed(f"saving failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _guarded(callback: Callable[[_T], object], argument: _T) -> None:
    try:
        callback(argument)
    except Exception:  # user code, or upkeep after a save that is already durable: neither unmakes the save
        logger.exception("after a save, %s failed", getattr(callback, "__qualname__", callback))
