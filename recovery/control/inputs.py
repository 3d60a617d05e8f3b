"""What happens to the coordinator's machine, and what it wants done: the seam between decisions and IO."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message

from protos.recovery.v1 import coordinator_pb2, operations_pb2
from recovery.control.record import Change
from recovery.errors import RecoveryError
from recovery.events import Event
from recovery.types import WorkerRef

OperationRequest = (
    operations_pb2.ListRequest
    | operations_pb2.ResyncRequest
    | operations_pb2.VerifyRequest
    | operations_pb2.SaveRequest
    | operations_pb2.DrainRequest
    | operations_pb2.CancelRequest
    | operations_pb2.SetRateRequest
    | operations_pb2.RollbackRequest
    | operations_pb2.AdoptRequest
)


@dataclass(frozen=True, slots=True)
class Attached:
    """A worker opened its stream and said hello."""

    worker: WorkerRef
    hello: coordinator_pb2.Hello


@dataclass(frozen=True, slots=True)
class Received:
    """A worker sent something else than a hello."""

    worker: WorkerRef
    message: coordinator_pb2.WorkerMessage


@dataclass(frozen=True, slots=True)
class Detached:
    """A worker's stream ended or its lease ran out. Not sent for a stream that the same process has replaced."""

    worker: WorkerRef
    reason: str


@dataclass(frozen=True, slots=True)
class Operated:
    """An operator asks. While a request is in flight the same id again is joined to it."""

    request_id: str
    request: OperationRequest


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Input = Attached | Received | Detached | Operated | Tick


@dataclass(frozen=True, slots=True)
class Persist:
    """Store this durably before any later effect of the same list is carried out."""

    record: Change


@dataclass(frozen=True, slots=True)
class Tell:
    """Send to a worker; whoever is not attached any more does not get it."""

    worker: WorkerRef
    message: coordinator_pb2.CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Drop:
    """End a worker's stream. The machine forgets it at once: no Detached is needed, and one does no harm."""

    worker: WorkerRef
    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of an operation, for everybody who asked with this id."""

    request_id: str
    answer: Message | RecoveryError


@dataclass(frozen=True, slots=True)
class Emit:
    """An event for the sink."""

    event: Event


@dataclass(frozen=True, slots=True)
class EndScope:
    """Forget a rendezvous scope: its group is of no more use."""

    scope: str


Effect = Persist | Tell | Drop | Answer | Emit | EndScope
