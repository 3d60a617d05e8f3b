"""What the coordinator said and the training thread has not acted on yet.

The client's dispatcher thread puts messages in; the training thread takes them out at inner-step boundaries and while
it stands at a boundary. A directive (become origin, a ticket, no donor) replaces the one before it: only the newest
tells what the coordinator wants now.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TypeVar

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.clock import Clock
from recovery.control.wire import from_proto
from recovery.errors import RecoveryError
from recovery.types import NO_VERSION, Fingerprint, Version

Directive = pb.BecomeOrigin | pb.Ticket | pb.NoDonor

T = TypeVar("T")

_SLICE_SECONDS = 0.05
_SEALS_KEPT = 16


class Inbox:
    """A small, typed mailbox; every method may be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition(threading.RLock())
        self._directive: Directive | None = None
        self._roster: pb.Roster | None = None
        self._outcomes: dict[int, pb.Outcome] = {}
        self._phase_ending: Version | None = None
        self._resync: pb.Order | None = None
        self._end: RecoveryError | None = None
        self._attachments = 0
        self._sealed: dict[Version, tuple[Fingerprint, float]] = {}
        """Fingerprint, and when this worker heard of the seal; 0: long after it."""

    # Written by the dispatcher thread.

    def put_directive(self, directive: Directive) -> None:
        with self._changed:
            self._directive = directive
            self._changed.notify_all()

    def put_roster(self, roster: pb.Roster) -> None:
        with self._changed:
            if self._roster is None or roster.epoch > self._roster.epoch:
                self._roster = roster
            self._changed.notify_all()

    def put_outcome(self, outcome: pb.Outcome) -> None:
        with self._changed:
            self._outcomes[outcome.epoch] = outcome
            self._changed.notify_all()

    def put_phase_ending(self, version: Version) -> None:
        with self._changed:
            self._phase_ending = version
            self._changed.notify_all()

    def put_resync(self, order: pb.Order) -> None:
        with self._changed:
            self._resync = order
            self._changed.notify_all()

    def put_welcome(self, welcome: pb.Welcome) -> None:
        """Note that the coordinator welcomed this worker (again): what was asked before may be lost."""
        with self._changed:
            self._attachments += 1
            if welcome.HasField("sealed"):
                self._note_sealed(from_proto(welcome.sealed), Fingerprint(welcome.sealed_fingerprint), 0.0)
            self._changed.notify_all()

    def put_sealed(self, version: Version, fingerprint: Fingerprint) -> None:
        """Note what the run holds."""
        with self._changed:
            self._note_sealed(version, fingerprint, self._clock.monotonic())
            self._changed.notify_all()

    def end(self, error: RecoveryError) -> None:
        """Make every present and later wait raise ``error``; the first call wins."""
        with self._changed:
            self._end = self._end or error
            self._changed.notify_all()

    # Read by the training thread.

    @property
    def attachments(self) -> int:
        with self._changed:
            return self._attachments

    @property
    def sealed(self) -> Version:
        """The newest sealed version that this worker heard of; ``NO_VERSION``: none."""
        with self._changed:
            return max(self._sealed, default=NO_VERSION)

    def fingerprint_of(self, version: Version) -> Fingerprint:
        """Return the sealed fingerprint of a version; empty: not heard of, or too long ago."""
        with self._changed:
            return self._sealed.get(version, (Fingerprint(b""), 0.0))[0]

    @property
    def outer_periods(self) -> list[float]:
        """Seconds between seals that followed each other and that this worker heard of as they happened."""
        with self._changed:
            pairs = [(old, new) for old, new in itertools.pairwise(sorted(self._sealed)) if old.next() == new]
            times = [(self._sealed[old][1], self._sealed[new][1]) for old, new in pairs]
            return [after - before for before, after in times if before and after]

    @property
    def outer_period_seconds(self) -> float:
        """Time between the two newest seals, if this worker heard of both as they happened; zero: unknown."""
        with self._changed:
            newest = sorted(self._sealed)[-2:]
            times = [self._sealed[version][1] for version in newest]
            if len(newest) < 2 or newest[0].next() != newest[1] or not all(times):
                return 0.0
            return times[1] - times[0]

    @property
    def seconds_since_seal(self) -> float | None:
        """Time since the newest seal, if this worker heard of it as it happened; None: unknown."""
        with self._changed:
            at = self._sealed[max(self._sealed)][1] if self._sealed else 0.0
            return self._clock.monotonic() - at if at else None

    def has_directive(self) -> bool:
        """Return whether the coordinator wants this worker to take its state from somewhere.

        Raises:
            RecoveryError: the coordinator ended this worker's part in the run.
        """
        with self._changed:
            self._raise_end()
            return self._directive is not None

    def take_directive(self) -> Directive | None:
        with self._changed:
            self._raise_end()
            directive, self._directive = self._directive, None
            return directive

    def has_resync(self) -> bool:
        """Return whether an operator wants this worker to take its state from peers again."""
        with self._changed:
            return self._resync is not None

    def take_resync(self) -> pb.Order | None:
        with self._changed:
            order, self._resync = self._resync, None
            return order

    def take_roster(self, version: Version, after_epoch: int) -> pb.Roster | None:
        """Return the newest roster for the boundary of ``version``, if its epoch is later than ``after_epoch``."""
        with self._changed:
            roster = self._roster
            if roster is None or roster.epoch <= after_epoch:
                return None
            if (roster.version.lineage, roster.version.outer_step) != (version.lineage, version.outer_step):
                return None
            self._roster = None
            return roster

    def take_outcome(self, epoch: int) -> pb.Outcome | None:
        with self._changed:
            outcome = self._outcomes.pop(epoch, None)
            if outcome is not None:
                self._outcomes = {e: o for e, o in self._outcomes.items() if e > epoch}
            return outcome

    def phase_ends(self, version: Version) -> bool:
        """Return whether the other members already stand at the boundary of ``version``."""
        with self._changed:
            return self._phase_ending == version

    def wait(self, take: Callable[[], T | None], timeout_seconds: float, meanwhile: Callable[[], None]) -> T | None:
        """Return what ``take`` returns as soon as it is not None, or None after ``timeout_seconds``.

        ``meanwhile`` runs on this thread some 20 times a second: the training thread stands still here, and a capture
        or a renewed arrival must not wait for it.

        Raises:
            RecoveryError: the coordinator ended this worker's part in the run.
        """
        deadline = self._clock.monotonic() + timeout_seconds
        while True:
            meanwhile()
            with self._changed:
                self._raise_end()
                found = take()
                if found is not None:
                    return found
                if self._clock.monotonic() >= deadline:
                    return None
                self._changed.wait(_SLICE_SECONDS)

    def _note_sealed(self, version: Version, fingerprint: Fingerprint, at: float) -> None:
        if fingerprint:
            self._sealed.setdefault(version, (fingerprint, at))
        for old in sorted(self._sealed)[:-_SEALS_KEPT]:
            del self._sealed[old]

    def _raise_end(self) -> None:
        if self._end is not None:
            raise self._end
