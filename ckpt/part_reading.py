"""Verified reads of one file: every piece is compared with the manifest's digest before it is handed on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Batch:
    """Runs that follow each other and are asked of the storage at once."""

    file_offset: int
    num_bytes: int
    runs: tuple[Run, ...]


class PartReading:
    """Verified reads of one open file. One thread's; ``read_all`` and ``in_order`` use threads of their own."""

    def __init__(self, handle: Readable, where: str, part: PartSpec, algorithm: DigestAlgorithm) -> None:
        self.plan = plan_file(part)
        self._handle = handle
        self._where = where
        self._part = part
        self._algorithm = algorithm
        self._places: dict[int, list[tuple[int, Piece]]] | None = None

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
        batches = self._batches()
        left = iter(batches)
        lock = threading.Lock()
        stop = threading.Event()

        def work() -> None:
            buffer = _buffer_for(batches)
            while not stop.is_set():
                with lock:
                    batch = next(left, None)
                if batch is None:
                    return
                try:
                    self._hand_on(batch, self._checked(batch, buffer), destination)
                except BaseException:  # whatever it was, the part is not whole: no other thread hands anything on
                    stop.set()
                    raise
                if progress is not None:
                    progress(batch.num_bytes)

        num_threads = min(num_threads, len(batches))
        if num_threads < 2:
            work()
            return
        with ThreadPoolExecutor(num_threads, thread_name_prefix="ckpt-read") as pool:
            try:
                for future in [pool.submit(work) for _ in range(num_threads)]:
                    future.result()
            except BaseException:  # Ctrl-C arrives in the waiting thread: it does not wait for the rest of the file
                stop.set()
                raise

    def in_order(self, num_threads: int) -> Generator[torch.Tensor, None, None]:
        """Yield the verified bytes that follow the header, piece by piece, each valid until the next; read ahead.

        Close it before the file: its threads read until then.

        Raises:
            CheckpointRejected: the first piece that differs.
        """
        batches = self._batches()
        left = iter(batches)
        num_threads = max(1, min(num_threads, len(batches)))
        free = deque(_buffer_for(batches) for _ in range(num_threads))
        ahead: deque[tuple[torch.Tensor, Future[torch.Tensor]]] = deque()
        with ThreadPoolExecutor(num_threads, thread_name_prefix="ckpt-read") as pool:
            try:
                while True:
                    while free and (batch := next(left, None)) is not None:
                        buffer = free.popleft()
                        ahead.append((buffer, pool.submit(self._checked, batch, buffer)))
                    if not ahead:
                        return
                    buffer, job = ahead.popleft()
                    yield job.result()
                    free.append(buffer)
            finally:
                for _, job in ahead:
                    job.cancel()

    def read_chunk(self, chunk: int) -> torch.Tensor | None:
        """Return the verified bytes of one of the manifest's chunks, or None where they are damaged."""
        spec = self._part.chunks[chunk]
        data = torch.empty(spec.num_bytes, dtype=torch.uint8)
        try:
            for position, piece in self._pieces_of(chunk):
                start = piece.part_offset - spec.offset
                view = data[start : start + piece.num_bytes]
                self._read(position, _memory(view))
                self._check(piece, view)
        except CheckpointRejected:
            return None
        return data

    def checked_run(self, run: Run, buffer: torch.Tensor) -> torch.Tensor:
        """Return a run's bytes, read into ``buffer``, after every digest was found right."""
        return self._checked(_Batch(run.file_offset, run.num_bytes, (run,)), buffer)

    def _checked(self, batch: _Batch, buffer: torch.Tensor) -> torch.Tensor:
        data = buffer[: batch.num_bytes]
        self._read(batch.file_offset, _memory(data))
        start = 0
        for run in batch.runs:
            for piece in run.pieces:
                self._check(piece, data[start : start + piece.num_bytes])
                start += piece.num_bytes
        return data

    def _hand_on(self, batch: _Batch, data: torch.Tensor, destination: Destination) -> None:
        # Out of a buffer of our own: the destination may be a tensor that training uses, and nothing reaches it
        # unverified. 4 MiB stay in the cache, so the extra copy costs little.
        start = 0
        for run in batch.runs:
            for offset, num_bytes in _joined(run.pieces):
                destination.write(offset, data[start : start + num_bytes])
                start += num_bytes

    def _batches(self) -> list[_Batch]:
        limit = max(CHUNK_BYTES, self._handle.request_bytes)
        batches: list[_Batch] = []
        pending: list[Run] = []
        num_bytes = 0
        for run in self.plan.runs:
            if pending and num_bytes + run.num_bytes > limit:
                batches.append(_Batch(pending[0].file_offset, num_bytes, tuple(pending)))
                pending, num_bytes = [], 0
            pending.append(run)
            num_bytes += run.num_bytes
        if pending:
            batches.append(_Batch(pending[0].file_offset, num_bytes, tuple(pending)))
        return batches

    def _pieces_of(self, chunk: int) -> list[tuple[int, Piece]]:
        """Return one chunk's pieces, each with its place in the file."""
        if self._places is None:
            places: dict[int, list[tuple[int, Piece]]] = {}
            for run in self.plan.runs:
                position = run.file_offset
                for piece in run.pieces:
                    places.setdefault(piece.chunk, []).append((position, piece))
                    position += piece.num_bytes
            self._places = places
        return self._places.get(chunk, [])

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


def _buffer_for(batches: Sequence[_Batch]) -> torch.Tensor:
    return torch.empty(max((batch.num_bytes for batch in batches), default=0), dtype=torch.uint8)


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
