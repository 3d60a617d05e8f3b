"""An honest model of a worker process: the messages of a real one, a digest in place of its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from protos.recovery.v1 import common_pb2, coordinator_pb2
from recovery.control.wire import from_proto, to_proto
from recovery.types import NO_VERSION, Incarnation, Version, WorkerId, WorkerRef
from tests.protocol.sim_oracle import mix

if TYPE_CHECKING:
    from tests.protocol.sim_world import Connection, World

IDLE, TRAINING, BOUNDARY, AVERAGING, VOTED, RESTORING = (
    "idle",
    "training",
    "boundary",
    "averaging",
    "voted",
    "restoring",
)
NUMERICS = "torch-2.13.0/cpu/AVX2"

_UP_FIELDS = {
    GetMessageClass(kind.message_type): kind.name
    for kind in coordinator_pb2.WorkerMessage.DESCRIPTOR.oneofs_by_name["kind"].fields
    if kind.message_type is not None
}


class Process:
    """One life of one worker."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self.world = world
        self.name = name
        self.ref = WorkerRef(WorkerId(name), Incarnation(f"{name}-{number}"))
        self.ref_proto = to_proto(self.ref)
        self.alive = True
        self.frozen = False
        self.deferred: list[Message] = []
        self.connection: Connection | None = None
        self.mode = IDLE
        self.held = NO_VERSION
        self.value = mix(b"init", self.ref.incarnation.encode())
        self.trained_from = NO_VERSION
        self.lent: dict[Version, bytes] = {}
        self.task = 0
        """Grows whenever the process turns to something else: what was scheduled before is void."""
        self.epoch = 0
        self.roster: coordinator_pb2.Roster | None = None
        self.average = b""
        self.era = 0
        """Of the coordinator that told the roster."""
        self.attempt: tuple[str, int] = ("", 0)
        self.attachments = 0
        self.phase_ending = False
        self.slow = 1.0

    # Messages up

    def say(self, message: Message) -> None:
        if self.connection is not None:
            wrapped = coordinator_pb2.WorkerMessage()
            getattr(wrapped, _UP_FIELDS[type(message)]).CopyFrom(message)
            self.connection.up(wrapped)

    def hello(self) -> coordinator_pb2.Hello:
        self.attachments += 1
        hello = coordinator_pb2.Hello(
            protocol=1,
            run_id="run",
            worker=self.ref_proto,
            numerics_id=NUMERICS,
            layout_digest=bytes(32),
            donor_slots=2,
            saves_checkpoints=True,
            undecided_epoch=self.epoch if self.mode == VOTED else 0,
            last_epoch=self.epoch,
        )
        if self.held != NO_VERSION:
            hello.held.CopyFrom(to_proto(self.held))
            hello.held_fingerprint = self.value
        return hello

    # Doing one thing at a time

    def turn_to(self, mode: str) -> int:
        self.mode = mode
        self.task += 1
        return self.task

    def later(self, task: int, seconds: float, what: str) -> None:
        """Do ``what`` after ``seconds`` unless the process turned to something else; a frozen one does it on waking."""

        self.world.after(seconds, self._due, task, what)

    def _due(self, task: int, what: str) -> None:
        if not self.alive or task != self.task:
            return
        if self.frozen:
            self.world.after(0.5, self._due, task, what)
        else:
            getattr(self, what)()

    def train(self) -> None:
        self.world.oracle.trains(self.name, self.trained_from, self.held)
        self.trained_from = self.held
        self.phase_ending = False
        self.note()
        task = self.turn_to(TRAINING)
        self.later(task, self.slow * self.world.random.uniform(0.5, 1.5), "arrive")

    def note(self) -> None:
        """Let the oracle know what an attached process holds."""
        self.world.note(self)

    def arrive(self) -> None:
        self.turn_to(BOUNDARY)
        self._say_arrival()

    def _say_arrival(self) -> None:
        self.say(
            coordinator_pb2.BoundaryArrival(
                version=to_proto(self.held), inner_steps_done=10, weight=1.0, fingerprint=self.value
            )
        )

    # Messages down

    def hear(self, message: Message) -> None:
        if self.frozen:
            self.deferred.append(message)
        else:
            self._HANDLERS[type(message)](self, message)

    def thaw(self) -> None:
        self.frozen = False
        deferred, self.deferred = self.deferred, []
        for message in deferred:
            if self.alive:
                self.hear(message)

    def _welcome(self, message: coordinator_pb2.Welcome) -> None:
        if self.mode == BOUNDARY:
            self._say_arrival()
        elif self.mode == AVERAGING:
            self._fail_averaging()
        elif self.mode == IDLE:
            if message.current:
                self.train()
            elif self.attachments > 1:  # what it was told before may be lost
                self.say(coordinator_pb2.RecoveryRequest(reason="fresh"))

    def _become_origin(self, message: coordinator_pb2.BecomeOrigin) -> None:
        version = from_proto(message.version)
        if version < self.held:
            return
        self.held = version
        self.lent = {version: self.value}
        self.say(coordinator_pb2.Applied(version=message.version, fingerprint=self.value))
        self.train()

    def _ticket(self, message: coordinator_pb2.Ticket) -> None:
        attempt = (message.transfer_id, message.attempt)
        if attempt == self.attempt:
            return
        self.attempt = attempt
        task = self.turn_to(RESTORING)
        self.world.planes.transfer(self, message, task)

    def restored(self, message: coordinator_pb2.Ticket, value: bytes, failed: list[str]) -> None:
        """The attempt ended: with the state ``value``, or none."""
        report = coordinator_pb2.RecoveryReport(transfer_id=message.transfer_id, attempt=message.attempt)
        for donor in failed:
            failure = common_pb2.Failure(next_action=common_pb2.NEXT_ACTION_OTHER_DONOR, kind="DonorLost", message="x")
            report.donor_failures.add(worker_id=donor, failure=failure)
        if value == message.fingerprint:
            self.value, self.held = value, from_proto(message.version)
            self.lent = {self.held: value}
            report.source = coordinator_pb2.RECOVERY_SOURCE_PEERS
        else:
            report.failure.next_action = common_pb2.NEXT_ACTION_OTHER_DONOR
            report.failure.kind = "DonorLost"
        if self.held != NO_VERSION:
            report.version.CopyFrom(to_proto(self.held))
            report.fingerprint = self.value
        self.turn_to(IDLE)
        self.say(report)
        if not report.HasField("failure"):
            self.train()
        else:
            self.later(self.task, 5.0, "ask_for_state")

    def _no_donor(self, message: coordinator_pb2.NoDonor) -> None:
        if message.resume_from_disk:
            self.resume_at = from_proto(message.resume_at)
            if self.mode in (IDLE, RESTORING):
                self.turn_to(IDLE)
            self.later(self.task, self.world.random.uniform(0.05, 0.5), "offer")
        elif not message.expected and self.mode in (IDLE, TRAINING, BOUNDARY):
            self.world.exit(self, message.reason)

    def offer(self) -> None:
        checkpoints = self.world.checkpoints_of(self.name)
        wanted = [c for c in checkpoints if self.resume_at == NO_VERSION or c[0] <= self.resume_at]
        report = coordinator_pb2.RecoveryReport(source=coordinator_pb2.RECOVERY_SOURCE_DISK)
        if not wanted:
            report.failure.next_action = common_pb2.NEXT_ACTION_NEXT_SOURCE
            report.failure.kind = "NoDonorLeft"
        else:
            version, value = max(wanted)
            self.held, self.value = version, value
            self.lent = {version: value}
            self.turn_to(IDLE)
            report.version.CopyFrom(to_proto(version))
            report.fingerprint = value
        self.say(report)
        if self.mode == IDLE:
            self.later(self.task, 5.0, "ask_for_state")

    def ask_for_state(self) -> None:
        """Nothing came of what this worker said: the coordinator may take it for ready."""
        self.say(coordinator_pb2.RecoveryRequest(reason="fresh" if self.held == NO_VERSION else "behind"))

    def _roster(self, message: coordinator_pb2.Roster) -> None:
        if self.mode != BOUNDARY or from_proto(message.version) != self.held or message.epoch <= self.epoch:
            return
        self.epoch, self.roster, self.average = message.epoch, message, b""
        self.era = self.connection.era if self.connection is not None else self.world.oracle.era
        self.turn_to(AVERAGING)
        self.later(self.task, 5.0, "_fail_averaging")
        self.world.planes.averaging(self, message)

    def averaged(self, digest: bytes) -> None:
        """The collective is complete here."""
        self.average = digest
        self.turn_to(VOTED)
        if self.world.bug == "apply-before-commit":
            self._apply(digest, self.held.next())
            return
        self.say(coordinator_pb2.Vote(epoch=self.epoch, version=to_proto(self.held), digest=digest))
        self.later(self.task, 1.0, "ask")

    def _fail_averaging(self) -> None:
        if self.mode != AVERAGING:
            return
        suspect = self.world.planes.suspect(self)
        failure = common_pb2.Failure(next_action=common_pb2.NEXT_ACTION_OTHER_DONOR, kind="DonorLost", message="x")
        self.say(coordinator_pb2.EpochFailure(epoch=self.epoch, failure=failure, suspect_worker_id=suspect))
        self.later(self.task, 5.0, "_fail_averaging")

    def ask(self) -> None:
        self.say(coordinator_pb2.OutcomeQuery(epoch=self.epoch))
        self.later(self.task, 1.0, "ask")

    def _outcome(self, message: coordinator_pb2.Outcome) -> None:
        if message.epoch != self.epoch or self.mode not in (AVERAGING, VOTED):
            return
        if message.verdict == coordinator_pb2.VERDICT_COMMITTED:
            if self.mode == VOTED and message.digest == self.average:
                self._apply(self.average, from_proto(message.version))
        elif message.verdict in (coordinator_pb2.VERDICT_ABORTED, coordinator_pb2.VERDICT_PAUSED):
            self.average = b""
            self.turn_to(BOUNDARY)
            if message.verdict == coordinator_pb2.VERDICT_ABORTED:
                self._say_arrival()
        else:
            self.average = b""
            self.turn_to(IDLE)
            self.say(coordinator_pb2.RecoveryRequest(reason="behind"))

    def _apply(self, digest: bytes, version: Version) -> None:
        self.world.oracle.applied(self.name, self.epoch, version, digest, self.era)
        tainted = self.value in self.world.oracle.tainted
        self.value = mix(self.value, digest)
        if tainted:
            self.world.oracle.tainted.add(self.value)
        self.held = version
        self.lent = {version: self.value}
        self.say(coordinator_pb2.Applied(epoch=self.epoch, version=to_proto(version), fingerprint=self.value))
        self.train()

    def _phase_ending(self, message: coordinator_pb2.PhaseEnding) -> None:
        if self.mode == TRAINING and from_proto(message.version) == self.held:
            self.later(self.task, 0.05, "arrive")

    def _sealed(self, message: coordinator_pb2.Sealed) -> None:
        if from_proto(message.version) == self.held and message.fingerprint == self.value:
            self.world.save(self, shared=False)

    def _saver(self, message: coordinator_pb2.SaverAssignment) -> None:
        # A saver digests what it writes: memory that a fault wrote does not pass for the sealed state.
        if from_proto(message.version) == self.held and self.value not in self.world.oracle.tainted:
            self.world.save(self, shared=True)

    def _rejected(self, message: coordinator_pb2.Rejected) -> None:
        self.world.exit(self, message.failure.message)

    def _evicted(self, message: coordinator_pb2.Evicted) -> None:
        self.world.exit(self, message.failure.message)

    def _order(self, message: coordinator_pb2.Order) -> None:
        if message.WhichOneof("kind") == "resync" and self.held != NO_VERSION and self.mode in (TRAINING, BOUNDARY):
            self.turn_to(IDLE)
            self.say(coordinator_pb2.RecoveryRequest(reason="resync", from_worker_id=message.resync.from_worker_id))

    _HANDLERS: ClassVar[dict[type[Message], Callable[[Process, Any], None]]] = {
        coordinator_pb2.Welcome: _welcome,
        coordinator_pb2.BecomeOrigin: _become_origin,
        coordinator_pb2.Ticket: _ticket,
        coordinator_pb2.NoDonor: _no_donor,
        coordinator_pb2.Roster: _roster,
        coordinator_pb2.Outcome: _outcome,
        coordinator_pb2.PhaseEnding: _phase_ending,
        coordinator_pb2.Sealed: _sealed,
        coordinator_pb2.SaverAssignment: _saver,
        coordinator_pb2.Rejected: _rejected,
        coordinator_pb2.Evicted: _evicted,
        coordinator_pb2.Order: _order,
    }
