"""The demo's data: the source text of the installed Python standard library, split by worker."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from recovery.errors import BadConfiguration

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3"})
"""Not part of the library itself, or so large that reading them would delay a worker's start."""
MAX_SHARD_BYTES = 4 * 1024 * 1024


def standard_library_files(root: Path | None = None) -> list[Path]:
    """Return the library's Python files, sorted by relative path: the same list on every worker of one machine."""
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = [path for path in folder.rglob("*.py") if not EXCLUDED_FOLDERS & set(path.relative_to(folder).parts[:-1])]
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def shard_of(files: Sequence[Path], *, index: int, count: int) -> list[Path]:
    """Return the files of worker ``index`` of ``count``: every ``count``-th, so that shards are disjoint and complete.

    Raises:
        BadConfiguration: ``index`` is not one of ``count`` workers.
    """
    if not 0 <= index < count:
        raise BadConfiguration(f"worker index {index} is not one of the {count} shards of the corpus")
    return list(files[index::count])


def read_shard(files: Iterable[Path], *, max_bytes: int = MAX_SHARD_BYTES) -> Tensor:
    """Return the files' text, joined with a zero byte between two files, as one uint8 tensor of at most ``max_bytes``.

    Raises:
        BadConfiguration: the files hold no text at all.
    """
    text = bytearray()
    for path in files:
        if len(text) >= max_bytes:
            break
        text += path.read_bytes() + b"\0"
    if not text:
        raise BadConfiguration("this worker's part of the corpus is empty: fewer files than workers")
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


class CorpusReader:
    """Yields batches of byte windows from one shard and remembers its place.

    A batch holds ``batch_size`` windows whose starts are spread evenly over the shard; each call moves all of them on
    by ``context`` bytes and wraps round. The place is a ``Stateful`` part of the worker: private-kept, because a joiner
    must never continue in another worker's data.
    """

    def __init__(self, shard: Tensor, *, worker_index: int, batch_size: int, context: int) -> None:
        if shard.numel() <= context:
            raise BadConfiguration(f"the shard has {shard.numel()} bytes: one window needs more than {context}")
        self._shard = shard
        self._worker_index = worker_index
        self._batch_size = batch_size
        self._context = context
        # Another start for each worker: with equal strides, a place then tells whose it is until the shard wraps.
        self._cursor = worker_index % context
        self._batches = 0

    @property
    def cursor(self) -> int:
        """Bytes from the shard's start to the first window of the next batch."""
        return self._cursor

    @property
    def batches(self) -> int:
        """Batches read so far."""
        return self._batches

    def next_batch(self) -> Tensor:
        """Return the next batch, int64 (batch, context + 1), owned by the caller; the place moves on."""
        size = self._shard.numel()
        starts = (self._cursor + torch.arange(self._batch_size) * (size // self._batch_size)) % size
        places = (starts[:, None] + torch.arange(self._context + 1)) % size
        self._cursor = (self._cursor + self._context) % size
        self._batches += 1
        return self._shard[places].long()

    def state_dict(self) -> dict[str, int]:
        """Return the place: whose shard, which byte, how many batches."""
        return {"worker_index": self._worker_index, "cursor": self._cursor, "batches": self._batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the place of ``state``.

        Raises:
            BadConfiguration: it is the place in another worker's shard, or outside this one. Nothing changed.
        """
        if state["worker_index"] != self._worker_index:
            raise BadConfiguration(
                f"data position of worker {state['worker_index']} given to worker {self._worker_index}: "
                "each worker continues in its own shard"
            )
        if not 0 <= state["cursor"] < self._shard.numel() or state["batches"] < 0:
            raise BadConfiguration(f"data position {state} lies outside the shard of {self._shard.numel()} bytes")
        self._cursor, self._batches = state["cursor"], state["batches"]
