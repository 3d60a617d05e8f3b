"""The power goes at any call of a save: the newest whole step is found, is not torn, and the next save works."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.catalog import Catalog
from ckpt.local import FileSystem, LocalStorage
from ckpt.reader import open_checkpoint
from ckpt.retention import Retention, RetentionPolicy
from ckpt.writer import write_checkpoint
from recovery.errors import CheckpointFailed
from recovery.types import Version
from tests.unit.ckpt.power import PowerCut, Quick
from tests.unit.ckpt.states import OUTER, RUN, W0, source, values


def save_two(root: Path, files: PowerCut) -> bool:
    """Save step 2 beside step 1, one part linked; return whether the save said that it is done."""
    storage = LocalStorage(root, files)
    second = {**values(2), OUTER: values(1)[OUTER]}
    with open_checkpoint(storage, Version(1, 1)) as previous:
        try:
            write_checkpoint(storage, [source(2, of=second)], previous=[previous])
        except CheckpointFailed:
            assert files.is_cut
            return False
    return True


def check(root: Path) -> Version:
    """Return the newest whole step after proving every byte of it."""
    storage = LocalStorage(root, Quick())
    newest = Catalog(storage, RUN).newest()
    assert newest is not None
    for worker_id in (None, *newest.workers):
        with open_checkpoint(storage, newest.version, run_id=RUN, worker_id=worker_id) as checkpoint:
            checkpoint.verify()
    return newest.version


@pytest.mark.parametrize("eager_names", [False, True])
def test_a_power_cut_at_every_call_of_a_save(tmp_path: Path, eager_names: bool) -> None:
    """NVIDIA-NeMo/Automodel#3261, Lightning-AI/pytorch-lightning#20012: a torn folder was resumed."""
    results = set()
    for n in range(1000):
        root, after = tmp_path / f"{n}" / "root", tmp_path / f"{n}" / "after"
        write_checkpoint(LocalStorage(root, Quick()), [source(1)])
        files = PowerCut(root, cut_after=n, eager_names=eager_names)
        done = save_two(root, files)
        files.survivors(after)
        found = check(after)
        assert found in (Version(1, 1), Version(1, 2))
        if done:
            # A save that returned is there, whatever happens afterwards.
            assert found == Version(1, 2)
        results.add(found)
        write_checkpoint(LocalStorage(after, Quick()), [source(3)])
        assert check(after) == Version(1, 3)
        write_checkpoint(LocalStorage(after, Quick()), [source(2, of={**values(2), OUTER: values(1)[OUTER]})])
        assert not [path for path in after.rglob(".tmp-*") if path.parent.parent.name == "step_1_2"]
        if not files.is_cut:
            break
    assert n > 30
    assert results == {Version(1, 1), Version(1, 2)}


@pytest.mark.parametrize("eager_names", [False, True])
def test_a_power_cut_at_every_call_of_a_deletion(tmp_path: Path, eager_names: bool) -> None:
    for n in range(1000):
        root, after = tmp_path / f"{n}" / "root", tmp_path / f"{n}" / "after"
        for seed in (1, 2):
            write_checkpoint(LocalStorage(root, Quick()), [source(seed)])
        files = PowerCut(root, cut_after=n, eager_names=eager_names)
        Retention(LocalStorage(root, files), RUN, RetentionPolicy(keep_newest=1)).run()
        files.survivors(after)
        for step in Catalog(LocalStorage(after, Quick()), RUN).whole():
            with open_checkpoint(LocalStorage(after, Quick()), step.version) as checkpoint:
                checkpoint.verify()
            for worker_id in step.workers:
                with open_checkpoint(LocalStorage(after, Quick()), step.version, worker_id=worker_id) as checkpoint:
                    checkpoint.verify()
        assert check(after) == Version(1, 2)
        Retention(LocalStorage(after, Quick()), RUN, RetentionPolicy(keep_newest=1)).run()
        assert [step.version for step in Catalog(LocalStorage(after, Quick()), RUN).steps()] == [Version(1, 2)]
        if not files.is_cut:
            break
    assert n > 5


def test_the_model_sees_a_rename_without_fsync(tmp_path: Path) -> None:
    """The proof that the fault reaches its victim: without the fsync of the content, a torn file has its name."""
    root = tmp_path / "root"
    root.mkdir()
    files = PowerCut(root, eager_names=True)
    descriptor = files.create(str(root / "temporary"))
    files.write(descriptor, memoryview(b"content"))
    files.close(descriptor)
    files.replace(str(root / "temporary"), str(root / "name"))
    files.survivors(tmp_path / "after")
    assert (tmp_path / "after" / "name").read_bytes() == b""


class NoFsync(PowerCut):
    """Forgets to sync contents: the protection removed."""

    def fsync(self, descriptor: int) -> None:
        pass


class NoFolderFsync(PowerCut):
    """Forgets to sync names: the protection removed."""

    def fsync_folder(self, path: str) -> None:
        pass


@pytest.mark.parametrize(("broken", "eager_names"), [(NoFsync, True), (NoFolderFsync, False)])
def test_without_its_protection_a_finished_save_is_lost(
    tmp_path: Path, broken: type[PowerCut], eager_names: bool
) -> None:
    root, after = tmp_path / "root", tmp_path / "after"
    write_checkpoint(LocalStorage(root, Quick()), [source(1)])
    files = broken(root, eager_names=eager_names)
    assert save_two(root, files)
    files.survivors(after)
    newest = Catalog(LocalStorage(after, Quick()), RUN).newest()
    assert newest is not None
    assert newest.version == Version(1, 1)


def test_the_real_calls_are_those_of_the_model() -> None:
    own = {name for name in vars(FileSystem) if not name.startswith("_")}
    assert own - {"close"} <= set(vars(PowerCut))
    assert W0.worker_id == "w0"
