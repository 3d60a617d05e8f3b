"""What the joiner's machine has others told of a transfer."""

from __future__ import annotations

from protos.recovery.v1 import peer_pb2
from recovery import events
from recovery.errors import RecoveryError
from recovery.protocol.joiner_io import Emit
from recovery.protocol.ports import Attempt
from recovery.types import PartName


def donor_failed(attempt: Attempt, donor: str, error: RecoveryError) -> Emit:
    """Say that a donor was dropped, or is not believed, and why."""
    return Emit(
        events.DonorFailed(
            worker_id=attempt.joiner.worker_id,
            transfer_id=attempt.transfer_id,
            donor=donor,
            reason=f"{error.kind}: {error}",
        )
    )


def progress(attempt: Attempt, verified_bytes: int, total_bytes: int, bytes_per_second: float) -> Emit:
    """Say how far the transfer is."""
    return Emit(
        events.TransferProgress(
            worker_id=attempt.joiner.worker_id,
            transfer_id=attempt.transfer_id,
            verified_bytes=verified_bytes,
            total_bytes=total_bytes,
            bytes_per_second=bytes_per_second,
        )
    )


def chunk_refetched(attempt: Attempt, donor: str, part: PartName, chunk: int, blame: peer_pb2.Blame.ValueType) -> Emit:
    """Say that a chunk came damaged and is asked for again, and whose fault the donor says it was."""
    return Emit(
        events.ChunkRefetched(
            worker_id=attempt.joiner.worker_id,
            transfer_id=attempt.transfer_id,
            part=part,
            chunk=chunk,
            donor=donor,
            blame=peer_pb2.Blame.Name(blame).removeprefix("BLAME_").lower(),
        )
    )
