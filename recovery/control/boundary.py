"""The boundary as the coordinator drives it: gather, roster, vote, commit, seal.

::

    no gather --arrival--> gather --everybody, or window over--> epoch --all live votes equal--> committed --> sealed
                              ^                                    |
                              +------- abort: all arrive again ----+

A roster is told only for a sealed version; a commit is stored before it is told. ``gathering`` and ``sealing`` hold the
ends, this file the epoch between them.
"""

from __future__ import annotations

from protos.recovery.v1 import coordinator_pb2
from recovery.control.boundary_vote import Ending, EpochState, Tally, tally
from recovery.control.gathering import BLAMES_UNTIL_LEFT_OUT, GatherDesk
from recovery.control.membership import Member, Standing, may_apply
from recovery.control.record import ABORTED, COMMITTED, EpochClosed, PositionRecorded, Voter
from recovery.control.run_state import AUTHORITIES, RunState, outcome_of
from recovery.control.sealing import SealDesk
from recovery.control.wire import from_proto
from recovery.events import EpochEnded
from recovery.types import NO_VERSION, Version


class BoundaryDesk:
    """Takes votes and failures; ``advance`` does what is due. Owns the desks of gathering and sealing."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self.seals = SealDesk(run)
        self.gathering = GatherDesk(run, self.seals)
        self._tie_at = NO_VERSION

    def vote(self, member: Member, message: coordinator_pb2.Vote) -> None:
        """A member holds the complete average."""
        epoch = self._run.epoch
        if epoch is None or message.epoch != epoch.epoch:
            self.query(member, message.epoch)
        elif member.voter in epoch.members and from_proto(message.version) == epoch.version:
            epoch.votes.setdefault(member.voter, message.digest)
            if message.data_position:
                epoch.positions[member.voter] = message.data_position

    def fail(self, member: Member, message: coordinator_pb2.EpochFailure) -> None:
        """A member's averaging failed: nobody can rely on the others having finished theirs."""
        epoch = self._run.epoch
        if epoch is None or message.epoch != epoch.epoch:
            self._note_late_blame(member, message)
            self.query(member, message.epoch)
            return
        if member.voter not in epoch.members:
            return
        name = message.suspect_worker_id or self._likely_culprit(epoch, member)
        self._blame(name, epoch.epoch, member)
        blamed = f", blames {message.suspect_worker_id}" if message.suspect_worker_id else ""
        self._abort(f"{member.worker_id} reports {message.failure.message or 'a failure'}{blamed}")

    def _blame(self, name: str, number: int, accuser: Member) -> None:
        suspect = self._run.members.get(name)
        if suspect is not None and suspect is not accuser:
            suspect.suspected_at = self._run.now
            self._run.blames.setdefault(name, set()).add(number)

    def _note_late_blame(self, member: Member, message: coordinator_pb2.EpochFailure) -> None:
        """The first report of a failure ends its epoch, and may come from the very member that broke it."""
        record = self._run.record
        ended = record.epochs.get(message.epoch)
        if ended is None or member.voter not in ended.members or ended.version != record.committed:
            return
        if message.suspect_worker_id in {name for name, _ in ended.members}:
            self._blame(message.suspect_worker_id, message.epoch, member)

    def _likely_culprit(self, epoch: EpochState, accuser: Member) -> str:
        """Whoever could not even connect names nobody: it will be the one who broke the epochs before."""
        known = {name: len(self._run.blames.get(name, ())) for name, _ in epoch.members if name != accuser.worker_id}
        worst = max(known, key=lambda name: (known[name], name), default="")
        return worst if known.get(worst) else ""

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
        run.tell(member, outcome_of(number, verdict, created, digest, reason))

    def advance(self) -> None:
        """Seal, end the epoch, or end the gathering, if their time has come."""
        run = self._run
        if run.beginning is not None:
            return
        if run.record.committed > run.record.sealed and not run.record.paused:
            self.seals.advance()
        if run.epoch is not None:
            self._advance_epoch(run.epoch)
        self.gathering.advance()

    def _advance_epoch(self, epoch: EpochState) -> None:
        run = self._run
        live = set()
        for voter in epoch.members:
            member = run.process(voter)
            if member is not None and member.standing not in AUTHORITIES:
                epoch.withdrawn.add(voter)
            elif member is not None and voter not in epoch.withdrawn:
                live.add(voter)
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
                        self._run.blames.setdefault(name, set()).add(epoch.epoch)
                self._abort(f"no vote from {', '.join(result.waiting_for)} within {run.policy.max_epoch_seconds:g} s")
            case Ending.UNDECIDED:
                run.wake(due)

    def _commit(self, epoch: EpochState, result: Tally) -> None:
        run = self._run
        created = epoch.version.next()
        reason = f"{len(result.voters)} equal votes"
        voters = tuple(voter for voter in result.voters if voter not in epoch.withdrawn)
        positions = tuple(
            PositionRecorded(voter[0], created, run.record.tokens_of(voter[0]), epoch.positions[voter])
            for voter in voters
            if voter in epoch.positions
        )
        run.persist(EpochClosed(epoch.epoch, COMMITTED, created, result.digest, voters, reason, positions))
        run.period_seconds = run.now - run.committed_at if run.committed_at else 0.0
        run.epoch, run.gather, run.committed_at = None, None, run.now
        self._tie_at = NO_VERSION
        self._clear_blames({name for name, _ in voters})
        for member in list(run.live()):
            if member.voter in voters:
                member.stand(Standing.APPLYING, run.now)
                outcome = outcome_of(epoch.epoch, coordinator_pb2.VERDICT_COMMITTED, created, result.digest, reason)
                run.tell(member, outcome)
            elif member.voter in result.excluded:
                self._exclude(member, epoch.epoch, result)
            elif member.standing in (Standing.READY, Standing.APPLIED):
                run.place(member)
        self._ended(epoch, COMMITTED, created, reason)

    def _clear_blames(self, voters: set[str]) -> None:
        """Who took part in a commit is cleared. Who was left out stays under suspicion: the next boundary that it
        breaks goes on without it after one failed epoch."""
        blames = self._run.blames
        for name in list(blames):
            if name in voters or len(blames[name]) < BLAMES_UNTIL_LEFT_OUT - 1:
                del blames[name]
            else:
                blames[name] = set(sorted(blames[name])[1 - BLAMES_UNTIL_LEFT_OUT :])

    def _exclude(self, member: Member, number: int, result: Tally) -> None:
        reason = "its average differs from the majority's"
        member.stand(Standing.QUEUED, self._run.now, "diverged")
        self._run.tell(member, outcome_of(number, coordinator_pb2.VERDICT_EXCLUDED, NO_VERSION, result.digest, reason))

    def _abort(self, reason: str, excluded: tuple[Voter, ...] = (), *, paused: bool = False) -> None:
        run, epoch = self._run, self._run.epoch
        if epoch is None:
            return
        run.persist(EpochClosed(epoch.epoch, ABORTED, NO_VERSION, b"", (), reason))
        run.epoch = None
        if run.gather is not None:
            run.gather.opened_at = run.now  # who withdrew may have arrived already: the others get their time
        run.drop_group()
        verdict = coordinator_pb2.VERDICT_PAUSED if paused else coordinator_pb2.VERDICT_ABORTED
        for voter in epoch.members:
            member = run.process(voter)
            if member is None:
                continue
            if voter in excluded:
                self._exclude(member, epoch.epoch, Tally(Ending.ABORT, reason=reason))
            else:
                run.tell(member, outcome_of(epoch.epoch, verdict, NO_VERSION, b"", reason))
        self._ended(epoch, ABORTED, NO_VERSION, reason)

    def abandon(self, reason: str) -> None:
        """Abort the epoch at work and forget the gathering: a new lineage begins."""
        self._abort(reason)
        self._run.gather = None
        self._run.drop_group()
        self._tie_at = NO_VERSION
        self._run.blames.clear()

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
        self.seals.pause(reason)

    def _ended(self, epoch: EpochState, verdict: str, created: Version, reason: str) -> None:
        self._run.emit(EpochEnded(epoch=epoch.epoch, verdict=verdict, version=created, reason=reason))
