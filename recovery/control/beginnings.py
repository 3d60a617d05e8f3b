"""How a lineage begins, whatever the cause: origin, resume, rollback, adoption.

A lineage number is used up durably, one process is told to begin it with the state that it holds, and the version is
sealed with the fingerprint that the process reports. Until then the older history stands: if the process is lost, the
number stays void and every member is judged anew by the older history.
"""

from __future__ import annotations

from protos.recovery.v1 import operations_pb2
from recovery.control.boundary import BoundaryDesk
from recovery.control.membership import Member, Standing
from recovery.control.record import ADOPT, RESUME, ROLLBACK, LineageBegun, PauseSet, VersionSealed, Voter
from recovery.control.run_state import AUTHORITIES, Beginning, RunState
from recovery.control.wire import to_proto
from recovery.errors import PeerUnreachable, RecoveryError, RunRefused
from recovery.events import LineageStarted
from recovery.events import VersionSealed as VersionSealedEvent
from recovery.types import NO_VERSION, Version


class BeginningDesk:
    """Begins lineages; ``advance`` gives up a beginner that is lost."""

    def __init__(self, run: RunState, boundary: BoundaryDesk) -> None:
        self._run = run
        self._boundary = boundary
        self.unfit: set[Voter] = set()
        """Processes that were told to begin a lineage and did not."""
        begun = run.record.unsealed_lineage
        self._restored = begun is not None
        if begun is not None:
            voter = (begun.worker_id, begun.incarnation)
            expected = run.record.seals.get(begun.parent, b"")
            run.beginning = Beginning(begun.version, begun.cause, voter, 0.0, expected)

    def begin(
        self,
        member: Member,
        outer_step: int,
        cause: str,
        *,
        parent: Version = NO_VERSION,
        expected_fingerprint: bytes = b"",
        request_ids: list[str] | None = None,
    ) -> None:
        """Use up a lineage number and tell ``member`` to begin it with the state that it holds."""
        run, record = self._run, self._run.record
        self._boundary.abandon(f"a new lineage begins ({cause})")
        version = Version(record.newest_lineage + 1, outer_step)
        lost = max(0, record.committed.outer_step - outer_step) if cause in (RESUME, ROLLBACK) else 0
        wall = run.now + run.wall_offset_seconds
        run.persist(LineageBegun(version, cause, parent, lost, *member.voter, wall))
        if record.paused:
            run.persist(PauseSet(""))
        run.beginning = Beginning(
            version, cause, member.voter, run.now, expected_fingerprint, None, list(request_ids or ())
        )
        for other in run.live():
            if other.standing is Standing.JOINING:
                run.end_attempt(other)
                other.standing = Standing.QUEUED
        run.forget_transfer(member)
        run.place_all()
        run.tell_to_begin(member, version)
        run.emit(
            LineageStarted(worker_id=member.worker_id, version=version, cause=cause, parent=parent, lost_steps=lost)
        )

    def reported(self, member: Member, version: Version, fingerprint: bytes) -> None:
        """The process that was told to begin reports its state: seal it, if it is what it had promised."""
        run, beginning = self._run, self._run.beginning
        if beginning is None or member.voter != beginning.voter or version != beginning.version or not fingerprint:
            return
        if beginning.expected_fingerprint and fingerprint != beginning.expected_fingerprint:
            self._void(
                RunRefused(
                    f"worker {member.worker_id} began {version} with {fingerprint.hex()[:16]}, not with the promised "
                    f"{beginning.expected_fingerprint.hex()[:16]}"
                )
            )
            return
        run.persist(VersionSealed(version, fingerprint))
        member.held, member.fingerprint = version, fingerprint
        run.beginning = None
        self.unfit.clear()
        run.outlook = ""
        run.emit(VersionSealedEvent(version=version, fingerprint=fingerprint.hex(), reporters=(member.worker_id,)))
        run.place_all()
        self._boundary.seals.announce()
        for request_id in beginning.request_ids:
            run.answer(request_id, _done(beginning, fingerprint))

    def remind(self, member: Member) -> None:
        """The process that was told to begin is back: its report or the order may have been lost."""
        run, beginning = self._run, self._run.beginning
        if beginning is None or member.voter != beginning.voter:
            return
        beginning.lost_at = None
        if member.held == beginning.version:
            self.reported(member, member.held, member.fingerprint)
        else:
            run.tell_to_begin(member, beginning.version)

    def _void(self, error: RecoveryError) -> None:
        run, beginning = self._run, self._run.beginning
        if beginning is None:
            return
        self.unfit.add(beginning.voter)
        run.beginning = None
        run.place_all()
        for member in run.live_in(*AUTHORITIES):
            run.welcome(member)  # it may have stood at a boundary that was called off: it arrives again
        for request_id in beginning.request_ids:
            run.answer(request_id, error)

    def advance(self) -> None:
        """Void the beginning if its process is lost, or does not report."""
        run, beginning = self._run, self._run.beginning
        if beginning is None:
            return
        if self._restored:
            beginning.since = beginning.lost_at = run.now
            self._restored = False
        name = beginning.voter[0]
        if run.process(beginning.voter) is not None:
            beginning.lost_at = None
            due = beginning.since + run.policy.origin_apply_seconds
            what = f"did not report its state within {run.policy.origin_apply_seconds:g} s"
        else:
            if beginning.lost_at is None:
                beginning.lost_at = run.now
            due, what = beginning.lost_at + run.policy.origin_wait_seconds, "was lost"
            known = run.members.get(name)
            if known is not None and (known.voter != beginning.voter or known.said_goodbye):
                due = run.now
        if run.now >= due:
            self._void(PeerUnreachable(f"worker {name} {what} before it began {beginning.version}"))
        else:
            run.wake(due)


def _done(beginning: Beginning, fingerprint: bytes) -> operations_pb2.AdoptResponse | operations_pb2.RollbackResponse:
    version = to_proto(beginning.version)
    if beginning.cause == ADOPT:
        return operations_pb2.AdoptResponse(version=version, fingerprint=fingerprint)
    return operations_pb2.RollbackResponse(version=version)
