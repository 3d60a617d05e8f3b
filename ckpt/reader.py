"""Reading: every byte is compared with the manifest's digest before it is handed on."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from ckpt.layout import manifest_names, step_folder, worker_folder
from ckpt.local import LocalStorage
from ckpt.part_reading import Destination, PartReading, Progress
from ckpt.record import CheckpointRecord, PartFile, Scope, decode_record
from ckpt.storage import Pin, Storage, read_whole
from recovery.errors import BadConfiguration, CheckpointRejected
from recovery.state.chunks import copy_bytes
from recovery.state.manifest import Manifest, PartSpec
from recovery.types import PartName, RunId, Version, WorkerId

logger = logging.getLogger(__name__)


class RestorationPort(Protocol):
    """What ``recovery.state.Restoration`` offers to a reader."""

    def destination(self, part: PartName) -> Destination:
        """Return where a part's bytes are to be written."""


def num_transfers(storage: Storage) -> int:
    """Return how many threads read or write at once: more do not help a disk, and each holds a buffer."""
    return 2 if isinstance(storage, LocalStorage) else 4


class _Nowhere:
    def write(self, offset: int, data: torch.Tensor) -> None:
        pass


class BytesDestination:
    """Keeps a part's bytes in one flat tensor."""

    def __init__(self, num_bytes: int) -> None:
        self.data = torch.empty(num_bytes, dtype=torch.uint8)

    def write(self, offset: int, data: torch.Tensor) -> None:
        copy_bytes(self.data[offset : offset + data.numel()], data)


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong with a checkpoint."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class Checkpoint:
    """One local rank's share of a checkpoint, open for reading and safe from retention until it is closed.

    Nothing of its files was read yet: ``verify``, ``read_part`` and ``restore`` each prove every byte that they touch.
    """

    def __init__(self, storage: Storage, folder: str, record: CheckpointRecord, pin: Pin | None) -> None:
        self._storage = storage
        self._folder = folder
        self._pin = pin
        self.record = record

    @property
    def manifest(self) -> Manifest:
        """What the checkpoint holds; a joiner compares its chunk digests with a peer's."""
        return self.record.manifest

    @property
    def version(self) -> Version:
        """The version that it belongs to."""
        return self.record.manifest.cut.version

    @property
    def url(self) -> str:
        """Its folder, for messages and events."""
        return self._storage.url_of(self._folder)

    @property
    def storage(self) -> Storage:
        """Where it lives."""
        return self._storage

    @property
    def folder(self) -> str:
        """Path of its folder inside the storage."""
        return self._folder

    @property
    def part_names(self) -> tuple[PartName, ...]:
        """Its parts, in the manifest's order."""
        return tuple(part.name for part in self.manifest.parts)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let retention have it; a second call does nothing."""
        pin, self._pin = self._pin, None
        if pin is not None:
            pin.close()

    def chosen(
        self, parts: Collection[PartName] | None = None, exclude: Collection[PartName] = ()
    ) -> tuple[PartName, ...]:
        """Return the named parts, or all, without the excluded ones.

        Raises:
            BadConfiguration: a name that this checkpoint does not have.
        """
        unknown = sorted({*(parts or ()), *exclude} - set(self.part_names))
        if unknown:
            raise BadConfiguration(
                f"{self.url} has no part {', '.join(map(repr, unknown))}; it has {', '.join(self.part_names)}"
            )
        return tuple(name for name in self.part_names if (parts is None or name in parts) and name not in exclude)

    @contextmanager
    def reading(self, part: PartName) -> Iterator[PartReading]:
        """Open a part's file for verified reads; its size and header are right already.

        Raises:
            CheckpointRejected: it is missing, of another size, or its header differs.
        """
        spec = self.manifest.part(part)
        file = self.record.file(part)
        where = f"{self._storage.url_of(self._path(file))} of {self._name}"
        try:
            handle = self._storage.open(self._path(file))
        except OSError as error:
            raise CheckpointRejected(f"{where} cannot be opened: {error}") from error
        try:
            opened = PartReading(handle, where, spec, self.manifest.digest_algorithm)
            opened.check_header()
            yield opened
        finally:
            handle.close()

    def read_part(self, part: PartName, destination: Destination, progress: Progress | None = None) -> None:
        """Write a part's bytes to ``destination``, each only after its digest was found right.

        Raises:
            CheckpointRejected: a byte differs, or the file is missing, cut short or unreadable.

        If it raises, ``destination`` may hold some verified bytes and no others.
        """
        with self.reading(part) as reading:
            reading.read_all(destination, progress, num_transfers(self._storage))

    def verify(self, parts: Collection[PartName] | None = None, progress: Progress | None = None) -> None:
        """Return if every byte of every (named) part agrees with the manifest.

        Raises:
            CheckpointRejected: the first thing that does not.
        """
        for part in self.chosen(parts):
            self.read_part(part, _Nowhere(), progress)

    def damages(self, progress: Progress | None = None) -> list[Damage]:
        """Return everything that ``verify`` would refuse, one entry a part."""
        found = []
        for part in self.part_names:
            try:
                self.read_part(part, _Nowhere(), progress)
            except CheckpointRejected as error:
                found.append(Damage(part, str(error)))
        return found

    def restore(
        self,
        restoration: RestorationPort,
        parts: Collection[PartName] | None = None,
        *,
        exclude: Collection[PartName] = (),
        progress: Progress | None = None,
    ) -> int:
        """Write the parts' verified bytes to the restoration's destinations; return how many. It does not commit.

        Raises:
            CheckpointRejected: as ``read_part``. The restoration must then not be committed.
            BadConfiguration: an unknown part.
        """
        done = 0
        for part in self.chosen(parts, exclude):
            self.read_part(part, restoration.destination(part), progress)
            done += self.manifest.part(part).num_bytes
        return done

    def part_bytes(self, part: PartName) -> torch.Tensor:
        """Return a part's verified bytes as one flat uint8 tensor."""
        destination = BytesDestination(self.manifest.part(part).num_bytes)
        self.read_part(part, destination)
        return destination.data

    def fill(self, wanted: PartSpec, destination: Destination) -> set[int]:
        """Write those chunks of another manifest's part that this checkpoint has too; return their indices.

        For a joiner that starts from its own disk and asks its peers only for what differs. A chunk that is damaged
        here is left out.
        """
        if wanted.name not in self.part_names:
            return set()
        mine = self.manifest.part(wanted.name)
        here = {(chunk.num_bytes, chunk.digest): index for index, chunk in enumerate(mine.chunks)}
        filled: set[int] = set()
        try:
            with self.reading(wanted.name) as reading:
                for index, chunk in enumerate(wanted.chunks):
                    source = here.get((chunk.num_bytes, chunk.digest))
                    data = None if source is None else reading.read_chunk(source)
                    if data is not None:
                        destination.write(chunk.offset, data)
                        filled.add(index)
        except CheckpointRejected as error:
            logger.warning("%s is not used to start from: %s", self.url, error)
        return filled

    @property
    def _name(self) -> str:
        manifest = self.manifest
        return f"checkpoint {manifest.cut} of run {manifest.run_id} by {manifest.worker}"

    def _path(self, file: PartFile) -> str:
        return f"{self._folder}/{file.path}"


