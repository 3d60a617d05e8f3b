"""A worker restores the newest step that verifies, takes its own private parts, and trains on bit for bit."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckpt.catalog import Catalog
from ckpt.local import LocalStorage
from ckpt.reader import Checkpoint
from ckpt.retention import Retention, RetentionPolicy
from ckpt.source import CheckpointSource, LoadCallbacks, Private, Restored
from ckpt.storage import Entry
from recovery.errors import BadConfiguration, CheckpointRejected, LayoutMismatch
from recovery.events import CheckpointLoaded, CheckpointSkipped, Recorder
from recovery.state.restore import RestoreMode
from recovery.types import Incarnation, PartName, RunId, Version, WorkerId, WorkerRef
from tests.unit.ckpt.states import RUN, W0, W1, storage
from tests.unit.ckpt.workers import Worker, differences

PRIVATE = ["inner_optimizer", "scheduler", "local_progress", "buffers"]


def source_for(
    root: LocalStorage, worker: WorkerRef, events: Recorder | None = None, **more: object
) -> CheckpointSource:
    return CheckpointSource(root, run_id=RUN, worker=worker, events=events or Recorder(), **more)  # type: ignore[arg-type]


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("mode", list(RestoreMode))
def test_a_restored_worker_is_bit_equal_and_so_is_its_next_step(tmp_path: Path, mode: RestoreMode) -> None:
    root = storage(tmp_path)
    trained = Worker(1).train(2)
    trained.save(root)
    fresh = Worker(2, WorkerRef(WorkerId("w0"), Incarnation("new")))
    restored = source_for(root, fresh.ref).restore(fresh.state, mode=mode)
    assert restored.version == Version(1, 2)
    assert restored.private_from == "w0"
    assert restored.own_position
    assert differences(trained, fresh) == []
    assert differences(trained.train(), fresh.train()) == []


def test_the_newest_lineage_wins_over_the_highest_step(tmp_path: Path) -> None:
    """huggingface/transformers#25136: folders of an older history with higher numbers were taken for the newest."""
    root = storage(tmp_path)
    worker = Worker(1).train(3)
    worker.save(root, Version(1, 9))
    worker.save(root, Version(2, 3))
    assert source_for(root, W0).restore(Worker(2).state).version == Version(2, 3)


def test_a_damaged_newest_step_is_skipped_aloud(tmp_path: Path) -> None:
    """pytorch/torchtitan#4011: damaged bytes were loaded without an error."""
    root = storage(tmp_path)
    worker = Worker(1).train()
    worker.save(root)
    good = Worker(1).train()
    worker.train().save(root)
    flip(root.root / "step_1_2" / "replicated" / "outer_params.safetensors")
    events = Recorder()
    fresh = Worker(2)
    restored = source_for(root, W0, events).restore(fresh.state)
    assert restored.version == Version(1, 1)
    assert differences(good, fresh) == []
    (skipped,) = events.of(CheckpointSkipped)
    assert "step_1_2" in skipped.url
    assert "outer_params" in skipped.reason
    assert len(events.of(CheckpointLoaded)) == 1


def test_nothing_is_applied_when_every_step_is_damaged(tmp_path: Path) -> None:
    root = storage(tmp_path)
    Worker(1).train(2).save(root)
    # The last file that is read: all before it were right, and still nothing may have changed.
    flip(root.root / "step_1_2" / "replicated" / "outer_optimizer.safetensors")
    fresh, twin = Worker(2).train(), Worker(2).train()
    with pytest.raises(CheckpointRejected, match="outer_optimizer"):
        source_for(root, W0).restore(fresh.state)
    assert differences(fresh, twin) == []


def test_a_worker_without_own_parts_takes_anothers_but_never_its_data_position(tmp_path: Path) -> None:
    root = storage(tmp_path)
    donor = Worker(1, W1).train(2)
    donor.save(root)
    fresh = Worker(2, W0)
    fresh.data.at = 77
    restored = source_for(root, W0).restore(fresh.state)
    assert restored.private_from == "w1"
    assert not restored.own_position
    assert fresh.data.at == 77
    names = [name for name in donor.state.part_names if name != "data"]
    assert differences(donor, fresh, parts=list(names)) == []


def test_own_private_parts_come_before_anothers(tmp_path: Path) -> None:
    root = storage(tmp_path)
    Worker(1, W1).train(2).save(root)
    mine = Worker(1, W0).train(2)
    mine.data.at = 5
    mine.save(root)
    fresh = Worker(2, W0)
    assert source_for(root, W0).restore(fresh.state).private_from == "w0"
    assert fresh.data.at == 5


