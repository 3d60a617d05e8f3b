"""Snapshots of a worker that trains: published, leased, guarded, captured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager

from recovery.clock import Clock
from recovery.errors import DonorBusy, DonorRefused, MisuseError
from recovery.events import EventSink
from recovery.snapshot.capture import PrivateCapture
from recovery.snapshot.capture_records import Captured
from recovery.snapshot.captures import Captures
from recovery.snapshot.config import SnapshotConfig
from recovery.snapshot.device import SideStream, device_of
from recovery.snapshot.hooks import OptimizerHooks
from recovery.snapshot.journal import Journal
from recovery.snapshot.keeper import Keeper
from recovery.snapshot.lease import Lease
from recovery.snapshot.making import Maker
from recovery.snapshot.reports import Reports
from recovery.snapshot.scalars import ScalarCapture
from recovery.snapshot.service import ServiceThread
from recovery.snapshot.shelf import Shelf
from recovery.snapshot.stall import StallAccount, StallCause
from recovery.snapshot.vault import Vault
from recovery.snapshot.waiting import Request
from recovery.state.manifest import Manifest
from recovery.state.parts import WorkerState
from recovery.types import Cut, RunId, Version, WorkerRef

logger = logging.getLogger(__name__)


class Snapshots:
    """Lends a worker's state to readers while it trains. One a worker.

    The training thread calls ``publish``, ``before_outer_update``, ``inner_boundary``, ``standing`` and
    ``lease_at_boundary``, and runs the optimizers' hooks; every other method may be called from any thread. Nothing
    here ever waits for a reader.

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
        self._worker = worker
        self._reports = reports = Reports(events, worker)
        self._clock = clock
        self._use_hooks = hooks
        self.stall = StallAccount()
        device = device_of(state)
        self.vault = Vault(config.budget_bytes, keep=config.prefault, pinned=device is not None)
        self._shelf = Shelf()
        self._maker = Maker(state, config, run_id=run_id, worker=worker, vault=self.vault, reports=reports, clock=clock)
        self._phase_seconds: float | None = None
        self._inner_step_at_publish = 0
        self._started = False
        self._ended = False
        self._digester = ServiceThread("snapshot-digest")
        self._copier = ServiceThread("snapshot-copy")
        self._keeper = Keeper(
            clock,
            current=lambda: self._shelf.current,
            phase_seconds=lambda: self._phase_seconds,
            expire=self._expire,
            on_busy=self.vault.hold,
            on_idle=self.vault.let_go,
            copy_ahead=config.copy_ahead,
            share=config.copy_ahead_share,
        )
        self._hooks = OptimizerHooks(self._before_inner_step, self._after_inner_step, self.before_outer_update)
        capture = PrivateCapture(
            state,
            self.vault,
            self.stall,
            self._copier,
            self._digester,
            SideStream(device),
            measure_in_step_bytes=config.measure_in_step_bytes,
            touch_share=config.touch_share,
            on_captured=self._captured,
            on_waited=reports.waited,
        )
        self._captures = Captures(
            state,
            capture,
            ScalarCapture(state, self.stall, self._digester, self._captured),
            copier=self._copier,
            stall=self.stall,
            shelf=self._shelf,
            maker=self._maker,
            reports=reports,
            hooks=self._hooks,
            version=lambda: self.version,
            on_lease=self._keeper.wake,
        )
        self.journal = Journal(
            self.vault,
            self._digester,
            self.stall,
            clock,
            describe=self._maker.entry,
            make_book=lambda version: self._maker.book(Cut(version)),
            grace_seconds=config.grace_seconds,
        )

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
        self._captures.fail(DonorRefused(f"{self._worker} is closing"))
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
            private_bytes = self._captures.size() if self._config.prefault else 0
            snapshot = self._maker.outer(version)
        self._shelf.publish(snapshot)
        self._reports.stalled(version, self.stall.since_told())
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
        self._captures.refuse_if_silent()
        # The outer step changes local progress and the version: a capture that is under way ends here.
        self._captures.step_begins()
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
        self._captures.between_steps()

    def phase_begins(self) -> None:
        """Local progress was replaced after the last ``publish``: inner steps are counted from here."""
        self._inner_step_at_publish = self._state.local_progress.inner_step

    def lend_scalars(self) -> None:
        """As ``inner_boundary``, for those who wait for scalars alone: called before each inner step, hooks or not."""
        self._captures.lend_scalars()

    def standing(self) -> AbstractContextManager[None]:
        """While the block runs, the training thread stays between two inner steps (it waits for a boundary's vote).

        Captures asked for meanwhile are made by a service thread; leaving the block waits for one under way.
        """
        return self._captures.standing()

    def lease_at_boundary(self, holder: str, version: Version) -> Future[Lease]:
        """As ``lease_private``, of the very instant before the first inner step at ``version``.

        Memory for it is made ready from now on: ask before the outer step that leads there, if that can be known. Asked
        too late for that, the copies go into memory that is touched for the first time, which takes longer. The future
        fails with ``DonorBusy`` if training comes past that instant without ``inner_boundary`` being called there.
        """
        self._check_running()
        future = self._captures.ask(holder, version, at_boundary=True)
        self._captures.prepare()
        return future

    # Any thread

    def manifest(self, version: Version, timeout_seconds: float) -> Manifest:
        """Return the manifest of the published replicated parts, fingerprint included; waits for the digest pass.

        Raises:
            DonorRefused: ``version`` is not held.
            DonorBusy: not ready in time, or overwritten before the pass was through.
        """
        with self.stall.measure(StallCause.DIGEST_WAIT):
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
        return self._captures.ask(holder, not_before)

    def lease_scalars(self, holder: str, not_before: Version) -> Future[Lease]:
        """As ``lease_private``, without what only optimizer steps change: captured at once, a few kilobytes."""
        self._check_running()
        return self._captures.ask_scalars(holder, not_before)

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
        with self.stall.measure(StallCause.DIGEST_WAIT):
            current.manifest(self._config.digest_timeout_seconds)
            return current.damaged()

    def expire_leases(self) -> None:
        """Leases past their deadline or grace are over. The keeper calls this while there are leases."""
        for snapshot in self._shelf.snapshots():
            snapshot.book.expire()
        self._captures.tidy()
        self._shelf.sweep()
        self.journal.sweep()

    # Inside

    def _before_inner_step(self) -> None:
        self._captures.step_begins()

    def _after_inner_step(self) -> None:
        self._captures.step_ended()

    def _captured(self, captured: Captured, requests: list[Request]) -> None:
        self._captures.captured(captured, requests)

    def _watch(self) -> None:
        if self._use_hooks:
            self._hooks.watch(self._state.inner_optimizers, self._state.outer_optimizers)

    def _prefault(self, sizes: Sequence[int]) -> None:
        if self.num_leases:
            return  # the memory is in use; what comes back is kept
        arenas = [self.vault.reserve(size) for size in sizes if size]
        for arena in arenas:
            if arena is not None:
                arena.touch()

    def _expire(self) -> bool:
        self.expire_leases()
        return self.num_leases > 0 or self._captures.wanted or self.journal.wanted

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
