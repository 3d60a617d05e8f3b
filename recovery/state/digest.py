"""Digests of chunks and tensors, the fingerprint of the replicated parts, the id of the software that computed them.

Hashing releases the GIL, so a digest pass beside training costs memory bandwidth only. Loops over many small tensors
give the GIL away every few hundred steps: a training thread would otherwise wait a whole switch interval for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import blake3
import torch
import xxhash

from protos.recovery.v1 import manifest_pb2
from recovery.errors import MisuseError, StateMismatch, UnsupportedLeaf
from recovery.state.chunks import CHUNK_BYTES, PartBytes, chunk_ranges
from recovery.state.leaf import ITEM_BYTES, TensorKind
from recovery.state.manifest import DIGEST_BYTES as DIGEST_BYTES
from recovery.state.manifest import TensorSpec
from recovery.state.tree import MAPPING_KINDS, SEQUENCE_KINDS
from recovery.types import MIB, DigestAlgorithm, Fingerprint, NumericsId

BLOCK_BYTES = MIB
"""Fingerprints hash global tensors in blocks of this size."""
_GIL_SHARE = 256
"""Small tensors hashed between two offers of the GIL: about a tenth of a millisecond."""


def chunk_digest(algorithm: DigestAlgorithm, data: torch.Tensor) -> bytes:
    """Return the digest of a 1-d contiguous uint8 CPU tensor; other threads run meanwhile."""
    return _HASHES[algorithm](data.numpy())


def blake3_digest(data: bytes) -> bytes:
    """Return the BLAKE3 digest of ``data``, 32 bytes."""
    return blake3.blake3(data).digest()


def _xxh3(data: object) -> bytes:
    return xxhash.xxh3_128_digest(data)  # type: ignore[arg-type]


def _blake3(data: object) -> bytes:
    return blake3.blake3(data).digest()  # type: ignore[arg-type]


_HASHES: dict[DigestAlgorithm, Callable[[object], bytes]] = {
    DigestAlgorithm.XXH3_128: _xxh3,
    DigestAlgorithm.BLAKE3: _blake3,
}


class PartDigests(NamedTuple):
    """``chunks``: one a chunk. ``tensors``: one a tensor; empty where the tensor does not share a chunk."""

    chunks: list[bytes]
    tensors: list[bytes]


def digest_part(part_bytes: PartBytes, algorithm: DigestAlgorithm) -> PartDigests:
    """Return the digests of a part's chunks, and those of the tensors that share a chunk with others, in one pass."""
    digest = _HASHES[algorithm]
    chunks: list[bytes] = []
    tensors = [b""] * part_bytes.num_tensors
    for offset, num_bytes in chunk_ranges(part_bytes.tensor_num_bytes):
        data = part_bytes.read(offset, num_bytes)
        chunks.append(digest(data.numpy()))
        sharing = sharing_tensors(part_bytes, offset, num_bytes)
        if sharing:
            raw = data.numpy().data
            for count, (index, start, size) in enumerate(sharing):
                tensors[index] = digest(raw[start - offset : start - offset + size])
                if count % _GIL_SHARE == _GIL_SHARE - 1:
                    time.sleep(0)
    return PartDigests(chunks, tensors)


def part_digests(part_bytes: PartBytes, algorithm: DigestAlgorithm) -> list[bytes]:
    """Return the digest of every chunk of a part, in order."""
    digest = _HASHES[algorithm]
    return [
        digest(part_bytes.read(offset, num_bytes).numpy())
        for offset, num_bytes in chunk_ranges(part_bytes.tensor_num_bytes)
    ]


def sharing_tensors(part_bytes: PartBytes, offset: int, num_bytes: int) -> list[tuple[int, int, int]]:
    """Return (index, offset, bytes) of the tensors with bytes in a chunk if it has several, else nothing."""
    found = [(index, *part_bytes.tensor_range(index)) for index in part_bytes.tensors_in(offset, num_bytes)]
    found = [entry for entry in found if entry[2]]
    return found if len(found) > 1 else []


class FingerprintPart(Protocol):
    """What is needed of a part: a ``LivePart``, for example."""

    @property
    def name(self) -> str: ...
    @property
    def tree(self) -> manifest_pb2.Value: ...
    @property
    def specs(self) -> Sequence[TensorSpec]: ...
    @property
    def bytes(self) -> PartBytes: ...


