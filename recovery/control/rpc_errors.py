"""The one place where gRPC's errors become the project's, and the other way round.

A server that refuses sends the whole ``Failure`` in the trailing metadata, so that the client raises the same class
with the same message; the status code tells tools that know only gRPC what they can do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import grpc
from google.protobuf.message import DecodeError

from protos.recovery.v1 import common_pb2
from recovery import errors
from recovery.control.wire import from_proto, to_proto
from recovery.errors import RecoveryError

FAILURE_KEY = "recovery-failure-bin"

_CODES: tuple[tuple[type[RecoveryError], grpc.StatusCode], ...] = (
    (errors.DonorBusy, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.BadConfiguration, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.CoordinatorUnreachable, grpc.StatusCode.UNAVAILABLE),
    (errors.RetrySameDonor, grpc.StatusCode.UNAVAILABLE),
    (errors.TryOtherDonor, grpc.StatusCode.UNAVAILABLE),
    (errors.TryNextSource, grpc.StatusCode.NOT_FOUND),
    (errors.ControlFlow, grpc.StatusCode.ABORTED),
    (errors.Stop, grpc.StatusCode.FAILED_PRECONDITION),
)


def abort_details(
    error: RecoveryError, code: grpc.StatusCode | None = None
) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Return status code, one-line details and trailing metadata with which a servicer ends a call."""
    failure = to_proto(error)
    if code is None:
        code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.UNKNOWN)
    # The status line is one header of text: the full message travels in the trailer.
    details = " ".join(failure.message.split())[:500]
    return code, details, ((FAILURE_KEY, failure.SerializeToString()),)


def told_failure(error: grpc.RpcError) -> RecoveryError | None:
    """Return the error that the other side sent along, or None if the failure was gRPC's own."""
    trailing: object = getattr(error, "trailing_metadata", lambda: None)()
    for key, value in cast("Iterable[tuple[str, str | bytes]]", trailing or ()):
        if key == FAILURE_KEY and isinstance(value, bytes):
            try:
                return from_proto(common_pb2.Failure.FromString(value))
            except DecodeError:
                return None
    return None


def status_code(error: grpc.RpcError) -> grpc.StatusCode:
    """Return the status of a failed call."""
    code: object = getattr(error, "code", lambda: None)()
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN


def details_of(error: grpc.RpcError) -> str:
    """Return gRPC's own words for a failed call."""
    return str(getattr(error, "details", lambda: "")() or "")


def is_overload(error: grpc.RpcError) -> bool:
    """Return whether a call was refused because the server had no thread left for it.

    gRPC has the same status for a message that is too long, which waiting does not make shorter.
    """
    details = details_of(error)
    return status_code(error) is grpc.StatusCode.RESOURCE_EXHAUSTED and "concurrent rpc limit" in details.lower()


def cause(error: grpc.RpcError) -> str:
    """Return in a few words why a call failed, without gRPC's nesting."""
    code = status_code(error)
    details = details_of(error)
    for known in ("Connection refused", "No route to host", "Network is unreachable", "Connection reset"):
        if known.lower() in details.lower():
            return known.lower()
    if "dns resolution failed" in details.lower():
        return "the host name is not known"
    if "ping timeout" in details.lower() or "keepalive" in details.lower():
        return "it stopped answering"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    line = " ".join(details.split())
    return (line if len(line) <= 200 else line[:200] + " ...") or code.name.lower()
