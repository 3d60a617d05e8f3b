"""The background saver: returns at once, never loses a failure, gives every lease back."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ckpt.catalog import Catalog
from ckpt.local import FileSystem, LocalStorage
from ckpt.reader import open_checkpoint
from ckpt.retention import RetentionPolicy
from ckpt.saver import OnFailure, SaveCallbacks, Saver, SaverConfig, WhenFull
from ckpt.values import Bytes, ValueSource
from ckpt.writer import WriteReport, write_checkpoint
from recovery.errors import CheckpointFailed, DonorRefused, MisuseError
from recovery.events import CheckpointSaved, CheckpointSaveFailed, CheckpointSkipped, Recorder, TrainingThreadWaited
from recovery.state.manifest import Manifest
from recovery.types import Version
from tests.unit.ckpt.states import OUTER, RUN, W0, private_values, replicated_values, source, storage, values

WAIT = 60.0


class Held(ValueSource):
    """A source whose reads wait until they are let go, and that counts its releases."""

    def __init__(self, seed: int, *, held: bool = False) -> None:
        inner = source(seed)
        super().__init__(inner.manifest, inner._parts)
        self.go = threading.Event()
        self.reached = threading.Event()
        self.released: list[str] = []
        if not held:
            self.go.set()

    def read(self, part: int, offset: int, num_bytes: int) -> Bytes:
        self.reached.set()
        assert self.go.wait(WAIT)
        return super().read(part, offset, num_bytes)

    def release(self, reason: str) -> None:
        self.released.append(reason)


class Full(FileSystem):
    """A disk without room while ``full`` is set."""

    def __init__(self) -> None:
        self.full = False
        self.refused = 0

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.full:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(descriptor, data)


def saver(root: LocalStorage, events: Recorder | None = None, **config: object) -> Saver:
    callbacks = config.pop("callbacks", ())
    return Saver(
        root,
        SaverConfig(**config),  # type: ignore[arg-type]
        run_id=RUN,
        worker=W0,
        events=events or Recorder(),
        callbacks=callbacks,  # type: ignore[arg-type]
    )


def test_a_save_returns_before_anything_is_read_and_gives_the_lease_back(tmp_path: Path) -> None:
    root, events, lease = storage(tmp_path), Recorder(), Held(1, held=True)
    with saver(root, events) as saving:
        ticket = saving.save([lease])
        assert ticket is not None
        assert lease.reached.wait(WAIT)
        assert lease.released == []
        assert saving.status.in_flight == 1
        lease.go.set()
        reports = ticket.result(WAIT)
    assert lease.released == ["saved"]
    assert [event.url for event in events.of(CheckpointSaved)] == [report.url for report in reports]
    with open_checkpoint(root, Version(1, 1), run_id=RUN) as checkpoint:
        checkpoint.verify()


def test_a_save_too_many_is_skipped_and_told(tmp_path: Path) -> None:
    events, first, second = Recorder(), Held(1, held=True), Held(2)
    with saver(storage(tmp_path), events) as saving:
        saving.save([first])
        assert saving.save([second]) is None
        assert second.released == ["not saved"]
        assert saving.status.skipped == 1
        first.go.set()
    assert "step_1_2" in events.of(CheckpointSkipped)[0].url


def test_a_save_too_many_can_be_waited_for(tmp_path: Path) -> None:
    events, first, second = Recorder(), Held(1, held=True), Held(2)
    with saver(storage(tmp_path), events, when_full=WhenFull.WAIT) as saving:
        saving.save([first])
        assert first.reached.wait(WAIT)
        threading.Timer(0.05, first.go.set).start()
        ticket = saving.save([second])
        assert first.released == ["saved"]  # it came to an end before the second was taken
        assert ticket is not None
        ticket.result(WAIT)
    assert events.of(TrainingThreadWaited)[0].what == "checkpoint"


def test_two_saves_can_be_in_flight(tmp_path: Path) -> None:
    first, second = Held(1, held=True), Held(2)
    root = storage(tmp_path)
    with saver(root, max_in_flight=2) as saving:
        saving.save([first])
        ticket = saving.save([second])
        assert ticket is not None
        assert saving.status.in_flight == 2
        first.go.set()
        ticket.result(WAIT)
    assert [step.version.outer_step for step in Catalog(root, RUN).whole()] == [2, 1]


def test_a_failed_save_is_an_event_and_raises_at_the_next_call(tmp_path: Path) -> None:
    """ray-project/ray#47939 and others: a background save failed in silence and the job ended without a checkpoint."""
    disk, events = Full(), Recorder()
    root = LocalStorage(tmp_path / "root", disk)
    saving = saver(root, events, on_failure=OnFailure.FAIL)
    saving.start()
    disk.full = True
    lease = Held(1)
    ticket = saving.save([lease])
    assert ticket is not None
    assert ticket.wait(WAIT)
    assert disk.refused > 0
    assert lease.released == ["not saved"]
    assert "No space left" in events.of(CheckpointSaveFailed)[0].reason
    late = Held(2)
    with pytest.raises(CheckpointFailed, match="No space left"):
        saving.save([late])
    assert late.released == ["not saved"]
    disk.full = False
    again = saving.save([Held(3)])  # it was told once; the caller chose to go on
    assert again is not None
    again.result(WAIT)
    saving.close()


