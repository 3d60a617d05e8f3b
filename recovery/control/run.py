"""The coordinator's brain: one pure state machine over inputs and time, from whose effects a shell makes a service.

    machine = RunMachine(policy, history.load(policy.run_id))
    for effect in machine.handle(Attached(worker, hello), clock.monotonic()):
        ...  # carry out in order; a Persist must be durable before the next

The machine has no IO, clock or thread. It is made of desks that share one ``RunState``:

* ``succession``: who has the history (origin, resume); ``lineage_orders``: rollback, adopt; both use ``beginnings``
* ``boundary``: roster, votes, commit; with ``gathering`` before and ``sealing`` after
* ``publishing``: steps that workers took without the coordinator
* ``tickets``: who gets state from whom
* ``orders``: what operators want of workers

After each input every desk does what is due, until nothing is.
"""

from __future__ import annotations

from protos.recovery.v1 import coordinator_pb2, operations_pb2
from recovery.control.beginnings import BeginningDesk
from recovery.control.boundary import BoundaryDesk
from recovery.control.inputs import (
    Answer,
    Attached,
    Detached,
    Drop,
    Effect,
    Emit,
    EndScope,
    Input,
    Operated,
    OperationRequest,
    Persist,
    Received,
    Tell,
    Tick,
)
from recovery.control.lineage_orders import LineageOrderDesk
from recovery.control.membership import Member, Standing, held_of, refusal, refusal_of_phase
from recovery.control.offers import OfferDesk
from recovery.control.orders import OrderDesk
from recovery.control.policy import RunPolicy
from recovery.control.publishing import PublishDesk
from recovery.control.record import HistoryRecord, RunSettled
from recovery.control.run_state import AUTHORITIES, RunState, envelope
from recovery.control.status import status_of
from recovery.control.succession import SuccessionDesk
from recovery.control.tickets import TicketDesk
from recovery.control.wire import from_proto, to_proto
from recovery.errors import BadConfiguration, RecoveryError, RunRefused
from recovery.events import WorkerAttached, WorkerLeft, WorkerLost, WorkerRejected
from recovery.types import WorkerRef

MAX_ROUNDS = 16
"""Rounds in which the desks come to rest after one input. More would be a cycle: an error of this program."""

MAX_EPOCH = 2**48
"""No epoch ever comes near it; what a worker claims must not exhaust the numbers."""

__all__ = [
    "Answer",
    "Attached",
    "Detached",
    "Drop",
    "Effect",
    "Emit",
    "EndScope",
    "Input",
    "Operated",
    "Persist",
    "Received",
    "RunMachine",
    "RunPolicy",
    "Tell",
    "Tick",
]


