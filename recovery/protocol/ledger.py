"""What a joiner has verified already, kept by its owner across attempts and donors."""

from __future__ import annotations

import threading
from typing import NamedTuple

from recovery.types import PartName


class ChunkName(NamedTuple):
    """A chunk by its content and place: the same in every version in which it did not change."""

    part: PartName
    offset: int
    num_bytes: int
    digest: bytes


class ChunkLedger:
    """Chunks that were verified into the destination memory. Thread-safe.

    An entry is a hint: before a later attempt relies on it, the memory is hashed again, because other code may have
    written there meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[tuple[PartName, int], ChunkName] = {}

    def add(self, name: ChunkName) -> None:
        """The memory at this place now holds this chunk; what it held before is forgotten."""
        with self._lock:
            self._chunks[name.part, name.offset] = name

    def discard(self, name: ChunkName) -> None:
        """The memory at this place does not hold this chunk (any more)."""
        with self._lock:
            if self._chunks.get((name.part, name.offset)) == name:
                del self._chunks[name.part, name.offset]

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return isinstance(name, ChunkName) and self._chunks.get((name.part, name.offset)) == name

    def __len__(self) -> int:
        with self._lock:
            return len(self._chunks)

    @property
    def num_bytes(self) -> int:
        """Sum of the chunks' bytes."""
        with self._lock:
            return sum(name.num_bytes for name in self._chunks.values())
