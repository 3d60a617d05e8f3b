"""What the coordinator's machine knows at this moment, and the list of effects that one input produces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from protos.recovery.v1 import coordinator_pb2
from recovery.control.boundary_vote import EpochState, Gather
from recovery.control.inputs import Answer, Drop, Effect, Emit, EndScope, Persist, Tell
from recovery.control.membership import Member, Standing, placed
from recovery.control.policy import RunPolicy
from recovery.control.record import Change, HistoryRecord, Voter
from recovery.control.wire import duration, to_proto
from recovery.errors import RecoveryError
from recovery.events import Event, WorkerRejected
from recovery.types import NO_VERSION, Version

AUTHORITIES = (Standing.READY, Standing.APPLIED, Standing.APPLYING)
"""Standings of workers that hold, or are about to hold, the newest committed version."""


@dataclass(slots=True)
class Beginning:
    """One process was told to begin a lineage and has not reported its state yet."""

    version: Version
    cause: str
    voter: Voter
    since: float
    expected_fingerprint: bytes = b""
    """Empty: whatever it reports."""
    lost_at: float | None = None
    request_ids: list[str] = field(default_factory=list)


class RunState:
    """Shared by the desks of one machine; no IO, no clock of its own."""

    def __init__(self, policy: RunPolicy, record: HistoryRecord, wall_offset_seconds: float) -> None:
        self.policy = policy
        self.record = record
        self.wall_offset_seconds = wall_offset_seconds
        self.now = 0.0
        self.turn = 0
        """Inputs taken so far."""
        self.started_at: float | None = None
        self.members: dict[str, Member] = {}
        self.gather: Gather | None = None
        self.epoch: EpochState | None = None
        self.group: tuple[Voter, ...] = ()
        """Members of the group that the next roster may use again; empty: none may."""
        self.group_id = 0
        self.blames: dict[str, set[int]] = {}
        """Failed epochs of the present boundary by whom they were blamed on."""
        self.committed_at = 0.0
        self.period_seconds = 0.0
        """Between the last two commits that this coordinator saw; zero: unknown."""
        self.beginning: Beginning | None = None
        self.rates: dict[tuple[str, str], float] = {}
        self.num_transfers = 0
        self.returning: set[str] = set()
        """Members of the last roster that this coordinator has not seen since its start."""
        newest = record.epochs.get(record.last_epoch)
        if newest is not None:
            self.returning.update(worker_id for worker_id, _ in newest.members)
        self.num_gone = 0
        """Lost members that were forgotten."""
        self.outlook = ""
        """Why no worker has the newest state; empty: one has."""
        self.effects: list[Effect] = []
        self.wake_at: float | None = None

    # Effects

    def persist(self, change: Change) -> None:
        """Take in a change of history; it is stored before any later effect."""
        self.record.apply(change)
        self.effects.append(Persist(change))

    def emit(self, event: Event) -> None:
        self.effects.append(Emit(event))

    def tell(self, member: Member, message: Message) -> None:
        """Send one of the kinds of ``CoordinatorMessage`` to a live member."""
        if member.alive:
            self.effects.append(Tell(member.ref, envelope(message)))

    def answer(self, request_id: str, answer: Message | RecoveryError) -> None:
        self.effects.append(Answer(request_id, answer))

    def end_scope(self, scope: str) -> None:
        self.effects.append(EndScope(scope))

    def reject(self, member: Member, error: RecoveryError) -> None:
        """Tell a member why it may not stay, and end its stream."""
        self.tell(member, coordinator_pb2.Rejected(failure=to_proto(error)))
        self.effects.append(Drop(member.ref, str(error)))
        self.emit(WorkerRejected(worker_id=member.worker_id, reason=str(error)))
        self.lose(member, str(error))
        member.said_goodbye = True

    def lose(self, member: Member, reason: str) -> None:
        """Count a member as gone."""
        member.alive = False
        member.lost_at = self.now
        member.lost_reason = reason
        if self.gather is not None:
            self.gather.arrivals.pop(member.worker_id, None)
            self.gather.deadlines.pop(member.worker_id, None)

    def drop_group(self) -> None:
        """The next roster gets a new group."""
        if self.group_id:
            self.end_scope(f"epoch/{self.group_id}")
        self.group, self.group_id = (), 0

    # Time

    def wake(self, at: float) -> None:
        """Something is due at ``at``."""
        if self.wake_at is None or at < self.wake_at:
            self.wake_at = at

    @property
    def returning_until(self) -> float:
        """Until when seals wait for members that the restarted coordinator has not seen yet."""
        return (self.started_at or 0.0) + self.policy.lease_seconds

    @property
    def gathering_returns_until(self) -> float:
        """Until when a boundary waits for them.

        No longer than a phase, once somebody has said how long one takes: who is left out loses the work of one phase,
        and everybody else would lose as much by standing there.
        """
        phases = [member.phase_seconds for member in self.live_in(*AUTHORITIES)]
        wait, phase = self.policy.return_wait_seconds, max(phases, default=0.0)
        if phase:
            wait = min(wait, max(phase, self.policy.gather_min_wait_seconds))
        return (self.started_at or 0.0) + wait

    # Members

    def live(self) -> Iterator[Member]:
        """Live members by name."""
        for member in self.members.values():
            if member.alive:
                yield member

    def live_in(self, *standings: Standing) -> list[Member]:
        found = []
        for member in self.members.values():
            if member.alive and member.standing in standings:
                found.append(member)
        return found

    def enter(self, member: Member) -> None:
        """Take in a member in the place of its name; ``members`` stays in the order of names."""
        if member.worker_id in self.members:
            self.members[member.worker_id] = member
            return
        self.members[member.worker_id] = member
        self.members = dict(sorted(self.members.items()))

    def forget_lost(self) -> None:
        """Forget members that were lost long ago; their names may come back as those of new workers."""
        keep = max(self.policy.forget_after_seconds, self.policy.expected_return_seconds)
        for member in [member for member in self.members.values() if not member.alive]:
            due = member.lost_at + keep
            if self.now < due:
                self.wake(due)
                continue
            self.forget_transfer(member)
            del self.members[member.worker_id]
            self.num_gone += 1

    def process(self, voter: Voter) -> Member | None:
        """Return the live member that is this very process."""
        member = self.members.get(voter[0])
        return member if member is not None and member.alive and member.voter == voter else None

    def place(self, member: Member) -> None:
        """Give a member the standing that its state has in the history."""
        beginning = self.beginning.voter if self.beginning is not None else None
        standing, why = placed(self.record, member, beginning=beginning)
        if standing is Standing.QUEUED and member.standing is Standing.JOINING:
            return  # its transfer goes on; what comes of it is judged then
        if standing is not Standing.QUEUED:
            self.forget_transfer(member)
        member.stand(standing, self.now, why)

    def place_all(self) -> None:
        """Judge every live member anew: the history took another course."""
        for member in self.live():
            self.place(member)

    def welcome(self, member: Member) -> None:
        """Tell a member where it stands; a second time: what it said or heard before may be void."""
        record = self.record
        welcome = coordinator_pb2.Welcome(
            sealed_fingerprint=record.sealed_fingerprint,
            current=member.standing in (Standing.READY, Standing.APPLIED),
            awaiting_origin=member.standing in (Standing.AWAITING, Standing.ORIGIN),
            gather_max_wait=duration(self.policy.gather_max_wait_seconds),
            min_participants=self.policy.min_participants,
            inner_steps_per_phase=self.policy.inner_steps_per_phase,
        )
        if record.sealed != NO_VERSION:
            welcome.sealed.CopyFrom(to_proto(record.sealed))
        self.tell(member, welcome)

    def tell_to_begin(self, member: Member, version: Version) -> None:
        """Tell a member to begin a lineage with the state that it holds."""
        data_position = self.data_position(member, version)
        self.tell(member, coordinator_pb2.BecomeOrigin(version=to_proto(version), data_position=data_position))

    def data_position(self, member: Member, version: Version) -> coordinator_pb2.RecordedPosition | None:
        """Return where a worker stood in its data when the run was at ``version``; None: not known."""
        found = self.record.position_at(member.worker_id, version)
        if found is None:
            return None
        return coordinator_pb2.RecordedPosition(position=found.position, version=to_proto(found.version))

    def forget_transfer(self, member: Member) -> None:
        """End a member's transfer and the rendezvous of its attempts."""
        self.end_attempt(member)
        member.transfer = None

    def end_attempt(self, member: Member) -> None:
        """End the attempt in flight; the transfer and what it knows of donors stays."""
        transfer = member.transfer
        if transfer is None:
            return
        for donor in transfer.donors:
            self.end_scope(f"transfer/{transfer.transfer_id}/{transfer.attempt}/{donor}")
        transfer.donors = ()


_FIELD_OF = {
    GetMessageClass(kind.message_type): kind.name
    for kind in coordinator_pb2.CoordinatorMessage.DESCRIPTOR.oneofs_by_name["kind"].fields
    if kind.message_type is not None
}


def envelope(message: Message) -> coordinator_pb2.CoordinatorMessage:
    """Return ``message`` as the kind of ``CoordinatorMessage`` that it is."""
    wrapped = coordinator_pb2.CoordinatorMessage()
    getattr(wrapped, _FIELD_OF[type(message)]).CopyFrom(message)
    return wrapped


def outcome_of(
    number: int, verdict: coordinator_pb2.Verdict.ValueType, created: Version, digest: bytes, reason: str
) -> coordinator_pb2.Outcome:
    """Return what a member is told of an epoch."""
    outcome = coordinator_pb2.Outcome(epoch=number, verdict=verdict, digest=digest, reason=reason)
    if created != NO_VERSION:
        outcome.version.CopyFrom(to_proto(created))
    return outcome
