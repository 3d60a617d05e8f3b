"""Versions that workers publish themselves, because their own all-reduce made them: committed by reports alone.

Where the coordinator drives the boundary, a vote precedes the step. Here each worker has taken the step already and
reports the result. The version counts as committed once everybody who is expected has reported it, or a majority has
and the others were waited for; who reported it holds it, who did not becomes a joiner. What it is, the seal decides as
for every version.
"""

from __future__ import annotations

from protos.recovery.v1 import coordinator_pb2
from recovery.control.membership import Member, Standing
from recovery.control.record import COMMITTED, EpochClosed, EpochOpened, Voter
from recovery.control.run_state import RunState
from recovery.control.sealing import SealDesk
from recovery.control.wire import from_proto
from recovery.events import EpochEnded
from recovery.types import NO_VERSION, Version


class PublishDesk:
    """Takes reports of published versions; ``advance`` commits."""

    def __init__(self, run: RunState, seals: SealDesk) -> None:
        self._run = run
        self._seals = seals
        self._version = NO_VERSION
        self._reports: dict[Voter, coordinator_pb2.Applied] = {}
        self._since = 0.0

    def published(self, member: Member, message: coordinator_pb2.Applied) -> None:
        """A member made the next version by itself. One that does not hold the present one has no say in that."""
        run, record = self._run, self._run.record
        version = from_proto(message.version)
        if record.paused:
            self._seals.tell_paused(member, record.last_epoch)
            return
        if member.standing is not Standing.READY or not self._is_next(version) or not message.fingerprint:
            return
        if version != self._version:
            self._version, self._since = version, run.now
            self._reports.clear()
        self._reports[member.voter] = message

    def advance(self) -> None:
        """Commit the published version if its time has come."""
        run = self._run
        if not self._reports:
            return
        if not self._is_next(self._version):
            self._reports.clear()
            return
        if run.returning and run.now < run.returning_until:
            run.wake(run.returning_until)
            return
        ready = run.live_in(Standing.READY)
        reporters = [member for member in ready if member.voter in self._reports]
        missing = [member for member in ready if member.voter not in self._reports and not member.stalled]
        due = self._since + run.policy.seal_wait_seconds
        if missing and run.now < due:
            run.wake(due)
            return
        # Never by a minority, however long that takes: the others may train on from the present version.
        if len(reporters) >= run.policy.min_participants and len(reporters) > len(missing):
            self._commit(reporters, missing)

    def _is_next(self, version: Version) -> bool:
        run, record = self._run, self._run.record
        idle = run.epoch is None and run.beginning is None and not record.paused
        return idle and record.sealed != NO_VERSION and record.committed == record.sealed == version_before(version)

    def _commit(self, reporters: list[Member], missing: list[Member]) -> None:
        run, version = self._run, self._version
        reports, self._reports = self._reports, {}
        number = run.record.last_epoch + 1
        voters = tuple(member.voter for member in reporters)
        reason = f"published by {len(voters)} workers"
        run.persist(EpochOpened(number, version_before(version), voters))
        run.persist(EpochClosed(number, COMMITTED, version, b"", voters, reason))
        run.gather, run.committed_at = None, run.now
        for member in reporters:
            self._seals.applied(member, reports[member.voter])
        for member in missing:
            run.place(member)
        run.emit(EpochEnded(epoch=number, verdict=COMMITTED, version=version, reason=reason))


def version_before(version: Version) -> Version:
    return Version(version.lineage, version.outer_step - 1)