def open_checkpoint(
    storage: Storage,
    version: Version,
    *,
    run_id: RunId | None = None,
    worker_id: WorkerId | None = None,
    local_rank: int = 0,
    num_local_ranks: int = 1,
    pinned: bool = True,
) -> Checkpoint:
    """Return one local rank's share of a step, checked against the place where it was found.

    Args:
        storage: Where to look.
        version: The step.
        run_id: The run that it must belong to; None takes any.
        worker_id: Whose private parts; None for the version's replicated parts.
        local_rank: Which share.
        num_local_ranks: Into how many shares it was cut.
        pinned: Whether to keep retention away until it is closed.

    Raises:
        CheckpointRejected: no such checkpoint, not whole, or of another run, version, worker, rank or kind.
    """
    folder = step_folder(version) + (f"/{worker_folder(worker_id)}" if worker_id is not None else "")
    path = f"{folder}/{manifest_names(num_local_ranks)[local_rank]}"
    where = storage.url_of(path)
    try:
        pin = storage.pin(path) if pinned else None
        if pinned and pin is None:
            raise CheckpointRejected(f"{where} does not exist, or is being deleted")
        try:
            record = decode_record(read_whole(storage, path), where)
            check_place(record, where, version, run_id, worker_id, local_rank, num_local_ranks)
        except BaseException:  # nobody else holds the pin yet: left open, it would keep retention away for ever
            if pin is not None:
                pin.close()
            raise
    except OSError as error:
        raise CheckpointRejected(f"{where} cannot be read: {error}") from error
    return Checkpoint(storage, folder, record, pin)


def check_place(
    record: CheckpointRecord,
    where: str,
    version: Version,
    run_id: RunId | None,
    worker_id: WorkerId | None,
    local_rank: int,
    num_local_ranks: int,
) -> None:
    """Return if a record is what its place promises.

    Raises:
        CheckpointRejected: it was copied or renamed from another run, lineage, step, worker or rank.
    """
    manifest = record.manifest
    scope = Scope.REPLICATED if worker_id is None else Scope.PRIVATE
    facts: list[tuple[str, object, object]] = [
        ("version", manifest.cut.version, version),
        ("scope", record.scope.name.lower(), scope.name.lower()),
        ("local rank", manifest.worker.local_rank, local_rank),
        ("number of local ranks", manifest.worker.num_local_ranks, num_local_ranks),
    ]
    if run_id is not None:
        facts.append(("run", manifest.run_id, run_id))
    if worker_id is not None:
        facts.append(("worker", manifest.worker.worker_id, worker_id))
    for what, found, wanted in facts:
        if found != wanted:
            raise CheckpointRejected(f"{where} belongs elsewhere: its {what} is {found}, not {wanted}")
