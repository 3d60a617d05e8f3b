"""Whatever is wrong with a checkpoint is found before anything of it is applied, and named."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.catalog import Catalog, StepState
from ckpt.local import LocalStorage
from ckpt.reader import open_checkpoint
from ckpt.record import seal, unseal
from ckpt.source import CheckpointSource
from ckpt.writer import write_checkpoint
from protos.recovery.v1 import checkpoint_pb2 as pb
from recovery.errors import CheckpointRejected
from recovery.events import CheckpointSkipped, Recorder
from recovery.types import Incarnation, RunId, Version, WorkerId, WorkerRef
from tests.unit.ckpt.states import RUN, W0, W1, private_values, replicated_values, source, storage
from tests.unit.ckpt.workers import Worker, differences


def proof(root: LocalStorage, version: Version, worker: WorkerRef = W0) -> None:
    """Read every byte of a step, as a restore does.

    Raises:
        CheckpointRejected: anything is wrong.
    """
    for worker_id in (None, worker.worker_id):
        with open_checkpoint(root, version, run_id=RUN, worker_id=worker_id) as checkpoint:
            checkpoint.verify()


def files_of(root: LocalStorage, step: str) -> list[Path]:
    return sorted(path for path in (root.root / step).rglob("*") if path.is_file() and not path.name.startswith("run_"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> LocalStorage:
    root = LocalStorage(tmp_path_factory.mktemp("saved") / "root")
    write_checkpoint(root, [source(1)])
    proof(root, Version(1, 1))
    return root


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_flipped_bit_anywhere_is_found(saved: LocalStorage, data: st.DataObject) -> None:
    """pytorch/torchtitan#4011, pytorch/pytorch#76395: flipped bits load without an error."""
    path = data.draw(st.sampled_from(files_of(saved, "step_1_1")))
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    bit = data.draw(st.integers(0, 7))
    changed = bytearray(content)
    changed[at] ^= 1 << bit
    try:
        path.write_bytes(changed)
        with pytest.raises(CheckpointRejected):
            proof(saved, Version(1, 1))
    finally:
        path.write_bytes(content)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_truncated_or_longer_file_is_found_by_the_catalog(saved: LocalStorage, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(files_of(saved, "step_1_1")))
    content = path.read_bytes()
    keep = data.draw(st.integers(0, len(content) - 1))
    changed = data.draw(st.sampled_from([content[:keep], content + b"\0", content + content]))
    try:
        path.write_bytes(changed)
        with pytest.raises(CheckpointRejected):
            proof(saved, Version(1, 1))
        step = Catalog(saved, RUN).look(Version(1, 1))
        assert step is not None
        if path.parent.name == "worker_w0":
            assert list(step.torn_workers) == ["w0"]
        else:
            assert step.state is StepState.TORN
            assert path.name in step.reason
    finally:
        path.write_bytes(content)


def test_every_missing_file_is_found_and_named(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(1)])
    for path in files_of(root, "step_1_1"):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(CheckpointRejected, match=path.name.replace(".", r"\.")):
            proof(root, Version(1, 1))
        path.write_bytes(content)
    proof(root, Version(1, 1))


def test_two_swapped_files_of_one_size_are_found(tmp_path: Path) -> None:
    """pytorch/pytorch#76395: what has the right name and size is taken for what was saved."""
    root = storage(tmp_path)
    write_checkpoint(root, [source(1)])
    write_checkpoint(root, [source(2)])
    a, b = (root.root / f"step_1_{k}" / "replicated" / "outer_params.safetensors" for k in (1, 2))
    assert a.stat().st_size == b.stat().st_size
    other = tmp_path / "other"
    a.replace(other)
    b.replace(a)
    other.replace(b)
    for k in (1, 2):
        with pytest.raises(CheckpointRejected, match="part outer_params, tensor count"):
            proof(root, Version(1, k))


