"""What operators want of workers: each request is carried out once, however often it is asked."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from google.protobuf.message import Message

from protos.recovery.v1 import coordinator_pb2, operations_pb2
from recovery.control.inputs import OperationRequest
from recovery.control.membership import Member, Standing
from recovery.control.record import DrainSet
from recovery.control.run_state import RunState
from recovery.control.tickets import TicketDesk
from recovery.control.wire import from_proto, seconds, to_proto
from recovery.errors import BadConfiguration, DonorRefused, NoDonorLeft, PeerUnreachable, RecoveryError
from recovery.events import OrderDone
from recovery.types import NO_VERSION

KEPT_ANSWERS = 1000

OBEY_SECONDS = 4.0
"""For orders that a worker carries out at once: it said so, or the operator is told that it did not, before the
operator's own patience ends."""


@dataclass(slots=True)
class OpenOrder:
    """An order that a worker has not answered."""

    order_id: str
    what: str
    worker_id: str
    incarnation: str
    due: float
    detail: str
    request_ids: list[str] = field(default_factory=list)
    expected_fingerprint: bytes = b""


@dataclass(frozen=True, slots=True)
class _WaitingSave:
    """A save for which no worker is ready this moment, as between a seal and the reports that follow it."""

    request_id: str
    due: float


class OrderDesk:
    """Turns requests into orders and results into answers."""

    def __init__(self, run: RunState, tickets: TicketDesk) -> None:
        self._run = run
        self._tickets = tickets
        self._open: dict[str, OpenOrder] = {}
        self._waiting_saves: list[_WaitingSave] = []
        self._seen: OrderedDict[str, tuple[bytes, Message | RecoveryError | None]] = OrderedDict()
        self._num_orders = 0

    def known(self, request_id: str, request: OperationRequest) -> bool:
        """Return whether this request was asked before; a finished one is answered again at once."""
        body = type(request).__name__.encode() + request.SerializeToString(deterministic=True)
        if request_id not in self._seen:
            self._seen[request_id] = (body, None)
            while len(self._seen) > KEPT_ANSWERS:
                self._seen.popitem(last=False)
            return False
        first, answer = self._seen[request_id]
        if first != body:
            reason = f"request id {request_id!r} was used for another request: take a new one"
            self._run.answer(request_id, BadConfiguration(reason))
        elif answer is not None:
            self._run.answer(request_id, answer)
        return True

    def answered(self, request_id: str, answer: Message | RecoveryError) -> None:
        """Remember an answer for whoever asks with the same id again."""
        if request_id in self._seen and self._seen[request_id][1] is None:
            self._seen[request_id] = (self._seen[request_id][0], answer)

    # Requests

    def resync(self, request_id: str, request: operations_pb2.ResyncRequest) -> None:
        member = self._live(request_id, request.worker_id)
        if member is None:
            return
        donor = request.from_worker_id
        obstacle = self._obstacle(member, donor)
        if obstacle is not None:
            self._run.answer(request_id, obstacle)
            return
        order = coordinator_pb2.Order(resync=coordinator_pb2.ResyncOrder(from_worker_id=donor))
        self._give(request_id, member, "resync", donor, order, seconds(request.timeout))

    def _obstacle(self, member: Member, donor: str) -> RecoveryError | None:
        """Return why ``member`` cannot take its state from ``donor`` (empty: from anybody) now."""
        record = self._run.record
        others = [view for view in self._tickets.donors() if view.worker_id != member.worker_id]
        # Between commit and seal nobody holds the newest sealed version, and a moment later everybody does.
        holders = [view for view in others if view.holds_sealed or record.committed > record.sealed]
        if donor == member.worker_id:
            return DonorRefused(f"worker {donor!r} cannot be its own donor: name another, or leave --from out")
        if donor:
            view = next((view for view in holders if view.worker_id == donor), None)
            if view is None and not any(view.worker_id == donor for view in others):
                return self._unknown(donor)
            if view is None:
                named = self._run.members[donor]
                why = "its state is damaged" if named.poisoned else f"its state: {named.standing.value}"
                holding = ", ".join(view.worker_id for view in holders if not view.drained) or "nobody"
                return DonorRefused(
                    f"worker {donor!r} does not hold {record.sealed} now ({why}), so it cannot be the donor of "
                    f"{member.worker_id}: wait until it does, or name one of those that do ({holding})"
                )
            if view.drained:
                return DonorRefused(f"worker {donor!r} is drained: name another, or `recovery drain {donor} --undo`")
        elif not holders:
            return NoDonorLeft(
                f"no other live worker holds {record.sealed}: {member.worker_id} has nobody to resync from"
            )
        elif all(view.drained for view in holders):
            return NoDonorLeft("every possible donor is drained: `recovery drain W --undo` one of them")
        return None

    def verify(self, request_id: str, request: operations_pb2.VerifyRequest) -> None:
        run = self._run
        member = self._live(request_id, request.worker_id)
        if member is None:
            return
        if run.record.sealed == NO_VERSION:
            run.answer(request_id, NoDonorLeft("nothing is sealed yet: there is nothing to verify against"))
            return
        order = coordinator_pb2.VerifyOrder(
            version=to_proto(run.record.sealed), fingerprint=run.record.sealed_fingerprint
        )
        reference = next((m for m in run.live_in(Standing.READY) if m is not member and not m.poisoned), None)
        if reference is not None:
            order.reference.CopyFrom(self._tickets.donor_of(reference, member, private_parts=False))
        wrapped = coordinator_pb2.Order(verify=order)
        self._give(request_id, member, "verify", "", wrapped, seconds(request.timeout))

    def save(self, request_id: str, request: operations_pb2.SaveRequest) -> None:
        if request.worker_id:
            member = self._live(request_id, request.worker_id)
            if member is not None:
                self._order_save(request_id, member, seconds(request.timeout))
            return
        if not any(member.hello.saves_checkpoints for member in self._run.live()):
            reason = "no attached worker has a place for checkpoints: start workers with a checkpoint_url"
            self._run.answer(request_id, NoDonorLeft(reason))
            return
        patience = seconds(request.timeout) or self._run.policy.order_timeout_seconds
        self._waiting_saves.append(_WaitingSave(request_id, self._run.now + patience))
        self._advance_saves()

    def _order_save(self, request_id: str, member: Member, timeout: float) -> None:
        order = coordinator_pb2.Order(save=coordinator_pb2.SaveOrder())
        self._give(request_id, member, "save", "", order, timeout)

    def _advance_saves(self) -> None:
        run = self._run
        waiting, self._waiting_saves = self._waiting_saves, []
        for save in waiting:
            member = next((m for m in run.live_in(Standing.READY) if m.hello.saves_checkpoints), None)
            if run.now >= save.due:
                savers = ", ".join(
                    f"{m.worker_id}: {m.standing.value}" for m in run.live() if m.hello.saves_checkpoints
                )
                reason = (
                    f"no worker that has a checkpoint_url came to hold {run.record.sealed} in time "
                    f"({savers or 'none is attached'}): ask again once `recovery status` shows one as ready, or start "
                    "a worker with a checkpoint_url"
                )
                run.answer(save.request_id, NoDonorLeft(reason))
            elif member is not None:
                self._order_save(save.request_id, member, save.due - run.now)
            else:
                self._waiting_saves.append(save)
                run.wake(save.due)

    def drain(self, request_id: str, request: operations_pb2.DrainRequest) -> None:
        run = self._run
        member = run.members.get(request.worker_id)
        if member is None and request.worker_id not in run.record.drained:
            run.answer(request_id, self._unknown(request.worker_id))
            return
        run.persist(DrainSet(request.worker_id, request.drained))
        if member is None or not member.alive:
            run.answer(request_id, operations_pb2.DrainResponse())
            return
        order = coordinator_pb2.Order(drain=coordinator_pb2.DrainOrder(drained=request.drained))
        self._give(request_id, member, "drain", str(request.drained), order, OBEY_SECONDS)

    def set_rate(self, request_id: str, request: operations_pb2.SetRateRequest) -> None:
        member = self._live(request_id, request.worker_id)
        if member is not None:
            rate = coordinator_pb2.RateOrder(bytes_per_second=request.bytes_per_second)
            order = coordinator_pb2.Order(rate=rate)
            self._give(request_id, member, "rate", str(request.bytes_per_second), order, OBEY_SECONDS)

    def cancel(self, request_id: str, request: operations_pb2.CancelRequest) -> None:
        run = self._run
        for member in run.live():
            transfer = member.transfer
            if transfer is not None and transfer.transfer_id == request.transfer_id and transfer.donors:
                transfer.cancelled = True
                cancel = coordinator_pb2.CancelOrder(transfer_id=transfer.transfer_id)
                order = coordinator_pb2.Order(cancel=cancel)
                self._give(request_id, member, "cancel", request.transfer_id, order, OBEY_SECONDS)
                return
        run.answer(request_id, BadConfiguration(f"no transfer {request.transfer_id!r} is under way"))

    def _live(self, request_id: str, worker_id: str) -> Member | None:
        member = self._run.members.get(worker_id)
        if member is None or not member.alive:
            self._run.answer(request_id, self._unknown(worker_id))
            return None
        return member

    def _unknown(self, worker_id: str) -> BadConfiguration:
        names = ", ".join(member.worker_id for member in self._run.live()) or "none"
        return BadConfiguration(f"worker {worker_id!r} is not attached; attached are: {names}")

    # Orders

    def _post(self, member: Member, order: coordinator_pb2.Order) -> str:
        self._num_orders += 1
        order.order_id = f"o{self._run.record.id_prefix}-{self._num_orders}"
        self._run.tell(member, order)
        return order.order_id

    def _give(
        self, request_id: str, member: Member, what: str, detail: str, order: coordinator_pb2.Order, timeout: float
    ) -> None:
        run = self._run
        for same in self._open.values():
            if (same.worker_id, same.what, same.detail) == (member.worker_id, what, detail):
                same.request_ids.append(request_id)  # one action, an answer for each
                return
        due = run.now + (timeout if timeout > 0 else run.policy.order_timeout_seconds)
        order_id = self._post(member, order)
        opened = OpenOrder(order_id, what, member.worker_id, member.ref.incarnation, due, detail, [request_id])
        opened.expected_fingerprint = run.record.sealed_fingerprint
        self._open[order_id] = opened

    def result(self, member: Member, message: coordinator_pb2.OrderResult) -> None:
        """A worker carried out an order, or failed to."""
        order = self._open.get(message.order_id)
        if order is None or order.worker_id != member.worker_id:
            return
        failed = message.HasField("failure")
        answer: Message | RecoveryError
        version = message.version if message.HasField("version") else None
        if failed:
            answer = from_proto(message.failure)
        elif order.what == "resync":
            answer = operations_pb2.ResyncResponse(
                version=version, fingerprint=message.fingerprint, detail=message.detail
            )
        elif order.what == "verify":
            answer = operations_pb2.VerifyResponse(
                version=version,
                fingerprint=message.fingerprint,
                expected_fingerprint=order.expected_fingerprint,
                different=message.different,
            )
        elif order.what == "drain":
            answer = operations_pb2.DrainResponse(obeyed=True)
        elif order.what == "rate":
            answer = operations_pb2.SetRateResponse()
        elif order.what == "cancel":
            answer = operations_pb2.CancelResponse(detail=message.detail or f"{member.worker_id} obeys")
        else:
            answer = operations_pb2.SaveResponse(version=version, detail=message.detail)
        if order.what == "resync" and member.standing in (Standing.IDLE, Standing.QUEUED) and member.why == "resync":
            if version is not None:
                member.held, member.fingerprint = from_proto(version), message.fingerprint
            self._run.place(member)
        self._finish(order, answer, message.failure.message if failed else "", message.detail)

    def _finish(self, order: OpenOrder, answer: Message | RecoveryError, failure: str, detail: str) -> None:
        del self._open[order.order_id]
        for request_id in order.request_ids:
            self._run.answer(request_id, answer)
        self._run.emit(
            OrderDone(
                worker_id=order.worker_id, order_id=order.order_id, order=order.what, failure=failure, detail=detail
            )
        )

    def advance(self) -> None:
        """Give the saves that a worker is ready for; fail the orders whose worker is gone or whose time is over."""
        run = self._run
        self._advance_saves()
        for order in list(self._open.values()):
            member = run.process((order.worker_id, order.incarnation))
            if member is None:
                reason = f"worker {order.worker_id} was lost before it finished: {order.what}"
            elif run.now >= order.due:
                reason = f"worker {order.worker_id} did not finish in time: {order.what}"
                if order.what == "resync" and member.transfer is not None and member.transfer.wanted_donor:
                    # The wish was the order's: without it the worker takes its state from whoever can give it.
                    member.transfer.wanted_donor = ""
                    reason += "; it takes its state from any donor now"
            else:
                run.wake(order.due)
                continue
            if order.what == "drain":
                # Who is chosen is decided here: the order's point is reached, only the worker does not know.
                self._finish(order, operations_pb2.DrainResponse(), reason, "")
            else:
                self._finish(order, PeerUnreachable(reason), reason, "")
