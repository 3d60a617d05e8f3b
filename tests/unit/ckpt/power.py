"""A file system whose power is cut: what was not synced is gone, or worse, half there."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ckpt.local import FileSystem

T = TypeVar("T")


class Quick(FileSystem):
    """Syncs nothing: for what is not about durability."""

    def fsync(self, descriptor: int) -> None:
        pass

    def fsync_folder(self, path: str) -> None:
        pass


class PowerLost(OSError):
    """The machine is off: this call did nothing, and no later one will."""


class PowerCut(FileSystem):
    """Works on a real folder and remembers what of it would survive.

    A file's content survives as it was at its last fsync, a folder's names as they were at its last fsync. With
    ``eager_names`` every name survives at once, as on file systems that journal names before data: the worst case for
    a rename without an fsync.
    """

    def __init__(self, root: Path, *, cut_after: int | None = None, eager_names: bool = False) -> None:
        """Begin with everything under ``root`` durable. Call number ``cut_after`` (from 0) does not happen."""
        self._root = root
        self._cut_after = cut_after
        self._eager = eager_names
        self._content: dict[int, bytes] = {}
        self._names: dict[Path, dict[str, int | None]] = {}
        self._lock = threading.Lock()
        self.calls: list[str] = []
        self.is_cut = False
        for folder, _, files in os.walk(root):
            for name in files:
                path = Path(folder) / name
                self._content[path.stat().st_ino] = path.read_bytes()
            self._note_names(Path(folder))

    def survivors(self, target: Path) -> None:
        """Build in ``target`` what a reboot would find."""
        self._build(self._root, target)

    def create(self, path: str) -> int:
        def work() -> int:
            descriptor = super(PowerCut, self).create(path)
            self._content.pop(os.fstat(descriptor).st_ino, None)  # inode numbers are used again
            return descriptor

        return self._call("create", path, work, names_of=[path])

    def write(self, descriptor: int, data: memoryview) -> int:
        return self._call("write", "", lambda: super(PowerCut, self).write(descriptor, data))

    def fsync(self, descriptor: int) -> None:
        def work() -> None:
            self._content[os.fstat(descriptor).st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

        self._call("fsync", "", work)

    def replace(self, source: str, target: str) -> None:
        self._call("replace", target, lambda: super(PowerCut, self).replace(source, target), names_of=[source, target])

    def link(self, source: str, target: str) -> None:
        self._call("link", target, lambda: super(PowerCut, self).link(source, target), names_of=[target])

    def unlink(self, path: str) -> None:
        self._call("unlink", path, lambda: super(PowerCut, self).unlink(path), names_of=[path])

    def mkdir(self, path: str) -> None:
        def work() -> None:
            super(PowerCut, self).mkdir(path)
            self._names[Path(path)] = {}

        self._call("mkdir", path, work, names_of=[path])

    def rmdir(self, path: str) -> None:
        self._call("rmdir", path, lambda: super(PowerCut, self).rmdir(path), names_of=[path])

    def fsync_folder(self, path: str) -> None:
        inside = Path(path) == self._root or self._root in Path(path).parents
        self._call("fsync_folder", path, lambda: self._note_names(Path(path)) if inside else None)

    def _call(self, name: str, path: str, work: Callable[[], T], names_of: Sequence[str] = ()) -> T:
        with self._lock:
            if self.is_cut or len(self.calls) == self._cut_after:
                self.is_cut = True
                raise PowerLost(f"the power is off: {name} {path}")
            self.calls.append(f"{name} {path}")
            result = work()
            if self._eager:
                for changed in names_of:
                    self._note_names(Path(changed).parent)
            return result

    def _note_names(self, folder: Path) -> None:
        names: dict[str, int | None] = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                names[entry.name] = None if stat.S_ISDIR(status.st_mode) else status.st_ino
        self._names[folder] = names

    def _build(self, folder: Path, target: Path) -> None:
        target.mkdir()
        for name, inode in self._names.get(folder, {}).items():
            if inode is None:
                self._build(folder / name, target / name)
            else:
                (target / name).write_bytes(self._content.get(inode, b""))