def test_a_failed_save_raises_at_close(tmp_path: Path) -> None:
    """google/orbax#605, NVIDIA/Megatron-LM#1435: a job ended well and its last checkpoint was not there."""
    disk = Full()
    disk.full = True
    saving = saver(LocalStorage(tmp_path / "root", disk), on_failure=OnFailure.FAIL_AFTER, fail_after=3)
    saving.start()
    saving.save([Held(1)])
    with pytest.raises(CheckpointFailed, match="No space left"):
        saving.close()
    saving.close()


def test_warn_never_raises_but_tells(tmp_path: Path) -> None:
    disk, events = Full(), Recorder()
    disk.full = True
    with saver(LocalStorage(tmp_path / "root", disk), events, on_failure=OnFailure.WARN) as saving:
        for seed in (1, 2, 3):
            ticket = saving.save([Held(seed)])
            assert ticket is not None
            assert ticket.wait(WAIT)
        assert saving.status.failures_in_a_row == 3
        assert "No space left" in saving.status.last_failure
    assert len(events.of(CheckpointSaveFailed)) == 3


def test_fail_after_counts_failures_in_a_row(tmp_path: Path) -> None:
    disk = Full()
    saving = saver(LocalStorage(tmp_path / "root", disk), on_failure=OnFailure.FAIL_AFTER, fail_after=2)
    saving.start()

    def save(seed: int, *, full: bool) -> None:
        disk.full = full
        ticket = saving.save([Held(seed)])
        assert ticket is not None
        assert ticket.wait(WAIT)

    save(1, full=True)
    save(2, full=False)
    save(3, full=True)
    save(4, full=True)
    with pytest.raises(CheckpointFailed, match="2 saves in a row"):
        saving.save([Held(5)])
    saving.close()


def test_a_lease_that_ends_under_the_save_is_a_failed_save(tmp_path: Path) -> None:
    class Ended(Held):
        def read(self, part: int, offset: int, num_bytes: int) -> Bytes:
            raise DonorRefused("the lease of checkpoint ended: its holder said nothing")

    with saver(storage(tmp_path), on_failure=OnFailure.WARN) as saving:
        ticket = saving.save([Ended(1)])
        assert ticket is not None
        with pytest.raises(CheckpointFailed, match="lease of checkpoint ended"):
            ticket.result(WAIT)


def test_a_source_that_breaks_does_not_take_the_saver_with_it(tmp_path: Path) -> None:
    class Broken(Held):
        def read(self, part: int, offset: int, num_bytes: int) -> Bytes:
            raise ZeroDivisionError

    with saver(storage(tmp_path), on_failure=OnFailure.WARN) as saving:
        broken = saving.save([Broken(1)])
        assert broken is not None
        assert broken.wait(WAIT)
        ticket = saving.save([Held(2)])
        assert ticket is not None
        ticket.result(WAIT)