def _other_step(root: LocalStorage) -> None:
    shutil.copytree(root.root / "step_1_1", root.root / "step_1_2")


def _other_lineage(root: LocalStorage) -> None:
    shutil.copytree(root.root / "step_1_1", root.root / "step_2_1")


def _other_worker(root: LocalStorage) -> None:
    shutil.copytree(root.root / "step_1_1" / "worker_w0", root.root / "step_1_1" / "worker_w1")


@pytest.mark.parametrize(
    ("forge", "version", "worker", "named"),
    [
        (_other_step, Version(1, 2), None, "version is L1.k1, not L1.k2"),
        (_other_lineage, Version(2, 1), None, "version is L1.k1, not L2.k1"),
        (_other_worker, Version(1, 1), W1, "worker is w0, not w1"),
    ],
)
def test_a_folder_copied_from_elsewhere_is_found(
    tmp_path: Path, forge: Callable[[LocalStorage], None], version: Version, worker: WorkerRef | None, named: str
) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(1)])
    forge(root)
    with pytest.raises(CheckpointRejected, match=named):
        open_checkpoint(root, version, worker_id=worker.worker_id if worker else None)
    step = Catalog(root, RUN).look(version)
    assert step is not None
    if worker is not None:
        assert list(step.torn_workers) == ["w1"]
    else:
        assert not step.whole


def test_a_private_manifest_in_the_replicated_ones_place_is_found(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(1)])
    folder = root.root / "step_1_1"
    shutil.copy(folder / "worker_w0" / "manifest.pb", folder / "manifest.pb")
    with pytest.raises(CheckpointRejected, match="scope is private, not replicated"):
        open_checkpoint(root, Version(1, 1))


def test_another_ranks_file_or_manifest_is_found(tmp_path: Path) -> None:
    root = storage(tmp_path)
    for rank in (0, 1):
        ref = WorkerRef(WorkerId("w0"), Incarnation("i"), rank, 2)
        write_checkpoint(root, [source(1 + rank, Version(1, 1), worker=ref, fingerprint=b"f" * 32)])
    step = Catalog(root, RUN).look(Version(1, 1))
    assert step is not None
    assert step.whole
    folder = root.root / "step_1_1"
    first, second = (folder / "replicated" / f"outer_params.{rank}-of-2.safetensors" for rank in (0, 1))
    keep = first.read_bytes()
    shutil.copy(second, first)
    with (
        open_checkpoint(root, Version(1, 1), local_rank=0, num_local_ranks=2) as checkpoint,
        pytest.raises(CheckpointRejected, match="outer_params"),
    ):
        checkpoint.verify()
    first.write_bytes(keep)
    shutil.copy(folder / "manifest.1-of-2.pb", folder / "manifest.0-of-2.pb")
    with pytest.raises(CheckpointRejected, match="local rank is 1, not 0"):
        open_checkpoint(root, Version(1, 1), local_rank=0, num_local_ranks=2)
    step = Catalog(root, RUN).look(Version(1, 1))
    assert step is not None
    assert not step.whole


def test_a_step_with_one_rank_missing_is_torn(tmp_path: Path) -> None:
    """facebookresearch/metaseq#53: a marker written before all ranks had finished."""
    root = storage(tmp_path)
    ref = WorkerRef(WorkerId("w0"), Incarnation("i"), 1, 2)
    write_checkpoint(root, [source(1, worker=ref)])
    step = Catalog(root, RUN).look(Version(1, 1))
    assert step is not None
    assert step.state is StepState.TORN
    assert "for 2 local ranks" in step.reason


def test_shares_of_two_saves_do_not_make_a_whole_step(tmp_path: Path) -> None:
    root = storage(tmp_path)
    for rank, fingerprint in ((0, b"a" * 32), (1, b"b" * 32)):
        ref = WorkerRef(WorkerId("w0"), Incarnation("i"), rank, 2)
        write_checkpoint(root, [source(1, worker=ref, fingerprint=fingerprint)])
    step = Catalog(root, RUN).look(Version(1, 1))
    assert step is not None
    assert not step.whole
    assert "another save" in step.reason


