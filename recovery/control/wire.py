"""The project's nouns as they travel: each has one protobuf form, converted here and nowhere else.

``to_proto`` and ``from_proto`` are inverse to each other. What arrives is checked: an id that could not stand in a path
or a number that the field's comment excludes is refused by name.
"""

from __future__ import annotations

from typing import overload

from google.protobuf import duration_pb2, timestamp_pb2

from protos.recovery.v1 import common_pb2
from recovery import errors
from recovery.errors import BadConfiguration, RecoveryError
from recovery.types import (
    Address,
    Cut,
    DigestAlgorithm,
    Incarnation,
    PartClass,
    Version,
    WorkerId,
    WorkerRef,
    checked_id,
)

PROTOCOL = 1
"""The protocol that this package speaks; a hello or an Open with another number is refused."""

MAX_FAILURE_MESSAGE_BYTES = 4096
"""A failure may travel in HTTP/2 trailers, of which gRPC accepts 8 KiB; longer messages are cut."""

_PART_CLASSES = {
    PartClass.REPLICATED: common_pb2.PART_CLASS_REPLICATED,
    PartClass.PRIVATE_COPIED: common_pb2.PART_CLASS_PRIVATE_COPIED,
    PartClass.PRIVATE_KEPT: common_pb2.PART_CLASS_PRIVATE_KEPT,
}
_PART_CLASSES_BACK: dict[int, PartClass] = {number: part_class for part_class, number in _PART_CLASSES.items()}

_DIGESTS = {
    DigestAlgorithm.XXH3_128: common_pb2.DIGEST_ALGORITHM_XXH3_128,
    DigestAlgorithm.BLAKE3: common_pb2.DIGEST_ALGORITHM_BLAKE3,
}
_DIGESTS_BACK: dict[int, DigestAlgorithm] = {number: algorithm for algorithm, number in _DIGESTS.items()}

_NEXT_ACTIONS: dict[type[RecoveryError], common_pb2.NextAction.ValueType] = {
    errors.RetrySameDonor: common_pb2.NEXT_ACTION_SAME_DONOR,
    errors.TryOtherDonor: common_pb2.NEXT_ACTION_OTHER_DONOR,
    errors.TryNextSource: common_pb2.NEXT_ACTION_NEXT_SOURCE,
    errors.Stop: common_pb2.NEXT_ACTION_STOP,
}
_NEXT_ACTIONS_BACK: dict[int, type[RecoveryError]] = {number: kind for kind, number in _NEXT_ACTIONS.items()}


@overload
def to_proto(noun: Version) -> common_pb2.Version: ...
@overload
def to_proto(noun: Cut) -> common_pb2.Cut: ...
@overload
def to_proto(noun: WorkerRef) -> common_pb2.WorkerRef: ...
@overload
def to_proto(noun: Address) -> common_pb2.Address: ...
@overload
def to_proto(noun: PartClass) -> common_pb2.PartClass.ValueType: ...
@overload
def to_proto(noun: DigestAlgorithm) -> common_pb2.DigestAlgorithm.ValueType: ...
@overload
def to_proto(noun: RecoveryError) -> common_pb2.Failure: ...


def to_proto(noun: object) -> object:
    """Return the protobuf form of a noun or of an error (a ``Failure``)."""
    match noun:
        case Version():
            return common_pb2.Version(lineage=noun.lineage, outer_step=noun.outer_step)
        case Cut():
            return common_pb2.Cut(version=to_proto(noun.version), inner_step=noun.inner_step)
        case WorkerRef():
            return common_pb2.WorkerRef(
                worker_id=noun.worker_id,
                incarnation=noun.incarnation,
                local_rank=noun.local_rank,
                num_local_ranks=noun.num_local_ranks,
            )
        case Address():
            return common_pb2.Address(host=noun.host, port=noun.port)
        case PartClass():
            return _PART_CLASSES[noun]
        case DigestAlgorithm():
            return _DIGESTS[noun]
        case RecoveryError():
            return _failure(noun)
        case _:
            raise TypeError(f"{type(noun).__name__} has no form on the wire")


