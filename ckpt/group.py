"""One reader for a group of processes that need the same state: it reads and verifies, the others receive and verify.

Through the group's own broadcast, or through the local file system by ``ckpt.remote.DownloadCache``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Protocol

import torch
import torch.distributed as dist

from ckpt.catalog import Catalog, Step
from ckpt.layout import plan_file
from ckpt.reader import Checkpoint, open_checkpoint
from ckpt.record import CheckpointRecord, decode_record, encode_record
from ckpt.storage import Storage
from recovery.errors import CheckpointRejected, RecoveryError
from recovery.state.chunks import CHUNK_BYTES
from recovery.state.digest import chunk_digest
from recovery.state.parts import WorkerState
from recovery.state.restore import Restoration, RestoreMode
from recovery.types import PartClass, PartName, RunId, Version, WorkerId

logger = logging.getLogger(__name__)

_FAILED = -1
_DONE = -2


class Group(Protocol):
    """Processes that call the same methods in the same order."""

    @property
    def is_leader(self) -> bool:
        """Whether this process reads."""

    def broadcast(self, data: torch.Tensor) -> None:
        """Make ``data`` (1-d, on the CPU) the leader's in every process."""

    def agree(self, ok: bool) -> bool:
        """Return whether every process said ``ok``."""


class TorchGroup:
    """A group over ``torch.distributed`` whose backend moves CPU tensors; its first rank reads."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._leader = dist.get_global_rank(group, 0) if group is not None else 0

    @property
    def is_leader(self) -> bool:
        return dist.get_rank() == self._leader

    def broadcast(self, data: torch.Tensor) -> None:
        dist.broadcast(data, src=self._leader, group=self._group)

    def agree(self, ok: bool) -> bool:
        verdict = torch.tensor([int(ok)])
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=self._group)
        return bool(verdict.item())


def restore_in_group(
    group: Group,
    state: WorkerState,
    *,
    storage: Storage | None,
    run_id: RunId,
    worker_id: WorkerId,
    at_most: Version | None = None,
    parts: Collection[PartName] | None = None,
    exclude: Collection[PartName] = (),
) -> Version:
    """Make every process's ``state`` the newest step that verifies; return its version.

    Every process of the group calls it, with the same arguments except that only the leader needs ``storage``. Private
    parts are the given worker's, else the saver's, its data position never. Each process proves what it received
    against the manifest; nothing is changed anywhere unless all of them have everything.

    Raises:
        CheckpointRejected: no step can be restored.
        LayoutMismatch: a process's state does not fit. Nothing was changed in any.
    """
    with ExitStack() as opened:
        offers = _offers(storage, run_id, worker_id, at_most, opened) if group.is_leader else iter(())
        while True:
            offer = next(offers, None) if group.is_leader else None
            records = _share_records(group, offer)
            if records is None:
                continue
            if not records:
                raise CheckpointRejected(f"the group's leader has no checkpoint of run {run_id} to restore")
            version = _restore_step(group, state, offer, records, parts, exclude)
            if version is not None:
                return version


def _offers(
    storage: Storage | None, run_id: RunId, worker_id: WorkerId, at_most: Version | None, opened: ExitStack
) -> Iterator[list[Checkpoint]]:
    if storage is None:
        raise CheckpointRejected("the group's leader was given no storage to read from")
    for step in Catalog(storage, run_id).iterate():
        if not step.whole or step.num_local_ranks != 1 or (at_most is not None and step.version > at_most):
            continue
        owners: list[WorkerId | None] = [None]
        private = _private_owner(step, worker_id)
        if private is not None:
            owners.append(private)
        try:
            yield [
                opened.enter_context(open_checkpoint(storage, step.version, run_id=run_id, worker_id=owner))
                for owner in owners
            ]
        except CheckpointRejected as error:
            logger.warning("step %s is not used: %s", step.version, error)


def _private_owner(step: Step, worker_id: WorkerId) -> WorkerId | None:
    saver = step.records[0].manifest.worker.worker_id
    for owner in (worker_id, saver, *step.workers):
        if owner in step.workers and step.local_ranks_of[owner] == 1:
            return owner
    return None


def _share_records(group: Group, offer: list[Checkpoint] | None) -> list[CheckpointRecord] | None:
    """Return the manifests that the leader offers; empty: it has nothing more; None: one arrived damaged somewhere."""
    contents = [encode_record(checkpoint.record) for checkpoint in offer or []]
    sizes = torch.zeros(3, dtype=torch.int64)
    sizes[0] = len(contents)
    for index, content in enumerate(contents):
        sizes[1 + index] = len(content)
    group.broadcast(sizes)
    arrived = []
    for index in range(int(sizes[0])):
        data = torch.empty(int(sizes[1 + index]), dtype=torch.uint8)
        if group.is_leader:
            data = torch.frombuffer(bytearray(contents[index]), dtype=torch.uint8)
        group.broadcast(data)
        arrived.append(data.numpy().tobytes())
    records: list[CheckpointRecord] | None
    try:
        records = [decode_record(content, "the manifest from the group's leader") for content in arrived]
    except CheckpointRejected as error:
        logger.warning("%s", error)
        records = None
    return records if group.agree(records is not None) else None


def _restore_step(
    group: Group,
    state: WorkerState,
    offer: list[Checkpoint] | None,
    records: list[CheckpointRecord],
    parts: Collection[PartName] | None,
    exclude: Collection[PartName],
) -> Version | None:
    """Return the version once every process has it, or None if the leader found it damaged."""
    jobs: list[tuple[Restoration, CheckpointRecord, list[PartName]]] = []
    failure: RecoveryError | None = None
    try:
        for record in records:
            names = [
                part.name
                for part in record.manifest.parts
                if part.part_class is not PartClass.PRIVATE_KEPT
                and (parts is None or part.name in parts)
                and part.name not in exclude
            ]
            restoration = Restoration(state, record.manifest, mode=RestoreMode.STAGED, parts=names)
            restoration.prepare()
            jobs.append((restoration, record, names))
    except RecoveryError as error:
        failure = error
    if not group.agree(failure is None):
        raise failure or CheckpointRejected("another process of the group cannot take this checkpoint")
    for index, (restoration, record, names) in enumerate(jobs):
        for name in names:
            damage: CheckpointRejected | None = None
            try:
                _move(group, restoration, record, name, offer[index] if offer is not None else None)
            except CheckpointRejected as error:
                damage = error
            # After each part: whoever found something wrong must not leave the others in the middle of the next one.
            if not group.agree(damage is None):
                logger.warning("%s is not used: %s", record.manifest.cut, damage or "another process found it damaged")
                return None
    for restoration, _, _ in jobs:
        restoration.commit()
    return records[0].manifest.cut.version


def _move(
    group: Group, restoration: Restoration, record: CheckpointRecord, name: PartName, checkpoint: Checkpoint | None
) -> None:
    spec = record.manifest.part(name)
    plan = plan_file(spec)
    destination = restoration.destination(name)
    buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    word = torch.zeros(1, dtype=torch.int64)
    with ExitStack() as opened:
        failure: CheckpointRejected | None = None
        reading = None
        if checkpoint is not None:
            try:
                reading = opened.enter_context(checkpoint.reading(name))
            except CheckpointRejected as error:
                failure = error
        mine: CheckpointRejected | None = None
        for run in plan.runs:
            data = buffer[: run.num_bytes]
            if reading is not None and failure is None:
                try:
                    reading.checked_run(run, buffer)
                except CheckpointRejected as error:
                    failure = error
            word[0] = _FAILED if failure is not None else run.num_bytes
            group.broadcast(word)
            if int(word[0]) == _FAILED:
                raise failure or CheckpointRejected(f"the group's leader found part {name} damaged")
            group.broadcast(data)
            start = 0
            for piece in run.pieces:
                view = data[start : start + piece.num_bytes]
                # A follower that finds a difference goes on receiving, so that the leader does not wait for it.
                if chunk_digest(record.manifest.digest_algorithm, view) == piece.digest:
                    destination.write(piece.part_offset, view)
                else:
                    mine = CheckpointRejected(f"part {name}, tensor {piece.path}: damaged on the way from the leader")
                start += piece.num_bytes
        word[0] = _FAILED if failure is not None else _DONE
        group.broadcast(word)
        if int(word[0]) == _FAILED:
            raise failure or CheckpointRejected(f"the group's leader found part {name} damaged")
        if mine is not None:
            raise mine
