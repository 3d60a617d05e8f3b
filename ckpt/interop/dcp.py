"""Folders of ``torch.distributed.checkpoint``: read without running their metadata, written with torch's own code."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from ckpt.interop.inert_pickle import Record, read_inert
from ckpt.interop.torch_file import read_torch
from recovery.errors import CheckpointFailed, CheckpointRejected

METADATA = ".metadata"
_FILE = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_PREFIX = "torch.distributed.checkpoint."


def is_dcp(path: Path) -> bool:
    """Return whether a folder holds a DCP checkpoint."""
    return (path / METADATA).is_file()


def read_dcp(path: Path, *, allow_pickle: bool = False) -> dict[str, object]:
    """Return the flat state of a DCP folder: whole tensors and values by their dotted names.

    Unlike torch's own reader it executes nothing, and refuses a tensor whose chunks do not cover it.

    Raises:
        CheckpointRejected: a file is missing, damaged, or holds what only unpickling restores.
    """
    return {name: value for name, (_, value) in _read(path, allow_pickle).items()}


def read_dcp_nested(path: Path, *, allow_pickle: bool = False) -> dict[str, object]:
    """Return the state of a DCP folder with the nesting that it was saved with."""
    nested: dict[str, object] = {}
    for name, (keys, value) in _read(path, allow_pickle).items():
        _put(nested, keys or (name,), value)
    return nested


def write_dcp(path: Path, state: Mapping[str, object]) -> None:
    """Write a state dict as a DCP folder of one rank.

    Raises:
        CheckpointFailed: the folder exists already, or torch or the disk refused it.
    """
    # Here alone: it takes a second, a third of what every `recovery` command needs to start.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    if is_dcp(path):
        raise CheckpointFailed(f"{path} holds a DCP checkpoint already")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group exists, and that one day formats will change
            save(dict(state), checkpoint_id=path, no_dist=True)
    except (OSError, CheckpointException) as error:
        raise CheckpointFailed(f"{path} cannot be written: {error}") from error


def _read(path: Path, allow_pickle: bool) -> dict[str, tuple[tuple[object, ...], object]]:
    where = str(path / METADATA)
    try:
        metadata = read_inert((path / METADATA).read_bytes(), where)
    except OSError as error:
        raise CheckpointRejected(f"{path} is no DCP folder: {error}") from error
    if not isinstance(metadata, Record) or metadata.name != f"{_PREFIX}metadata.Metadata":
        raise CheckpointRejected(f"{where} does not describe a DCP checkpoint")
    entries, stored = metadata.field("state_dict_metadata"), metadata.field("storage_data")
    planned = metadata.field("planner_data")
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        raise CheckpointRejected(f"{where} lists no entries")
    places: dict[str, list[tuple[tuple[int, ...] | None, Record]]] = {}
    for key, info in stored.items():
        if not isinstance(key, Record) or not isinstance(info, Record):
            raise CheckpointRejected(f"{where} lists a place that is none")
        places.setdefault(str(key.field("fqn")), []).append((_size(key.field("offset")), info))
    found = {}
    for name, entry in entries.items():
        keys = planned.get(name) if isinstance(planned, dict) else None
        value = _entry(str(name), entry, places.get(str(name), []), _Files(path), allow_pickle, where)
        found[str(name)] = (keys if isinstance(keys, tuple) else (), value)
    return found


def _entry(
    name: str,
    entry: object,
    places: list[tuple[tuple[int, ...] | None, Record]],
    reader: _Files,
    allow_pickle: bool,
    where: str,
) -> object:
    if not isinstance(entry, Record) or not places:
        raise CheckpointRejected(f"{where} does not say where {name} is")
    if entry.name == f"{_PREFIX}metadata.BytesStorageMetadata":
        return read_torch(reader.slice(places[0][1]), f"{name} of {where}", allow_pickle=allow_pickle)
    shape = _size(entry.field("size"))
    if shape is None:
        raise CheckpointRejected(f"{where} gives no size for {name}")
    whole: torch.Tensor | None = None
    covered = torch.zeros(shape, dtype=torch.bool)
    for offset, info in places:
        piece = read_torch(reader.slice(info), f"{name} of {where}", allow_pickle=False)
        if not isinstance(piece, torch.Tensor) or offset is None or len(offset) != len(shape):
            raise CheckpointRejected(f"{where}: a chunk of {name} is no tensor that fits")
        if whole is None:
            whole = torch.empty(shape, dtype=piece.dtype)
        region = tuple(slice(start, start + size) for start, size in zip(offset, piece.shape, strict=True))
        if whole.dtype != piece.dtype or whole[region].shape != piece.shape:
            raise CheckpointRejected(
                f"{where}: a chunk of {name} is {piece.dtype} {list(piece.shape)}, it does not fit"
            )
        whole[region] = piece
        covered[region] = True
    if whole is None or not bool(covered.all()):
        raise CheckpointRejected(f"{where}: the chunks of {name} do not cover it")
    return whole


class _Files:
    """The data files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def slice(self, info: Record) -> bytes:
        """Return the bytes of one entry."""
        name, offset, length = (info.field(key) for key in ("relative_path", "offset", "length"))
        if info.field("transform_descriptors"):
            raise CheckpointRejected(f"{self._folder} was written with transforms (compression), which are not read")
        if not isinstance(name, str) or not _FILE.fullmatch(name) or name.startswith(".."):
            raise CheckpointRejected(f"{self._folder} names a file {name!r} outside of it")
        if not isinstance(offset, int) or not isinstance(length, int) or offset < 0 or length < 0:
            raise CheckpointRejected(f"{self._folder} gives no place in {name}")
        try:
            with (self._folder / name).open("rb") as file:
                file.seek(offset)
                content = file.read(length)
        except OSError as error:
            raise CheckpointRejected(f"{self._folder / name} cannot be read: {error}") from error
        if len(content) != length:
            raise CheckpointRejected(f"{self._folder / name} ended at byte {offset + len(content)}")
        return content


def _size(value: object) -> tuple[int, ...] | None:
    """Return a ``torch.Size`` record's numbers."""
    if isinstance(value, Record) and value.name == "torch.Size" and len(value.arguments) == 1:
        numbers = value.arguments[0]
        if isinstance(numbers, tuple | list) and all(isinstance(n, int) and n >= 0 for n in numbers):
            return tuple(numbers)
    return None


def _put(nested: dict[str, object], keys: tuple[object, ...], value: object) -> None:
    here: object = nested
    for position, key in enumerate(keys):
        last = position == len(keys) - 1
        following: object = value if last else ([] if isinstance(keys[position + 1], int) else {})
        if isinstance(here, list):
            assert isinstance(key, int)
            while len(here) <= key:
                here.append(None)
            if last or here[key] is None:
                here[key] = following
            here = here[key]
        else:
            assert isinstance(here, dict)
            if last:
                here[key] = value
            here = here.setdefault(key, following)
