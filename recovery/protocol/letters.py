"""Small conversions between letters and the project's own words."""

from __future__ import annotations

from protos.recovery.v1 import common_pb2, peer_pb2
from recovery import errors
from recovery.errors import DonorBusy, RecoveryError
from recovery.protocol.planner import ChunkKey
from recovery.protocol.ports import Attempt
from recovery.types import Version, WorkerRef

PROTOCOL = 1
"""Version of the direct conversation that this code speaks."""

_ACTIONS = [
    (errors.RetrySameDonor, common_pb2.NEXT_ACTION_SAME_DONOR),
    (errors.TryOtherDonor, common_pb2.NEXT_ACTION_OTHER_DONOR),
    (errors.TryNextSource, common_pb2.NEXT_ACTION_NEXT_SOURCE),
]


def version_message(version: Version) -> common_pb2.Version:
    return common_pb2.Version(lineage=version.lineage, outer_step=version.outer_step)


def worker_message(worker: WorkerRef) -> common_pb2.WorkerRef:
    return common_pb2.WorkerRef(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        local_rank=worker.local_rank,
        num_local_ranks=worker.num_local_ranks,
    )


def chunk_message(key: ChunkKey) -> peer_pb2.ChunkId:
    return peer_pb2.ChunkId(role=key.role, part=key.part, chunk=key.chunk)


def open_message(attempt: Attempt, donor: WorkerRef, lanes: int, sealing_key: bytes) -> peer_pb2.Open:
    """Return the first letter of an attempt to one of its donors."""
    return peer_pb2.Open(
        protocol=PROTOCOL,
        run_id=attempt.run_id,
        transfer_id=attempt.transfer_id,
        attempt=attempt.number,
        token=attempt.token,
        joiner=worker_message(attempt.joiner),
        donor=worker_message(donor),
        version=version_message(attempt.version),
        layout_digest=attempt.layout_digest,
        lanes=lanes,
        data_host=attempt.data_host,
        lends=attempt.first,
        sealing_key=sealing_key,
    )


def sealing_context(run_id: str, transfer_id: str, attempt: int) -> tuple[bytes, ...]:
    """Return what both ends of a sealed link bind its key to, as ``Open`` says it."""
    return run_id.encode(), transfer_id.encode(), str(attempt).encode()


def failure_message(error: RecoveryError) -> common_pb2.Failure:
    """Return the error as it crosses a process boundary."""
    action = next((number for kind, number in _ACTIONS if isinstance(error, kind)), common_pb2.NEXT_ACTION_STOP)
    return common_pb2.Failure(next_action=action, kind=error.kind, message=str(error))


def error_of(donor: str, failure: common_pb2.Failure, retry_after_seconds: float = 1.0) -> RecoveryError:
    """Return a donor's failure as an error of this process. A name that is not an error's reads as ``DonorRefused``."""
    kind = errors.find(failure.kind)
    message = f"{donor}: {failure.message or 'no reason given'}"
    if kind is DonorBusy:
        return DonorBusy(message, retry_after_seconds)
    if kind is None or issubclass(kind, errors.ControlFlow) or kind is RecoveryError:
        return errors.DonorRefused(message)
    return kind(message)
