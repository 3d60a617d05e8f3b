"""Full disk, quota, read-only, permission lost: the save fails loudly, the last whole step stays, nothing is left."""

from __future__ import annotations

import errno
import itertools
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt.catalog import Catalog
from ckpt.local import LocalStorage
from ckpt.reader import open_checkpoint
from ckpt.saver import OnFailure, Saver, SaverConfig
from ckpt.writer import write_checkpoint
from recovery.errors import CheckpointFailed
from recovery.events import CheckpointSaveFailed, Recorder
from recovery.types import Version
from tests.unit.ckpt.power import Quick
from tests.unit.ckpt.states import RUN, W0, source

WAIT = 60.0

ERRNOS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO]


class Faulty(Quick):
    """Call number ``at`` fails; and so does every later write if ``for_good``."""

    def __init__(self, at: int, number: int, *, for_good: bool) -> None:
        self._at = at
        self._errno = number
        self._for_good = for_good
        self._calls = itertools.count()
        self.hit = ""

    def _may_fail(self, name: str) -> None:
        call = next(self._calls)
        if call == self._at or (call > self._at and self._for_good and name not in ("unlink", "rmdir")):
            self.hit = self.hit or name
            raise OSError(self._errno, errno.errorcode[self._errno], name)

    def create(self, path: str) -> int:
        self._may_fail("create")
        return super().create(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        self._may_fail("write")
        return super().write(descriptor, data[: max(1, len(data) // 2)])  # disks take less than they are given

    def fsync(self, descriptor: int) -> None:
        self._may_fail("fsync")

    def replace(self, source: str, target: str) -> None:
        self._may_fail("replace")
        super().replace(source, target)

    def mkdir(self, path: str) -> None:
        self._may_fail("mkdir")
        super().mkdir(path)

    def fsync_folder(self, path: str) -> None:
        self._may_fail("fsync_folder")


def leftovers(root: Path) -> list[Path]:
    """Return files that belong to no whole step, the mark of ownership apart."""
    named = {root / "latest"}
    for step in Catalog(LocalStorage(root), RUN).whole():
        named.update(root / path for path in step.files)
    return [p for p in root.rglob("*") if p.is_file() and p not in named and p.name != f"run_{RUN}"]


@pytest.mark.parametrize("for_good", [False, True])
def test_a_fault_at_every_call(tmp_path: Path, for_good: bool) -> None:
    """NVIDIA-NeMo/Automodel#3261, PrimeIntellect-ai/prime-rl#1593: an interrupted save left a folder behind."""
    hits = set()
    for n in range(1000):
        path = tmp_path / f"{n}"
        write_checkpoint(LocalStorage(path, Quick()), [source(1)])
        files = Faulty(n, ERRNOS[n % len(ERRNOS)], for_good=for_good)
        try:
            write_checkpoint(LocalStorage(path, files), [source(2)])
            failed = False
        except CheckpointFailed as error:
            failed = True
            assert files.hit
            assert "L1.k2" in str(error)
            assert "step_1_2" in str(error)
        hits.add(files.hit)
        storage = LocalStorage(path, Quick())
        newest = Catalog(storage, RUN).newest()
        assert newest is not None
        for worker_id in (None, *newest.workers):
            with open_checkpoint(storage, newest.version, worker_id=worker_id) as checkpoint:
                checkpoint.verify()
        if not failed:
            assert newest.version == Version(1, 2)
        assert leftovers(path) == [], files.hit
        write_checkpoint(storage, [source(2)])
        assert [step.version.outer_step for step in Catalog(storage, RUN).whole()] == [2, 1]
        if not files.hit:
            break
    assert hits >= {"create", "write", "fsync", "replace", "mkdir", "fsync_folder"}


def test_a_file_size_limit_of_the_kernel(tmp_path: Path) -> None:
    """A real refusal in the middle of a file, from the kernel."""
    root = LocalStorage(tmp_path / "root")
    write_checkpoint(root, [source(1)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(CheckpointFailed, match="File too large"):
            write_checkpoint(root, [source(2, large=True)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert leftovers(root.root) == []
    assert [step.version for step in Catalog(root, RUN).whole()] == [Version(1, 1)]
    write_checkpoint(root, [source(2, large=True)])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A memory file system of 4 MiB, of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_full_and_one_that_becomes_read_only(small_disk: Path) -> None:
    """The kernel's own refusals, seen by a saver that goes on."""
    root, events = LocalStorage(small_disk / "root"), Recorder()
    config = SaverConfig(on_failure=OnFailure.WARN)
    with Saver(root, config, run_id=RUN, worker=W0, events=events) as saver:

        def save(step: int, *, large: bool = False) -> str:
            ticket = saver.save([source(step, large=large)])
            assert ticket is not None
            assert ticket.wait(WAIT)
            return str(ticket.failure or "")

        assert save(1) == ""
        assert "No space left on device" in save(2, large=True)
        assert leftovers(root.root) == []
        assert save(3) == ""
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        assert "Read-only file system" in save(4)
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
        assert save(5) == ""
    assert [step.version.outer_step for step in Catalog(root, RUN).whole()] == [5, 3, 1]
    assert ["No space" in event.reason for event in events.of(CheckpointSaveFailed)] == [True, False]
    assert leftovers(root.root) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda root: (root / "step_1_2").write_text("a file in the folder's place"),
        lambda root: (root / "step_1_2" / "manifest.pb").mkdir(parents=True),
        lambda root: (root / "step_1_2" / "replicated" / "outer_params.safetensors").mkdir(parents=True),
    ],
)
def test_something_in_the_way(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    root = LocalStorage(tmp_path / "root")
    write_checkpoint(root, [source(1)])
    spoil(root.root)
    with pytest.raises(CheckpointFailed):
        write_checkpoint(root, [source(2)])
    assert [step.version for step in Catalog(root, RUN).whole()] == [Version(1, 1)]
