"""Each worker's newest position in its data: one object that proves itself, put in one piece."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from google.protobuf.message import DecodeError

from ckpt.layout import POSITIONS, parse_position_name, position_name
from ckpt.part_writing import PartSource
from ckpt.record import FORMAT, seal, unseal
from ckpt.storage import MAX_RECORD_BYTES, Storage, read_whole, write_whole
from protos.recovery.v1 import checkpoint_pb2 as pb
from recovery.clock import Clock, SystemClock
from recovery.errors import CheckpointFailed, CheckpointRejected, ManifestRejected
from recovery.state.digest import chunk_digest
from recovery.state.manifest import Manifest, decode, encode
from recovery.state.parts import WorkerState
from recovery.state.restore import Restoration, RestoreMode
from recovery.types import Cut, PartClass, PartName, RunId, WorkerId

logger = logging.getLogger(__name__)

_KEEP = 2
"""The newest, and the one before it in case the newest is damaged."""


@dataclass(frozen=True, slots=True)
class Position:
    """A worker's private-kept parts, every byte verified."""

    manifest: Manifest
    payloads: Sequence[torch.Tensor]

    @property
    def cut(self) -> Cut:
        """When it was."""
        return self.manifest.cut

    @property
    def part_names(self) -> tuple[PartName, ...]:
        """Its parts."""
        return tuple(part.name for part in self.manifest.parts)

    def restore(self, state: WorkerState) -> None:
        """Make it the state's: training thread only.

        Raises:
            LayoutMismatch: the worker has no such part.
            StateMismatch: afterwards, memory differs.
        """
        restoration = Restoration(state, self.manifest, mode=RestoreMode.STAGED, parts=self.part_names)
        restoration.prepare()
        for part, payload in zip(self.manifest.parts, self.payloads, strict=True):
            if payload.numel():
                restoration.destination(part.name).write(0, payload)
        restoration.commit()


def write_position(storage: Storage, source: PartSource, *, clock: Clock | None = None) -> str:
    """Make the source's private-kept parts its worker's newest position; return where.

    Never compared with what is there: two positions may well have the same size.

    Raises:
        CheckpointFailed: it holds another kind of part, or the storage failed. The older position stands.
    """
    manifest = source.manifest
    others = [part.name for part in manifest.parts if part.part_class is not PartClass.PRIVATE_KEPT]
    if others or not manifest.parts:
        raise CheckpointFailed(f"a data position holds private-kept parts only, not {', '.join(others) or 'nothing'}")
    message = pb.DataPosition(format=FORMAT)
    message.manifest.ParseFromString(encode(manifest))
    message.saved_at.FromNanoseconds(int((clock or SystemClock()).wall() * 1e9))
    for index, part in enumerate(manifest.parts):
        payload = bytearray()
        for chunk in part.chunks:
            data = source.read(index, chunk.offset, chunk.num_bytes).data
            if chunk_digest(manifest.digest_algorithm, data) != chunk.digest:
                raise CheckpointFailed(f"part {part.name} changed while it was saved as a data position")
            payload += data.numpy().tobytes()
        message.payloads.append(bytes(payload))
    folder = _folder(manifest.worker.worker_id)
    path = f"{folder}/{position_name(manifest.cut.version, manifest.cut.inner_step)}"
    try:
        write_whole(storage, path, seal("DataPosition", message))
        for old in _names(storage, manifest.worker.worker_id)[_KEEP:]:
            storage.delete(f"{folder}/{old}")
    except OSError as error:
        raise CheckpointFailed(f"{storage.url_of(path)} cannot be written: {error}") from error
    return storage.url_of(path)


def newest_position(storage: Storage, run_id: RunId, worker_id: WorkerId) -> Position | None:
    """Return the worker's newest position that verifies, or None. A damaged one is skipped with a warning.

    Raises:
        CheckpointRejected: the storage cannot be listed.
    """
    try:
        names = _names(storage, worker_id)
    except OSError as error:
        raise CheckpointRejected(f"the data positions in {storage.url} cannot be listed: {error}") from error
    for name in names:
        path = f"{_folder(worker_id)}/{name}"
        try:
            position = _decode(read_whole(storage, path, limit=MAX_RECORD_BYTES), storage.url_of(path))
            found = (position.manifest.run_id, position.manifest.worker.worker_id)
            cut = position.cut
            if found != (run_id, worker_id) or name != position_name(cut.version, cut.inner_step):
                raise CheckpointRejected(f"{storage.url_of(path)} belongs to {found[1]} of run {found[0]} at {cut}")
        except (CheckpointRejected, OSError) as error:
            logger.warning("a data position is not used: %s", error)
            continue
        return position
    return None


def _decode(content: bytes, where: str) -> Position:
    message = pb.DataPosition()
    try:
        message.ParseFromString(unseal("DataPosition", content, where))
        if message.format != FORMAT:
            raise CheckpointRejected(f"{where} has format {message.format}, this version reads {FORMAT}")
        manifest = decode(message.manifest.SerializeToString(deterministic=True))
    except (DecodeError, ManifestRejected) as error:
        raise CheckpointRejected(f"{where} cannot be read: {error}") from error
    payloads = [
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        for data in message.payloads
    ]
    if [payload.numel() for payload in payloads] != [part.num_bytes for part in manifest.parts]:
        raise CheckpointRejected(f"{where} holds other bytes than its manifest says")
    for part, payload in zip(manifest.parts, payloads, strict=True):
        for chunk in part.chunks:
            piece = payload[chunk.offset : chunk.offset + chunk.num_bytes]
            if chunk_digest(manifest.digest_algorithm, piece) != chunk.digest:
                raise CheckpointRejected(f"{where} is damaged in part {part.name}")
    return Position(manifest, payloads)


def _folder(worker_id: WorkerId) -> str:
    return f"{POSITIONS}/{worker_id}"


def _names(storage: Storage, worker_id: WorkerId) -> list[str]:
    """Return the names of a worker's positions, newest first by number, never by time."""
    found = []
    for entry in storage.entries(_folder(worker_id)):
        key = None if entry.is_folder else parse_position_name(entry.name)
        if key is not None:
            found.append((key, entry.name))
    return [name for _, name in sorted(found, reverse=True)]
