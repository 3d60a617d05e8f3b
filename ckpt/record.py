"""The manifest file: a message that proves itself, with the snapshot's manifest and the list of files inside."""

from __future__ import annotations

import enum
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from blake3 import blake3
from google.protobuf.message import DecodeError, Message

from ckpt.layout import is_part_file_name, is_replicated, part_file_name, plan_file
from protos.recovery.v1 import checkpoint_pb2 as pb
from recovery.errors import CheckpointRejected, ManifestRejected
from recovery.state.manifest import Manifest, decode, encode
from recovery.types import PartName

FORMAT = 1

KEPT = "kept"
"""Side record of a step that retention never deletes; its value says why: saved by order, the best so far."""


CONVERTED = "converted"
"""Side record of what another system wrote: ``from``, its name, and ``absent``, which parts it lacks and why. It
does not say the classes of optimizers and schedulers: the worker's are taken, everything else is compared."""


class Scope(enum.Enum):
    """Whose parts a checkpoint holds."""

    REPLICATED = pb.CHECKPOINT_SCOPE_REPLICATED
    """The version's: any worker may take them."""
    PRIVATE = pb.CHECKPOINT_SCOPE_PRIVATE
    """One worker's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartFile:
    """One safetensors file. ``path`` is relative to the manifest's folder."""

    part: PartName
    path: str
    num_bytes: int
    header_num_bytes: int
    header_digest: bytes
    content_digest: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """What one manifest file says."""

    scope: Scope
    manifest: Manifest
    files: tuple[PartFile, ...]
    saved_at: float
    """Seconds since the Unix epoch; for people."""
    records: Mapping[str, object] = field(default_factory=dict)
    """Side records: JSON values by name."""
    torch_version: str = ""
    package_version: str = ""

    def file(self, part: PartName) -> PartFile:
        """Return a part's file.

        Raises:
            KeyError: there is no such part.
        """
        for found in self.files:
            if found.part == part:
                return found
        raise KeyError(part)

    @property
    def kept(self) -> str:
        """Why retention must leave the step alone; empty: it need not."""
        return str(self.records.get(KEPT) or "")

    @property
    def num_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.num_bytes for file in self.files)


def seal(kind: str, message: Message) -> bytes:
    """Return the bytes of a file that holds ``message`` and proves it."""
    body = message.SerializeToString(deterministic=True)
    record = pb.SealedRecord(digest=_seal_digest(kind, body), kind=kind, body=body)
    return record.SerializeToString(deterministic=True)


def unseal(kind: str, content: bytes, where: str) -> bytes:
    """Return the body of a sealed file.

    Raises:
        CheckpointRejected: the file is damaged, cut short, or holds another kind of message.
    """
    record = pb.SealedRecord()
    try:
        record.ParseFromString(content)
    except DecodeError as error:
        raise CheckpointRejected(f"{where} is damaged: it is not a sealed record") from error
    # The digest covers kind and body; comparing the encoding covers the few bytes around them.
    if (
        record.digest != _seal_digest(record.kind, record.body)
        or record.SerializeToString(deterministic=True) != content
    ):
        raise CheckpointRejected(f"{where} is damaged: its {len(content)} bytes do not have the digest that they name")
    if record.kind != kind:
        raise CheckpointRejected(f"{where} holds a {record.kind}, not a {kind}")
    return record.body


def encode_record(record: CheckpointRecord) -> bytes:
    """Return the content of a manifest file."""
    message = pb.Checkpoint(
        format=FORMAT,
        scope=record.scope.value,
        torch_version=record.torch_version or torch.__version__,
        package_version=record.package_version or package_version(),
    )
    message.manifest.ParseFromString(encode(record.manifest))
    for file in record.files:
        message.files.add(
            part=file.part,
            path=file.path,
            num_bytes=file.num_bytes,
            header_num_bytes=file.header_num_bytes,
            header_digest=file.header_digest,
            content_digest=file.content_digest,
        )
    message.saved_at.FromNanoseconds(int(record.saved_at * 1e9))
    for name in sorted(record.records):
        message.records.add(name=name, json=json.dumps(record.records[name], sort_keys=True, allow_nan=False))
    return seal("Checkpoint", message)


def decode_record(content: bytes, where: str) -> CheckpointRecord:
    """Return what a manifest file says.

    Raises:
        CheckpointRejected: damaged, of another format, or its file list does not follow from its manifest.
    """
    message = pb.Checkpoint()
    try:
        message.ParseFromString(unseal("Checkpoint", content, where))
        if message.format != FORMAT:
            raise CheckpointRejected(
                f"{where} has format {message.format}, this version reads {FORMAT}; it was written by package "
                f"{message.package_version or 'unknown'} with torch {message.torch_version or 'unknown'}"
            )
        manifest = decode(message.manifest.SerializeToString(deterministic=True))
        records = {entry.name: json.loads(entry.json) for entry in message.records}
        scope = Scope(message.scope)
    except (DecodeError, ManifestRejected, ValueError) as error:
        raise CheckpointRejected(f"{where} cannot be read: {error}") from error
    files = tuple(
        PartFile(
            part=PartName(file.part),
            path=file.path,
            num_bytes=file.num_bytes,
            header_num_bytes=file.header_num_bytes,
            header_digest=file.header_digest,
            content_digest=file.content_digest,
        )
        for file in message.files
    )
    found = CheckpointRecord(
        scope=scope,
        manifest=manifest,
        files=files,
        saved_at=message.saved_at.ToNanoseconds() / 1e9,
        records=records,
        torch_version=message.torch_version,
        package_version=message.package_version,
    )
    _check_files(found, where)
    return found


def file_of(manifest: Manifest, part_index: int, scope: Scope) -> PartFile:
    """Return what the record says of a part's file; it follows from the manifest alone."""
    part = manifest.parts[part_index]
    plan = plan_file(part)
    folder = "replicated/" if scope is Scope.REPLICATED else ""
    return PartFile(
        part=part.name,
        path=folder + part_file_name(part.name, manifest.worker),
        num_bytes=plan.num_bytes,
        header_num_bytes=len(plan.header),
        header_digest=plan.header_digest,
        content_digest=plan.content_digest(),
    )


def package_version() -> str:
    """Return this package's version; empty where it is not installed."""
    try:
        return importlib.metadata.version("diloco-recovery")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _check_files(record: CheckpointRecord, where: str) -> None:
    manifest = record.manifest
    if len(record.files) != len(manifest.parts) or not manifest.parts:
        raise CheckpointRejected(f"{where} lists {len(record.files)} files for {len(manifest.parts)} parts")
    for index, (file, part) in enumerate(zip(record.files, manifest.parts, strict=True)):
        if file != file_of(manifest, index, record.scope) or not is_part_file_name(file.path.rpartition("/")[2]):
            raise CheckpointRejected(f"{where} lists a file {file.path!r} that does not follow from part {part.name}")
        if is_replicated(part) != (record.scope is Scope.REPLICATED):
            raise CheckpointRejected(f"{where} is a {record.scope.name.lower()} record but lists part {part.name}")


def _seal_digest(kind: str, body: bytes) -> bytes:
    return blake3(kind.encode() + b"\0" + body).digest()
