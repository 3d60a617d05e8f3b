"""Snapshots of a worker that trains: published, leased, guarded, captured."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from recovery.clock import Clock
from recovery.errors import DonorBusy, DonorRefused, MisuseError, RecoveryError
from recovery.events import EventSink
from recovery.snapshot.capture import PrivateCapture
from recovery.snapshot.capture_records import Captured, Request
from recovery.snapshot.config import SnapshotConfig
from recovery.snapshot.device import SideStream, device_of
from recovery.snapshot.frozen import freeze
from recovery.snapshot.guard import OuterSnapshot
from recovery.snapshot.hooks import SILENT_STEPS, OptimizerHooks
from recovery.snapshot.journal import Journal
from recovery.snapshot.keeper import Keeper
from recovery.snapshot.lease import Lease, LeaseBook, LeaseRecord
from recovery.snapshot.private import PrivateSnapshot
from recovery.snapshot.reports import Reports
from recovery.snapshot.scalars import ScalarCapture
from recovery.snapshot.service import ServiceThread
from recovery.snapshot.shelf import Shelf
from recovery.snapshot.stall import StallAccount, StallCause
from recovery.snapshot.vault import Vault
from recovery.state.digest import numerics_id
from recovery.state.live_part import LivePart, describe
from recovery.state.manifest import Manifest
from recovery.state.optimizer_part import OptimizerPart
from recovery.state.parts import WorkerState
from recovery.types import Cut, PartName, RunId, Version, WorkerRef

logger = logging.getLogger(__name__)


class Snapshots:
    """Lends a worker's state to readers while it trains. One a worker.

    The training thread calls ``publish``, ``before_outer_update``, ``inner_boundary`` and ``standing``, and runs the
    optimizers' hooks; every other method may be called from any thread. Nothing here ever waits for a reader.

    Args:
        state: What is lent.
        config: Settings.
        run_id: For manifests.
        worker: For manifests and events.
        events: Where events go.
        clock: Time for deadlines.
        hooks: Install step hooks on the optimizers. False: the training loop calls ``inner_boundary`` after each
            inner step and ``before_outer_update`` before each outer one.
    """

    def __init__(
        self,
        state: WorkerState,
        config: SnapshotConfig,
        *,
        run_id: RunId,
        worker: WorkerRef,
        events: EventSink,
        clock: Clock,
        hooks: bool = True,
    ) -> None:
        self._state = state
        self._config = config
        self._run_id = run_id
        self._worker = worker
        self._reports = Reports(events, worker)
        self._clock = clock
        self._use_hooks = hooks
        self.stall = StallAccount()
        device = device_of(state)
        self.vault = Vault(config.budget_bytes, keep=config.prefault, pinned=device is not None)
        self._shelf = Shelf()
        self._phase_seconds: float | None = None
        self._layout_digest = b""
        self._inner_step_at_publish = 0
        self._standing = False
        self._standing_lock = threading.Lock()
        self._started = False
        self._ended = False
        self._digester = ServiceThread("snapshot-digest")
        self._copier = ServiceThread("snapshot-copy")
        self._keeper = Keeper(
            clock,
            current=lambda: self._shelf.current,
            phase_seconds=lambda: self._phase_seconds,
            expire=self._expire,
            copy_ahead=config.copy_ahead,
            share=config.copy_ahead_share,
        )
        self._capture = PrivateCapture(
            state,
            self.vault,
            self.stall,
            self._copier,
            self._digester,
            SideStream(device),
            measure_in_step_bytes=config.measure_in_step_bytes,
            on_captured=self._captured,
            on_waited=self._reports.waited,
        )
        self._scalars = ScalarCapture(state, self.stall, self._digester, self._captured)
        self.journal = Journal(
            self.vault,
            self._digester,
            clock,
            describe=lambda version, part: self._describe([part], Cut(version), self._layout_digest),
            make_book=lambda version: lambda counts, on_empty: self._make_book(Cut(version), counts, on_empty),
            grace_seconds=config.grace_seconds,
        )
        self._hooks = OptimizerHooks(self._before_inner_step, self._after_inner_step, self.before_outer_update)

    def start(self) -> None:
        """Service threads run, hooks are installed. Nothing is lent before ``publish``."""
        if self._started:
            return
        self._started = True
        self._digester.start()
        self._copier.start()
        self._keeper.start()
        self._watch()

    def close(self) -> None:
        """Every lease has ended, hooks are removed, threads joined, memory given back. Training thread. Safe twice."""
        if self._ended:
            return
        self._ended = True
        self._hooks.remove()
        self.journal.close(f"{self._worker} is closing")
        self._scalars.fail(DonorRefused(f"{self._worker} is closing"))
        self._capture.fail(DonorRefused(f"{self._worker} is closing"))
        for snapshot in self._shelf.snapshots():
            snapshot.book.end_all(f"{self._worker} is closing")
        self._keeper.close()
        self._copier.close()
        self._digester.close()
        self._shelf.clear()
        self.vault.close()

    def __enter__(self) -> Snapshots:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def version(self) -> Version | None:
        """The version that can be leased now; None before the first ``publish`` and during an outer step."""
        current = self._shelf.current
        return current.version if current is not None and current.is_open else None

    @property
    def num_leases(self) -> int:
        """Leases that count now, those in grace included."""
        return self._shelf.num_leases + self.journal.num_leases

    # Training thread

    def publish(self, version: Version) -> None:
        """The replicated parts are at ``version``, and stand still until ``before_outer_update``. Digests follow.

        O(number of tensors): large tensors are referenced, not copied; parts that forward may change (replicated
        buffers) are.

        Raises:
            UnsupportedLeaf, MisuseError: a part cannot be read; nothing is published.
        """
        self._check_running()
        self.stall.bind()
        old = self._shelf.current
        if old is not None and old.is_open:
            reason = f"{version} was published and the guard had not been called before {old.version} was overwritten"
            self._call(old.void(reason))
        with self.stall.measure(StallCause.PUBLISH):
            self._watch()
            parts = [self._standing_part(name) for name in self._state.replicated_names]
            self._layout_digest = self._state.layout_digest()
            cut, layout_digest = Cut(version), self._layout_digest
            private_bytes = self._capture.size() if self._config.prefault else 0
            snapshot = OuterSnapshot(
                version,
                parts,
                lambda these: self._describe(these, cut, layout_digest),
                self.vault,
                self._clock,
                lambda counts, on_empty: self._make_book(cut, counts, on_empty),
            )
        self._shelf.publish(snapshot)
        self._inner_step_at_publish = self._state.local_progress.inner_step
        self._digester.submit(snapshot.run_digest)
        if self._config.prefault:
            self._copier.submit(lambda: self._prefault([snapshot.arena_bytes, private_bytes]))

    def before_outer_update(self) -> None:
        """Outer parts may be overwritten: what readers still need is saved, live views are closed.

        Once a version; further calls do nothing. Costs the copies of what is leased and not yet verified, waits for
        no reader.
        """
        snapshot = self._shelf.current
        if snapshot is None or not snapshot.is_open:
            return
        self._hooks.count(max(0, self._state.local_progress.inner_step - self._inner_step_at_publish))
        self._refuse_if_silent()
        # The outer step changes local progress and the version: a capture that is under way ends here.
        self._capture.step_begins(snapshot.version)
        self._phase_seconds = self._clock.monotonic() - snapshot.published_at_seconds
        if not len(snapshot.book):
            snapshot.close()
            return
        with self.stall.measure(StallCause.GUARD_COPY) as span:
            report = snapshot.close()
            span.num_bytes = report.copied_bytes
        void = self._call(report.callbacks)
        self._reports.guard_copied(snapshot.version, report.copied_bytes, void, span.seconds)

    def inner_boundary(self) -> None:
        """The training thread stands between two inner steps, with all done that belongs to the last one.

        A capture that somebody waits for takes place here, or takes its scalars here if it began at the step's end.
        Free when nobody waits.
        """
        self.lend_scalars()
        if not self._capture.wanted:
            return
        version = self.version
        if version is not None:
            self._capture.between_steps(version, whole=not (self._use_hooks and self._hooks.sees_inner_steps))

    def phase_begins(self) -> None:
        """Local progress was replaced after the last ``publish``: inner steps are counted from here."""
        self._inner_step_at_publish = self._state.local_progress.inner_step

    def lend_scalars(self) -> None:
        """As ``inner_boundary``, for those who wait for scalars alone: called before each inner step, hooks or not."""
        if not self._scalars.wanted:
            return
        version = self.version
        if version is not None:
            self._scalars.take(version)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """While the block runs, the training thread stays between two inner steps (it waits for a boundary's vote).

        Captures asked for meanwhile are made by a service thread; leaving the block waits for one under way.
        """
        self.inner_boundary()
        with self._standing_lock:
            self._standing = True
        if self._capture.wanted or self._scalars.wanted:
            self._copier.submit(self._capture_while_standing)
        try:
            yield
        finally:
            began = time.perf_counter()
            free = self._standing_lock.acquire(blocking=False)
            if not free:
                self._standing_lock.acquire()
                self._reports.waited(time.perf_counter() - began, "a capture at the boundary")
            self._standing = False
            self._standing_lock.release()

    # Any thread

    def manifest(self, version: Version, timeout_seconds: float) -> Manifest:
        """Return the manifest of the published replicated parts, fingerprint included; waits for the digest pass.

        Raises:
            DonorRefused: ``version`` is not held.
            DonorBusy: not ready in time, or overwritten before the pass was through.
        """
        return self._shelf.find(version).manifest(timeout_seconds)[0]

    def lease_outer(self, version: Version, holder: str) -> Lease:
        """Return a lease on the replicated parts at ``version``.

        Reserves and touches memory for the worst case, and waits for the version's digests. A holder that left a lease
        behind takes it up again, with all that it acknowledged.

        Raises:
            DonorRefused: ``version`` is not held.
            DonorBusy: the version is being closed, or its digests are not ready in time.
        """
        self._check_running()
        snapshot = self._shelf.find(version)
        record = snapshot.take(holder)
        generation = record.generation
        try:
            self._keeper.wake()
            if not snapshot.reserve():
                record.until_boundary = True
                if not snapshot.is_open:
                    raise DonorBusy(f"{version} was closed before memory for its lease was ready")
            manifest, manifest_bytes = snapshot.manifest(self._config.digest_timeout_seconds)
        except BaseException as error:
            snapshot.book.release(record, generation, str(error), grace=False)
            raise
        lease = Lease(snapshot, record, manifest, manifest_bytes)
        lease.renew()
        self._reports.lease_taken(holder, version, until_boundary=record.until_boundary)
        return lease

    def lease_private(self, holder: str, not_before: Version) -> Future[Lease]:
        """Return a future of a lease on the private-copied parts, captured at the next inner-step boundary.

        Args:
            holder: Who reads. Who left a private lease behind, of a version not before ``not_before``, gets that.
            not_before: Captured only once this version is published.

        The future fails with ``DonorBusy`` if the copies do not fit the budget, and with what reading a part raised.
        Cancel it if nobody waits any more.
        """
        self._check_running()
        future: Future[Lease] = Future()
        kept = self._shelf.private_of(holder, not_before)
        if kept is not None:
            future.set_result(self._private_lease(kept, holder))
            return future
        self._capture.request(Request(holder, not_before, future))
        self._refuse_if_silent()
        self._keeper.wake()
        if self._standing:
            self._copier.submit(self._capture_while_standing)
        return future

    def lease_scalars(self, holder: str, not_before: Version) -> Future[Lease]:
        """As ``lease_private``, without what only optimizer steps change: captured at once, a few kilobytes."""
        self._check_running()
        future: Future[Lease] = Future()
        self._scalars.request(Request(f"{holder} (scalars)", not_before, future))
        self._keeper.wake()
        if self._standing:
            self._copier.submit(self._capture_while_standing)
        return future

    def lease_journal(self, version: Version, holder: str) -> Lease:
        """Return a lease on the averages that led to ``version``; errors as ``Journal.lease``."""
        self._check_running()
        lease = self.journal.lease(version, holder, self._config.digest_timeout_seconds)
        self._keeper.wake()
        self._reports.lease_taken(holder, version, until_boundary=False)
        return lease

    def damaged(self) -> list[str]:
        """Hash the memory of the published parts again; return the tensors, as part/path, written round the guard.

        Raises:
            DonorBusy: no version stands now, or it was closed meanwhile.
        """
        current = self._shelf.current
        if current is None or not current.is_open:
            raise DonorBusy("no version is published now: ask again after the outer step")
        current.manifest(self._config.digest_timeout_seconds)
        return current.damaged()

    def expire_leases(self) -> None:
        """Leases past their deadline or grace are over. The keeper calls this while there are leases."""
        for snapshot in self._shelf.snapshots():
            snapshot.book.expire()
        self._capture.tidy()
        self._scalars.tidy()
        self._shelf.sweep()
        self.journal.sweep()

    # Hooks

    def _before_inner_step(self) -> None:
        if not self._capture.wanted:
            return
        version = self.version
        if version is not None:
            self._capture.step_begins(version)

    def _after_inner_step(self) -> None:
        if not self._capture.wanted:
            return
        version = self.version
        if version is not None:
            self._capture.step_ended(version)

    def _refuse_if_silent(self) -> None:
        """Refuse captures if a registered optimizer no longer steps: the state of the one that trains is not known."""
        silent = self._hooks.silent()
        if not silent or not self._capture.wanted:
            return
        parts = map(self._state.part, self._state.private_copied_names)
        names = [p.name for p in parts if isinstance(p, OptimizerPart) and any(p.optimizer is one for one in silent)]
        self._capture.fail(
            DonorRefused(
                f"{', '.join(names)} did not step in the last {SILENT_STEPS} inner steps: if the training loop uses "
                "another optimizer now, register that one in a new WorkerState"
            )
        )

    def _watch(self) -> None:
        if self._use_hooks:
            self._hooks.watch(self._state.inner_optimizers, self._state.outer_optimizers)

    # Service threads

    def _capture_while_standing(self) -> None:
        with self._standing_lock:
            version = self.version
            if not self._standing or version is None:
                return
            self._scalars.take(version)
            if not self._capture.wanted:
                return
            self._capture.between_steps(version, whole=True)
            again = self._capture.is_due(version)
        if again:
            # Behind the job that touches memory, during which the training thread is free to leave.
            self._copier.submit(self._capture_while_standing)

    def _captured(self, captured: Captured, requests: list[Request]) -> None:
        try:
            snapshot = self._private_snapshot(captured)
        except Exception as error:  # whatever it is, nobody may wait for ever
            for request in requests:
                request.future.set_exception(error)
            if not isinstance(error, RecoveryError):
                raise
            return
        leases = [(request, self._private_lease(snapshot, request.holder)) for request in requests]
        self._shelf.add(snapshot)
        self._reports.captured(captured)
        for request, lease in leases:
            request.future.set_result(lease)
        self._keeper.wake()

    def _private_snapshot(self, captured: Captured) -> PrivateSnapshot:
        manifest = self._describe(captured.parts, captured.cut, self._layout_digest)
        return PrivateSnapshot(
            manifest,
            captured.data,
            lambda counts, on_empty: self._make_book(captured.cut, counts, on_empty),
        )

    def _prefault(self, sizes: Sequence[int]) -> None:
        if self.num_leases:
            return  # the memory is in use; what comes back is kept
        arenas = [self.vault.reserve(size) for size in sizes if size]
        for arena in arenas:
            if arena is not None:
                arena.touch()

    def _expire(self) -> bool:
        self.expire_leases()
        return self.num_leases > 0 or self._capture.wanted or self._scalars.wanted or self.journal.wanted

    # Inside

    def _standing_part(self, name: PartName) -> LivePart:
        part = self._state.read_part(name)
        if not self._state.changes_in_forward(name):
            return part
        # It does not stand still in the inner phase: its value at the boundary is kept by itself. Buffers are small.
        return freeze(
            part, part.bytes.read(0, part.bytes.num_bytes, torch.empty(part.bytes.num_bytes, dtype=torch.uint8))
        )

    def _describe(self, parts: Sequence[LivePart], cut: Cut, layout_digest: bytes) -> Manifest:
        return describe(
            parts,
            run_id=self._run_id,
            worker=self._worker,
            cut=cut,
            numerics_id=numerics_id(),
            layout_digest=layout_digest,
            algorithm=self._config.digest_algorithm,
        )

    def _make_book(self, cut: Cut, counts: Sequence[int], on_empty: Callable[[], None]) -> LeaseBook:
        def ended(record: LeaseRecord, reason: str) -> None:
            self._reports.lease_ended(record.holder, cut.version, reason)

        return LeaseBook(
            counts,
            self._clock,
            deadline_seconds=self._config.lease_deadline_seconds,
            grace_seconds=self._config.grace_seconds,
            on_ended=ended,
            on_empty=on_empty,
        )

    def _private_lease(self, snapshot: PrivateSnapshot, holder: str) -> Lease:
        record = snapshot.book.take(holder, until_boundary=False)
        self._reports.lease_taken(holder, snapshot.manifest.cut.version, until_boundary=False)
        return Lease(snapshot, record, snapshot.manifest, snapshot.manifest_bytes)

    def _call(self, callbacks: Sequence[Callable[[], int | None]]) -> int:
        """Tell readers that live views are closed; return how many pulls they declared void."""
        void = 0
        with self.stall.measure(StallCause.CLOSE_CALLBACKS):
            for callback in callbacks:
                try:
                    void += callback() or 0
                except Exception:  # a reader's error must reach neither training nor the other readers
                    logger.exception("a reader failed to take the closing of a version")
        return void

    def _check_running(self) -> None:
        if not self._started:
            raise MisuseError("Snapshots was not started")
        if self._ended:
            raise MisuseError("Snapshots is closed")
