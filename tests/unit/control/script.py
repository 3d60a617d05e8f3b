"""Drives a ``RunMachine`` line by line: what a worker says, what everybody is told."""

from __future__ import annotations

from google.protobuf.message import Message

from protos.recovery.v1 import common_pb2, coordinator_pb2
from recovery.control.inputs import (
    Answer,
    Attached,
    Detached,
    Drop,
    Effect,
    Emit,
    EndScope,
    Operated,
    OperationRequest,
    Persist,
    Received,
    Tell,
    Tick,
)
from recovery.control.policy import RunPolicy
from recovery.control.record import HistoryRecord, copy_of
from recovery.control.run import RunMachine
from recovery.control.wire import from_proto, to_proto
from recovery.errors import RecoveryError
from recovery.events import Event
from recovery.types import NO_VERSION, Incarnation, Version, WorkerId, WorkerRef

NUMERICS = "torch-2.13.0/cpu/AVX2"
LAYOUT = bytes(32)


def fingerprint_of(version: Version, flavour: str = "") -> bytes:
    return f"{version.outer_step}{flavour}".encode().ljust(32, b"f")


class Script:
    """A coordinator's machine and everything it has told."""

    def __init__(self, record: HistoryRecord | None = None, **policy: object) -> None:
        settings: dict[str, object] = {"run_id": "run", "expected_return_seconds": 5.0, **policy}
        self.policy = RunPolicy(**settings)  # type: ignore[arg-type]
        self.durable = copy_of(record) if record is not None else HistoryRecord("run")
        self.machine = RunMachine(self.policy, copy_of(self.durable))
        self.now = 100.0
        self.told: dict[str, list[Message]] = {}
        self.answers: dict[str, list[Message | RecoveryError]] = {}
        self.dropped: dict[str, str] = {}
        self.events: list[Event] = []
        self.scopes: list[str] = []
        self.refs: dict[str, WorkerRef] = {}

    # What happens

    def attach(
        self,
        name: str,
        held: Version = NO_VERSION,
        *,
        incarnation: str = "i1",
        fingerprint: bytes | None = None,
        **hello: object,
    ) -> None:
        ref = WorkerRef(WorkerId(name), Incarnation(incarnation))
        fields: dict[str, object] = {
            "protocol": 1,
            "run_id": "run",
            "numerics_id": NUMERICS,
            "layout_digest": LAYOUT,
            "donor_slots": 2,
            "saves_checkpoints": True,
            "data_hosts": ["127.0.0.1"],
            **hello,
        }
        message = coordinator_pb2.Hello(worker=to_proto(ref), **fields)  # type: ignore[arg-type]
        if held != NO_VERSION:
            message.held.CopyFrom(to_proto(held))
            message.held_fingerprint = fingerprint_of(held) if fingerprint is None else fingerprint
        refused = len(self.dropped)
        self._run(self.machine.handle(Attached(ref, message), self.now))
        if len(self.dropped) == refused or name not in self.refs:
            self.refs[name] = ref

    def say(self, name: str, message: Message) -> None:
        wrapped = coordinator_pb2.WorkerMessage()
        fields = coordinator_pb2.WorkerMessage.DESCRIPTOR.oneofs_by_name["kind"].fields
        (field,) = [f.name for f in fields if f.message_type is message.DESCRIPTOR]
        getattr(wrapped, field).CopyFrom(message)
        self._run(self.machine.handle(Received(self.refs[name], wrapped), self.now))

    def detach(self, name: str) -> None:
        self._run(self.machine.handle(Detached(self.refs[name], "killed"), self.now))

    def operate(self, request_id: str, request: OperationRequest) -> None:
        self._run(self.machine.handle(Operated(request_id, request), self.now))

    def wait(self, seconds: float) -> None:
        """Let time pass; ticks come when the machine wants them."""
        until = self.now + seconds
        while (due := self.machine.next_wakeup()) is not None and due <= until:
            self.now = max(self.now, due)
            self._run(self.machine.handle(Tick(), self.now))
        self.now = until

    def restart(self) -> None:
        """The coordinator is killed and comes back with what was durable."""
        for epoch in self.durable.epochs.values():
            if epoch.verdict == "open":
                epoch.verdict = "aborted"
                self.durable.num_aborted += 1
        self.durable.generation += 1
        self.machine = RunMachine(self.policy, copy_of(self.durable))
        self._run(self.machine.handle(Tick(), self.now))

    def _run(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Persist():
                    self.durable.apply(effect.record)
                case Tell():
                    kind = effect.message.WhichOneof("kind")
                    assert kind is not None
                    self.told.setdefault(effect.worker.worker_id, []).append(getattr(effect.message, kind))
                case Drop():
                    self.dropped[effect.worker.worker_id] = effect.reason
                case Answer():
                    self.answers.setdefault(effect.request_id, []).append(effect.answer)
                case Emit():
                    self.events.append(effect.event)
                case EndScope():
                    self.scopes.append(effect.scope)

    # What was told

    def heard(self, name: str) -> list[Message]:
        """Take what ``name`` was told since the last call."""
        return self.told.pop(name, [])

    def heard_only(self, name: str, kind: type[Message]) -> list[Message]:
        return [message for message in self.heard(name) if isinstance(message, kind)]

    # Common passages

    def ticket(self, name: str) -> coordinator_pb2.Ticket:
        found = self.heard_only(name, coordinator_pb2.Ticket)
        assert found, f"{name} got no ticket"
        assert isinstance(found[-1], coordinator_pb2.Ticket)
        return found[-1]

    def no_donor(self, name: str) -> coordinator_pb2.NoDonor:
        found = self.heard_only(name, coordinator_pb2.NoDonor)
        assert found, f"{name} was not told that there is no donor"
        assert isinstance(found[-1], coordinator_pb2.NoDonor)
        return found[-1]

    def received(self, name: str, ticket: coordinator_pb2.Ticket) -> None:
        self.say(
            name,
            coordinator_pb2.RecoveryReport(
                transfer_id=ticket.transfer_id,
                attempt=ticket.attempt,
                version=ticket.version,
                fingerprint=ticket.fingerprint,
                source=coordinator_pb2.RECOVERY_SOURCE_PEERS,
            ),
        )

    def applied(self, name: str, version: Version, fingerprint: bytes | None = None, epoch: int = 0) -> None:
        self.say(
            name,
            coordinator_pb2.Applied(
                epoch=epoch,
                version=to_proto(version),
                fingerprint=fingerprint_of(version) if fingerprint is None else fingerprint,
            ),
        )

    def start(self, *names: str) -> Version:
        """All are members at the origin's version."""
        for name in names:
            self.attach(name)
        self.wait(self.policy.origin_wait_seconds)
        origin = names[0]
        (told,) = self.heard_only(origin, coordinator_pb2.BecomeOrigin)
        assert isinstance(told, coordinator_pb2.BecomeOrigin)
        version = from_proto(told.version)
        self.applied(origin, version)
        for name in names[1:]:
            self.received(name, self.ticket(name))
        for name in names:
            self.heard(name)
        return version

    def advertise(self, name: str, inner_step: int, of: int = 10, seconds: float = 1.0, **more: object) -> None:
        self.say(
            name,
            coordinator_pb2.Advertisement(
                inner_step=inner_step,
                inner_steps_per_phase=of,
                seconds_per_inner_step=seconds,
                ready=True,
                **more,  # type: ignore[arg-type]
            ),
        )

    def arrive(self, *names: str, at: Version, weight: float = 1.0, fingerprint: bytes | None = None) -> None:
        for name in names:
            self.say(
                name,
                coordinator_pb2.BoundaryArrival(
                    version=to_proto(at),
                    inner_steps_done=10,
                    weight=weight,
                    fingerprint=fingerprint_of(at) if fingerprint is None else fingerprint,
                ),
            )

    def roster(self, name: str) -> coordinator_pb2.Roster:
        found = self.heard_only(name, coordinator_pb2.Roster)
        assert found, f"{name} got no roster"
        assert isinstance(found[-1], coordinator_pb2.Roster)
        return found[-1]

    def vote(self, *names: str, epoch: int, at: Version, digest: bytes = b"d") -> None:
        for name in names:
            self.say(name, coordinator_pb2.Vote(epoch=epoch, version=to_proto(at), digest=digest))

    def outcome(self, name: str) -> coordinator_pb2.Outcome:
        found = self.heard_only(name, coordinator_pb2.Outcome)
        assert found, f"{name} got no outcome"
        assert isinstance(found[-1], coordinator_pb2.Outcome)
        return found[-1]

    def step(self, *names: str, at: Version) -> Version:
        """One boundary that all of ``names`` commit and apply."""
        self.arrive(*names, at=at)
        epoch = self.roster(names[0]).epoch
        self.vote(*names, epoch=epoch, at=at)
        for name in names:
            assert self.outcome(name).verdict == coordinator_pb2.VERDICT_COMMITTED
            self.applied(name, at.next(), epoch=epoch)
        for name in names:
            self.heard(name)
        return at.next()

    def waiting_for(self, name: str) -> str:
        (found,) = [w for w in self.machine.status(self.now).workers if w.worker.worker_id == name]
        return found.waiting_for

    @property
    def sealed(self) -> Version:
        return self.machine.record.sealed


def failure(
    next_action: common_pb2.NextAction.ValueType, kind: str = "DonorLost", text: str = "lost"
) -> common_pb2.Failure:
    return common_pb2.Failure(next_action=next_action, kind=kind, message=text)