@overload
def from_proto(message: common_pb2.Version) -> Version: ...
@overload
def from_proto(message: common_pb2.Cut) -> Cut: ...
@overload
def from_proto(message: common_pb2.WorkerRef) -> WorkerRef: ...
@overload
def from_proto(message: common_pb2.Address) -> Address: ...
@overload
def from_proto(message: common_pb2.Failure) -> RecoveryError: ...


def from_proto(message: object) -> object:
    """Return the noun that a message carries; an absent ``Version`` is ``NO_VERSION``.

    Enumerations are plain ints in Python's protobuf: see ``part_class`` and ``digest_algorithm``.

    Raises:
        BadConfiguration: an id or a number that no sender of this package makes.
    """
    match message:
        case common_pb2.Version():
            return Version(message.lineage, message.outer_step)
        case common_pb2.Cut():
            return Cut(Version(message.version.lineage, message.version.outer_step), message.inner_step)
        case common_pb2.WorkerRef():
            return _worker_ref(message)
        case common_pb2.Address():
            if not message.host or len(message.host) > 255 or not 1 <= message.port <= 65535:
                raise BadConfiguration(f"address {message.host[:255]!r} port {message.port} cannot be reached")
            return Address(message.host, message.port)
        case common_pb2.Failure():
            return _error(message)
        case _:
            raise TypeError(f"{type(message).__name__} carries no noun")


def part_class(number: int) -> PartClass:
    """Return the class of part that ``number`` stands for.

    Raises:
        BadConfiguration: unspecified or unknown.
    """
    found = _PART_CLASSES_BACK.get(number)
    if found is None:
        raise BadConfiguration(f"part class {number} is unknown")
    return found


def digest_algorithm(number: int) -> DigestAlgorithm:
    """Return the digest algorithm that ``number`` stands for.

    Raises:
        BadConfiguration: unspecified or unknown.
    """
    found = _DIGESTS_BACK.get(number)
    if found is None:
        raise BadConfiguration(f"digest algorithm {number} is unknown")
    return found


def duration(seconds: float) -> duration_pb2.Duration:
    """Return ``seconds`` as a Duration, to the nanosecond."""
    nanos = round(seconds * 1e9)
    return duration_pb2.Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


def seconds(message: duration_pb2.Duration) -> float:
    """Return a Duration's seconds; an absent one is zero."""
    return message.seconds + message.nanos / 1e9


def timestamp(epoch_seconds: float) -> timestamp_pb2.Timestamp:
    """Return seconds since the Unix epoch as a Timestamp."""
    nanos = round(epoch_seconds * 1e9)
    return timestamp_pb2.Timestamp(seconds=nanos // 10**9, nanos=nanos % 10**9)


def _worker_ref(message: common_pb2.WorkerRef) -> WorkerRef:
    # A sender that has one process may leave the number of ranks out.
    num_local_ranks = message.num_local_ranks or 1
    if message.local_rank >= num_local_ranks:
        raise BadConfiguration(f"local rank {message.local_rank} of {num_local_ranks} does not exist")
    return WorkerRef(
        WorkerId(checked_id("worker id", message.worker_id)),
        Incarnation(checked_id("incarnation", message.incarnation)),
        message.local_rank,
        num_local_ranks,
    )


def _failure(error: RecoveryError) -> common_pb2.Failure:
    action = next((number for base, number in _NEXT_ACTIONS.items() if isinstance(error, base)), None)
    encoded = str(error).encode()
    if len(encoded) > MAX_FAILURE_MESSAGE_BYTES:
        encoded = encoded[: MAX_FAILURE_MESSAGE_BYTES - 4] + b" ..."
    return common_pb2.Failure(
        next_action=action if action is not None else common_pb2.NEXT_ACTION_UNSPECIFIED,
        kind=error.kind,
        message=encoded.decode(errors="ignore"),
    )


def _error(failure: common_pb2.Failure) -> RecoveryError:
    # A newer peer may name a class that this side does not have: what to do next is still known.
    kind = errors.find(failure.kind) or _NEXT_ACTIONS_BACK.get(failure.next_action, RecoveryError)
    return kind(failure.message)