def test_a_file_of_another_run_is_found(tmp_path: Path) -> None:
    root, other = storage(tmp_path), LocalStorage(tmp_path / "other")
    write_checkpoint(root, [source(1)])
    write_checkpoint(other, [source(2, Version(1, 1), run_id=RunId("run-b"))])
    for name in ("manifest.pb", "replicated/outer_params.safetensors"):
        target = root.root / "step_1_1" / name
        keep = target.read_bytes()
        shutil.copy(other.root / "step_1_1" / name, target)
        with pytest.raises(CheckpointRejected):
            proof(root, Version(1, 1))
        target.write_bytes(keep)
    proof(root, Version(1, 1))


def test_a_whole_folder_of_another_run_is_foreign(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(1, run_id=RunId("run-b"))])
    step = Catalog(root, RUN).look(Version(1, 1))
    assert step is not None
    assert step.state is StepState.FOREIGN


def test_a_restore_takes_the_next_source_whatever_is_wrong_with_the_newest(tmp_path: Path) -> None:
    """Every file of the newest step is damaged in turn: the state is always exactly the older step's."""
    root = storage(tmp_path)
    worker = Worker(1).train()
    worker.save(root)
    older = Worker(1).train()
    worker.train().save(root)
    seeded = random.Random(5)
    for path in files_of(root, "step_1_2"):
        content = bytearray(path.read_bytes())
        content[seeded.randrange(len(content))] ^= 1 << seeded.randrange(8)
        keep = path.read_bytes()
        path.write_bytes(content)
        fresh, events = Worker(3), Recorder()
        restored = CheckpointSource(root, run_id=RUN, worker=W0, events=events).restore(fresh.state)
        if "worker_w0" in str(path):  # nobody else's private parts are there: only the replicated ones are taken
            assert restored.private_from is None
        else:
            assert restored.version == Version(1, 1)
            assert differences(older, fresh) == []
        reasons = [event.reason + event.url for event in events.of(CheckpointSkipped)]
        assert any(path.name in reason for reason in reasons), (path, reasons)
        path.write_bytes(keep)


def test_values_of_the_two_scopes_are_kept_apart() -> None:
    assert not set(replicated_values(1)) & set(private_values(1))


def test_another_format_is_refused_and_says_who_wrote_it(tmp_path: Path) -> None:
    """pytorch/pytorch#133923: a newer version's files failed in the middle of a load, without a word about versions."""
    root = storage(tmp_path)
    write_checkpoint(root, [source(1)])
    path = root.root / "step_1_1" / "manifest.pb"
    message = pb.Checkpoint()
    message.ParseFromString(unseal("Checkpoint", path.read_bytes(), "here"))
    message.format, message.torch_version, message.package_version = 2, "9.9", "8.8"
    path.write_bytes(seal("Checkpoint", message))
    with pytest.raises(CheckpointRejected, match=r"format 2, this version reads 1; .* package 8\.8 with torch 9\.9"):
        open_checkpoint(root, Version(1, 1))


def test_a_file_list_that_does_not_follow_from_the_manifest_is_refused(tmp_path: Path) -> None:
    root = storage(tmp_path)
    write_checkpoint(root, [source(1)])
    path = root.root / "step_1_1" / "manifest.pb"
    for forged in ("/etc/passwd", "../../elsewhere.safetensors", "replicated/run_progress.safetensors"):
        message = pb.Checkpoint()
        message.ParseFromString(unseal("Checkpoint", path.read_bytes(), "here"))
        message.files[0].path = forged
        keep = path.read_bytes()
        path.write_bytes(seal("Checkpoint", message))
        with pytest.raises(CheckpointRejected, match="does not follow"):
            open_checkpoint(root, Version(1, 1))
        path.write_bytes(keep)
