"""The boundary as the coordinator drives it: gather, roster, vote, commit, seal.

::

    no gather --arrival--> gather --everybody, or window over--> epoch --all live votes equal--> committed --> sealed
                              ^                                    |
                              +------- abort: all arrive again ----+

A roster is told only for a sealed version; a commit is stored before it is told.
"""

from __future__ import annotations

from protos.recovery.v1 import coordinator_pb2
from recovery.control.boundary_vote import (
    Arrival,
    Ending,
    EpochState,
    Gather,
    Tally,
    gather_verdict,
    member_deadline,
    seal_verdict,
    tally,
)
from recovery.control.membership import Member, Standing, may_apply
from recovery.control.record import (
    ABORTED,
    COMMITTED,
    EpochClosed,
    EpochOpened,
    PauseSet,
    PositionRecorded,
    VersionSealed,
    Voter,
)
from recovery.control.run_state import AUTHORITIES, RunState
from recovery.control.wire import duration, from_proto, to_proto
from recovery.events import (
    EpochEnded,
    FingerprintDiverged,
    RosterIssued,
    RunPausedEvent,
    WorkerStalled,
)
from recovery.events import VersionSealed as VersionSealedEvent
from recovery.types import NO_VERSION, Version

MAX_TOKENS = 2**63 - 1
"""What the history can store."""

BLAMES_UNTIL_LEFT_OUT = 3
"""Failed epochs of one boundary in which a member was blamed, after which the next roster goes without it."""


