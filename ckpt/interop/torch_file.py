"""Files of ``torch.save``: read with ``weights_only``, or, behind a flag that says so, by unpickling."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import torch

from recovery.errors import CheckpointFailed, CheckpointRejected

FLAG = "allow_pickle"


def read_torch(source: Path | bytes, where: str, *, allow_pickle: bool) -> object:
    """Return what a ``torch.save`` file holds, tensors on the CPU.

    Args:
        source: The file, or its content.
        where: Its name in messages.
        allow_pickle: Unpickle whatever the file holds. That runs code of whoever wrote it: only for one's own files.

    Raises:
        CheckpointRejected: it cannot be read, or holds objects that only unpickling restores.
    """
    try:
        opened = io.BytesIO(source) if isinstance(source, bytes) else source
        return torch.load(opened, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        raise CheckpointRejected(
            f"{where} is damaged or holds objects that can only be unpickled, which would run its writer's code; if "
            f"you wrote it yourself, say {FLAG}: {error}"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, ImportError) as error:
        raise CheckpointRejected(f"{where} cannot be read: {error}") from error


def write_torch(path: Path, value: object) -> None:
    """Write ``value`` with ``torch.save`` under a temporary name, then give it its own.

    Raises:
        CheckpointFailed: the disk refused it.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, temporary)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        raise CheckpointFailed(f"{path} cannot be written: {error}") from error
