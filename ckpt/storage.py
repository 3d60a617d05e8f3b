"""Where checkpoints live: the port that every backend fills, and the way from a URL to one.

Paths are relative to the storage's root, with ``/`` between folder names. All methods may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class StorageError(OSError):
    """A storage backend failed: the one form in which its client library's errors reach the rest of ``ckpt``.

    Local storage raises plain ``OSError``; this class is one, so ``except OSError`` catches both.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One name in a folder."""

    name: str
    is_folder: bool
    num_bytes: int
    """Zero for folders."""
    modified: float | None
    """Seconds since the Unix epoch, or None where the backend does not say."""


class Readable(Protocol):
    """An open file or object. May be read from several threads at once."""

    @property
    def num_bytes(self) -> int:
        """Size when it was opened."""

    @property
    def request_bytes(self) -> int:
        """How much is worth asking for at once."""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset``; return the bytes read, fewer only at the end of the file."""

    def close(self) -> None:
        """Let it go; a second call does nothing."""


class Writable(Protocol):
    """A file that nobody sees under its name before ``commit``. Owned by one thread.

    Object stores without a rename may show it earlier; what it holds is then still not named by any manifest.
    """

    def write(self, data: memoryview) -> None:
        """Append ``data``, which may be reused as soon as this returns."""

    def commit(self) -> None:
        """Make the content durable, then give it its name, replacing what was there.

        If it raises, the old file of that name stands unchanged or, on an object store, may be replaced.
        """

    def abort(self) -> None:
        """Remove every trace of an uncommitted file; after ``commit`` or a second time it does nothing."""


class Pin(Protocol):
    """Keeps retention away from a step until it is closed."""

    def close(self) -> None:
        """Let retention have the step; a second call does nothing."""


class Storage(Protocol):
    """One root folder or bucket prefix."""

    @property
    def url(self) -> str:
        """The root, for messages and events."""

    def url_of(self, path: str) -> str:
        """Return the full name of ``path``, for messages and events."""

    def entries(self, folder: str) -> list[Entry]:
        """Return what ``folder`` holds now, sorted by name; empty if it does not exist. Never from a cache."""

    def num_bytes(self, path: str) -> int | None:
        """Return the size of a file, or None if there is none."""

    def open(self, path: str) -> Readable:
        """Open a file for reading.

        Raises:
            FileNotFoundError: there is none.
            OSError: it cannot be read.
        """

    def create(self, path: str, num_bytes: int = 0) -> Writable:
        """Begin a file, making its folders. ``num_bytes``: how large it will be, if known."""

    def settle(self, folders: Iterable[str]) -> None:
        """Make the names in ``folders``, and the folders' own names, durable."""

    def duplicate(self, source: str, target: str) -> bool:
        """Make ``target`` hold what ``source`` holds without moving its bytes through this process.

        Returns:
            False where the backend cannot, with nothing done.
        """

    def delete(self, path: str) -> None:
        """Remove a file; one that is absent already is no error."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder if it is empty; otherwise, or if there is none, do nothing."""

    def pin(self, manifest_path: str) -> Pin | None:
        """Keep retention from deleting the checkpoint of ``manifest_path``; None if it is gone or going."""

    def claim(self, manifest_path: str) -> Pin | None:
        """Take the checkpoint for deletion; None while anyone reads it. Held until closed."""

    def being_written(self, folder: str) -> bool:
        """Return whether somebody writes in ``folder`` now, or did a moment ago, as far as can be told."""

    def sweep(self, folder: str) -> int:
        """Remove what interrupted writers left in ``folder``; return how many files that were."""


MAX_RECORD_BYTES = 256 * 1024 * 1024
"""Manifests above this size are refused before a byte of them is read."""


def read_whole(storage: Storage, path: str, *, limit: int = MAX_RECORD_BYTES) -> bytes:
    """Return a small file's content.

    Raises:
        FileNotFoundError: there is none.
        OSError: it is larger than ``limit``, shorter than its size says, or cannot be read.
    """
    handle = storage.open(path)
    try:
        if handle.num_bytes > limit:
            raise OSError(f"{storage.url_of(path)} has {handle.num_bytes} bytes, more than the {limit} allowed")
        content = bytearray(handle.num_bytes)
        got = handle.read_into(0, memoryview(content))
        if got != len(content):
            raise OSError(f"{storage.url_of(path)} ended after {got} of {len(content)} bytes")
        return bytes(content)
    finally:
        handle.close()


def write_whole(storage: Storage, path: str, content: bytes) -> None:
    """Replace a small file durably, its name included."""
    handle = storage.create(path)
    try:
        handle.write(memoryview(content))
        handle.commit()
    finally:
        handle.abort()
    storage.settle([path.rpartition("/")[0]])