class BoundaryDesk:
    """Takes arrivals, votes and reports; ``advance`` does what is due."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._tie_at = NO_VERSION
        self._saver = ""
        self._blames: dict[str, set[int]] = {}

    # What members say

    def arrive(self, member: Member, message: coordinator_pb2.BoundaryArrival) -> None:
        """A member stands at a boundary."""
        run, version = self._run, from_proto(message.version)
        epoch = run.epoch
        if epoch is not None and member.voter in epoch.members and version == epoch.version:
            if member.voter not in epoch.votes:  # it lost the roster with a connection, or says it twice
                run.tell(member, coordinator_pb2.Roster.FromString(epoch.roster))
            return
        if run.record.paused:
            self._tell_paused(member, run.record.last_epoch)
        if not self._accepts(member, version, message.fingerprint):
            return
        if run.gather is None or run.gather.version != version:
            run.gather = Gather(version, run.now)
            for late in run.live_in(Standing.READY):
                if late.began_late_at == version and late is not member:
                    self.phase_ending(late)
        weight = message.weight if 0.0 <= message.weight <= 1.0 else 0.0  # NaN compares false
        run.gather.arrivals[member.worker_id] = Arrival(member.voter, message.inner_steps_done, weight, run.now)

    def _accepts(self, member: Member, version: Version, fingerprint: bytes) -> bool:
        run, record = self._run, self._run.record
        if member.standing is Standing.JOINING:
            transfer = member.transfer
            if transfer is not None and transfer.told_turn < member.attached_turn:
                # Who stands at a boundary is at no transfer: its ticket was lost with an earlier stream.
                run.end_attempt(member)
                member.stand(Standing.QUEUED, run.now, member.why)
            return False
        if run.beginning is not None or member.why == "resync":
            return False
        if version < member.held or (member.standing is Standing.APPLYING and version < record.committed):
            return False  # said before it moved on
        if version != record.committed:
            member.held, member.fingerprint = version, fingerprint
            run.place(member)
            return False
        if fingerprint and (member.held != version or member.fingerprint != fingerprint):
            self._report(member, version, fingerprint)
        return member.standing in AUTHORITIES

    def phase_ending(self, member: Member) -> None:
        """Tell a member that started the phase late that the others stand at the boundary."""
        run = self._run
        if run.gather is None:
            return
        left = max(0.0, run.gather.opened_at + run.policy.gather_max_wait_seconds - run.now)
        run.tell(member, coordinator_pb2.PhaseEnding(version=to_proto(run.gather.version), deadline=duration(left)))

    def vote(self, member: Member, message: coordinator_pb2.Vote) -> None:
        """A member holds the complete average."""
        epoch = self._run.epoch
        if epoch is None or message.epoch != epoch.epoch:
            self.query(member, message.epoch)
        elif member.voter in epoch.members and from_proto(message.version) == epoch.version:
            epoch.votes.setdefault(member.voter, message.digest)

    def fail(self, member: Member, message: coordinator_pb2.EpochFailure) -> None:
        """A member's averaging failed: nobody can rely on the others having finished theirs."""
        run, epoch = self._run, self._run.epoch
        if epoch is None or message.epoch != epoch.epoch:
            self.query(member, message.epoch)
            return
        if member.voter not in epoch.members:
            return
        suspect = run.members.get(message.suspect_worker_id)
        if suspect is not None and suspect is not member:
            suspect.suspected_at = run.now
            self._blames.setdefault(suspect.worker_id, set()).add(epoch.epoch)
        blamed = f", blames {message.suspect_worker_id}" if message.suspect_worker_id else ""
        self._abort(f"{member.worker_id} reports {message.failure.message or 'a failure'}{blamed}")

    def query(self, member: Member, number: int) -> None:
        """Tell a member how an epoch ended. An open one is answered when it ends; silence means only that."""
        run, record = self._run, self._run.record
        if number == 0 or (run.epoch is not None and run.epoch.epoch == number) or number > record.last_epoch:
            return
        known = record.epochs.get(number)
        if known is None:
            verdict, reason = coordinator_pb2.VERDICT_EXCLUDED, "the epoch is too long ago to tell its outcome"
        elif known.verdict != COMMITTED:
            verdict, reason = coordinator_pb2.VERDICT_ABORTED, known.reason
        elif not may_apply(record, member, number):
            verdict, reason = coordinator_pb2.VERDICT_EXCLUDED, "its vote is not part of the commit"
        elif not record.on_path(known.created):
            verdict, reason = coordinator_pb2.VERDICT_EXCLUDED, f"the run left {known.created} behind"
        else:
            verdict, reason = coordinator_pb2.VERDICT_COMMITTED, known.reason
        created = known.created if known is not None else NO_VERSION
        digest = known.digest if known is not None else b""
        run.tell(member, _outcome(number, verdict, created, digest, reason))

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
            self._report(member, version, message.fingerprint)

    def _report(self, member: Member, version: Version, fingerprint: bytes) -> None:
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

    # What is due

    def advance(self) -> None:
        """Seal, end the epoch, or end the gathering, if their time has come."""
        run = self._run
        if run.beginning is not None:
            return
        if run.record.committed > run.record.sealed and not run.record.paused:
            self._advance_seal()
        if run.epoch is not None:
            self._advance_epoch(run.epoch)
        if run.gather is not None and run.epoch is None and not run.record.paused:
            self._advance_gather(run.gather)

    def _advance_seal(self) -> None:
        run, record = self._run, self._run.record
        reports = {member.worker_id: member.fingerprint for member in run.live_in(Standing.APPLIED)}
        outstanding = {member.worker_id for member in run.live_in(Standing.APPLYING)}
        committed = record.epochs.get(record.committed_epoch)
        if committed is not None and run.now < run.returning_until:
            outstanding |= run.returning & {worker_id for worker_id, _ in committed.voters}
            if outstanding & run.returning:
                run.wake(run.returning_until)
        due = run.committed_at + run.policy.seal_wait_seconds
        if reports and outstanding and run.now < due:
            run.wake(due)
        verdict = seal_verdict(reports, outstanding, run.now >= due)
        if verdict.tie:
            self._pause(
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
        self.announce_seal()

    def announce_seal(self) -> None:
        """Tell everybody the newest sealed version, and one holder to save it."""
        run, record = self._run, self._run.record
        for member in run.live():
            run.tell(
                member,
                coordinator_pb2.Sealed(version=to_proto(record.sealed), fingerprint=record.sealed_fingerprint),
            )
        every = run.policy.save_every_steps
        holders = [member for member in run.live_in(Standing.READY) if member.worker_id not in record.drained]
        if not every or record.sealed.outer_step % every or not holders:
            return
        saver = next((member for member in holders if member.worker_id == self._saver), holders[0])
        self._saver = saver.worker_id
        run.tell(saver, coordinator_pb2.SaverAssignment(version=to_proto(record.sealed)))

    def _advance_epoch(self, epoch: EpochState) -> None:
        run = self._run
        live = {voter for voter in epoch.members if run.process(voter) is not None}
        result = tally(epoch.members, live, epoch.votes, run.policy.min_participants)
        due = epoch.issued_at + run.policy.max_epoch_seconds
        match result.ending:
            case Ending.COMMIT:
                self._commit(epoch, result)
            case Ending.ABORT:
                self._abort(result.reason, result.excluded)
            case Ending.TIE:
                self._tie(epoch, result)
            case Ending.UNDECIDED if run.now >= due:
                for name in result.waiting_for:
                    if (epoch_member := run.members.get(name)) is not None:
                        epoch_member.suspected_at = run.now
                        self._blames.setdefault(name, set()).add(epoch.epoch)
                self._abort(f"no vote from {', '.join(result.waiting_for)} within {run.policy.max_epoch_seconds:g} s")
            case Ending.UNDECIDED:
                run.wake(due)

    def _commit(self, epoch: EpochState, result: Tally) -> None:
        run = self._run
        created = epoch.version.next()
        reason = f"{len(result.voters)} equal votes"
        run.persist(EpochClosed(epoch.epoch, COMMITTED, created, result.digest, result.voters, reason))
        run.epoch, run.gather, run.committed_at = None, None, run.now
        self._tie_at = NO_VERSION
        self._blames.clear()
        for member in list(run.live()):
            if member.voter in result.voters:
                member.stand(Standing.APPLYING, run.now)
                outcome = _outcome(epoch.epoch, coordinator_pb2.VERDICT_COMMITTED, created, result.digest, reason)
                run.tell(member, outcome)
            elif member.voter in result.excluded:
                self._exclude(member, epoch.epoch, result)
            elif member.standing in (Standing.READY, Standing.APPLIED):
                run.place(member)
        self._ended(epoch, COMMITTED, created, reason)

    def _exclude(self, member: Member, number: int, result: Tally) -> None:
        reason = "its average differs from the majority's"
        member.stand(Standing.QUEUED, self._run.now, "diverged")
        self._run.tell(member, _outcome(number, coordinator_pb2.VERDICT_EXCLUDED, NO_VERSION, result.digest, reason))

    def _abort(self, reason: str, excluded: tuple[Voter, ...] = (), *, paused: bool = False) -> None:
        run, epoch = self._run, self._run.epoch
        if epoch is None:
            return
        run.persist(EpochClosed(epoch.epoch, ABORTED, NO_VERSION, b"", (), reason))
        run.epoch = None
        self.drop_group()
        verdict = coordinator_pb2.VERDICT_PAUSED if paused else coordinator_pb2.VERDICT_ABORTED
        for voter in epoch.members:
            member = run.process(voter)
            if member is None:
                continue
            if voter in excluded:
                self._exclude(member, epoch.epoch, Tally(Ending.ABORT, reason=reason))
            else:
                run.tell(member, _outcome(epoch.epoch, verdict, NO_VERSION, b"", reason))
        self._ended(epoch, ABORTED, NO_VERSION, reason)

    def abandon(self, reason: str) -> None:
        """Abort the epoch at work and forget the gathering: a new lineage begins."""
        self._abort(reason)
        self._run.gather = None
        self.drop_group()
        self._tie_at = NO_VERSION
        self._blames.clear()

    def drop_group(self) -> None:
        """The next roster gets a new group."""
        run = self._run
        if run.group_id:
            run.end_scope(f"epoch/{run.group_id}")
        run.group, run.group_id = (), 0

    def _tie(self, epoch: EpochState, result: Tally) -> None:
        if self._tie_at != epoch.version:
            self._tie_at = epoch.version
            self._abort(f"{result.reason}; averaged once more on a new group")
            return
        reason = (
            f"members disagree twice about the average of {epoch.version}: {result.reason}. Choose whose state is the "
            "run's: `recovery rollback --worker W`"
        )
        self._abort(reason, paused=True)
        self._pause(reason)

    def _pause(self, reason: str) -> None:
        run = self._run
        run.persist(PauseSet(reason))
        run.emit(RunPausedEvent(reason=reason))
        for member in run.live():
            if member.standing is Standing.APPLIED:
                self._tell_paused(member, run.record.last_epoch)

    def _tell_paused(self, member: Member, number: int) -> None:
        reason = self._run.record.paused
        self._run.tell(member, _outcome(number, coordinator_pb2.VERDICT_PAUSED, NO_VERSION, b"", reason))

    def _ended(self, epoch: EpochState, verdict: str, created: Version, reason: str) -> None:
        self._run.emit(EpochEnded(epoch=epoch.epoch, verdict=verdict, version=created, reason=reason))

    # The gathering

    def _advance_gather(self, gather: Gather) -> None:
        run, record = self._run, self._run.record
        if gather.version != record.committed:
            run.gather = None
            return
        self._expect(gather)
        arrived = {
            name
            for name, arrival in gather.arrivals.items()
            if (member := run.process(arrival.voter)) is not None and member.standing in AUTHORITIES
        }
        left_out = self._left_out(arrived)
        arrived -= left_out
        verdict = gather_verdict(
            arrived,
            {name: until for name, until in gather.deadlines.items() if name not in left_out},
            run.returning if run.now < run.returning_until else (),
            run.returning_until,
            run.policy.min_participants,
            run.now,
        )
        if verdict.until is not None:
            run.wake(verdict.until)
        if verdict.close and record.committed == record.sealed:
            self._issue_roster(gather, sorted(arrived), verdict.missing)

    def _expect(self, gather: Gather) -> None:
        run = self._run
        for member in run.live_in(Standing.READY, Standing.APPLIED):
            name = member.worker_id
            if name in gather.arrivals:
                continue
            stalls_at = member.progress_at + member.stall_limit(run.policy)
            if run.now >= stalls_at and not member.stalled:
                member.stalled = True
                run.emit(WorkerStalled(worker_id=name, stalled_seconds=run.now - member.progress_at))
            if member.stalled:
                gather.deadlines.pop(name, None)
                continue
            run.wake(stalls_at)
            if member.suspected_at is not None:  # it may be innocent: it gets the time that a live process needs
                gather.deadlines[name] = gather.opened_at + run.policy.gather_min_wait_seconds
            elif name not in gather.deadlines:
                gather.deadlines[name] = member_deadline(
                    max(gather.opened_at, member.since),
                    remaining_seconds=self._remaining(member, gather.version),
                    factor=run.policy.gather_factor,
                    min_wait=run.policy.gather_min_wait_seconds,
                    max_wait=run.policy.gather_max_wait_seconds,
                )

    @staticmethod
    def _remaining(member: Member, version: Version) -> float | None:
        """Return the seconds that a member still needs by its own announcements; None: it announced nothing."""
        told = member.advertisement
        step_seconds = member.seconds_per_inner_step
        if member.began_late_at == version:
            return step_seconds or None  # it was told that the phase ends: one step, at most
        if member.advertised_at is None or not told.inner_steps_per_phase or not step_seconds:
            return None
        steps_left = max(0, told.inner_steps_per_phase - told.inner_step)
        return steps_left * step_seconds

    def _left_out(self, arrived: set[str]) -> set[str]:
        """Return a member that this boundary goes without, because epoch after epoch was blamed on it."""
        worst = max(arrived, key=lambda name: (len(self._blames.get(name, ())), name), default="")
        enough = len(arrived) - 1 >= max(1, self._run.policy.min_participants)
        return {worst} if enough and len(self._blames.get(worst, ())) >= BLAMES_UNTIL_LEFT_OUT else set()

    def _issue_roster(self, gather: Gather, names: list[str], missing: tuple[str, ...]) -> None:
        run = self._run
        number = run.record.last_epoch + 1
        voters = tuple(gather.arrivals[name].voter for name in names)
        absent = {member.worker_id for member in run.live_in(Standing.READY)} - set(names) | set(missing)
        run.persist(EpochOpened(number, gather.version, voters))
        if run.group != voters:
            self.drop_group()
            run.group, run.group_id = voters, number
        total = sum(gather.arrivals[name].weight for name in names)
        roster = coordinator_pb2.Roster(
            epoch=number,
            version=to_proto(gather.version),
            waited=duration(run.now - gather.opened_at),
            missing=sorted(absent),
            group_id=run.group_id,
        )
        for name in names:
            # If nobody did a step there is nothing to weigh by, and the mean of equals is defined.
            weight = gather.arrivals[name].weight if total > 0 else 1.0
            member = run.members[name]
            roster.members.add(worker=to_proto(member.ref), data_host=member.data_host, weight=weight)
        run.epoch = EpochState(number, gather.version, voters, run.group_id, run.now, roster.SerializeToString())
        run.gather = None
        for name in names:
            run.tell(run.members[name], roster)
        run.emit(
            RosterIssued(
                epoch=number,
                version=gather.version,
                members=tuple(names),
                missing=tuple(sorted(absent)),
                waited_seconds=run.now - gather.opened_at,
            )
        )


def _outcome(
    number: int, verdict: coordinator_pb2.Verdict.ValueType, created: Version, digest: bytes, reason: str
) -> coordinator_pb2.Outcome:
    outcome = coordinator_pb2.Outcome(epoch=number, verdict=verdict, digest=digest, reason=reason)
    if created != NO_VERSION:
        outcome.version.CopyFrom(to_proto(created))
    return outcome
