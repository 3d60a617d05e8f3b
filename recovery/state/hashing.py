"""Digests of a part's bytes: of chunks, of tensors that share a chunk, of the blocks that fingerprints are made of.

Hashing releases the GIL, so a digest pass beside training costs memory bandwidth only. Loops over many small tensors
give the GIL away every few hundred steps: a training thread would otherwise wait a whole switch interval for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import blake3
import torch
import xxhash

from recovery.state.chunks import CHUNK_BYTES, GIL_SHARE, PartBytes, chunk_ranges
from recovery.types import MIB, DigestAlgorithm

BLOCK_BYTES = MIB
"""Fingerprints hash global tensors in blocks of this size."""


def _xxh3(data: Any) -> bytes:
    return xxhash.xxh3_128_digest(data)


def _blake3(data: Any) -> bytes:
    return blake3.blake3(data).digest()


HASHES: dict[DigestAlgorithm, Callable[[Any], bytes]] = {
    DigestAlgorithm.XXH3_128: _xxh3,
    DigestAlgorithm.BLAKE3: _blake3,
}
"""Digest of anything with a buffer."""


def chunk_digest(algorithm: DigestAlgorithm, data: torch.Tensor) -> bytes:
    """Return the digest of a 1-d contiguous uint8 CPU tensor; other threads run meanwhile."""
    return HASHES[algorithm](data.numpy())


class PartDigests(NamedTuple):
    """``chunks``: one a chunk. ``tensors``: one a tensor; empty where the tensor does not share a chunk."""

    chunks: list[bytes]
    tensors: list[bytes]


def digest_part(part_bytes: PartBytes, algorithm: DigestAlgorithm) -> PartDigests:
    """Return the digests of a part's chunks, and those of the tensors that share a chunk with others, in one pass."""
    run = _Pass(part_bytes)
    run.over(algorithm, None)
    return PartDigests(run.chunks, run.tensors)


def digest_part_and_blocks(
    part_bytes: PartBytes, algorithm: DigestAlgorithm, block_algorithm: DigestAlgorithm = DigestAlgorithm.XXH3_128
) -> tuple[PartDigests, list[bytes]]:
    """Return what ``digest_part`` and ``block_digests`` return, reading memory once instead of twice."""
    run = _Pass(part_bytes)
    run.over(algorithm, block_algorithm)
    return PartDigests(run.chunks, run.tensors), run.wholes


def part_digests(part_bytes: PartBytes, algorithm: DigestAlgorithm) -> list[bytes]:
    """Return the digest of every chunk of a part, in order."""
    digest = HASHES[algorithm]
    return [
        digest(part_bytes.read(offset, num_bytes).numpy())
        for offset, num_bytes in chunk_ranges(part_bytes.tensor_num_bytes)
    ]


def block_digests(part_bytes: PartBytes, block_algorithm: DigestAlgorithm) -> list[bytes]:
    """Return for each tensor BLAKE3 over the digests of its blocks: what its fingerprint counts of its bytes."""
    run = _Pass(part_bytes)
    run.over(None, block_algorithm)
    return run.wholes


class _Pass:
    """One pass over a part's bytes, a chunk at a time, so that what is hashed twice is in the cache the second time."""

    def __init__(self, part_bytes: PartBytes) -> None:
        self.chunks: list[bytes] = []
        self.tensors = [b""] * part_bytes.num_tensors
        self.wholes = [blake3.blake3(b"").digest()] * part_bytes.num_tensors
        self._part_bytes = part_bytes
        self._blocks: list[bytes] = []

    def over(self, algorithm: DigestAlgorithm | None, block_algorithm: DigestAlgorithm | None) -> None:
        """Fill ``chunks`` and ``tensors`` by ``algorithm`` and ``wholes`` by ``block_algorithm``; None: leave them."""
        sizes = self._part_bytes.tensor_num_bytes
        for offset, num_bytes in chunk_ranges(sizes):
            raw = self._part_bytes.read(offset, num_bytes).numpy().data
            if algorithm is not None:
                self.chunks.append(HASHES[algorithm](raw))
            inside = self._part_bytes.tensors_in(offset, num_bytes)
            if sizes[inside[-1]] < CHUNK_BYTES:
                self._small(raw, sizes, inside, algorithm, block_algorithm)
            elif block_algorithm is not None:
                index = inside[-1]  # those before it are empty
                self._large(raw, index, block_algorithm)
                if offset + num_bytes == sum(self._part_bytes.tensor_range(index)):
                    self.wholes[index] = blake3.blake3(b"".join(self._blocks)).digest()
                    self._blocks.clear()

    def _large(self, raw: memoryview, index: int, algorithm: DigestAlgorithm) -> None:
        digest = HASHES[algorithm]
        self._blocks += [digest(raw[at : at + BLOCK_BYTES]) for at in range(0, len(raw), BLOCK_BYTES)]

    def _small(
        self,
        raw: memoryview,
        sizes: list[int],
        inside: range,
        algorithm: DigestAlgorithm | None,
        block_algorithm: DigestAlgorithm | None,
    ) -> None:
        """Hash each of the whole tensors that fill a chunk."""
        digest = None if algorithm is None else HASHES[algorithm]
        block_digest = None if block_algorithm is None else HASHES[block_algorithm]
        alone = sum(1 for index in inside if sizes[index]) == 1
        over = blake3.blake3
        start = 0
        for count, index in enumerate(inside):
            size = sizes[index]
            if not size:
                continue
            piece = raw[start : start + size]
            start += size
            own = b""
            if digest is not None and not alone:
                own = self.tensors[index] = digest(piece)
            if block_digest is not None:
                if size > BLOCK_BYTES:
                    blocks = b"".join(block_digest(piece[at : at + BLOCK_BYTES]) for at in range(0, size, BLOCK_BYTES))
                else:
                    blocks = own if own and algorithm is block_algorithm else block_digest(piece)
                self.wholes[index] = over(blocks).digest()
            if count % GIL_SHARE == GIL_SHARE - 1:
                time.sleep(0)
