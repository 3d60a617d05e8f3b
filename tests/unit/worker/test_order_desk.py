"""Orders that only set something are answered at once, though a save is under way; each is answered exactly once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, cast

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.clock import SystemClock
from recovery.control.wire import from_proto
from recovery.errors import CheckpointFailed, RecoveryError
from recovery.events import OrderDone, Recorder
from recovery.types import Fingerprint, Incarnation, Version, WorkerId, WorkerRef
from recovery.worker.order_desk import OrderDesk
from recovery.worker.standing import Standing

WAIT_SECONDS = 30.0


class Answers:
    """The coordinator's ear."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.results: list[pb.OrderResult] = []

    def send(self, message: pb.WorkerMessage) -> None:
        with self._changed:
            self.results.append(message.order_result)
            self._changed.notify_all()

    def of(self, order_id: str) -> pb.OrderResult:
        with self._changed:
            assert self._changed.wait_for(lambda: any(r.order_id == order_id for r in self.results), WAIT_SECONDS)
            (found,) = [result for result in self.results if result.order_id == order_id]
            return found


@dataclass
class Worker:
    """What orders are carried out on; a save lasts until ``let_save_end``."""

    client: Answers = field(default_factory=Answers)
    events: Recorder = field(default_factory=Recorder)
    standing: Standing = field(default_factory=lambda: Standing(SystemClock()))
    worker: WorkerRef = field(default_factory=lambda: WorkerRef(WorkerId("w0"), Incarnation("i1")))
    saving: threading.Event = field(default_factory=threading.Event)
    let_save_end: threading.Event = field(default_factory=threading.Event)
    done: list[tuple[str, object]] = field(default_factory=list)

    failure: RecoveryError | None = field(default_factory=lambda: CheckpointFailed("disk full"))

    def save_now(self, timeout_seconds: float) -> tuple[Version, str]:
        version = self.standing.read().version
        self.saving.set()
        assert self.let_save_end.wait(WAIT_SECONDS)
        if self.failure is not None:
            raise self.failure
        return version, "/checkpoints"

    def drain(self, drained: bool) -> None:
        self.done.append(("drain", drained))

    def set_rate(self, bytes_per_second: int) -> None:
        self.done.append(("rate", bytes_per_second))

    def cancel(self, transfer_id: str) -> None:
        self.done.append(("cancel", transfer_id))


def test_orders_that_only_set_something_do_not_queue_behind_a_save() -> None:
    worker = Worker()
    anything = cast(Any, worker)
    desk = OrderDesk(anything, anything, anything, anything)
    desk.start()
    desk.put(pb.Order(order_id="save", save=pb.SaveOrder()))
    assert worker.saving.wait(WAIT_SECONDS)
    desk.put(pb.Order(order_id="rate", rate=pb.RateOrder(bytes_per_second=7)))
    desk.put(pb.Order(order_id="drain", drain=pb.DrainOrder(drained=True)))
    desk.put(pb.Order(order_id="cancel", cancel=pb.CancelOrder(transfer_id="t1")))
    for order_id in ("rate", "drain", "cancel"):
        assert not worker.client.of(order_id).HasField("failure")
    assert worker.done == [("rate", 7), ("drain", True), ("cancel", "t1"), ("cancel", "t1")]
    assert [result.order_id for result in worker.client.results] == ["rate", "drain", "cancel"], "the save goes on"
    worker.let_save_end.set()
    assert worker.client.of("save").failure.message == "disk full"
    desk.close()
    assert [event.order for event in worker.events.of(OrderDone)] == ["rate", "drain", "cancel", "save"]


def test_a_save_is_answered_with_the_version_that_was_saved_though_training_went_on() -> None:
    worker = Worker(failure=None)
    worker.standing.update(version=Version(1, 32), fingerprint=Fingerprint(b"old"))
    anything = cast(Any, worker)
    desk = OrderDesk(anything, anything, anything, anything)
    desk.start()
    desk.put(pb.Order(order_id="save", save=pb.SaveOrder()))
    assert worker.saving.wait(WAIT_SECONDS)
    worker.standing.update(version=Version(1, 33), fingerprint=Fingerprint(b"new"))
    worker.let_save_end.set()
    result = worker.client.of("save")
    desk.close()
    assert (from_proto(result.version), result.detail) == (Version(1, 32), "/checkpoints")
    assert result.fingerprint == b"", "it would be another version's"
