"""What a committed version is: reports of those who applied it, the seal, and the pause when they disagree."""

from __future__ import annotations

from protos.recovery.v1 import coordinator_pb2
from recovery.control.boundary_vote import seal_verdict
from recovery.control.membership import Member, Standing
from recovery.control.record import PauseSet, PositionRecorded, VersionSealed
from recovery.control.run_state import RunState, outcome_of
from recovery.control.wire import from_proto, to_proto
from recovery.events import FingerprintDiverged, RunPausedEvent
from recovery.events import VersionSealed as VersionSealedEvent
from recovery.types import NO_VERSION, Version

MAX_TOKENS = 2**63 - 1
"""What the history can store."""


class SealDesk:
    """Takes reports of applied steps; ``advance`` seals."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._saver = ""

    def applied(self, member: Member, message: coordinator_pb2.Applied) -> None:
        """A member applied a committed step."""
        run, record = self._run, self._run.record
        version = from_proto(message.version)
        if message.data_position or message.tokens:
            known = record.positions.get(member.worker_id)
            tokens = min(message.tokens, MAX_TOKENS)
            change = PositionRecorded(member.worker_id, version, tokens, message.data_position)
            if record.on_path(version) and change != known:
                run.persist(change)
        if member.standing is not Standing.JOINING and version >= member.held:
            self.report(member, version, message.fingerprint)

    def report(self, member: Member, version: Version, fingerprint: bytes) -> None:
        """A member holds ``version`` with this fingerprint; empty: not known yet."""
        member.held, member.fingerprint = version, fingerprint
        self._run.place(member)
        self._note_divergence(member)

    def _note_divergence(self, member: Member) -> None:
        record = self._run.record
        if member.standing is Standing.QUEUED and member.why == "diverged" and not member.poisoned:
            self._run.emit(
                FingerprintDiverged(
                    worker_id=member.worker_id,
                    version=member.held,
                    fingerprint=member.fingerprint.hex(),
                    expected=record.sealed_fingerprint.hex(),
                )
            )

    def advance(self) -> None:
        """Seal the committed version once a majority of those who can has reported it."""
        run, record = self._run, self._run.record
        reports = {member.worker_id: member.fingerprint for member in run.live_in(Standing.APPLIED)}
        outstanding = {member.worker_id for member in run.live_in(Standing.APPLYING)}
        committed = record.epochs.get(record.committed_epoch)
        if committed is not None and run.now < run.returning_until:
            outstanding |= run.returning & {worker_id for worker_id, _ in committed.voters}
            if outstanding & run.returning:
                run.wake(run.returning_until)
        # After a restart the members get the time again that they had after the commit.
        due = max(run.committed_at, run.started_at or 0.0) + run.policy.seal_wait_seconds
        if reports and outstanding and run.now < due:
            run.wake(due)
        verdict = seal_verdict(reports, outstanding, run.now >= due)
        if verdict.tie:
            self.pause(
                f"members disagree about {record.committed} after applying it: {verdict.tie}. Choose whose state is "
                "the run's: `recovery rollback --worker W`"
            )
        elif verdict.fingerprint:
            self._seal(record.committed, verdict.fingerprint)

    def _seal(self, version: Version, fingerprint: bytes) -> None:
        run = self._run
        applied = run.live_in(Standing.APPLIED)
        run.persist(VersionSealed(version, fingerprint))
        reporters = tuple(member.worker_id for member in applied if member.fingerprint == fingerprint)
        run.emit(VersionSealedEvent(version=version, fingerprint=fingerprint.hex(), reporters=reporters))
        for member in applied:
            run.place(member)
            self._note_divergence(member)
        self.announce()

    def announce(self) -> None:
        """Tell one holder to save the newest sealed version, and everybody that it is sealed, in this order."""
        self._name_saver()
        run, record = self._run, self._run.record
        for member in run.live():
            run.tell(
                member,
                coordinator_pb2.Sealed(version=to_proto(record.sealed), fingerprint=record.sealed_fingerprint),
            )

    def _name_saver(self) -> None:
        run, record = self._run, self._run.record
        every = run.policy.save_every_steps
        ready = [member for member in run.live_in(Standing.READY) if member.hello.saves_checkpoints]
        holders = [member for member in ready if member.worker_id not in record.drained]
        if not every or record.sealed.outer_step % every or not holders:
            return
        saver = next((member for member in holders if member.worker_id == self._saver), holders[0])
        self._saver = saver.worker_id
        run.tell(saver, coordinator_pb2.SaverAssignment(version=to_proto(record.sealed)))

    def pause(self, reason: str) -> None:
        """Stop committing until an operator acts."""
        run = self._run
        run.persist(PauseSet(reason))
        run.emit(RunPausedEvent(reason=reason))
        for member in run.live():
            if member.standing is Standing.APPLIED:
                self.tell_paused(member, run.record.last_epoch)

    def tell_paused(self, member: Member, number: int) -> None:
        """Tell a member that its boundary waits for an operator."""
        reason = self._run.record.paused
        self._run.tell(member, outcome_of(number, coordinator_pb2.VERDICT_PAUSED, NO_VERSION, b"", reason))
