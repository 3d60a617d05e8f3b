"""Saving leased snapshots while the worker trains: every checkpoint is exactly the version that it names."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ckpt.catalog import Catalog
from ckpt.local import LocalStorage
from ckpt.saver import Saver, SaverConfig, SaveSource, WhenFull
from ckpt.source import CheckpointSource
from ckpt.values import standing_source
from recovery.clock import SystemClock
from recovery.events import Recorder
from recovery.snapshot import SnapshotConfig, Snapshots
from recovery.types import Cut, Version
from tests.unit.ckpt.power import Quick
from tests.unit.ckpt.states import RUN, W0
from tests.unit.ckpt.workers import Worker, differences

WAIT = 60.0
STEPS = 6


@pytest.mark.parametrize("slow", [False, True])
def test_checkpoints_of_a_worker_that_trains_on(tmp_path: Path, slow: bool) -> None:
    """Each save goes on while the next inner phases and outer steps overwrite what it reads."""

    class Slow(Quick):
        """Lets training overtake the writer: each file waits for the next outer step to have happened."""

        def create(self, path: str) -> int:
            if slow and path.endswith(".safetensors"):
                overtaken.append(path)
                overtake()
            return super().create(path)

    overtaken: list[str] = []
    worker = Worker(1)
    storage, events = LocalStorage(tmp_path / "root", Slow()), Recorder()
    snapshots = Snapshots(worker.state, SnapshotConfig(), run_id=RUN, worker=W0, events=events, clock=SystemClock())
    reached = [0]

    def overtake() -> None:
        with stepped:
            target = min(reached[0] + 1, STEPS)
            assert stepped.wait_for(lambda: reached[0] >= target, WAIT)

    stepped = threading.Condition()
    saver = Saver(
        storage,
        SaverConfig(max_in_flight=2 * STEPS, when_full=WhenFull.WAIT),
        run_id=RUN,
        worker=W0,
        events=events,
    )
    with snapshots, saver:
        for _ in range(STEPS):
            worker.train()
            version = worker.version
            with stepped:
                reached[0] = version.outer_step
                stepped.notify_all()
            snapshots.publish(version)
            copied = snapshots.lease_private("checkpoint", version)
            snapshots.inner_boundary()
            kept = standing_source(
                worker.state, worker.state.private_kept_names, run_id=RUN, worker=W0, cut=Cut(version), copy=True
            )
            sources: list[SaveSource] = [snapshots.lease_outer(version, f"checkpoint/{version}")]
            assert saver.save(sources) is not None
            assert saver.save([copied.result(WAIT), kept]) is not None
        assert saver.wait_idle(WAIT)
        assert snapshots.num_leases == 0
    assert saver.status.failed == 0, saver.status.last_failure
    if slow:
        assert overtaken
    whole = Catalog(storage, RUN).whole()
    assert [step.version.outer_step for step in whole] == list(range(STEPS, 0, -1))
    for step in whole:
        fresh = Worker(2)
        source = CheckpointSource(storage, run_id=RUN, worker=W0, events=events)
        restored = source.restore(fresh.state, at=step.version)
        assert restored.private_from == "w0"
        assert restored.own_position
        expected = Worker(1).train(step.version.outer_step)
        assert differences(expected, fresh) == []
        assert differences(expected.train(), fresh.train()) == []
    assert whole[0].version == Version(1, STEPS)