def test_damaged_own_private_parts_give_way_to_anothers(tmp_path: Path) -> None:
    root = storage(tmp_path)
    Worker(1, W1).train(2).save(root)
    Worker(1, W0).train(2).save(root)
    flip(root.root / "step_1_2" / "worker_w0" / "inner_optimizer.safetensors")
    events = Recorder()
    restored = source_for(root, W0, events).restore(Worker(2, W0).state)
    assert restored.private_from == "w1"
    assert "worker_w0" in events.of(CheckpointSkipped)[0].url


def test_an_explicit_step_that_is_missing_is_an_error(tmp_path: Path) -> None:
    """pytorch/torchtitan#1311: a requested step that is not there must not mean training from random weights."""
    root = storage(tmp_path)
    Worker(1).train(2).save(root)
    fresh, twin = Worker(2), Worker(2)
    with pytest.raises(BadConfiguration, match=r"step L1\.k7 .* does not exist; whole steps: L1\.k2"):
        source_for(root, W0).restore(fresh.state, at=Version(1, 7))
    assert differences(fresh, twin) == []


def test_an_explicit_step_that_is_damaged_is_not_replaced_by_another(tmp_path: Path) -> None:
    root = storage(tmp_path)
    worker = Worker(1).train()
    worker.save(root)
    worker.train().save(root)
    flip(root.root / "step_1_2" / "replicated" / "outer_params.safetensors")
    with pytest.raises(CheckpointRejected):
        source_for(root, W0).restore(Worker(2).state, at=Version(1, 2))


def test_at_most_bounds_the_step(tmp_path: Path) -> None:
    root = storage(tmp_path)
    worker = Worker(1).train()
    worker.save(root)
    worker.train().save(root)
    source = source_for(root, W0)
    assert source.restore(Worker(2).state, at_most=Version(1, 1)).version == Version(1, 1)
    step = source.newest(at_most=Version(1, 1))
    assert step is not None
    assert step.version == Version(1, 1)


def test_another_runs_steps_are_not_taken(tmp_path: Path) -> None:
    root = storage(tmp_path)
    Worker(1).train(2).save(root)
    other = CheckpointSource(root, run_id=RunId("run-b"), worker=W0, events=Recorder())
    assert other.newest() is None
    with pytest.raises(CheckpointRejected, match="belongs to run run-a"):
        other.restore(Worker(2).state)


def test_another_model_is_a_layout_mismatch_and_changes_nothing(tmp_path: Path) -> None:
    root = storage(tmp_path)
    Worker(1).train(2).save(root)
    fresh, twin = Worker(2, width=9), Worker(2, width=9)
    with pytest.raises(LayoutMismatch, match="outer_params"):
        source_for(root, W0).restore(fresh.state)
    assert differences(fresh, twin) == []


def test_only_weights_or_all_but_some_parts(tmp_path: Path) -> None:
    root = storage(tmp_path)
    trained = Worker(1).train(2)
    trained.save(root)
    fresh, twin = Worker(2), Worker(2)
    source_for(root, W0).restore(fresh.state, parts=[PartName("outer_params")])
    assert differences(trained, fresh, parts=["outer_params"]) == []
    assert differences(twin, fresh, parts=["outer_optimizer", "inner_optimizer", "scheduler"]) == []
    assert fresh.state.run_progress.outer_step == 0
    assert all(outer.equal(live) for outer, live in zip(fresh.outer, fresh.model.parameters(), strict=True))
    other = Worker(3)
    source_for(root, W0).restore(other.state, exclude=[PartName("scheduler")])
    assert other.scheduler.last_epoch == 0
    assert other.inner_optimizer.state_dict()["state"].keys() == trained.inner_optimizer.state_dict()["state"].keys()


def test_weights_and_scheduler_only(tmp_path: Path) -> None:
    root = storage(tmp_path)
    trained = Worker(1).train(2)
    trained.save(root)
    fresh = Worker(2)
    source_for(root, W0).restore(fresh.state, parts=[PartName("outer_params"), PartName("scheduler")])
    assert fresh.scheduler.last_epoch == trained.scheduler.last_epoch
    assert fresh.inner_optimizer.state_dict()["state"] == {}


def test_an_unknown_part_is_an_error(tmp_path: Path) -> None:
    root = storage(tmp_path)
    Worker(1).train(2).save(root)
    with pytest.raises(BadConfiguration, match="'optim'"):
        source_for(root, W0).restore(Worker(2).state, exclude=[PartName("optim")])


def test_private_parts_can_be_left_out(tmp_path: Path) -> None:
    root = storage(tmp_path)
    Worker(1).train(2).save(root)
    fresh = Worker(2)
    restored = source_for(root, W0).restore(fresh.state, private=Private.NONE)
    assert restored.private_from is None
    assert fresh.inner_optimizer.state_dict()["state"] == {}


