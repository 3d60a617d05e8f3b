"""The fingerprint of the replicated parts, and the id of the software that computed them; digests of their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import blake3
import torch

from protos.recovery.v1 import manifest_pb2
from recovery.errors import MisuseError, StateMismatch, UnsupportedLeaf
from recovery.state.chunks import PartBytes
from recovery.state.hashing import BLOCK_BYTES as BLOCK_BYTES
from recovery.state.hashing import HASHES, block_digests
from recovery.state.hashing import PartDigests as PartDigests
from recovery.state.hashing import chunk_digest as chunk_digest
from recovery.state.hashing import digest_part as digest_part
from recovery.state.hashing import digest_part_and_blocks as digest_part_and_blocks
from recovery.state.hashing import part_digests as part_digests
from recovery.state.leaf import ITEM_BYTES, TensorKind
from recovery.state.manifest import DIGEST_BYTES as DIGEST_BYTES
from recovery.state.manifest import TensorSpec
from recovery.state.tree import MAPPING_KINDS, SEQUENCE_KINDS
from recovery.types import DigestAlgorithm, Fingerprint, NumericsId


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


def fingerprint(
    parts: Iterable[FingerprintPart],
    algorithm: DigestAlgorithm = DigestAlgorithm.XXH3_128,
    known: Mapping[str, Sequence[bytes]] | None = None,
) -> Fingerprint:
    """Return one digest over the values of ``parts``: BLAKE3 over names, structure, scalars, dtypes, global shapes and
    the digests of 1 MiB blocks of tensors.

    Equal for equal values whatever the order of parts and of dict entries, and whatever strides, devices, parameter or
    tensor, tied or not, sharded over one rank or not at all; any other bit, name, shape, dtype or scalar changes it.

    Args:
        parts: In any order.
        algorithm: Digest of the blocks.
        known: By part name, what ``digest_part_and_blocks`` found with ``algorithm`` in the same memory; that memory is
            not read again.

    Raises:
        MisuseError: a tensor is a shard of a larger one: combine the ranks' ``partial_fingerprint``.
    """
    return combine_fingerprints([partial_fingerprint(parts, algorithm, known)])


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
    parts: Iterable[FingerprintPart],
    algorithm: DigestAlgorithm = DigestAlgorithm.XXH3_128,
    known: Mapping[str, Sequence[bytes]] | None = None,
) -> PartialFingerprint:
    """Return what this local rank contributes.

    Rows of a tensor sharded by its first dimension cost two fragments of less than 1 MiB; shards of other dimensions
    contribute their bytes.

    Raises:
        UnsupportedLeaf: a DTensor with a pending reduction: its value is on no rank.
    """
    found = [_partial_part(part, algorithm, (known or {}).get(part.name)) for part in parts]
    return PartialFingerprint(algorithm=algorithm, parts=tuple(found))


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
    digest = HASHES[algorithm]
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


def _partial_part(part: FingerprintPart, algorithm: DigestAlgorithm, known: Sequence[bytes] | None) -> PartialPart:
    specs, part_bytes = part.specs, part.bytes
    if known is not None and len(known) != len(specs):
        raise MisuseError(f"part {part.name!r}: {len(known)} known digests for {len(specs)} tensors")
    tensors: list[bytes | TensorBlocks] = list(block_digests(part_bytes, algorithm) if known is None else known)
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


def _blocks_of(spec: TensorSpec, part_bytes: PartBytes, algorithm: DigestAlgorithm) -> TensorBlocks:
    assert spec.shard is not None
    digest = HASHES[algorithm]
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
