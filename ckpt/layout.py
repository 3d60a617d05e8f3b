"""Names of folders and files, and where each tensor's bytes stand in a part's file.

::

    <root>/
      latest                                    a hint, never believed
      step_<lineage>_<outer step>/
        manifest.pb                             written last: the replicated parts are whole
        replicated/<part>.safetensors
        worker_<id>/manifest.pb                 written last: this worker's private parts are whole
        worker_<id>/<part>.safetensors
      positions/<worker id>/<lineage>_<outer step>_<inner step>.pb

A worker of several local ranks has ``manifest.<rank>-of-<ranks>.pb`` and ``<part>.<rank>-of-<ranks>.safetensors``;
its checkpoint is whole when every rank's manifest is.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from recovery.errors import CheckpointRejected
from recovery.state.chunks import CHUNK_BYTES
from recovery.state.manifest import PartSpec, TensorSpec
from recovery.types import PartClass, Version, WorkerId, WorkerRef

LATEST = "latest"
POSITIONS = "positions"
REPLICATED_FOLDER = "replicated"

_NUMBER = r"0|[1-9][0-9]{0,18}"
_STEP = re.compile(rf"step_([1-9][0-9]{{0,18}})_({_NUMBER})")
_WORKER = re.compile(r"worker_([A-Za-z0-9_-][A-Za-z0-9._-]{0,199})")
_RANK = rf"(?:\.(?:{_NUMBER})-of-(?:[1-9][0-9]{{0,4}}))?"
_MANIFEST = re.compile(rf"manifest{_RANK}\.pb")
_PART_FILE = re.compile(r"[A-Za-z0-9._%-]{1,180}\.safetensors")
_POSITION = re.compile(rf"({_NUMBER})_({_NUMBER})_({_NUMBER})\.pb")

HEADER_LIMIT_BYTES = 100_000_000
"""The safetensors library refuses longer headers."""

_SAFETENSORS_NAMES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}


def step_folder(version: Version) -> str:
    """Return the name of a version's folder.

    Raises:
        ValueError: the version is none that a checkpoint can have.
    """
    name = f"step_{version.lineage}_{version.outer_step}"
    if not _STEP.fullmatch(name):
        raise ValueError(f"{version} is not a version that can be saved")
    return name


def parse_step_folder(name: str) -> Version | None:
    """Return the version that exactly this folder name stands for, or None: ``step_1_2.backup`` is not ours."""
    match = _STEP.fullmatch(name)
    return Version(int(match[1]), int(match[2])) if match else None


def worker_folder(worker_id: WorkerId) -> str:
    """Return the name of a worker's folder inside a step's."""
    name = f"worker_{worker_id}"
    if not _WORKER.fullmatch(name):
        raise ValueError(f"worker id {worker_id!r} cannot name a folder")
    return name


def parse_worker_folder(name: str) -> WorkerId | None:
    """Return the worker whose folder this is, or None."""
    match = _WORKER.fullmatch(name)
    return WorkerId(match[1]) if match else None


def manifest_name(worker: WorkerRef) -> str:
    """Return the name of one local rank's manifest file."""
    return f"manifest{_rank_suffix(worker)}.pb"


def manifest_names(num_local_ranks: int) -> list[str]:
    """Return the names that a whole checkpoint of so many local ranks has."""
    if num_local_ranks == 1:
        return ["manifest.pb"]
    return [f"manifest.{rank}-of-{num_local_ranks}.pb" for rank in range(num_local_ranks)]


def is_manifest_name(name: str) -> bool:
    """Return whether a file of this name is a manifest of ours."""
    return _MANIFEST.fullmatch(name) is not None


def is_part_file_name(name: str) -> bool:
    """Return whether a file of this name is one that ``part_file_name`` can make."""
    return _PART_FILE.fullmatch(name) is not None


def part_file_name(part: str, worker: WorkerRef) -> str:
    """Return the name of a part's file: letters, digits, ``.``, ``_``, ``-``; anything else as ``%XX``."""
    quoted = "".join(
        chr(byte) if chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) in "._-") else f"%{byte:02X}"
        for byte in part.encode()
    )
    if quoted.startswith("."):
        quoted = "%2E" + quoted[1:]
    if len(quoted) > 140:
        quoted = f"{quoted[:100]}-{blake3(part.encode()).hexdigest()[:32]}"
    return f"{quoted}{_rank_suffix(worker)}.safetensors"


def position_name(version: Version, inner_step: int) -> str:
    """Return the name of a data position's object."""
    return f"{version.lineage}_{version.outer_step}_{inner_step}.pb"


def parse_position_name(name: str) -> tuple[int, int, int] | None:
    """Return (lineage, outer step, inner step), or None if the name is not ours."""
    match = _POSITION.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _rank_suffix(worker: WorkerRef) -> str:
    return "" if worker.num_local_ranks == 1 else f".{worker.local_rank}-of-{worker.num_local_ranks}"


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that one digest covers; they are read, checked and applied together."""

    part_offset: int
    num_bytes: int
    digest: bytes
    path: str
    """Path of the first tensor in it."""
    chunk: int
    """Index of the manifest's chunk that holds them."""