def fingerprint(parts: Iterable[FingerprintPart], algorithm: DigestAlgorithm = DigestAlgorithm.XXH3_128) -> Fingerprint:
    """Return one digest over the values of ``parts``: BLAKE3 over names, structure, scalars, dtypes, global shapes and
    the digests of 1 MiB blocks of tensors.

    Equal for equal values whatever the order of parts and of dict entries, and whatever strides, devices, parameter or
    tensor, tied or not, sharded over one rank or not at all; any other bit, name, shape, dtype or scalar changes it.

    Raises:
        MisuseError: a tensor is a shard of a larger one: combine the ranks' ``partial_fingerprint``.
    """
    return combine_fingerprints([partial_fingerprint(parts, algorithm)])


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBlocks:
    """What one rank knows of a global tensor that is spread over several: whole blocks, and bytes of shared ones."""

    num_bytes: int
    """Of the global tensor."""
    blocks: dict[int, bytes]
    """Digest of each block that lies whole in this rank's shard, by index."""
    fragments: dict[int, bytes]
    """Bytes of blocks that other ranks hold too, by offset in the global tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialPart:
    """One part as one rank sees it; ``tensors`` has a finished digest for each tensor that the rank holds whole."""

    name: str
    tree: manifest_pb2.Value
    heads: tuple[bytes, ...]
    tensors: tuple[bytes | TensorBlocks, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialFingerprint:
    """One local rank's contribution to its worker's fingerprint."""

    algorithm: DigestAlgorithm
    parts: tuple[PartialPart, ...]


def partial_fingerprint(
    parts: Iterable[FingerprintPart], algorithm: DigestAlgorithm = DigestAlgorithm.XXH3_128
) -> PartialFingerprint:
    """Return what this local rank contributes.

    Rows of a tensor sharded by its first dimension cost two fragments of less than 1 MiB; shards of other dimensions
    contribute their bytes.

    Raises:
        UnsupportedLeaf: a DTensor with a pending reduction: its value is on no rank.
    """
    return PartialFingerprint(algorithm=algorithm, parts=tuple(_partial_part(part, algorithm) for part in parts))


def combine_fingerprints(ranks: Sequence[PartialFingerprint]) -> Fingerprint:
    """Return the fingerprint of the state of which ``ranks`` hold the shards, one entry a local rank, in any order.

    Raises:
        MisuseError: no rank, a part's name twice, ranks with other parts or algorithms, or shards missing.
        StateMismatch: two ranks that hold the same bytes or scalars disagree about them.
    """
    if not ranks:
        raise MisuseError("a fingerprint of no rank")
    first = ranks[0]
    names = [part.name for part in first.parts]
    if len(set(names)) != len(names):
        raise MisuseError(f"a fingerprint over parts of equal names: {names}")
    for rank in ranks[1:]:
        if rank.algorithm is not first.algorithm or {part.name for part in rank.parts} != set(names):
            raise MisuseError("a fingerprint over ranks with different parts or algorithms")
    by_name = [{part.name: part for part in rank.parts} for rank in ranks]
    total = blake3.blake3(b"recovery.fingerprint.1 " + first.algorithm.value.encode())
    for name in sorted(names):
        root = _root_digest([parts[name] for parts in by_name], first.algorithm)
        total.update(_framed(name.encode()) + root)
    return Fingerprint(total.digest())


def _root_digest(ranks: Sequence[PartialPart], algorithm: DigestAlgorithm) -> bytes:
    first = ranks[0]
    tensors = []
    for index, head in enumerate(first.heads):
        views = [rank.tensors[index] if index < len(rank.tensors) else b"" for rank in ranks]
        if any(index >= len(rank.heads) or rank.heads[index] != head for rank in ranks):
            raise StateMismatch(f"part {first.name!r}: local ranks hold different tensors at position {index}")
        tensors.append(blake3.blake3(head + _merged(first.name, index, views, algorithm)).digest())
    roots = {_Canonical(tensors).value(rank.tree) for rank in ranks}
    if len(roots) > 1 or len({len(rank.heads) for rank in ranks}) > 1:
        raise StateMismatch(f"part {first.name!r}: local ranks differ in structure or scalars")
    return roots.pop()


def _merged(name: str, index: int, views: Sequence[bytes | TensorBlocks], algorithm: DigestAlgorithm) -> bytes:
    """Return the digest over the blocks of one tensor, put together from what each rank holds of it."""
    digest = _HASHES[algorithm]
    where = f"part {name!r}, tensor {index}"
    whole = {view for view in views if isinstance(view, bytes)}
    spread = [view for view in views if isinstance(view, TensorBlocks)]
    if len(whole) > 1:
        raise StateMismatch(f"{where}: local ranks hold different bytes")
    if not spread:
        return whole.pop()
    blocks: dict[int, bytes] = {}
    fragments: dict[int, bytes] = {}
    for view in spread:
        for known, found in ((blocks, view.blocks), (fragments, view.fragments)):
            for position, content in found.items():
                if known.setdefault(position, content) != content:
                    raise StateMismatch(f"{where}: local ranks hold different bytes at {position}")
    pending: dict[int, list[bytes]] = {}
    expected: dict[int, int] = {}
    for offset in sorted(fragments):
        block = offset // BLOCK_BYTES
        if expected.setdefault(block, block * BLOCK_BYTES) == offset:
            pending.setdefault(block, []).append(fragments[offset])
            expected[block] += len(fragments[offset])
    num_bytes = spread[0].num_bytes
    for block, pieces in pending.items():
        if expected[block] == min((block + 1) * BLOCK_BYTES, num_bytes):
            blocks.setdefault(block, digest(b"".join(pieces)))
    num_blocks = -(-num_bytes // BLOCK_BYTES)
    missing = [block for block in range(num_blocks) if block not in blocks]
    if missing and whole and not blocks and not fragments:
        return whole.pop()  # one rank's shard is everything, the others' are empty
    if missing:
        raise MisuseError(
            f"{where}: {len(missing)} of {num_blocks} blocks are not complete: combine the partial fingerprints of all "
            f"local ranks"
        )
    merged = blake3.blake3(b"".join(blocks[block] for block in range(num_blocks))).digest()
    if whole and whole != {merged}:
        raise StateMismatch(f"{where}: local ranks hold different bytes")
    return merged


def _partial_part(part: FingerprintPart, algorithm: DigestAlgorithm) -> PartialPart:
    specs, part_bytes = part.specs, part.bytes
    tensors: list[bytes | TensorBlocks] = list(_whole_tensors(part_bytes, algorithm))
    for index, spec in enumerate(specs):
        if spec.shard is None:
            continue
        if any(placement.startswith("P") for placement in spec.shard.placements):
            raise UnsupportedLeaf(f"{part.name}/{spec.path}: a DTensor with a pending reduction has no value yet")
        if spec.shard.global_shape != spec.shape:
            tensors[index] = _blocks_of(spec, part_bytes, algorithm)
    heads = []
    for spec in specs:
        shape = spec.shape if spec.shard is None else spec.shard.global_shape
        kind = "array" if spec.kind is TensorKind.NDARRAY else "tensor"
        heads.append(_framed(f"{kind} {spec.dtype} {','.join(map(str, shape))}".encode()))
    return PartialPart(name=part.name, tree=part.tree, heads=tuple(heads), tensors=tuple(tensors))


def _whole_tensors(part_bytes: PartBytes, algorithm: DigestAlgorithm) -> list[bytes]:
    """Return for each tensor the digest over the digests of its blocks."""
    digest = _HASHES[algorithm]
    over = blake3.blake3
    blocks: list[bytes] = []
    found = [over(b"").digest()] * part_bytes.num_tensors
    for offset, num_bytes in chunk_ranges(part_bytes.tensor_num_bytes):
        raw = part_bytes.read(offset, num_bytes).numpy().data
        for count, index in enumerate(part_bytes.tensors_in(offset, num_bytes)):
            start, size = part_bytes.tensor_range(index)
            if not size:
                continue
            inside = raw if size >= CHUNK_BYTES else raw[start - offset : start - offset + size]
            if len(inside) <= BLOCK_BYTES:
                blocks.append(digest(inside))
            else:
                blocks += [digest(inside[at : at + BLOCK_BYTES]) for at in range(0, len(inside), BLOCK_BYTES)]
            if offset + num_bytes >= start + size:  # the tensor's last chunk
                found[index] = over(b"".join(blocks)).digest()
                blocks.clear()
            if count % _GIL_SHARE == _GIL_SHARE - 1:
                time.sleep(0)
    return found


def _blocks_of(spec: TensorSpec, part_bytes: PartBytes, algorithm: DigestAlgorithm) -> TensorBlocks:
    assert spec.shard is not None
    digest = _HASHES[algorithm]
    whole = spec.shard.global_shape
    item = ITEM_BYTES[spec.dtype]
    blocks: dict[int, bytes] = {}
    fragments: dict[int, bytes] = {}
    num_bytes = item * math.prod(whole)
    for global_start, local_start, size in _runs(spec.shape, spec.shard.global_offset, whole):
        position, end = global_start * item, (global_start + size) * item
        local = spec.offset + local_start * item - position
        while position < end:
            block = position // BLOCK_BYTES
            stop = min(end, (block + 1) * BLOCK_BYTES)
            data = part_bytes.read(local + position, stop - position)
            if position == block * BLOCK_BYTES and stop == min((block + 1) * BLOCK_BYTES, num_bytes):
                blocks[block] = digest(data.numpy())
            else:
                fragments[position] = data.numpy().tobytes()
            position = stop
    return TensorBlocks(num_bytes=num_bytes, blocks=blocks, fragments=fragments)


def _runs(shape: Sequence[int], offset: Sequence[int], whole: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (start in the global tensor, start in the local box, elements) of the runs that are contiguous in both."""
    if not math.prod(shape):
        return
    cut = len(shape)  # dimensions from here on are whole, so that one index of the dimension before is one run
    while cut and shape[cut - 1] == whole[cut - 1]:
        cut -= 1
    outer = max(0, cut - 1)
    run = math.prod(shape[outer:])
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    base = sum(start * stride for start, stride in zip(offset, strides, strict=True))
    for number in range(math.prod(shape[:outer])):
        rest, start = number, base
        for dim in reversed(range(outer)):
            rest, position = divmod(rest, shape[dim])
            start += position * strides[dim]
        yield start, number * run, run


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


