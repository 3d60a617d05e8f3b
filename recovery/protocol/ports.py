"""What the conversation needs of other storeys, as ports; the worker connects them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from protos.recovery.v1 import peer_pb2
from protos.recovery.v1.peer_pb2 import DonorLetter, JoinerLetter, Open
from recovery.errors import MisuseError
from recovery.state.manifest import Manifest
from recovery.transport.link import Link
from recovery.types import Fingerprint, KeyValue, PartName, RunId, TransferId, Version, WorkerRef

Role: TypeAlias = peer_pb2.ManifestRole.ValueType
"""Which of a conversation's manifests: ``OUTER``, ``PRIVATE``, ``JOURNAL`` or ``SCALARS``."""

OUTER: Role = peer_pb2.MANIFEST_ROLE_OUTER
"""Replicated parts, at the ticket's version."""

PRIVATE: Role = peer_pb2.MANIFEST_ROLE_PRIVATE
"""Private-copied parts, at one donor's cut."""

JOURNAL: Role = peer_pb2.MANIFEST_ROLE_JOURNAL
"""The averages of one commit, named by the version that they lead to; replicated."""

SCALARS: Role = peer_pb2.MANIFEST_ROLE_SCALARS
"""Private-copied parts without the inner optimizers' state, at one donor's cut."""

AT_A_CUT = (PRIVATE, SCALARS)
"""Lent at the donor's next inner-step boundary: no two donors lend the same, so an attempt for them has one donor."""


class JoinerConversation(Protocol):
    """The joiner's end of the direct stream to one donor. All methods may be called from different threads.

    Attributes:
        round_trip_seconds: Measured while it was opened; None: it was not.
    """

    round_trip_seconds: float | None

    def send(self, letter: JoinerLetter, /) -> None:
        """Queue a letter. Raises: DonorLost: the stream has ended."""

    def receive(self, timeout_seconds: float, /) -> DonorLetter | None:
        """Return the next letter, or None if none came in time.

        Raises:
            RecoveryError: the stream ended; ``DonorLost`` unless the other side gave another reason.
        """

    def close(self, reason: str, /) -> None:
        """End the stream after the queued letters; a blocked ``receive`` raises. Twice without harm."""


class DonorConversation(Protocol):
    """The donor's end of the same stream; errors as the joiner's."""

    def send(self, letter: DonorLetter, /) -> None: ...

    def receive(self, timeout_seconds: float, /) -> JoinerLetter | None: ...

    def close(self, reason: str, /) -> None: ...


class Destination(Protocol):
    """A part's memory at the joiner, addressed as one byte string (``recovery.state.PartBytes``)."""

    num_bytes: int

    def view(self, offset: int, num_bytes: int) -> torch.Tensor | None:
        """Return the range's memory itself as 1-d uint8, or None if it is not one piece of CPU memory."""

    def read(self, offset: int, num_bytes: int, out: torch.Tensor | None = None) -> torch.Tensor: ...

    def write(self, offset: int, data: torch.Tensor) -> None: ...


class Reading(Protocol):
    """Bytes lent by a snapshot. ``live``: the guard may close them, and what was read of them by then may be torn."""

    @property
    def data(self) -> torch.Tensor: ...

    @property
    def live(self) -> bool: ...


class SourceLease(Protocol):
    """A donor's snapshot, lent to one joiner. All methods may be called from different threads."""

    manifest: Manifest
    manifest_bytes: bytes
    until_boundary: bool

    def read(self, part: int, offset: int, num_bytes: int) -> Reading: ...

    def acknowledge(self, part: int, chunk: int) -> None: ...

    def recheck(self, part: int, chunk: int) -> bool: ...

    def renew(self) -> None: ...

    def release(self, reason: str, *, grace: bool = False) -> None: ...

    def on_closed(self, callback: Callable[[], int | None], /) -> None: ...


class SnapshotSource(Protocol):
    """Where a donor's leases come from (``recovery.snapshot.Snapshots``)."""

    def lease_outer(self, version: Version, holder: str) -> SourceLease: ...

    def lease_private(self, holder: str, not_before: Version) -> Future[Any]:
        """Return a future of a ``SourceLease``. (Futures are invariant: a precise type would refuse every lender.)"""

    def lease_scalars(self, holder: str, not_before: Version) -> Future[Any]: ...

    def lease_journal(self, version: Version, holder: str) -> SourceLease: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DonorPeer:
    """A donor as the ticket names it.

    Attributes:
        worker: Which process.
        addresses: Where its peer service listens; opaque here, used by ``dial``.
        private_parts: Private-copied parts are asked from this one first.
        measured_rate: Bytes per second seen before; 0: unknown.
        round_trip_seconds: Measured by a probe; None: unknown.
    """

    worker: WorkerRef
    addresses: tuple[str, ...] = ()
    private_parts: bool = False
    measured_rate: float = 0.0
    round_trip_seconds: float | None = None

    @property
    def name(self) -> str:
        """The donor's name in plans, logs and errors."""
        return str(self.worker)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One try of one transfer with one set of donors: what the coordinator's ticket orders.

    Attributes:
        fingerprint: Sealed fingerprint that every donor's outer manifest must carry.
        first: What the donors lend first: everything else is asked for when that is verified.
        layout_digest: The joiner's own.
        data_host: Interface address that the joiner's groups bind and advertise.
        want_private: Whether private-copied parts are asked after what is lent first.
    """

    run_id: RunId
    transfer_id: TransferId
    number: int
    version: Version
    fingerprint: Fingerprint
    token: bytes
    joiner: WorkerRef
    layout_digest: bytes
    data_host: str
    donors: tuple[DonorPeer, ...]
    want_private: bool = True
    first: Role = OUTER

    def __post_init__(self) -> None:
        if self.first in AT_A_CUT and (self.want_private or len(self.donors) > 1):
            raise MisuseError("what is captured at a cut is asked of one donor, and nothing after it")


Dial = Callable[[DonorPeer], JoinerConversation]
"""Opens the direct stream. Raises: TryOtherDonor. Called in a thread of its own for each donor."""

OpenLink = Callable[[KeyValue, str, str, int, threading.Event], Link]
"""(where the ends meet, scope, own host, lanes, cancelled) to this end of the link. Raises: TryOtherDonor,
BadConfiguration."""

OnManifest = Callable[[Role, Manifest], Mapping[PartName, Destination]]
"""Checks a verified manifest against the joiner's state and returns the memory of each of its parts. What it raises
ends the transfer. Called on the thread that runs the session."""

Admit = Callable[[Open], None]
"""Decides whether a joiner is served: run, incarnation, version, token, layout, drained. Raises: DonorRefused,
DonorBusy, RunRefused, LayoutMismatch."""
