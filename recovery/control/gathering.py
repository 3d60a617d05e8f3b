"""The gathering at a boundary: who has arrived, who is waited for and until when, and the roster that ends it."""

from __future__ import annotations

from protos.recovery.v1 import coordinator_pb2
from recovery.control.boundary_vote import Arrival, EpochState, Gather, gather_verdict, member_deadline
from recovery.control.membership import Member, Standing
from recovery.control.record import EpochOpened
from recovery.control.run_state import AUTHORITIES, RunState
from recovery.control.sealing import SealDesk
from recovery.control.wire import duration, from_proto, to_proto
from recovery.events import RosterIssued, WorkerStalled
from recovery.types import Version

BLAMES_UNTIL_LEFT_OUT = 3
"""Failed epochs of one boundary in which a member was blamed, after which the next roster goes without it."""


class GatherDesk:
    """Takes arrivals; ``advance`` ends the gathering."""

    def __init__(self, run: RunState, seals: SealDesk) -> None:
        self._run = run
        self._seals = seals

    def arrive(self, member: Member, message: coordinator_pb2.BoundaryArrival) -> None:
        """A member stands at a boundary."""
        run, version = self._run, from_proto(message.version)
        epoch = run.epoch
        at_work = epoch is not None and member.voter in epoch.members and member.voter not in epoch.withdrawn
        if epoch is not None and at_work and version == epoch.version:
            if member.voter not in epoch.votes:  # it lost the roster with a connection, or says it twice
                run.tell(member, coordinator_pb2.Roster.FromString(epoch.roster))
            return
        if run.record.paused:
            self._seals.tell_paused(member, run.record.last_epoch)
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
            self._seals.report(member, version, fingerprint)
        return member.standing in AUTHORITIES

    def phase_ending(self, member: Member) -> None:
        """Tell a member that started the phase late that the others stand at the boundary."""
        run = self._run
        if run.gather is None:
            return
        left = max(0.0, run.gather.opened_at + run.policy.gather_max_wait_seconds - run.now)
        run.tell(member, coordinator_pb2.PhaseEnding(version=to_proto(run.gather.version), deadline=duration(left)))

    def advance(self) -> None:
        """Issue the roster if everybody is there, or the time is over."""
        run, record = self._run, self._run.record
        gather = run.gather
        if gather is None or run.epoch is not None or record.paused:
            return
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
        returns_until = run.gathering_returns_until
        verdict = gather_verdict(
            arrived,
            {name: until for name, until in gather.deadlines.items() if name not in left_out},
            run.returning if run.now < returns_until else (),
            returns_until,
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
        if not self._run.blames:
            return set()
        worst = max(arrived, key=lambda name: (len(self._run.blames.get(name, ())), name), default="")
        enough = len(arrived) - 1 >= max(1, self._run.policy.min_participants)
        return {worst} if enough and len(self._run.blames.get(worst, ())) >= BLAMES_UNTIL_LEFT_OUT else set()

    def _issue_roster(self, gather: Gather, names: list[str], missing: tuple[str, ...]) -> None:
        run = self._run
        number = run.record.last_epoch + 1
        voters = tuple(gather.arrivals[name].voter for name in names)
        absent = {member.worker_id for member in run.live_in(Standing.READY)} - set(names) | set(missing)
        run.persist(EpochOpened(number, gather.version, voters))
        if run.group != voters:
            run.drop_group()
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