@dataclass(frozen=True, slots=True)
class Run:
    """Pieces that follow each other in the file, at most ``CHUNK_BYTES`` together: one read or write."""

    file_offset: int
    num_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A part's file: its header, then ``runs`` without a gap."""

    header: bytes
    runs: tuple[Run, ...]
    num_bytes: int
    pieces_of_chunk: tuple[int, ...]
    """How many pieces each chunk of the manifest is cut into."""

    @property
    def header_digest(self) -> bytes:
        """BLAKE3 over the header."""
        return blake3(self.header).digest()

    def content_digest(self) -> bytes:
        """Return what is equal exactly where two files hold the same bytes."""
        digest = blake3(self.header_digest)
        for run in self.runs:
            for piece in run.pieces:
                digest.update(piece.digest)
        return digest.digest()


def plan_file(part: PartSpec) -> FilePlan:
    """Return where each tensor of ``part`` stands in its file, and the file's header.

    Safetensors allows no gaps, so alignment comes from the order: tensors stand by falling item size, equal sizes in
    the manifest's order. A part of one dtype therefore has the same order on disk as on the wire.

    Raises:
        CheckpointRejected: the header would be longer than the safetensors library reads.
    """
    # The sort is stable and the manifest's order is fixed, so that equal parts make equal files.
    order = sorted(range(len(part.tensors)), key=lambda i: -_form(part.tensors[i])[2])
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    names = _unique_names(part.tensors)
    offset = 0
    for i in order:
        tensor = part.tensors[i]
        code, shape, _ = _form(tensor)
        end = offset + tensor.num_bytes
        entries[names[i]] = {"dtype": code, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT_BYTES:
        raise CheckpointRejected(
            f"part {part.name} has {len(part.tensors)} tensors whose names need a header of {len(text)} bytes; "
            f"a safetensors file holds {HEADER_LIMIT_BYTES}"
        )
    header = struct.pack("<Q", len(text)) + text
    pieces = _pieces(part)
    runs: list[Run] = []
    pending: list[Piece] = []
    position, pending_bytes = len(header), 0
    for i in order:
        for piece in pieces[i]:
            if pending and pending_bytes + piece.num_bytes > CHUNK_BYTES:
                runs.append(Run(position, pending_bytes, tuple(pending)))
                position, pending, pending_bytes = position + pending_bytes, [], 0
            pending.append(piece)
            pending_bytes += piece.num_bytes
    if pending:
        runs.append(Run(position, pending_bytes, tuple(pending)))
    counts = [0] * len(part.chunks)
    for run in runs:
        for piece in run.pieces:
            counts[piece.chunk] += 1
    return FilePlan(header, tuple(runs), len(header) + part.num_bytes, tuple(counts))


def _form(tensor: TensorSpec) -> tuple[str, list[int], int]:
    """Return dtype code, shape and item size as the file names them; what safetensors cannot name is bytes there."""
    known = _SAFETENSORS_NAMES.get(tensor.dtype)
    if known is None:
        return "U8", [tensor.num_bytes], 1
    return known[0], list(tensor.shape), known[1]


def _unique_names(tensors: Sequence[TensorSpec]) -> list[str]:
    """Return a name for each tensor: its path; keys with a '/' can make two paths equal, then a number tells them."""
    taken = {"__metadata__"}
    names = []
    for tensor in tensors:
        name, n = tensor.path, 1
        while name in taken:
            n += 1
            name = f"{tensor.path}#{n}"
        taken.add(name)
        names.append(name)
    return names


def _pieces(part: PartSpec) -> list[list[Piece]]:
    """Return each tensor's pieces.

    A chunk inside one tensor is a piece. A chunk that packs several tensors is one piece, listed at its first tensor,
    if they stay neighbours in the file; otherwise each tensor is a piece with its own digest.
    """
    found: list[list[Piece]] = [[] for _ in part.tensors]
    filled = [i for i, tensor in enumerate(part.tensors) if tensor.num_bytes]
    at = 0
    for index, chunk in enumerate(part.chunks):
        end = chunk.offset + chunk.num_bytes
        begin = at
        while at < len(filled) and part.tensors[filled[at]].offset < end:
            at += 1
        inside = filled[begin:at]
        first, last = part.tensors[inside[0]], part.tensors[inside[-1]]
        if last.offset + last.num_bytes > end:
            at -= 1  # it goes on in the next chunk
        if len(inside) == 1 or len({_form(part.tensors[i])[2] for i in inside}) == 1:
            found[inside[0]].append(Piece(chunk.offset, chunk.num_bytes, chunk.digest, first.path, index))
            continue
        for i in inside:
            tensor = part.tensors[i]
            if not tensor.digest:
                raise CheckpointRejected(f"tensor {tensor.path} of part {part.name} shares a chunk and has no digest")
            found[i].append(Piece(tensor.offset, tensor.num_bytes, tensor.digest, tensor.path, index))
    return found


def is_replicated(part: PartSpec) -> bool:
    """Return whether the part belongs to the version rather than to a worker."""
    return part.part_class is PartClass.REPLICATED
