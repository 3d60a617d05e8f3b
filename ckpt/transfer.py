"""Copying a step from one storage to another: verified on the way, the manifest last, and read back at the end."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass

from ckpt.catalog import OWNER, Catalog, Step, StepState
from ckpt.layout import manifest_name, step_folder
from ckpt.part_reading import Progress
from ckpt.reader import Checkpoint, num_transfers, open_checkpoint
from ckpt.record import PartFile, encode_record
from ckpt.storage import Storage, write_whole
from ckpt.writer import write_hint
from recovery.errors import CheckpointFailed, CheckpointRejected
from recovery.types import RunId, Version, WorkerId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyReport:
    """What a copy did."""

    url: str
    version: Version
    num_bytes: int
    """Of all files of the step."""
    moved_bytes: int
    reused_bytes: int
    """In files that were there already, or that the server copied from an earlier step."""
    workers: tuple[WorkerId, ...]


def copy_step(
    source: Storage,
    target: Storage,
    version: Version,
    *,
    run_id: RunId | None,
    workers: Collection[WorkerId] | None = None,
    replicated: bool | None = True,
    progress: Progress | None = None,
) -> CopyReport:
    """Make ``target`` hold a step as ``source`` does, every byte verified when it was read and again after it arrived.

    Args:
        source: Where it is.
        target: Where it shall be.
        version: Which step.
        run_id: The run that it must belong to; None takes any.
        workers: Whose private parts; None: everybody's that are whole.
        replicated: Whether to copy the replicated parts; None: if they are whole. A worker that was not their saver
            has only its private parts.
        progress: Told bytes as they are written and again as they are read back.

    Raises:
        CheckpointRejected: the source's step is damaged.
        BadConfiguration: the source has no such step, or it is not whole.
        CheckpointFailed: the target cannot be written, or does not give back what it took.
    """
    step = Catalog(source, run_id).look(version) if replicated is None else None
    if step is None or (replicated is None and step.state is StepState.FOREIGN):
        step = Catalog(source, run_id).get(version)
    chosen = [worker_id for worker_id in step.workers if workers is None or worker_id in workers]
    num_bytes = moved = reused = 0
    # Private parts first: the replicated manifest is what makes the step count.
    for worker_id in (*chosen, *([None] if replicated or (replicated is None and step.whole) else [])):
        for rank in range(_num_ranks(source, step, worker_id)):
            with _open(source, step, worker_id, rank) as checkpoint:
                job = _Copy(checkpoint, target, progress)
                job.run(_twins(target, checkpoint))
                num_bytes += checkpoint.record.num_bytes
                moved += job.moved_bytes
                reused += job.reused_bytes
    return CopyReport(
        url=target.url_of(step_folder(version)),
        version=version,
        num_bytes=num_bytes,
        moved_bytes=moved,
        reused_bytes=reused,
        workers=tuple(chosen),
    )


def _open(storage: Storage, step: Step, worker_id: WorkerId | None, rank: int) -> Checkpoint:
    return open_checkpoint(
        storage,
        step.version,
        worker_id=worker_id,
        local_rank=rank,
        num_local_ranks=_num_ranks(storage, step, worker_id),
    )


def _num_ranks(storage: Storage, step: Step, worker_id: WorkerId | None) -> int:
    return step.num_local_ranks if worker_id is None else step.local_ranks_of[worker_id]


def _twins(target: Storage, checkpoint: Checkpoint) -> list[Checkpoint]:
    """Return the newest older step of the target, from which unchanged parts can be copied by the server."""
    manifest = checkpoint.manifest
    private = checkpoint.record.scope.name == "PRIVATE"
    try:
        steps = Catalog(target, manifest.run_id).steps()
    except OSError as error:  # without a listing everything is moved; whether the target can be written is seen then
        logger.info("%s cannot be listed: %s", target.url, error)
        return []
    for step in steps:
        if step.whole and step.version < manifest.cut.version:
            try:
                found = open_checkpoint(
                    target,
                    step.version,
                    run_id=manifest.run_id,
                    worker_id=manifest.worker.worker_id if private else None,
                    local_rank=manifest.worker.local_rank,
                    num_local_ranks=manifest.worker.num_local_ranks,
                )
            except CheckpointRejected:
                return []
            return [found]
    return []


class _Copy:
    """One local rank's share on its way."""

    def __init__(self, checkpoint: Checkpoint, target: Storage, progress: Progress | None) -> None:
        self._from = checkpoint
        self._to = target
        self._progress = progress
        self.moved_bytes = 0
        self.reused_bytes = 0

    def run(self, twins: Sequence[Checkpoint]) -> None:
        record = self._from.record
        manifest = record.manifest
        folder = self._from.folder
        marker = f"{folder}/{manifest_name(manifest.worker)}"
        content = encode_record(record)
        try:
            owner = f"{step_folder(manifest.cut.version)}/{OWNER}{manifest.run_id}"
            if self._to.num_bytes(owner) is None:
                write_whole(self._to, owner, b"")
            have = {file.content_digest: (twin, file) for twin in twins for file in twin.record.files}
            for file in record.files:
                self._file(file, have.get(file.content_digest))
            self._to.settle({folder, *(f"{folder}/{file.path}".rpartition("/")[0] for file in record.files)})
            write_whole(self._to, marker, content)
            self._prove()
        except OSError as error:
            raise CheckpointFailed(f"copying {self._from.url} to {self._to.url} failed: {error}") from error
        finally:
            for twin in twins:
                twin.close()
        if record.scope.name == "REPLICATED":
            write_hint(self._to, manifest)

    def _file(self, file: PartFile, twin: tuple[Checkpoint, PartFile] | None) -> None:
        path = f"{self._from.folder}/{file.path}"
        # Never by size alone: equal size says nothing about equal content.
        if self._to.num_bytes(path) == file.num_bytes and self._holds(file):
            self.reused_bytes += file.num_bytes
            return
        if twin is not None and self._to.duplicate(f"{twin[0].folder}/{twin[1].path}", path):
            self.reused_bytes += file.num_bytes
            return
        handle = self._to.create(path, file.num_bytes)
        try:
            with self._from.reading(file.part) as reading:
                handle.write(memoryview(reading.plan.header))
                with closing(reading.in_order(num_transfers(self._from.storage))) as pieces:
                    for data in pieces:
                        handle.write(data.numpy().data)
                        if self._progress is not None:
                            self._progress(data.numel())
            handle.commit()
        finally:
            handle.abort()
        self.moved_bytes += file.num_bytes

    def _holds(self, file: PartFile) -> bool:
        arrived = Checkpoint(self._to, self._from.folder, self._from.record, None)
        try:
            arrived.verify([file.part])
        except CheckpointRejected:
            return False
        return True

    def _prove(self) -> None:
        """Read everything back. An upload that was accepted is not yet one that can be downloaded."""
        manifest = self._from.manifest
        private = self._from.record.scope.name == "PRIVATE"
        try:
            with open_checkpoint(
                self._to,
                manifest.cut.version,
                run_id=manifest.run_id,
                worker_id=manifest.worker.worker_id if private else None,
                local_rank=manifest.worker.local_rank,
                num_local_ranks=manifest.worker.num_local_ranks,
            ) as arrived:
                arrived.verify(progress=self._progress)
        except CheckpointRejected as error:
            # What does not verify must not look whole to the next reader.
            self._to.delete(f"{self._from.folder}/{manifest_name(manifest.worker)}")
            raise CheckpointFailed(f"{self._to.url} does not give back what it took: {error}") from error