class RunMachine:
    """One run. Not thread-safe: one caller at a time."""

    def __init__(self, policy: RunPolicy, history: HistoryRecord, wall_offset_seconds: float = 0.0) -> None:
        """Go on from ``history``, which the machine owns from now on.

        Args:
            policy: What the run's owner decided.
            history: As loaded; open epochs in it are closed.
            wall_offset_seconds: Wall clock minus monotonic clock, for records that people read.
        """
        self._run = RunState(policy, history, wall_offset_seconds)
        self._boundary = BoundaryDesk(self._run)
        self._publishing = PublishDesk(self._run, self._boundary.seals)
        self._tickets = TicketDesk(self._run, self._boundary.gathering)
        self._beginnings = BeginningDesk(self._run, self._boundary)
        self._offers = OfferDesk(self._run, self._tickets)
        self._succession = SuccessionDesk(self._run, self._beginnings, self._offers, self._tickets)
        self._lineage_orders = LineageOrderDesk(self._run, self._beginnings, self._offers)
        self._orders = OrderDesk(self._run, self._tickets)

    @property
    def record(self) -> HistoryRecord:
        """The history, to be read only."""
        return self._run.record

    def handle(self, input: Input, now: float) -> list[Effect]:
        """Take one input and return what is to be done, in order.

        Args:
            input: What happened.
            now: Monotonic seconds, never less than in the call before.
        """
        run = self._run
        run.now, run.effects, run.wake_at = now, [], None
        run.turn += 1
        if run.started_at is None:
            run.started_at = now
        match input:
            case Attached():
                self._attach(input.worker, input.hello)
            case Received():
                self._receive(input.worker, input.message)
            case Detached():
                self._detach(input.worker, input.reason)
            case Operated():
                self._operate(input.request_id, input.request)
            case Tick():
                pass
        self._settle()
        for effect in run.effects:
            if isinstance(effect, Answer):
                self._orders.answered(effect.request_id, effect.answer)
        return run.effects

    def next_wakeup(self) -> float | None:
        """Return when a ``Tick`` is due at the latest, or None if only an input can change anything."""
        return self._run.wake_at

    def status(self, now: float) -> operations_pb2.ListResponse:
        """Return the run as operators see it; changes nothing."""
        return status_of(self._run, now)

    def _settle(self) -> None:
        run = self._run
        for _ in range(MAX_ROUNDS):
            before = len(run.effects)
            run.wake_at = None
            self._beginnings.advance()
            self._lineage_orders.advance()
            self._succession.advance()
            self._boundary.advance()
            self._publishing.advance()
            self._tickets.advance()
            self._orders.advance()
            run.forget_lost()
            if len(run.effects) == before:
                return
        raise AssertionError(f"the coordinator did not come to rest after {MAX_ROUNDS} rounds")

    # Members come and go

    def _attach(self, worker: WorkerRef, hello: coordinator_pb2.Hello) -> None:
        run = self._run
        known = run.members.get(worker.worker_id)
        error: RecoveryError | None = refusal(hello, run.policy, run.record) or refusal_of_phase(
            hello, run.policy, run.members.values()
        )
        if error is None and known is not None and known.alive and known.ref.incarnation != worker.incarnation:
            silent = run.now - known.last_seen
            if silent < run.policy.lease_seconds:
                error = RunRefused(
                    f"worker id {worker.worker_id} is taken by process {known.hello.process_id} on "
                    f"{known.hello.hostname or 'an unnamed host'}, heard of {silent:.1f} s ago: end that one, or take "
                    "another id"
                )
            else:
                self._replace(known, silent)
        if error is not None:
            run.effects.append(Tell(worker, envelope(coordinator_pb2.Rejected(failure=to_proto(error)))))
            run.effects.append(Drop(worker, str(error)))
            run.emit(WorkerRejected(worker_id=worker.worker_id, reason=str(error)))
            return
        if not run.record.numerics_id:
            run.persist(RunSettled(hello.numerics_id, hello.layout_digest))
        held = held_of(hello)
        member = Member(
            worker, hello, run.now, run.turn, last_seen=run.now, since=run.now, progress_at=run.now, held=held
        )
        member.fingerprint = hello.held_fingerprint
        if known is not None:
            self._inherit(member, known)
        run.enter(member)
        run.returning.discard(worker.worker_id)
        run.emit(WorkerAttached(worker_id=worker.worker_id, incarnation=worker.incarnation, held=held))
        undecided = hello.undecided_epoch
        if max(hello.last_epoch, hello.undecided_epoch) < MAX_EPOCH:
            run.record.last_epoch = max(run.record.last_epoch, hello.last_epoch, hello.undecided_epoch)
        run.place(member)
        run.welcome(member)
        if undecided:
            self._boundary.query(member, undecided)
        self._beginnings.remind(member)

    def _replace(self, old: Member, silent: float) -> None:
        run = self._run
        reason = f"a newer process of worker {old.worker_id} attached, and this one was silent for {silent:.1f} s"
        run.tell(old, coordinator_pb2.Evicted(failure=to_proto(RunRefused(reason))))
        run.effects.append(Drop(old.ref, reason))
        self._lose(old, reason)

    def _inherit(self, member: Member, known: Member) -> None:
        """A worker's name keeps what was learnt of it; the same process also goes on with its transfer and progress."""
        run = self._run
        if known.ref.incarnation != member.ref.incarnation:
            run.end_attempt(known)
            return
        member.transfer = known.transfer
        member.ended_attempts = known.ended_attempts
        member.advertisement = known.advertisement
        member.advertised_at = known.advertised_at
        member.began_late_at = known.began_late_at
        if known.transfer is not None and known.transfer.donors:
            # Only the stream to here was lost: its conversations with the donors go on.
            member.standing, member.why, member.since = Standing.JOINING, known.why, known.since

    def _detach(self, worker: WorkerRef, reason: str) -> None:
        member = self._run.process((worker.worker_id, worker.incarnation))
        if member is not None:
            self._lose(member, reason)

    def _lose(self, member: Member, reason: str) -> None:
        run = self._run
        run.lose(member, reason)
        if member.said_goodbye:
            run.emit(WorkerLeft(worker_id=member.worker_id, reason=reason))
        else:
            run.emit(WorkerLost(worker_id=member.worker_id, incarnation=member.ref.incarnation, reason=reason))

    # Messages

    def _receive(self, worker: WorkerRef, message: coordinator_pb2.WorkerMessage) -> None:
        run = self._run
        member = run.process((worker.worker_id, worker.incarnation))
        if member is None:
            run.effects.append(Drop(worker, f"worker {worker.worker_id} is not attached"))
            return
        member.last_seen = run.now
        member.suspected_at = None
        match message.WhichOneof("kind"):
            case "advertisement":
                self._advertised(member, message.advertisement)
            case "recovery_request":
                self._tickets.request(member, message.recovery_request)
            case "recovery_report":
                if not self._offers.take(member, message.recovery_report):
                    self._tickets.report(member, message.recovery_report)
            case "boundary_arrival":
                self._boundary.gathering.arrive(member, message.boundary_arrival)
            case "vote":
                self._boundary.vote(member, message.vote)
            case "epoch_failure":
                self._boundary.fail(member, message.epoch_failure)
            case "applied":
                version = from_proto(message.applied.version)
                if member.standing is Standing.ORIGIN:
                    self._beginnings.reported(member, version, message.applied.fingerprint)
                if message.applied.epoch == 0 and version > run.record.committed:
                    self._publishing.published(member, message.applied)
                else:
                    self._boundary.seals.applied(member, message.applied)
            case "outcome_query":
                self._boundary.query(member, message.outcome_query.epoch)
            case "order_result":
                self._orders.result(member, message.order_result)
            case "goodbye":
                member.said_goodbye = True
                self._lose(member, message.goodbye.reason or "it said goodbye")
            case "hello" | "beat" | None:
                pass

    def _advertised(self, member: Member, told: coordinator_pb2.Advertisement) -> None:
        run = self._run
        before = member.advertisement
        if member.advertised_at is None or told.inner_step != before.inner_step:
            member.progress_at = run.now
            member.stalled = False
        member.advertisement = told
        member.advertised_at = run.now
        member.poisoned_in_a_row = member.poisoned_in_a_row + 1 if told.poisoned else 0
        if member.poisoned and member.standing in AUTHORITIES:
            run.place(member)
        elif told.ready and not told.poisoned and member.standing is Standing.IDLE and told.HasField("version"):
            member.held, member.fingerprint = from_proto(told.version), told.fingerprint
            run.place(member)

    # Operators

    def _operate(self, request_id: str, request: OperationRequest) -> None:
        run = self._run
        if isinstance(request, operations_pb2.ListRequest):
            if self._of_this_run(request_id, request.run_id):
                run.answer(request_id, status_of(run, run.now))
            return
        if self._orders.known(request_id, request) or not self._of_this_run(request_id, request.run_id):
            return
        match request:
            case operations_pb2.ResyncRequest():
                self._orders.resync(request_id, request)
            case operations_pb2.VerifyRequest():
                self._orders.verify(request_id, request)
            case operations_pb2.SaveRequest():
                self._orders.save(request_id, request)
            case operations_pb2.DrainRequest():
                self._orders.drain(request_id, request)
            case operations_pb2.CancelRequest():
                self._orders.cancel(request_id, request)
            case operations_pb2.SetRateRequest():
                self._orders.set_rate(request_id, request)
            case operations_pb2.RollbackRequest():
                self._lineage_orders.rollback(request_id, from_proto(request.version), request.worker_id)
            case operations_pb2.AdoptRequest():
                self._lineage_orders.adopt(request_id, request.worker_id)

    def _of_this_run(self, request_id: str, run_id: str) -> bool:
        if run_id in ("", self._run.policy.run_id):
            return True
        mine = self._run.policy.run_id
        reason = f"this coordinator serves run {mine!r}, not {run_id!r}: correct the run id or the address"
        self._run.answer(request_id, BadConfiguration(reason))
        return False
