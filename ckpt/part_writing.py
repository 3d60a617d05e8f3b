"""Verified writes of one file: every piece is compared with its digest before it is written."""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from ckpt.layout import FilePlan, Piece, plan_file
from ckpt.storage import Writable
from recovery.errors import CheckpointFailed
from recovery.state.chunks import CHUNK_BYTES, copy_bytes
from recovery.state.digest import chunk_digest
from recovery.state.manifest import Manifest

_TRIES = 3
"""Reads of one piece of live memory: the guard closes a view at most once a boundary."""


class ReadingPort(Protocol):
    """Bytes that a source lends."""

    @property
    def data(self) -> torch.Tensor:
        """One-dimensional, uint8, contiguous."""

    @property
    def live(self) -> bool:
        """Whether training may overwrite ``data`` at its next boundary."""


class PartSource(Protocol):
    """Where a checkpoint's bytes come from; ``recovery.snapshot.Lease`` is one."""

    @property
    def manifest(self) -> Manifest:
        """What the source holds, with every digest."""

    def read(self, part: int, offset: int, num_bytes: int) -> ReadingPort:
        """Return bytes of the manifest's part number ``part``."""

    def acknowledge(self, part: int, chunk: int) -> None:
        """A chunk was taken and will not be asked again."""


class GivenUp(Exception):
    """This file is not finished because another one failed."""


class PartWriting:
    def __init__(self, handle: Writable, source: PartSource, index: int) -> None:
        self._handle = handle
        self._source = source
        self._index = index
        self._spec = source.manifest.parts[index]
        self._algorithm = source.manifest.digest_algorithm
        self._plan: FilePlan = plan_file(self._spec)
        self._left = list(self._plan.pieces_of_chunk)

    def write(self, stop: threading.Event) -> None:
        """Append header and pieces, each piece after its digest was found right; end early if ``stop`` is set."""
        buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self._handle.write(memoryview(self._plan.header))
        for run in self._plan.runs:
            if stop.is_set():
                raise GivenUp
            if len(run.pieces) == 1:
                data = self._checked(run.pieces[0], buffer[: run.num_bytes])
            else:
                data = buffer[: run.num_bytes]
                start = 0
                for piece in run.pieces:
                    into = data[start : start + piece.num_bytes]
                    found = self._checked(piece, into)
                    if found.data_ptr() != into.data_ptr():
                        copy_bytes(into, found)
                    start += piece.num_bytes
            self._handle.write(data.numpy().data)

    def _checked(self, piece: Piece, buffer: torch.Tensor) -> torch.Tensor:
        """Return a piece's bytes after their digest was found right: lent ones if they stand still, else a copy."""
        for _ in range(_TRIES):
            reading = self._source.read(self._index, piece.part_offset, piece.num_bytes)
            data = reading.data
            if reading.live:
                # Hash what will be written, not what may be overwritten between hash and write.
                data = buffer
                copy_bytes(data, reading.data)
            if chunk_digest(self._algorithm, data) == piece.digest:
                self._left[piece.chunk] -= 1
                if not self._left[piece.chunk]:
                    self._source.acknowledge(self._index, piece.chunk)
                return data
            if not reading.live:
                break
        raise CheckpointFailed(
            f"part {self._spec.name}, tensor {piece.path}: the memory differs from the snapshot's manifest; it was "
            "written round the guard, or is damaged. Nothing was saved"
        )
