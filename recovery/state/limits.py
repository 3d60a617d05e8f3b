"""Caps on everything that a manifest or a state tree may claim, checked before anything is allocated for the claim."""

from __future__ import annotations

from dataclasses import dataclass, fields

from recovery.errors import BadConfiguration
from recovery.types import MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What is still believed. One object serves both directions: what may be sent and what may be received."""

    manifest_bytes: int = 64 * MIB
    """Encoded manifest. Parsing may take about twenty times as much memory."""
    parts: int = 4096
    tensors: int = 1_000_000
    """Tensors of all parts together."""
    chunks: int = 8_000_000
    """Chunks of all parts together."""
    total_bytes: int = 1 << 45
    """Tensor bytes of all parts together; also what one tensor's shape may span."""
    dims: int = 64
    """Dimensions of one tensor."""
    depth: int = 30
    """Containers inside containers. Protobuf parsers stop at 100 nested messages and a dict costs three."""
    nodes: int = 4_000_000
    """Values of all trees together, containers and scalars."""
    text_bytes: int = 16 * MIB
    """One str, bytes or int."""
    path_chars: int = 4096
    """One leaf's path; a key may not be longer either."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise BadConfiguration(f"Limits.{field.name} is {getattr(self, field.name)}: it must be at least 1")
        if self.depth > 30:
            raise BadConfiguration(f"Limits.depth is {self.depth}: protobuf cannot nest deeper than 30 containers")


DEFAULT_LIMITS = Limits()
