"""Local storage: temporary file, fsync, rename, fsync of the folder. The order is what survives a power cut."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from ckpt.storage import Entry, Pin, Readable, Writable
from recovery.types import MIB

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Without O_NONBLOCK a pipe that bears a manifest's name would hold whoever looks at the folder, for ever."""

_NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.ENOENT, errno.ENOSYS)

YOUNG_SECONDS = 30.0
"""Between two files of a save nothing is locked: what changed less long ago counts as being written."""

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}-.+")


class FileSystem:
    """The calls that change a disk, in one place, so that a test can cut the power between any two of them."""

    def create(self, path: str) -> int:
        """Make a new file; return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Append some of ``data``; return how many bytes."""
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        """Make a file's content durable."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def replace(self, source: str, target: str) -> None:
        """Rename, replacing ``target``."""
        os.replace(source, target)  # noqa: PTH105

    def link(self, source: str, target: str) -> None:
        """Give a file a second name."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        os.unlink(path)  # noqa: PTH108 - the calls stay the kernel's, one to one

    def mkdir(self, path: str) -> None:
        """Make one folder."""
        os.mkdir(path)  # noqa: PTH102

    def rmdir(self, path: str) -> None:
        """Remove one empty folder."""
        os.rmdir(path)  # noqa: PTH106

    def fsync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _LocalReadable:
    request_bytes = 4 * MIB
    """Stays in a core's cache between reading, hashing and copying."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, _READ)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            raise OSError(errno.EINVAL, "not a regular file", path)
        self.num_bytes = status.st_size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            got = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if got == 0:
                break
            done += got
        return done

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _LocalWritable:
    def __init__(self, files: FileSystem, path: Path) -> None:
        self._files = files
        self._path = str(path)
        # Between its making and its lock another process may sweep the file away: then another one is made.
        while True:
            self._temporary = str(path.parent / _temporary_name(path.name))
            self._descriptor = files.create(self._temporary)
            self._open = True
            try:
                # Held until the file has its name or is gone: a sweep takes only what no living process holds.
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                if _is_at(self._descriptor, self._temporary):
                    return
            except BaseException:  # also Ctrl-C while waiting for the lock: nobody else knows of this file
                self.abort()
                raise
            self._close()

    def write(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += self._files.write(self._descriptor, data[done:])

    def commit(self) -> None:
        # The content must be on the disk before the name is: a rename that survives a power cut alone would name a
        # file of zeros.
        self._files.fsync(self._descriptor)
        self._files.replace(self._temporary, self._path)
        self._open = False
        self._close()

    def abort(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            self._close()
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(self._temporary)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._files.close(descriptor)


class _Lock:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)  # ends the flock too, as the end of the process does
            self._descriptor = -1


class LocalStorage:
    """A folder of this machine."""

    def __init__(self, root: str | Path, files: FileSystem | None = None) -> None:
        self._root = Path(root).absolute()
        self._files = files or FileSystem()

    @property
    def root(self) -> Path:
        """The folder."""
        return self._root

    @property
    def url(self) -> str:
        return str(self._root)

    def url_of(self, path: str) -> str:
        return str(self._root / path)

    def entries(self, folder: str) -> list[Entry]:
        found = []
        try:
            with os.scandir(self._root / folder) as names:
                for name in names:
                    # A file may vanish between the listing and the look at it: another process retains or renames.
                    with contextlib.suppress(FileNotFoundError):
                        status = name.stat(follow_symlinks=False)
                        is_folder = stat.S_ISDIR(status.st_mode)
                        found.append(
                            Entry(
                                name=name.name,
                                is_folder=is_folder,
                                num_bytes=0 if is_folder else status.st_size,
                                modified=status.st_mtime,
                            )
                        )
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(found, key=lambda entry: entry.name)

    def num_bytes(self, path: str) -> int | None:
        try:
            status = (self._root / path).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def open(self, path: str) -> Readable:
        return _LocalReadable(str(self._root / path))

    def create(self, path: str, num_bytes: int = 0) -> Writable:
        target = self._root / path
        self._make_folder(target.parent)
        return _LocalWritable(self._files, target)

    def settle(self, folders: Iterable[str]) -> None:
        settled: set[Path] = set()
        for folder in sorted(set(folders), key=len, reverse=True):
            path = self._root / folder
            # A folder's name is an entry of its parent: without the parents' fsync the whole folder can vanish.
            while path not in settled:
                self._files.fsync_folder(str(path))
                settled.add(path)
                if path == self._root or path == path.parent:
                    break
                path = path.parent
        if settled:
            self._files.fsync_folder(str(self._root.parent))

    def duplicate(self, source: str, target: str) -> bool:
        to = self._root / target
        self._make_folder(to.parent)
        temporary = str(to.parent / _temporary_name(to.name))
        try:
            held = os.open(self._root / source, _READ)
        except FileNotFoundError:
            return False  # the source is gone: the caller writes it
        try:
            # The second name is a temporary file too: unlocked, another process's sweep would take it.
            fcntl.flock(held, fcntl.LOCK_SH)
            try:
                self._files.link(str(self._root / source), temporary)
            except OSError as error:
                if error.errno in _NO_LINK:
                    return False  # no hard links here, too many of them, or the source is gone: the caller writes it
                raise
            try:
                if not _is_at(held, temporary):
                    return False  # the source was replaced meanwhile: this is another file, and it is not locked
                self._files.replace(temporary, str(to))
            finally:
                # rename() between two names of one file does nothing and leaves both.
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(temporary)
        finally:
            os.close(held)
        return True

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(str(self._root / path))

    def remove_folder(self, folder: str) -> None:
        try:
            self._files.rmdir(str(self._root / folder))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
                raise

    def pin(self, manifest_path: str) -> Pin | None:
        return self._lock(manifest_path, fcntl.LOCK_SH)

    def claim(self, manifest_path: str) -> Pin | None:
        return self._lock(manifest_path, fcntl.LOCK_EX)

    def being_written(self, folder: str) -> bool:
        entries = self.entries(folder)
        if any(e.modified is not None and time.time() - e.modified < YOUNG_SECONDS for e in entries):
            return True
        # A disk may take longer than that for one write; its writer holds the lock all the time.
        temporary = [e for e in entries if not e.is_folder and _TEMPORARY.fullmatch(e.name)]
        return any(self._is_locked(f"{folder}/{entry.name}") for entry in temporary)

    def sweep(self, folder: str) -> int:
        swept = 0
        for entry in self.entries(folder):
            if entry.is_folder or not _TEMPORARY.fullmatch(entry.name):
                continue
            path = f"{folder}/{entry.name}" if folder else entry.name
            lock = self._lock(path, fcntl.LOCK_EX)
            if lock is None:
                continue  # its writer lives, or has just given it its name
            try:
                self.delete(path)
                swept += 1
            finally:
                lock.close()
        return swept

    def _is_locked(self, path: str) -> bool:
        try:
            descriptor = os.open(self._root / path, _READ)
        except FileNotFoundError:
            return False
        try:
            # Shared: this look must not make a sweep or another look take the file for a living writer's.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _lock(self, path: str, how: int) -> _Lock | None:
        full = str(self._root / path)
        try:
            descriptor = os.open(full, _READ)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            # Deleted or replaced between open and lock: the lock is then on a file that nobody sees any more.
            if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not _is_at(descriptor, full):
                os.close(descriptor)
                return None
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        return _Lock(descriptor)

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            self._files.mkdir(str(folder))


def _is_at(descriptor: int, path: str) -> bool:
    """Return whether ``path`` still names the open file."""
    try:
        there = os.stat(path)  # noqa: PTH116
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _temporary_name(name: str) -> str:
    return f".tmp-{secrets.token_hex(8)}-{name}"
