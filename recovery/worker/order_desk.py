"""Carries out the operators' orders that do not touch training: verify, save, drain, rate, cancel."""

from __future__ import annotations

import logging
import queue
import threading

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.control.wire import to_proto
from recovery.errors import MisuseError, RecoveryError
from recovery.events import OrderDone
from recovery.types import Version
from recovery.worker.checkpoints import Checkpoints
from recovery.worker.context import Context
from recovery.worker.donor_loop import DonorLoop
from recovery.worker.peer_source import PeerSource

logger = logging.getLogger(__name__)

_SAVE_TIMEOUT_SECONDS = 600.0

_AT_ONCE = ("drain", "rate", "cancel")
"""Orders that only set something: they do not queue behind a save that takes minutes."""


class OrderDesk:
    """Answers each order exactly once. Owns the thread ``recovery-orders``, where those that need time wait in turn."""

    def __init__(self, context: Context, checkpoints: Checkpoints, donors: DonorLoop, peers: PeerSource) -> None:
        self._context = context
        self._checkpoints = checkpoints
        self._donors = donors
        self._peers = peers
        self._orders: queue.SimpleQueue[pb.Order | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="recovery-orders", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._orders.put(None)
            self._thread.join()

    def put(self, order: pb.Order) -> None:
        """Take an order; any thread; returns at once."""
        if order.WhichOneof("kind") in _AT_ONCE:
            self._answer(order)
        else:
            self._orders.put(order)

    def answer(
        self,
        order: pb.Order,
        error: RecoveryError | None,
        *,
        different: list[str] | None = None,
        detail: str = "",
        saved: Version | None = None,
    ) -> None:
        """Tell the coordinator how an order ended; any thread.

        Args:
            order: What was ordered.
            error: Why it failed; None: it did not.
            different: Names of the tensors that a verification found to differ.
            detail: More, for people.
            saved: The version that was saved: training goes on meanwhile, and memory may hold a newer one by now.
        """
        stand = self._context.standing.read()
        result = pb.OrderResult(
            order_id=order.order_id,
            failure=None if error is None else to_proto(error),
            version=to_proto(saved or stand.version),
            fingerprint=stand.fingerprint if saved in (None, stand.version) else b"",
            different=different or [],
            detail=detail,
        )
        self._context.client.send(pb.WorkerMessage(order_result=result))
        self._context.events(
            OrderDone(
                worker_id=self._context.worker.worker_id,
                order_id=order.order_id,
                order=order.WhichOneof("kind") or "",
                failure="" if error is None else str(error),
                detail=detail or ", ".join(different or []),
            )
        )

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            self._answer(order)

    def _answer(self, order: pb.Order) -> None:
        try:
            self._carry_out(order)
        except RecoveryError as error:
            self.answer(order, error)
        except Exception as error:  # the thread's root: an order must be answered, and the next one served
            logger.exception("%s: order %s failed", self._context.worker, order.order_id)
            self.answer(order, RecoveryError(f"{type(error).__name__}: {error}"))

    def _carry_out(self, order: pb.Order) -> None:
        match order.WhichOneof("kind"):
            case "verify":
                self.answer(order, None, different=self._context.snapshots.damaged())
            case "save":
                version, url = self._checkpoints.save_now(_SAVE_TIMEOUT_SECONDS)
                self.answer(order, None, detail=url, saved=version)
            case "drain":
                self._donors.drain(order.drain.drained)
                self.answer(order, None)
            case "rate":
                self._donors.set_rate(order.rate.bytes_per_second)
                self.answer(order, None)
            case "cancel":
                self._donors.cancel(order.cancel.transfer_id)
                self._peers.cancel(order.cancel.transfer_id)
                self.answer(order, None)
            case other:
                raise MisuseError(f"order {order.order_id}: this worker does not know how to {other}")