def test_live_memory_that_is_torn_once_is_read_again(tmp_path: Path) -> None:
    """The guard may close a live view while it is copied: the next reading is stable, and only that is written."""

    class Torn(Held):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.torn = 0

        def read(self, part: int, offset: int, num_bytes: int) -> Bytes:
            data = super().read(part, offset, num_bytes).data
            if self.torn < 3:
                self.torn += 1
                return Bytes(data ^ 1, live=True)
            return Bytes(data, live=False)

    root, torn = storage(tmp_path), Torn(1)
    torn.torn = 1
    with saver(root) as saving:
        ticket = saving.save([torn])
        assert ticket is not None
        ticket.result(WAIT)
    assert torn.torn == 3
    with open_checkpoint(root, Version(1, 1)) as checkpoint:
        checkpoint.verify()


def test_lent_memory_may_change_once_it_was_taken(tmp_path: Path) -> None:
    """What is written is what was hashed, even if training overwrites the tensor right after it was read."""

    class Overwritten(Held):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.acknowledged = 0

        def read(self, part: int, offset: int, num_bytes: int) -> Bytes:
            return Bytes(super().read(part, offset, num_bytes).data, live=True)

        def acknowledge(self, part: int, chunk: int) -> None:
            self.acknowledged += 1
            spec = self.manifest.parts[part].chunks[chunk]
            for tensor in self._parts[part]._holders:
                if isinstance(tensor, torch.Tensor) and spec.num_bytes:
                    tensor.zero_()

    root, lease = storage(tmp_path), Overwritten(1)
    expected = values(1)[OUTER][1]
    with saver(root) as saving:
        ticket = saving.save([lease])
        assert ticket is not None
        ticket.result(WAIT)
    assert lease.acknowledged == lease.manifest.num_chunks
    assert isinstance(expected, dict)
    with open_checkpoint(root, Version(1, 1)) as checkpoint:
        checkpoint.verify()


def test_every_chunk_is_acknowledged_so_that_the_guard_need_not_copy_it(tmp_path: Path) -> None:
    class Counting(Held):
        def __init__(self) -> None:
            super().__init__(1)
            self.seen: list[tuple[int, int]] = []

        def acknowledge(self, part: int, chunk: int) -> None:
            self.seen.append((part, chunk))

    lease = Counting()
    with saver(storage(tmp_path)) as saving:
        saving.save([lease])
    parts = lease.manifest.parts
    assert sorted(lease.seen) == [(i, j) for i in range(len(parts)) for j in range(len(parts[i].chunks))]


def test_callbacks_are_called_around_a_save_and_may_add_records(tmp_path: Path) -> None:
    seen: list[str] = []

    def before(manifests: Sequence[Manifest]) -> dict[str, object]:
        seen.append(f"before {manifests[0].cut.version} on {threading.current_thread().name}")
        return {"trained_samples": 7}

    def saved(reports: Sequence[WriteReport]) -> None:
        seen.append(f"saved {len(reports)} on {threading.current_thread().name}")
        raise ValueError("a callback that breaks does not unmake the save")

    root = storage(tmp_path)
    with saver(root, callbacks=[SaveCallbacks(before=before, saved=saved)]) as saving:
        ticket = saving.save([Held(1)], {"note": "mine"})
        assert ticket is not None
        ticket.result(WAIT)
    assert seen == ["before L1.k1 on MainThread", "saved 2 on ckpt-saver"]
    with open_checkpoint(root, Version(1, 1)) as checkpoint:
        assert checkpoint.record.records == {"note": "mine", "trained_samples": 7}