def test_the_token_count_can_be_overridden(tmp_path: Path) -> None:
    root = storage(tmp_path)
    Worker(1).train(2).save(root)
    fresh = Worker(2)
    source_for(root, W0).restore(fresh.state, tokens=123_456)
    assert fresh.state.run_progress.tokens == 123_456
    assert fresh.state.run_progress.outer_step == 2


def test_callbacks_see_the_load(tmp_path: Path) -> None:
    root = storage(tmp_path)
    Worker(1).train(2).save(root)
    seen: list[str] = []

    def before(checkpoint: Checkpoint) -> None:
        seen.append(f"before {checkpoint.version}")

    def after(restored: Restored) -> None:
        seen.append(f"after {restored.version}")

    source = source_for(root, W0, callbacks=[LoadCallbacks(before=before, after=after)])
    source.restore(Worker(2).state)
    assert seen == ["before L1.k2", "after L1.k2"]


def test_latest_is_only_a_hint(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Automodel#3390: a pointer that could not be moved made the next jobs replay 10,000 steps."""
    root = storage(tmp_path)
    worker = Worker(1).train()
    worker.save(root)
    # A folder in the pointer's place cannot be replaced by a file: the pointer is unwritable, the save succeeds.
    (root.root / "latest").unlink()
    (root.root / "latest").mkdir()
    worker.train().save(root)
    assert source_for(root, W0).restore(Worker(2).state).version == Version(1, 2)
    (root.root / "latest").rmdir()
    for text in ("step_1_1\n", "step_9_9", "nonsense", ""):
        (root.root / "latest").write_text(text)
        assert source_for(root, W0).restore(Worker(2).state).version == Version(1, 2)


def test_a_load_is_logged_with_its_ranks_and_its_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = storage(tmp_path)
    Worker(1).train(2).save(root)
    with caplog.at_level("INFO", logger="ckpt.source"):
        source_for(root, W0).restore(Worker(2).state)
    assert "w0 (rank 0 of 1): restored" in caplog.text
    assert "with private parts of w0" in caplog.text


def sick(path: Path, folder: str) -> LocalStorage:
    """Return a storage that does not give one folder."""

    class Sick(LocalStorage):
        def entries(self, name: str) -> list[Entry]:
            if name == folder:
                raise OSError(errno.EIO, "Input/output error", name)
            return super().entries(name)

    return Sick(path)


def test_another_workers_folder_that_cannot_be_read_does_not_hide_the_step(tmp_path: Path) -> None:
    root = storage(tmp_path)
    worker = Worker(1).train()
    worker.save(root)
    Worker(1, W1).train().save(root)
    root = sick(root.root, "step_1_1/worker_w1")
    fresh = Worker(2)
    assert source_for(root, W0).restore(fresh.state).private_from == "w0"
    assert differences(worker, fresh) == []
    (step,) = Catalog(root, RUN).steps()
    assert "Input/output error" in step.torn_workers[W1.worker_id]


@pytest.mark.parametrize("folder", ["step_1_2", "step_1_2/replicated"])
def test_a_step_that_the_disk_does_not_give_does_not_hide_the_others(tmp_path: Path, folder: str) -> None:
    """NVIDIA-NeMo/Automodel#3261: one bad folder kept a job from resuming at all."""
    root = storage(tmp_path)
    worker = Worker(1).train()
    worker.save(root)
    Worker(1).train(2).save(root)
    root = sick(root.root, folder)
    events = Recorder()
    fresh = Worker(2)
    restored = source_for(root, W0, events).restore(fresh.state)
    assert restored.version == Version(1, 1)
    assert differences(worker, fresh) == []
    assert any("Input/output error" in event.reason for event in events.of(CheckpointSkipped))
    with pytest.raises(CheckpointRejected, match="Input/output error"):
        source_for(root, W0).restore(Worker(3).state, at=Version(1, 2))
    Retention(root, RUN, RetentionPolicy(keep_newest=1)).run()
    assert {step.version.outer_step for step in Catalog(root, RUN).steps()} == {1, 2}


def test_a_pipe_with_a_manifests_name_holds_nobody(tmp_path: Path) -> None:
    root = storage(tmp_path)
    worker = Worker(1).train()
    worker.save(root)
    (root.root / "step_1_2").mkdir()
    for name in ("manifest.pb", ".tmp-0123456789abcdef-manifest.pb"):
        os.mkfifo(root.root / "step_1_2" / name)
    fresh = Worker(2)
    assert source_for(root, W0).restore(fresh.state).version == Version(1, 1)
    root.sweep("step_1_2")
    Worker(1).train(2).save(root)
    assert source_for(root, W0).restore(Worker(3).state).version == Version(1, 2)
