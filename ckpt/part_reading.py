"""Verified reads of one file: every piece is compared with the manifest's digest before it is handed on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from ckpt.layout import Piece, Run, plan_file
from ckpt.storage import Readable
from recovery.errors import CheckpointRejected
from recovery.state.chunks import CHUNK_BYTES
from recovery.state.digest import chunk_digest
from recovery.state.manifest import PartSpec
from recovery.types import DigestAlgorithm

Progress = Callable[[int], None]
"""Told the number of bytes that were just verified; called from reading threads."""


class Destination(Protocol):
    """Where a part's verified bytes go; ``recovery.state.PartBytes`` is one."""

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Take bytes at a position of the part. Called from several threads, for ranges that do not overlap."""


class PartReading:
    """Verified reads of one open file. One thread's; ``read_all`` uses threads of its own and joins them."""

    def __init__(self, handle: Readable, where: str, part: PartSpec, algorithm: DigestAlgorithm) -> None:
        self.plan = plan_file(part)
        self._handle = handle
        self._where = where
        self._part = part
        self._algorithm = algorithm

    def check_header(self) -> None:
        """Return if size and header are what the manifest asks for, so that any safetensors reader sees the same."""
        if self._handle.num_bytes != self.plan.num_bytes:
            raise CheckpointRejected(
                f"{self._where} has {self._handle.num_bytes} bytes, its manifest says {self.plan.num_bytes}"
            )
        header = bytearray(len(self.plan.header))
        self._read(0, memoryview(header))
        if header != self.plan.header:
            raise CheckpointRejected(f"{self._where} has a damaged header")

    def read_all(self, destination: Destination, progress: Progress | None, num_threads: int) -> None:
        """Verify every piece and hand it to ``destination``.

        Raises:
            CheckpointRejected: the first piece that differs; no further one is handed on after that is known.
        """
        runs = iter(self.plan.runs)
        lock = threading.Lock()
        stop = threading.Event()

        def work() -> None:
            buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
            while not stop.is_set():
                with lock:
                    run = next(runs, None)
                if run is None:
                    return
                try:
                    self._read_run(run, buffer, destination)
                except BaseException:
                    stop.set()
                    raise
                if progress is not None:
                    progress(run.num_bytes)

        num_threads = min(num_threads, len(self.plan.runs))
        if num_threads < 2:
            work()
            return
        with ThreadPoolExecutor(num_threads, thread_name_prefix="ckpt-read") as pool:
            for future in [pool.submit(work) for _ in range(num_threads)]:
                future.result()

    def read_chunk(self, chunk: int) -> torch.Tensor | None:
        """Return the verified bytes of one of the manifest's chunks, or None where they are damaged."""
        spec = self._part.chunks[chunk]
        data = torch.empty(spec.num_bytes, dtype=torch.uint8)
        try:
            for run in self.plan.runs:
                position = run.file_offset
                for piece in run.pieces:
                    if piece.chunk == chunk:
                        start = piece.part_offset - spec.offset
                        view = data[start : start + piece.num_bytes]
                        self._read(position, _memory(view))
                        self._check(piece, view)
                    position += piece.num_bytes
        except CheckpointRejected:
            return None
        return data

    def checked_run(self, run: Run, buffer: torch.Tensor) -> torch.Tensor:
        """Return a run's bytes, read into ``buffer``, after every digest was found right."""
        data = buffer[: run.num_bytes]
        self._read(run.file_offset, _memory(data))
        start = 0
        for piece in run.pieces:
            self._check(piece, data[start : start + piece.num_bytes])
            start += piece.num_bytes
        return data

    def _read_run(self, run: Run, buffer: torch.Tensor, destination: Destination) -> None:
        # Into a buffer of our own first: the destination may be a tensor that training uses, and nothing reaches it
        # unverified. 4 MiB stay in the cache, so the extra copy costs little.
        data = self.checked_run(run, buffer)
        start = 0
        for offset, num_bytes in _joined(run.pieces):
            destination.write(offset, data[start : start + num_bytes])
            start += num_bytes

    def _read(self, offset: int, into: memoryview) -> None:
        try:
            got = self._handle.read_into(offset, into)
        except OSError as error:
            raise CheckpointRejected(f"{self._where} cannot be read at byte {offset}: {error}") from error
        if got != len(into):
            raise CheckpointRejected(f"{self._where} ended at byte {offset + got}, it has {self.plan.num_bytes}")

    def _check(self, piece: Piece, data: torch.Tensor) -> None:
        if chunk_digest(self._algorithm, data) == piece.digest:
            return
        raise CheckpointRejected(
            f"{self._where} is damaged: part {self._part.name}, tensor {self._damaged(piece, data)}, bytes "
            f"{piece.part_offset} to {piece.part_offset + piece.num_bytes} of the part differ from the manifest"
        )

    def _damaged(self, piece: Piece, data: torch.Tensor) -> str:
        end = piece.part_offset + piece.num_bytes
        names = []
        for tensor in self._part.tensors:
            start = tensor.offset - piece.part_offset
            inside = piece.part_offset <= tensor.offset and tensor.offset + tensor.num_bytes <= end
            if inside and tensor.digest and tensor.num_bytes:
                slice_ = data[start : start + tensor.num_bytes]
                if chunk_digest(self._algorithm, slice_) != tensor.digest:
                    names.append(tensor.path)
        return ", ".join(names) or piece.path


def _joined(pieces: tuple[Piece, ...]) -> list[tuple[int, int]]:
    """Return (part offset, bytes) of stretches that follow each other in the part as they do in the file."""
    stretches: list[tuple[int, int]] = []
    for piece in pieces:
        if stretches and stretches[-1][0] + stretches[-1][1] == piece.part_offset:
            stretches[-1] = (stretches[-1][0], stretches[-1][1] + piece.num_bytes)
        else:
            stretches.append((piece.part_offset, piece.num_bytes))
    return stretches


def _memory(data: torch.Tensor) -> memoryview:
    return data.numpy().data
