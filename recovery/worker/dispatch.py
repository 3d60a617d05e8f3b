"""Files each of the coordinator's messages where the thread that acts on it looks. Never blocks."""

from __future__ import annotations

import logging

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.control.wire import from_proto
from recovery.errors import RunRefused
from recovery.types import Fingerprint
from recovery.worker.checkpoints import Checkpoints
from recovery.worker.context import Context
from recovery.worker.groups import EpochGroups
from recovery.worker.order_desk import OrderDesk

logger = logging.getLogger(__name__)


class Dispatcher:
    """Called by the client's dispatcher thread, one message at a time."""

    def __init__(self, context: Context, groups: EpochGroups, orders: OrderDesk, checkpoints: Checkpoints) -> None:
        self._context = context
        self._groups = groups
        self._orders = orders
        self._checkpoints = checkpoints

    def __call__(self, message: pb.CoordinatorMessage) -> None:
        inbox = self._context.inbox
        match message.WhichOneof("kind"):
            case "welcome":
                inbox.put_welcome(message.welcome)
                if inbox.attachments > 1:
                    logger.warning("%s is attached to the coordinator again", self._context.worker)
            case "become_origin":
                inbox.put_directive(message.become_origin)
            case "ticket":
                inbox.put_directive(message.ticket)
            case "no_donor":
                inbox.put_directive(message.no_donor)
            case "roster":
                inbox.put_roster(message.roster)
            case "outcome":
                if message.outcome.verdict != pb.VERDICT_COMMITTED:
                    self._groups.abort(message.outcome.epoch, message.outcome.reason)
                inbox.put_outcome(message.outcome)
            case "phase_ending":
                inbox.put_phase_ending(from_proto(message.phase_ending.version))
            case "order":
                self._order(message.order)
            case "saver_assignment":
                self._checkpoints.assign(from_proto(message.saver_assignment.version))
            case "rejected":
                inbox.end(from_proto(message.rejected.failure))
            case "evicted":
                inbox.end(from_proto(message.evicted.failure))
            case "sealed":
                inbox.put_sealed(from_proto(message.sealed.version), Fingerprint(message.sealed.fingerprint))
                self._checkpoints.sealed(from_proto(message.sealed.version))
            case other:
                logger.warning(
                    "%s: the coordinator said %r, which this version does not know", self._context.worker, other
                )

    def _order(self, order: pb.Order) -> None:
        match order.WhichOneof("kind"):
            case "resync":
                self._context.inbox.put_resync(order)
            case "stop":
                self._context.inbox.end(RunRefused(f"ordered to stop: {order.stop.reason}"))
            case _:
                self._orders.put(order)