def test_a_failed_save_is_told_to_callbacks(tmp_path: Path) -> None:
    disk, failures = Full(), []
    disk.full = True
    callbacks = [SaveCallbacks(failed=lambda error: failures.append(str(error)))]
    with saver(LocalStorage(tmp_path / "root", disk), on_failure=OnFailure.WARN, callbacks=callbacks) as saving:
        saving.save([Held(1)])
    assert len(failures) == 1


def test_retention_runs_after_saves_and_unchanged_parts_are_linked(tmp_path: Path) -> None:
    root = storage(tmp_path)
    with saver(root, max_in_flight=9, retention=RetentionPolicy(keep_newest=2), verify_after=True) as saving:
        for seed in range(1, 6):
            saving.save([Held(seed)])
    assert [step.version.outer_step for step in Catalog(root, RUN).steps()] == [5, 4]
    a, b = (root.root / f"step_1_{k}" / "replicated" / "run_progress.safetensors" for k in (4, 5))
    assert a.samefile(b)


class Private(Held):
    """A source of private parts only."""

    def __init__(self, seed: int, version: Version | None = None) -> None:
        inner = source(seed, version, of=private_values(seed))
        ValueSource.__init__(self, inner.manifest, inner._parts)
        self.go, self.reached, self.released = threading.Event(), threading.Event(), []
        self.go.set()


def test_a_disk_with_private_parts_alone_does_not_fill_up(tmp_path: Path) -> None:
    """Another worker saves the replicated parts elsewhere: here, steps are kept for this worker's own parts."""
    root = storage(tmp_path)
    with saver(root, max_in_flight=9, retention=RetentionPolicy(keep_newest=2)) as saving:
        for seed in range(1, 6):
            saving.save([Private(seed)])
    steps = Catalog(root, RUN).steps()
    assert [(step.version.outer_step, step.workers) for step in steps] == [(5, ("w0",)), (4, ("w0",))]


def test_a_private_save_does_not_retain_where_replicated_parts_are(tmp_path: Path) -> None:
    root = storage(tmp_path)
    for seed in (1, 2, 3):
        write_checkpoint(root, [source(seed)])
    with saver(root, retention=RetentionPolicy(keep_newest=1)) as saving:
        saving.save([Private(9, Version(1, 4))])
    assert [step.version.outer_step for step in Catalog(root, RUN).steps()] == [4, 3, 2, 1]


def test_private_parts_are_linked_to_the_last_private_ones(tmp_path: Path) -> None:
    root = storage(tmp_path)
    with saver(root, max_in_flight=9) as saving:
        for number in (1, 2):
            replicated = source(number, of=replicated_values(number))
            saving.save([replicated])
            saving.save([Private(7, Version(1, number))])
    a, b = (root.root / f"step_1_{k}" / "worker_w0" / "inner_optimizer.safetensors" for k in (1, 2))
    assert a.samefile(b)


def test_close_waits_for_saves_under_way(tmp_path: Path) -> None:
    """Lightning-AI, Megatron: a process that ended before its background save lost the checkpoint with exit code 0."""
    root, lease = storage(tmp_path), Held(1, held=True)
    saving = saver(root)
    saving.start()
    saving.save([lease])
    assert lease.reached.wait(WAIT)
    threading.Timer(0.05, lease.go.set).start()
    saving.close()
    assert [step.version for step in Catalog(root, RUN).whole()] == [Version(1, 1)]
    saving.close()
    with pytest.raises(MisuseError):
        saving.save([Held(2)])


def test_close_names_a_save_that_does_not_end(tmp_path: Path) -> None:
    lease = Held(1, held=True)
    saving = saver(storage(tmp_path), close_timeout_seconds=0.01)
    saving.start()
    ticket = saving.save([lease])
    with pytest.raises(CheckpointFailed, match="has not ended"):
        saving.close()
    lease.go.set()
    assert ticket is not None
    assert ticket.wait(WAIT)


def test_a_save_is_logged_with_its_ranks_and_its_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="ckpt.saver"), saver(storage(tmp_path)) as saving:
        saving.save([Held(1)])
    assert "w0 (rank 0 of 1): saved" in caplog.text
    assert " s" in caplog.text
