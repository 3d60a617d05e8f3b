"""What a source of state reports when it has restored."""

from __future__ import annotations

from dataclasses import dataclass

from recovery.types import Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A verified state in memory, and what it cost."""

    version: Version
    source: str
    """"peers" or "disk"."""
    num_tensors: int
    num_bytes: int
    payload_bytes: int
    """Bytes that were read or received."""
    reused_bytes: int = 0
    """Bytes that were already there and verified."""
    own_position: bool = False
    """This worker's own private-kept parts came along."""
