"""Writing: data files first, each durable, the manifest last. What is written is what the manifest says, or nothing."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from ckpt.catalog import OWNER
from ckpt.layout import LATEST, manifest_name, step_folder, worker_folder
from ckpt.part_writing import GivenUp, PartSource, PartWriting
from ckpt.reader import Checkpoint, num_transfers, open_checkpoint
from ckpt.record import KEPT, CheckpointRecord, PartFile, Scope, encode_record, file_of
from ckpt.storage import Storage, write_whole
from recovery.clock import Clock, SystemClock
from recovery.errors import CheckpointFailed, CheckpointRejected, RetrySameDonor, TryOtherDonor
from recovery.state.manifest import Manifest, PartSpec
from recovery.types import PartClass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteReport:
    """What a save did."""

    url: str
    manifest: Manifest
    num_bytes: int
    """Of all its files."""
    written_bytes: int
    linked_bytes: int
    """In files whose content an earlier checkpoint had already."""
    already_there: bool = False
    """The same checkpoint stood there, and every byte of it was verified: nothing but a new mark was written."""


class _Share:
    """The parts of one scope, each with its source."""

    def __init__(self, sources: Sequence[PartSource], scope: Scope) -> None:
        self.scope = scope
        self.parts: list[tuple[PartSource, int]] = []
        specs: list[PartSpec] = []
        for source in sources:
            for index, part in enumerate(source.manifest.parts):
                if (part.part_class is PartClass.REPLICATED) == (scope is Scope.REPLICATED):
                    self.parts.append((source, index))
                    specs.append(part)
        first = sources[0].manifest
        self.manifest = Manifest(
            run_id=first.run_id,
            worker=first.worker,
            cut=first.cut,
            numerics_id=first.numerics_id,
            layout_digest=first.layout_digest,
            fingerprint=first.fingerprint if scope is Scope.REPLICATED else type(first.fingerprint)(b""),
            digest_algorithm=first.digest_algorithm,
            parts=tuple(specs),
        )


def write_checkpoint(
    storage: Storage,
    sources: Sequence[PartSource],
    *,
    records: Mapping[str, object] | None = None,
    previous: Sequence[Checkpoint] = (),
    clock: Clock | None = None,
) -> list[WriteReport]:
    """Make the sources' parts durable checkpoints: replicated parts of the version, private parts of the worker.

    Args:
        storage: The root.
        sources: One or more, all of the same version of the same worker, together with at least one part. The first
            one's inner step is the record's.
        records: Side records, JSON values by name. With ``KEPT`` among them retention never deletes the step, also
            where it stood there already.
        previous: Open checkpoints of the same storage. A part of theirs with the same content is verified, then
            linked or copied by the server, instead of written.
        clock: Only for the time that people read in the record.

    Returns:
        One report for each scope that has parts, replicated first.

    Raises:
        CheckpointFailed: the storage failed, the memory differs from the sources' manifest, or another checkpoint of
            the same version with another content stands there. Nothing half-written remains under a manifest; what
            stood there before is unchanged, except that a torn or, for private parts, older one may be gone.
    """
    origins = {(s.manifest.run_id, s.manifest.worker, s.manifest.cut.version) for s in sources}
    if len(origins) != 1:
        raise CheckpointFailed(
            f"a checkpoint holds one version of one worker, not {len(origins)}: "
            + ", ".join(sorted(f"{version} of {worker} in {run}" for run, worker, version in origins))
        )
    reports = []
    for scope in (Scope.REPLICATED, Scope.PRIVATE):
        share = _Share(sources, scope)
        if share.parts:
            reports.append(_write_share(storage, share, records or {}, previous, clock or SystemClock()))
    if not reports:
        raise CheckpointFailed("there is nothing to save: no source holds a part")
    return reports


def folder_of(manifest: Manifest, scope: Scope) -> str:
    """Return the folder of a checkpoint inside its storage."""
    step = step_folder(manifest.cut.version)
    return step if scope is Scope.REPLICATED else f"{step}/{worker_folder(manifest.worker.worker_id)}"


def write_hint(storage: Storage, manifest: Manifest) -> None:
    """Let ``latest`` name a step. It is a hint: that it cannot be written is logged and changes nothing."""
    try:
        write_whole(storage, LATEST, f"{step_folder(manifest.cut.version)}\n".encode())
    except OSError as error:
        logger.warning("%s cannot be written, which is only a hint: %s", storage.url_of(LATEST), error)


def _write_share(
    storage: Storage, share: _Share, records: Mapping[str, object], previous: Sequence[Checkpoint], clock: Clock
) -> WriteReport:
    manifest = share.manifest
    folder = folder_of(manifest, share.scope)
    marker = f"{folder}/{manifest_name(manifest.worker)}"
    files = tuple(file_of(manifest, index, share.scope) for index in range(len(manifest.parts)))
    record = CheckpointRecord(
        scope=share.scope, manifest=manifest, files=files, saved_at=clock.wall(), records=dict(records)
    )
    content = encode_record(record)
    job = _Job(storage, folder, share)
    begun = False
    try:
        standing = _standing(storage, record)
        if standing is not None:
            if record.kept and not standing.kept and share.scope is Scope.REPLICATED:
                marked = dataclasses.replace(standing, records={**standing.records, KEPT: records[KEPT]})
                write_whole(storage, marker, encode_record(marked))
            return WriteReport(
                url=storage.url_of(folder),
                manifest=manifest,
                num_bytes=record.num_bytes,
                written_bytes=0,
                linked_bytes=0,
                already_there=True,
            )
        begun = True
        folders = {folder, *(f"{folder}/{file.path}".rpartition("/")[0] for file in files)}
        for name in folders:
            storage.sweep(name)
        # What stands there is torn, or of another life of this worker. Its marker goes first, durably: a marker over
        # files of two saves would be a lie.
        if storage.num_bytes(marker) is not None:
            storage.delete(marker)
            storage.settle([folder])
        _own(storage, manifest)
        job.write_files(files, previous)
        storage.settle(folders)
        write_whole(storage, marker, content)
    except BaseException as error:  # also Ctrl-C: files without a manifest only fill the disk
        if begun:  # before, what stands there is somebody's checkpoint
            job.undo(marker)
        if isinstance(error, OSError | RetrySameDonor | TryOtherDonor):  # the storage, or a lease that ended
            raise CheckpointFailed(f"saving {manifest.cut} to {storage.url_of(folder)} failed: {error}") from error
        raise
    if share.scope is Scope.REPLICATED:
        write_hint(storage, manifest)
    return WriteReport(
        url=storage.url_of(folder),
        manifest=manifest,
        num_bytes=record.num_bytes,
        written_bytes=job.written_bytes,
        linked_bytes=job.linked_bytes,
    )


def _own(storage: Storage, manifest: Manifest) -> None:
    """Say whose step this is before any other file does, so that retention can tell what an interrupted save left."""
    path = f"{step_folder(manifest.cut.version)}/{OWNER}{manifest.run_id}"
    if storage.num_bytes(path) is None:
        handle = storage.create(path)
        try:
            handle.commit()
        finally:
            handle.abort()


def _standing(storage: Storage, record: CheckpointRecord) -> CheckpointRecord | None:
    """Return the record of the same checkpoint, every byte of it verified, if it is there already."""
    manifest = record.manifest
    private = record.scope is Scope.PRIVATE
    try:
        with open_checkpoint(
            storage,
            manifest.cut.version,
            run_id=manifest.run_id,
            worker_id=manifest.worker.worker_id if private else None,
            local_rank=manifest.worker.local_rank,
            num_local_ranks=manifest.worker.num_local_ranks,
        ) as standing:
            equal = _same_content(standing.record, record)
            if private and not equal:
                return None
            standing.verify()
            if not equal:
                raise CheckpointFailed(
                    f"{standing.url} holds a whole checkpoint of {manifest.cut.version} with another content, "
                    f"saved by {standing.manifest.worker}: one of the two is not of this history"
                )
            return standing.record
    except CheckpointRejected:
        return None  # nothing, or something torn: it is written anew


def _same_content(standing: CheckpointRecord, record: CheckpointRecord) -> bool:
    a, b = standing.manifest, record.manifest
    if standing.scope is Scope.REPLICATED and a.fingerprint and b.fingerprint:
        return a.fingerprint == b.fingerprint  # whatever the order in which two workers list equal values
    return (
        standing.files == record.files
        and a.cut == b.cut
        and [part.tree for part in a.parts] == [part.tree for part in b.parts]
    )


class _Job:
    """The files of one save, until they are all durable."""

    def __init__(self, storage: Storage, folder: str, share: _Share) -> None:
        self._storage = storage
        self._folder = folder
        self._share = share
        self._made: list[str] = []
        self._written: list[int] = []
        self._linked: list[int] = []

    def write_files(self, files: Sequence[PartFile], previous: Sequence[Checkpoint]) -> None:
        """Write or link every file; all are durable, but their names not yet.

        Each file is read, hashed, written and synced by one thread, several files at a time: handing each chunk from
        thread to thread would cost more than it gains wherever training keeps the cores busy.
        """
        have = {file.content_digest: (found, file) for found in previous for file in found.record.files}
        stop = threading.Event()

        def work(file: PartFile, source: PartSource, index: int) -> None:
            if stop.is_set():
                return
            try:
                self._write_file(file, source, index, have.get(file.content_digest), stop)
            except BaseException:  # the save has failed: what the other thread still wrote would only be removed again
                stop.set()
                raise

        num_threads = num_transfers(self._storage)
        with ThreadPoolExecutor(num_threads, thread_name_prefix="ckpt-write") as pool:
            jobs = [pool.submit(work, file, *part) for file, part in zip(files, self._share.parts, strict=True)]
            try:
                wait(jobs)
            except BaseException:  # Ctrl-C arrives in the waiting thread: it does not wait for the rest of the save
                stop.set()
                raise
        errors = [error for job in jobs if (error := job.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, GivenUp)):
            raise error

    def _write_file(
        self,
        file: PartFile,
        source: PartSource,
        index: int,
        twin: tuple[Checkpoint, PartFile] | None,
        stop: threading.Event,
    ) -> None:
        path = f"{self._folder}/{file.path}"
        self._made.append(path)
        if twin is not None and self._reuse(*twin, path):
            self._linked.append(file.num_bytes)
            for chunk in range(len(source.manifest.parts[index].chunks)):
                source.acknowledge(index, chunk)
            return
        handle = self._storage.create(path, file.num_bytes)
        try:
            PartWriting(handle, source, index).write(stop)
            handle.commit()
        finally:
            handle.abort()
        self._written.append(file.num_bytes)

    @property
    def written_bytes(self) -> int:
        """In files that were written."""
        return sum(self._written)

    @property
    def linked_bytes(self) -> int:
        """In files that were linked."""
        return sum(self._linked)

    def undo(self, marker: str) -> None:
        """Remove the files of this save: without a manifest they only fill the disk.

        The marker may have its name already, if only the last fsync failed. It goes first, and if it cannot go, the
        files that it names stay.
        """
        for path in (marker, *self._made):
            try:
                self._storage.delete(path)
            except OSError as error:
                logger.warning("%s stays behind after a failed save: %s", self._storage.url_of(path), error)
                if path == marker:
                    return

    def _reuse(self, previous: Checkpoint, twin: PartFile, path: str) -> bool:
        source = f"{previous.folder}/{twin.path}"
        if source == path:
            return False
        try:
            previous.verify([twin.part])  # a link to a damaged file would spread the damage over every later step
            return self._storage.duplicate(source, path)
        except CheckpointRejected as error:
            logger.warning("an unchanged part is written anew, since its last copy is damaged: %s", error)
            return False
