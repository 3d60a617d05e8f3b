"""Verified chunks on the joiner's disk, so that a restarted joiner does not fetch them again."""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path

import torch

from recovery.errors import BadConfiguration, MisuseError
from recovery.protocol.ledger import ChunkName
from recovery.types import GIB

_MAGIC = b"recovery spool 1\n"
_HEADER = struct.Struct("<IHQ")
"""Before each record's digest and bytes: a fixed mark, length of the digest, length of the bytes."""
_MARK = 0x51D05EED
_MAX_CHUNK_BYTES = 64 * 1024 * 1024


class ChunkSpool:
    """A file of chunks, found by their content. Thread-safe.

    Records are appended and never trusted: whoever loads one hashes it. A record that was cut off by a crash ends the
    readable part; what follows is overwritten. Nothing is synchronised to the disk: a lost record is fetched again.

    Args:
        path: The file; its folder must exist.
        max_bytes: The file does not grow beyond this; further chunks are not kept.
    """

    def __init__(self, path: Path, max_bytes: int = 1024 * GIB) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._file: int | None = None
        self._end = len(_MAGIC)
        self._index: dict[tuple[bytes, int], int] = {}

    def start(self) -> None:
        """Open the file, creating it if it is not there, and read its index.

        Raises:
            BadConfiguration: it cannot be opened, or is a file of another kind.
        """
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            head = os.pread(self._file, len(_MAGIC), 0)
            if not head:
                os.pwrite(self._file, _MAGIC, 0)
                return
            if head != _MAGIC:
                raise BadConfiguration(f"{self._path} is not a spool of this program; name another file")
            self._read_index(self._file)
        except OSError as error:
            raise BadConfiguration(f"the spool {self._path} cannot be used: {error}") from error
        except BadConfiguration:
            self.close()
            raise

    def close(self) -> None:
        """Close the file, which stays. Twice without harm."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def remove(self) -> None:
        """Close and delete the file: everything was restored."""
        self.close()
        self._path.unlink(missing_ok=True)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return isinstance(name, ChunkName) and (name.digest, name.num_bytes) in self._index

    def __len__(self) -> int:
        with self._lock:
            return len(self._index)

    def store(self, name: ChunkName, data: torch.Tensor) -> None:
        """Append a verified chunk; no-op if it is there, or if the file is full.

        Raises:
            BadConfiguration: the disk refuses. What was stored before stays readable.
        """
        length = _HEADER.size + len(name.digest) + name.num_bytes
        with self._lock:
            if (name.digest, name.num_bytes) in self._index or self._end + length > self._max_bytes:
                return
            file = self._opened()
            start, self._end = self._end, self._end + length
        header = _HEADER.pack(_MARK, len(name.digest), name.num_bytes) + name.digest
        try:
            # The payload first: a header is only ever in front of bytes that were written.
            _write_all(file, _bytes_of(data), start + len(header))
            _write_all(file, memoryview(header), start)
        except OSError as error:
            raise BadConfiguration(f"the spool {self._path} cannot be written: {error}") from error
        with self._lock:
            self._index[name.digest, name.num_bytes] = start + len(header)

    def load(self, name: ChunkName) -> torch.Tensor | None:
        """Return the spooled bytes, not verified, or None if there are none."""
        with self._lock:
            offset = self._index.get((name.digest, name.num_bytes))
            file = self._opened()
        if offset is None:
            return None
        data = torch.empty(name.num_bytes, dtype=torch.uint8)
        view = _bytes_of(data)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(file, [view[done:]], offset + done)
            except OSError:
                return None  # an unreadable record is as good as none: the chunk is fetched from a peer
            if count == 0:
                return None
            done += count
        return data

    def _opened(self) -> int:
        if self._file is None:
            raise MisuseError(f"the spool {self._path} is not open")
        return self._file

    def _read_index(self, file: int) -> None:
        size = os.fstat(file).st_size
        while self._end + _HEADER.size <= size:
            mark, digest_bytes, num_bytes = _HEADER.unpack(os.pread(file, _HEADER.size, self._end))
            start = self._end + _HEADER.size + digest_bytes
            if mark != _MARK or digest_bytes > 64 or num_bytes > _MAX_CHUNK_BYTES or start + num_bytes > size:
                return
            digest = os.pread(file, digest_bytes, self._end + _HEADER.size)
            self._index[digest, num_bytes] = start
            self._end = start + num_bytes


def _write_all(file: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)


def _bytes_of(data: torch.Tensor) -> memoryview:
    return memoryview(data.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers; its stubs say so from 3.12 on
