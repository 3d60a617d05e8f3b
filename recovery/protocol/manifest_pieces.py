"""A manifest on the direct stream: cut into letters at the donor, put together and checked at the joiner."""

from __future__ import annotations

from collections.abc import Iterator

from protos.recovery.v1.peer_pb2 import DonorLetter, ManifestPiece
from recovery.errors import ManifestRejected
from recovery.protocol.ports import Role
from recovery.state.manifest import Manifest, decode, manifest_digest
from recovery.types import MIB

PIECE_BYTES = MIB
MAX_MANIFEST_BYTES = 256 * MIB
"""A manifest of ten million tensors or chunks; larger ones are refused before memory is taken."""


def cut_manifest(role: Role, encoded: bytes) -> Iterator[DonorLetter]:
    """Yield the letters that carry ``encoded``; the last one carries its digest."""
    for offset in range(0, len(encoded), PIECE_BYTES):
        last = offset + PIECE_BYTES >= len(encoded)
        yield DonorLetter(
            manifest=ManifestPiece(
                role=role,
                offset=offset,
                data=encoded[offset : offset + PIECE_BYTES],
                last=last,
                digest=manifest_digest(encoded) if last else b"",
            )
        )


class ManifestAssembler:
    """Puts one manifest together.

    Args:
        role: Which manifest; pieces of another are refused.
        num_bytes: Length that the donor promised; None: unknown, up to the cap.
        digest: What the donor promised; None: the last piece's digest is taken (the stream is authenticated).
    """

    def __init__(self, role: Role, *, num_bytes: int | None = None, digest: bytes | None = None) -> None:
        if num_bytes is not None and not 0 < num_bytes <= MAX_MANIFEST_BYTES:
            raise ManifestRejected(
                f"a manifest of {num_bytes} bytes was announced; at most {MAX_MANIFEST_BYTES} are read"
            )
        self._role = role
        self._num_bytes = num_bytes
        self._digest = digest
        self._data = bytearray()
        self._finished = False

    def add(self, piece: ManifestPiece) -> tuple[bytes, Manifest] | None:
        """Take the next piece; return the manifest and its encoding when it is complete, else None.

        Raises:
            ManifestRejected: out of order, over the promised length or the cap, not of the promised digest, malformed.
        """
        if self._finished or piece.role != self._role or piece.offset != len(self._data) or not piece.data:
            raise ManifestRejected(f"a manifest piece at {piece.offset} came where {len(self._data)} was due")
        limit = MAX_MANIFEST_BYTES if self._num_bytes is None else self._num_bytes
        if len(piece.data) > PIECE_BYTES or len(self._data) + len(piece.data) > limit:
            raise ManifestRejected(f"a manifest grew over the {limit} bytes that were agreed")
        self._data += piece.data
        if not piece.last:
            return None
        self._finished = True
        encoded = bytes(self._data)
        if self._num_bytes is not None and len(encoded) != self._num_bytes:
            raise ManifestRejected(f"a manifest of {self._num_bytes} bytes was announced, {len(encoded)} came")
        promised = self._digest if self._digest is not None else piece.digest
        if manifest_digest(encoded) != promised:
            raise ManifestRejected("the manifest does not have the digest that the donor promised")
        return encoded, decode(encoded)