class _Canonical:
    """Digests a tree so that equal values give equal digests: dicts and sets sorted, sharing and ties written out."""

    def __init__(self, tensors: Sequence[bytes]) -> None:
        self._tensors = tensors
        self._containers: list[bytes] = []

    def value(self, tree: manifest_pb2.Value) -> bytes:
        kind = tree.WhichOneof("kind")
        if kind == "tensor":
            return b"t" + self._tensors[tree.tensor]
        if kind == "shared":
            return self._containers[tree.shared]
        if kind in MAPPING_KINDS or kind in SEQUENCE_KINDS:
            number = len(self._containers)
            self._containers.append(b"")
            if kind in MAPPING_KINDS:
                pairs = [
                    _framed(entry.key.SerializeToString(deterministic=True)) + self.value(entry.value)
                    for entry in getattr(tree, kind).entries
                ]
                pairs.sort()
            elif kind == "set":  # sorted by its encoding already
                pairs = [_framed(item.SerializeToString(deterministic=True)) for item in tree.set.items]
            else:
                pairs = [self.value(item) for item in getattr(tree, kind).items]
            digest = blake3.blake3(_framed(kind.encode()) + b"".join(map(_framed, pairs))).digest()
            self._containers[number] = b"c" + digest
            return self._containers[number]
        return b"s" + _framed(tree.SerializeToString(deterministic=True))


def numerics_id(device_kind: str = "cpu") -> NumericsId:
    """Return what two workers must have in common to compute bit-equal steps, for example ``torch-2.13.0/cpu/AVX2``.

    The CPU capability belongs to it: one instruction set apart, sums of floats differ in their last bits.
    """
    release = torch.__version__.split("+")[0]
    device = device_kind
    if device_kind == "cuda":
        major, minor = torch.cuda.get_device_capability()
        device = f"cuda-{torch.version.cuda}-sm{major}{minor}"
    return NumericsId(f"torch-{release}/{device}/{torch.backends.cpu.get_cpu_capability()}")
