"""A sweep of another worker between the making of a temporary file and its lock must not cost the save."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.local import LocalStorage
from ckpt.storage import read_whole, write_whole
from tests.unit.ckpt.power import Quick


class Swept(Quick):
    """Another process's sweep comes right after each new name, ``times`` times."""

    def __init__(self, root: Path, times: int) -> None:
        self._other = LocalStorage(root)
        self._left = times
        self.swept = 0

    def create(self, path: str) -> int:
        descriptor = super().create(path)
        self._sweep(path)
        return descriptor

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        self._sweep(target)

    def _sweep(self, path: str) -> None:
        if self._left:
            self._left -= 1
            self.swept += self._other.sweep(Path(path).parent.name)


@pytest.mark.parametrize("times", [1, 3])
def test_a_sweep_between_making_and_locking_does_not_fail_the_write(tmp_path: Path, times: int) -> None:
    files = Swept(tmp_path, times)
    storage = LocalStorage(tmp_path, files)
    write_whole(storage, "step_1_1/run_demo", b"mine")
    assert files.swept == times  # it was in the way indeed
    assert read_whole(storage, "step_1_1/run_demo") == b"mine"
    assert [path.name for path in (tmp_path / "step_1_1").iterdir()] == ["run_demo"]


def test_a_sweep_leaves_the_second_name_of_a_reused_part_alone(tmp_path: Path) -> None:
    write_whole(LocalStorage(tmp_path, Quick()), "step_1_1/part", b"content")
    files = Swept(tmp_path, 1)
    storage = LocalStorage(tmp_path, files)
    (tmp_path / "step_1_2").mkdir()
    # What a dead writer left lies there too: it shows that the sweep took place.
    (tmp_path / "step_1_2" / f".tmp-{'0' * 16}-part").write_bytes(b"torso")
    assert storage.duplicate("step_1_1/part", "step_1_2/part")
    assert files.swept == 1
    assert (tmp_path / "step_1_2" / "part").samefile(tmp_path / "step_1_1" / "part")
    assert [path.name for path in (tmp_path / "step_1_2").iterdir()] == ["part"]


def test_a_part_that_is_replaced_while_it_gets_its_second_name_is_not_reused(tmp_path: Path) -> None:
    """The new file was not verified by whoever asked, and its lock is not held."""

    class Replaced(Quick):
        replaced = 0

        def link(self, source: str, target: str) -> None:
            self.replaced += 1
            write_whole(LocalStorage(tmp_path, Quick()), "step_1_1/part", b"another")
            super().link(source, target)

    write_whole(LocalStorage(tmp_path, Quick()), "step_1_1/part", b"content")
    files = Replaced()
    assert not LocalStorage(tmp_path, files).duplicate("step_1_1/part", "step_1_2/part")
    assert files.replaced == 1
    assert list((tmp_path / "step_1_2").iterdir()) == []


def test_a_lock_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("ckpt.local.fcntl.flock", refuse)
    with pytest.raises(OSError, match="No locks"):
        LocalStorage(tmp_path, Quick()).create("part")
    assert list(tmp_path.iterdir()) == []
