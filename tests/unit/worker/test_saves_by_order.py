"""A checkpoint that an operator asked for: one save for several who ask at once, and it stays."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ckpt.catalog import Catalog
from ckpt.local import LocalStorage
from protos.recovery.v1 import coordinator_pb2, operations_pb2
from recovery.clock import SystemClock
from recovery.events import CheckpointSaved, Event
from recovery.snapshot import SnapshotConfig, Snapshots
from recovery.types import Version
from recovery.worker.checkpoints import Checkpoints
from recovery.worker.config import AgentConfig
from recovery.worker.standing import Standing
from tests.unit.ckpt.states import RUN, W0
from tests.unit.ckpt.workers import Worker
from tests.unit.control.script import Script

WAIT = 60.0


class Saved:
    """An event sink that counts checkpoints."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def __call__(self, event: Event, /) -> None:
        if isinstance(event, CheckpointSaved):
            with self._changed:
                self.count += 1
                self._changed.notify_all()

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count >= count, WAIT)


def test_retention_leaves_what_was_saved_by_order(tmp_path: Path) -> None:
    """bghira/SimpleTuner#1954, instructlab/training#686: an operator wants a checkpoint now, and to find it later."""
    worker, clock, saved = Worker(1), SystemClock(), Saved()
    snapshots = Snapshots(worker.state, SnapshotConfig(), run_id=RUN, worker=W0, events=saved, clock=clock)
    standing = Standing(clock)
    context: Any = SimpleNamespace(
        config=AgentConfig(
            coordinator="127.0.0.1:1",
            run_id=RUN,
            worker_id=W0.worker_id,
            inner_steps_per_phase=1,
            checkpoint_url=str(tmp_path / "root"),
            checkpoint_keep=1,
        ),
        worker=W0,
        events=saved,
        clock=clock,
        snapshots=snapshots,
        standing=standing,
        state=worker.state,
    )
    checkpoints = Checkpoints(context)
    with snapshots:
        checkpoints.start()
        for step in range(1, 5):
            worker.train()
            version = Version(1, step)
            snapshots.publish(version)
            standing.update(version=version)
            if step == 2:
                with snapshots.standing():
                    saved_version, url = checkpoints.save_now(WAIT)
                assert (saved_version, url.endswith("step_1_2")) == (version, True)
            else:
                checkpoints.assign(version)
            saved.wait(step if step < 2 else step + 1)  # the one by order has private parts too
        checkpoints.close()
    steps = Catalog(LocalStorage(tmp_path / "root"), RUN).steps()
    assert [step.version.outer_step for step in steps] == [4, 2]
    assert steps[1].kept == "saved by order"


def test_two_who_ask_at_once_get_one_save_and_two_answers() -> None:
    """mlcommons/GaNDLF#632, instructlab/training#686: two requests must not become two actions, nor one lost answer."""
    script = Script()
    script.start("a")

    def ordered() -> list[coordinator_pb2.Order]:
        found = script.heard_only("a", coordinator_pb2.Order)
        return [order for order in found if isinstance(order, coordinator_pb2.Order)]

    ordered()
    for name in ("first", "second"):
        script.operate(name, operations_pb2.SaveRequest(worker_id="a"))
    orders = ordered()
    assert [order.WhichOneof("kind") for order in orders] == ["save"]
    script.say("a", coordinator_pb2.OrderResult(order_id=orders[0].order_id, detail="s3://there"))
    for name in ("first", "second"):
        (answer,) = script.answers[name]
        assert isinstance(answer, operations_pb2.SaveResponse)
        assert answer.detail == "s3://there"
    script.operate("third", operations_pb2.SaveRequest(worker_id="a"))
    assert len(ordered()) == 1
