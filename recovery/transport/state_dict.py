"""Exact sending and receiving of tensor state dicts over any torch process group: typed, verified, without pickle.

The live path moves its pieces through ``post_send`` and ``post_receive`` too, so that the two cannot drift.

On the wire, all as 1-d uint8 messages under one tag::

    sender                         receiver
    header, 64 bytes     ->        checked before anything is allocated for what it announces
                         <-        answer, 512 bytes: go on, or why not
    manifest             ->        decoded, checked, compared with ``into``
                         <-        answer
    chunks, in order     ->        each checked against its digest on arrival

Both sides only post messages of sizes that both agreed on, because gloo ends a process that is sent more than it
posted; after a refusal nothing is under way, so that the group can be used on.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from recovery.errors import (
    ChunkDamaged,
    DonorLost,
    LayoutMismatch,
    ManifestRejected,
    MisuseError,
    PeerUnreachable,
    RecoveryError,
    Stop,
)
from recovery.state.chunks import PartBytes, chunk_ranges
from recovery.state.compare import Difference, describe_differences
from recovery.state.digest import chunk_digest, digest_part, numerics_id
from recovery.state.leaf import Leaf, TensorKind
from recovery.state.limits import DEFAULT_LIMITS, Limits
from recovery.state.manifest import (
    ChunkSpec,
    Manifest,
    PartSpec,
    TensorSpec,
    decode,
    empty_leaf,
    encode,
    manifest_digest,
    specs_of,
)
from recovery.state.tree import join, split
from recovery.types import (
    Cut,
    DigestAlgorithm,
    Fingerprint,
    Incarnation,
    PartClass,
    PartName,
    RunId,
    Version,
    WorkerId,
    WorkerRef,
)

_HEADER = struct.Struct("<8sIIQ32s8x")
_MAGIC = b"RCVSTATE"
_FORMAT = 1
_ANSWER_BYTES = 512
_GO_ON = b"\x01"
_WINDOW = 4
"""Chunks under way at once: enough to keep the link busy while the receiver hashes."""
_PART = PartName("state_dict")


def post_send(pg: dist.ProcessGroup, data: torch.Tensor, dst: int, tag: int) -> dist.Work:
    """Start sending a 1-d contiguous uint8 tensor to group rank ``dst``.

    The memory belongs to the group until the work's ``wait`` returned or the group's sockets are shut. ``wait`` exactly
    once: a second one blocks until the group's timeout.
    """
    _check_message(data)
    return pg.send([data], dst, tag)


def post_receive(pg: dist.ProcessGroup, into: torch.Tensor, src: int, tag: int) -> dist.Work:
    """Start receiving exactly ``into.numel()`` bytes from group rank ``src``; ownership and waiting as ``post_send``.

    A longer message ends this process inside gloo: the length must have been agreed on.
    """
    _check_message(into)
    return pg.recv([into], src, tag)


def wait_for(work: dist.Work, timeout_seconds: float | None) -> None:
    """Return when the message has left or arrived; call once a work.

    Raises:
        DonorLost: it did not within ``timeout_seconds`` (None: the group's own), or the connection broke. The group's
            connection to that rank cannot be used again.
    """
    try:
        done = work.wait() if timeout_seconds is None else work.wait(timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        raise DonorLost(f"a message did not get through: {error}") from error
    if not done:
        raise DonorLost(f"a message did not get through within {timeout_seconds} s")


def send_state_dict(
    pg: dist.ProcessGroup,
    state_dict: object,
    dst: int,
    *,
    tag: int = 0,
    timeout: float | None = None,
    algorithm: DigestAlgorithm = DigestAlgorithm.XXH3_128,
    limits: Limits = DEFAULT_LIMITS,
) -> None:
    """Send a tree of tensors and plain values to group rank ``dst``, which runs ``recv_state_dict``.

    Only logical bytes travel; tied tensors once. Dense CPU tensors are sent from their own memory: nothing may write to
    them until this returns.

    Args:
        pg: Any process group that has both ranks.
        state_dict: What ``recovery.state.split`` can take apart.
        dst: Rank in ``pg``.
        tag: Same on both sides. One transfer at a time may use a tag between two ranks.
        timeout: Seconds without progress after which to give up; None: the group's own timeout.
        algorithm: Digest of chunks.
        limits: What the receiver accepts.

    Raises:
        UnsupportedLeaf: a value has no exact form. Nothing was sent.
        LayoutMismatch: the receiver's ``into`` does not fit. No payload moved; the group may be used on.
        ManifestRejected: the receiver does not accept the manifest. As above.
        DonorLost: no progress, or the connection broke. The connection to ``dst`` is of no further use.
    """
    wire = _Wire(pg, dst, tag, timeout)
    tree, leaves = split(state_dict, limits)
    part_bytes = PartBytes([leaf.value for leaf in leaves])
    data = encode(_manifest_of(tree, leaves, part_bytes, algorithm), limits)
    header = _HEADER.pack(_MAGIC, _FORMAT, _ANSWER_BYTES, len(data), manifest_digest(data))
    for message in (header, data):
        wire.send(_payload(message))
        answer = torch.empty(_ANSWER_BYTES, dtype=torch.uint8)
        wire.receive(answer)
        _raise_refusal(answer.numpy().tobytes())
    wire.send_all(part_bytes.read(*place) for place in chunk_ranges(part_bytes.tensor_num_bytes))


def recv_state_dict(
    pg: dist.ProcessGroup,
    src: int,
    *,
    into: object = None,
    tag: int = 0,
    limits: Limits = DEFAULT_LIMITS,
    timeout: float | None = None,
) -> object:
    """Return the tree that group rank ``src`` sends, bit-equal, every chunk verified.

    Args:
        pg: Any process group that has both ranks.
        src: Rank in ``pg``.
        into: A tree whose tensors are written in place, keeping their memory and identity. It must have the same
            tensors at the same paths, with the same shapes, dtypes and ties; other values come from the sender. None:
            tensors are created (on the sender's kind of device). Needed for DTensors.
        tag: Same on both sides.
        limits: What is accepted; checked before anything is allocated.
        timeout: Seconds without progress after which to give up; None: the group's own timeout.

    Raises:
        ManifestRejected: what arrived is not an acceptable manifest. Nothing was allocated for it; ``into`` is
            untouched and the group may be used on, unless the sender does not speak this protocol at all.
        LayoutMismatch: ``into`` does not fit; names every leaf. Nothing moved, ``into`` is untouched.
        UnsupportedLeaf: ``into`` holds something that has no exact form. As above.
        ChunkDamaged: bytes differ from their digest; names the tensors. ``into`` has been written; the group may be
            used on, because all chunks were received.
        DonorLost: no progress, or the connection broke. ``into`` may have been written in part.
    """
    wire = _Wire(pg, src, tag, timeout)
    manifest = _receive_manifest(wire, limits)
    part = manifest.parts[0]
    try:
        leaves = _own_leaves(part) if into is None else _matching_leaves(part, into, limits)
    except Stop as error:
        wire.send(_refusal(error))
        raise
    part_bytes = PartBytes([leaf.value if isinstance(leaf, Leaf) else leaf for leaf in leaves], part.tensors)
    wire.send(_go_on())
    _receive_chunks(wire, part, part_bytes, manifest.digest_algorithm)
    return join(part.tree, leaves, limits)


def _manifest_of(tree: object, leaves: list[Leaf], part_bytes: PartBytes, algorithm: DigestAlgorithm) -> Manifest:
    digests = digest_part(part_bytes, algorithm)
    ranges = chunk_ranges(part_bytes.tensor_num_bytes)
    part = PartSpec(
        name=_PART,
        part_class=PartClass.PRIVATE_COPIED,
        tree=tree,  # type: ignore[arg-type]
        tensors=tuple(
            replace(spec, digest=digest) if digest else spec
            for spec, digest in zip(specs_of(leaves), digests.tensors, strict=True)
        ),
        chunks=tuple(
            ChunkSpec(offset=offset, num_bytes=num_bytes, digest=digest)
            for (offset, num_bytes), digest in zip(ranges, digests.chunks, strict=True)
        ),
        num_bytes=part_bytes.num_bytes,
    )
    return Manifest(
        run_id=RunId("state-dict"),
        worker=WorkerRef(WorkerId("sender"), Incarnation("0")),
        cut=Cut(Version(0, 0)),
        numerics_id=numerics_id(),
        layout_digest=b"",
        fingerprint=Fingerprint(b""),
        digest_algorithm=algorithm,
        parts=(part,),
    )


@dataclass(frozen=True, slots=True)
class _Wire:
    """One peer of a group under one tag; messages in order."""

    pg: dist.ProcessGroup
    peer: int
    tag: int
    timeout: float | None

    def __post_init__(self) -> None:
        kinds = [device.type for device in getattr(self.pg, "_device_types", ())]
        if kinds and "cpu" not in kinds:
            raise MisuseError(
                f"this group moves {', '.join(kinds)} tensors only: pass one with a CPU backend, for example "
                f"new_group(backend='gloo')"
            )
        if not 0 <= self.peer < self.pg.size() or self.peer == self.pg.rank():
            raise MisuseError(f"rank {self.peer} is no other rank of this group: it has {self.pg.size()}")

    def send(self, data: torch.Tensor) -> None:
        self.send_all([data])

    def send_all(self, messages: Iterable[torch.Tensor]) -> None:
        under_way: deque[tuple[dist.Work, torch.Tensor]] = deque()
        for message in messages:
            if len(under_way) == _WINDOW:
                self._finish(under_way)
            under_way.append((post_send(self.pg, message, self.peer, self.tag), message))
        while under_way:
            self._finish(under_way)

    def receive(self, into: torch.Tensor) -> None:
        wait_for(post_receive(self.pg, into, self.peer, self.tag), self.timeout)

    def _finish(self, under_way: deque[tuple[dist.Work, torch.Tensor]]) -> None:
        work, message = under_way.popleft()  # the tensor stays referenced until its work has ended
        wait_for(work, self.timeout)
        del message


def _receive_manifest(wire: _Wire, limits: Limits) -> Manifest:
    header = torch.empty(_HEADER.size, dtype=torch.uint8)
    wire.receive(header)
    magic, version, answer_bytes, num_bytes, digest = _HEADER.unpack(header.numpy().tobytes())
    if (magic, version, answer_bytes) != (_MAGIC, _FORMAT, _ANSWER_BYTES):
        raise ManifestRejected(f"rank {wire.peer} sent something else than a state dict of format {_FORMAT}")
    try:
        if num_bytes > limits.manifest_bytes:
            raise ManifestRejected(
                f"rank {wire.peer} announces a manifest of {num_bytes} bytes, at most {limits.manifest_bytes} are "
                f"accepted"
            )
        wire.send(_go_on())
        data = torch.empty(num_bytes, dtype=torch.uint8)
        wire.receive(data)
        raw = data.numpy().tobytes()
        if manifest_digest(raw) != digest:
            raise ManifestRejected(f"the manifest from rank {wire.peer} was damaged on its way")
        manifest = decode(raw, limits)
        if [part.name for part in manifest.parts] != [_PART]:
            raise ManifestRejected(f"rank {wire.peer} sent the manifest of something else than one state dict")
    except ManifestRejected as error:
        wire.send(_refusal(error))
        raise
    return manifest


def _own_leaves(part: PartSpec) -> list[torch.Tensor | np.ndarray]:
    sharded = [spec.path for spec in part.tensors if spec.shard is not None]
    if sharded:
        raise LayoutMismatch(
            f"{len(sharded)} tensors are shards of DTensors, {sharded[0]!r} the first: pass into= with DTensors"
        )
    return [empty_leaf(spec) for spec in part.tensors]


def _matching_leaves(part: PartSpec, into: object, limits: Limits) -> list[Leaf]:
    """Return the leaves of ``into`` in the sender's order.

    Raises:
        LayoutMismatch: they are not the sender's; names every leaf.
    """
    leaves = split(into, limits).leaves
    found = dict(zip((leaf.path for leaf in leaves), zip(leaves, specs_of(leaves), strict=True), strict=True))
    differences = []
    matched = []
    for spec in part.tensors:
        leaf, own = found.pop(spec.path, (None, None))
        if leaf is None or own is None:
            differences.append(
                Difference(spec.path, f"sent as {_spec_text(spec)}, not there (or tied to another) here")
            )
        elif _form(own) != _form(spec):
            differences.append(Difference(spec.path, f"sent as {_spec_text(spec)}, here it is {_spec_text(own)}"))
        else:
            matched.append(leaf)
    differences += [
        Difference(path, f"{_spec_text(own)} here, not sent (or sent tied to another)")
        for path, (_, own) in found.items()
    ]
    if differences:
        raise LayoutMismatch(
            f"{len(differences)} tensors differ between the state dict that is sent and the one to receive into:\n"
            f"{describe_differences(differences)}"
        )
    return matched


def _form(spec: TensorSpec) -> object:
    # Parameter or tensor, and memory order, are the receiver's own affair.
    return spec.dtype, spec.shape, spec.shard, spec.kind is TensorKind.NDARRAY


def _spec_text(spec: TensorSpec) -> str:
    array = " array" if spec.kind is TensorKind.NDARRAY else ""
    shard = f", shard {spec.shard.placements} of {list(spec.shard.global_shape)}" if spec.shard else ""
    return f"{spec.dtype}{array} {list(spec.shape)}{shard}"


def _receive_chunks(wire: _Wire, part: PartSpec, part_bytes: PartBytes, algorithm: DigestAlgorithm) -> None:
    """Return when every chunk lies in its tensors and has its digest.

    All chunks are received even after a damaged one, so that the next message on this tag is the next transfer's.
    """
    damaged: list[ChunkSpec] = []
    under_way: deque[tuple[dist.Work, ChunkSpec, torch.Tensor, bool]] = deque()

    def finish() -> None:
        work, chunk, buffer, in_place = under_way.popleft()
        wait_for(work, wire.timeout)
        if chunk_digest(algorithm, buffer) != chunk.digest:
            damaged.append(chunk)
        elif not in_place:
            part_bytes.write(chunk.offset, buffer)

    for chunk in part.chunks:
        if len(under_way) == _WINDOW:
            finish()
        place = part_bytes.view(chunk.offset, chunk.num_bytes)
        buffer = torch.empty(chunk.num_bytes, dtype=torch.uint8) if place is None else place
        under_way.append((post_receive(wire.pg, buffer, wire.peer, wire.tag), chunk, buffer, place is not None))
    while under_way:
        finish()
    if damaged:
        raise ChunkDamaged(
            f"{len(damaged)} of {len(part.chunks)} chunks from rank {wire.peer} differ from their digests; they hold "
            f"bytes of {', '.join(_tensors_of(part, damaged))}"
        )


def _tensors_of(part: PartSpec, chunks: list[ChunkSpec]) -> list[str]:
    def touches(spec: TensorSpec, chunk: ChunkSpec) -> bool:
        return max(spec.offset, chunk.offset) < min(spec.offset + spec.num_bytes, chunk.offset + chunk.num_bytes)

    return [spec.path for spec in part.tensors if any(touches(spec, chunk) for chunk in chunks)][:20]


def _go_on() -> torch.Tensor:
    return _payload(_GO_ON.ljust(_ANSWER_BYTES, b"\0"))


def _refusal(error: RecoveryError) -> torch.Tensor:
    text = f"\0{error.kind}\0{error}".encode()[: _ANSWER_BYTES - 1]
    return _payload(text.ljust(_ANSWER_BYTES, b"\0"))


def _raise_refusal(answer: bytes) -> None:
    if answer[:1] == _GO_ON:
        return
    kind, separator, text = answer[1:].rstrip(b"\0").partition(b"\0")
    if answer[:1] != b"\0" or not separator:
        raise PeerUnreachable("the receiver answered something that is not of this protocol")
    message = f"the receiver refused the state dict: {text.decode(errors='replace')}"
    if kind == ManifestRejected.__name__.encode():
        raise ManifestRejected(message)
    raise LayoutMismatch(message)


def _payload(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _check_message(data: torch.Tensor) -> None:
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise MisuseError(f"a message is a 1-d contiguous uint8 tensor, not {data.dtype} {tuple(data.shape)}")
