"""Captures of private parts as a whole: who asks, at which calls of the training loop they run, who gets the result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from recovery.errors import DonorRefused, RecoveryError
from recovery.snapshot.capture import PrivateCapture
from recovery.snapshot.capture_records import Captured
from recovery.snapshot.hooks import SILENT_STEPS, OptimizerHooks
from recovery.snapshot.lease import Lease
from recovery.snapshot.making import Maker
from recovery.snapshot.reports import Reports
from recovery.snapshot.scalars import ScalarCapture
from recovery.snapshot.service import ServiceThread
from recovery.snapshot.shelf import Shelf
from recovery.snapshot.stall import StallAccount, StallCause
from recovery.snapshot.waiting import Request
from recovery.state.optimizer_part import OptimizerPart
from recovery.state.parts import WorkerState
from recovery.types import Version


class Captures:
    """Leads both captures, whole ones and those of scalars, through the training loop's calls.

    Args:
        state: Whose private parts are captured.
        whole: The capture of all private parts.
        scalars: That of scalars alone. Both hand their results to ``captured``.
        copier: The thread that captures while training stands.
        version: Returns the version that training stands on, or None during an outer step.
        hooks: The optimizers'.
        on_lease: Called when somebody asked or got something: there is work for the keeper.
    """

    def __init__(
        self,
        state: WorkerState,
        whole: PrivateCapture,
        scalars: ScalarCapture,
        *,
        copier: ServiceThread,
        stall: StallAccount,
        shelf: Shelf,
        maker: Maker,
        reports: Reports,
        hooks: OptimizerHooks,
        version: Callable[[], Version | None],
        on_lease: Callable[[], None],
    ) -> None:
        self._state = state
        self._whole = whole
        self._scalars = scalars
        self._copier = copier
        self._stall = stall
        self._shelf = shelf
        self._maker = maker
        self._reports = reports
        self._hooks = hooks
        self._version = version
        self._on_lease = on_lease
        self._standing = False
        self._standing_lock = threading.Lock()

    # Any thread

    @property
    def wanted(self) -> bool:
        """Whether anybody waits, or a capture runs."""
        return self._whole.wanted or self._scalars.wanted

    def ask(self, holder: str, not_before: Version, *, at_boundary: bool = False) -> Future[Lease]:
        """See ``Snapshots.lease_private`` and ``lease_at_boundary``."""
        future: Future[Lease] = Future()
        kept = None if at_boundary else self._shelf.private_of(holder, not_before)
        if kept is not None:
            future.set_result(self._maker.private_lease(kept, holder))
            return future
        self._whole.request(Request(holder, not_before, future, at_boundary))
        self.refuse_if_silent()
        self._asked()
        return future

    def ask_scalars(self, holder: str, not_before: Version) -> Future[Lease]:
        """See ``Snapshots.lease_scalars``."""
        future: Future[Lease] = Future()
        self._scalars.request(Request(f"{holder} (scalars)", not_before, future))
        self._asked()
        return future

    def tidy(self) -> None:
        """Cancelled requests are forgotten, and what only they needed."""
        self._whole.tidy()
        self._scalars.tidy()

    def fail(self, error: RecoveryError) -> None:
        """All who wait get ``error``: this is the end."""
        self._scalars.fail(error)
        self._whole.fail(error)
        self._whole.hurry.set()

    # Training thread

    def size(self) -> int:
        """Return about how many bytes a capture takes now."""
        return self._whole.size()

    def prepare(self) -> None:
        """See ``PrivateCapture.prepare``."""
        self._whole.prepare()

    def step_begins(self) -> None:
        """An inner optimizer is about to step, or the outer one: a capture that is under way ends here."""
        version = self._version() if self._whole.wanted else None
        if version is not None:
            self._whole.step_begins(version)

    def step_ended(self) -> None:
        """The last inner optimizer has stepped."""
        version = self._version() if self._whole.wanted else None
        if version is not None:
            self._whole.step_ended(version)

    def between_steps(self) -> None:
        """See ``Snapshots.inner_boundary``."""
        self.lend_scalars()
        version = self._version() if self._whole.wanted else None
        if version is not None:
            self._whole.between_steps(version, whole=not self._hooks.sees_inner_steps)

    def lend_scalars(self) -> None:
        """See ``Snapshots.lend_scalars``."""
        version = self._version() if self._scalars.wanted else None
        if version is not None:
            self._scalars.take(version)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """See ``Snapshots.standing``."""
        self.between_steps()
        with self._standing_lock:
            self._standing = True
        self._whole.hurry.set()
        if self.wanted:
            self._copier.submit(self._capture_while_standing)
        try:
            yield
        finally:
            if not self._standing_lock.acquire(blocking=False):
                with self._stall.measure(StallCause.CAPTURE_WAIT) as span:
                    self._standing_lock.acquire()
                self._reports.waited(span.seconds, "a capture at the boundary")
            self._standing = False
            self._whole.hurry.clear()
            self._standing_lock.release()

    def refuse_if_silent(self) -> None:
        """Refuse captures if a registered optimizer no longer steps: the state of the one that trains is not known."""
        silent = self._hooks.silent()
        if not silent or not self._whole.wanted:
            return
        parts = map(self._state.part, self._state.private_copied_names)
        names = [p.name for p in parts if isinstance(p, OptimizerPart) and any(p.optimizer is one for one in silent)]
        self._whole.fail(
            DonorRefused(
                f"{', '.join(names)} did not step in the last {SILENT_STEPS} inner steps: if the training loop uses "
                "another optimizer now, register that one in a new WorkerState"
            )
        )

    def captured(self, captured: Captured, requests: list[Request]) -> None:
        """What was captured is described and lent to those who asked; on the thread that finishes captures."""
        try:
            snapshot = self._maker.private(captured)
        except Exception as error:  # whatever it is, nobody may wait for ever
            for request in requests:
                request.future.set_exception(error)
            if not isinstance(error, RecoveryError):
                raise
            return
        leases = [(request, self._maker.private_lease(snapshot, request.holder)) for request in requests]
        self._shelf.add(snapshot)
        self._reports.captured(captured)
        for request, lease in leases:
            request.future.set_result(lease)
        self._on_lease()

    # Inside

    def _asked(self) -> None:
        self._on_lease()
        if self._standing:
            self._copier.submit(self._capture_while_standing)

    def _capture_while_standing(self) -> None:
        with self._standing_lock:
            version = self._version()
            if not self._standing or version is None:
                return
            self._scalars.take(version)
            if not self._whole.wanted:
                return
            self._whole.between_steps(version, whole=True)
            again = self._whole.is_due(version)
        if again:
            # Behind the job that touches memory, during which the training thread is free to leave.
            self._copier.submit(self._capture_while_standing)
