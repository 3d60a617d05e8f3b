"""What goes into the donor's machine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

from protos.recovery.v1.peer_pb2 import DonorLetter, JoinerLetter, Open
from recovery.errors import RecoveryError
from recovery.protocol.planner import ChunkKey
from recovery.protocol.ports import Role
from recovery.state.manifest import Manifest
from recovery.types import Version

# Events


@dataclass(frozen=True, slots=True)
class Heard:
    letter: JoinerLetter


@dataclass(frozen=True, slots=True)
class Lent:
    """A lease was taken: of what is lent first after ``Admit``, of the private parts after ``Capture``."""

    role: Role
    manifest: Manifest
    encoded: bytes
    digest: bytes
    until_boundary: bool


@dataclass(frozen=True, slots=True)
class NotLent:
    """The joiner is refused, or the private parts could not be captured."""

    role: Role
    error: RecoveryError


@dataclass(frozen=True, slots=True)
class LinkOpened:
    endpoints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sent:
    """A send is over: its bytes are with the operating system or the joiner."""

    pull_id: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """A queued pull was cancelled before its bytes were read."""

    pull_id: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The lease did not give the bytes of a pull."""

    pull_id: int
    error: RecoveryError


@dataclass(frozen=True, slots=True)
class ViewsClosed:
    """The guard closed the live views; these pulls may have carried torn bytes."""

    role: Role
    void_pull_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rechecked:
    key: ChunkKey
    intact: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream ended, or the link failed or broke."""

    error: RecoveryError


@dataclass(frozen=True, slots=True)
class Stopped:
    """The donor's owner ends the conversation, or its lease has ended; the joiner is told why."""

    error: RecoveryError


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. ``moved``: the link's progress count."""

    moved: int = 0


DonorEvent = (
    Heard | Lent | NotLent | LinkOpened | Sent | Skipped | Unreadable | ViewsClosed | Rechecked | Ended | Stopped | Tick
)

# Actions


@dataclass(frozen=True, slots=True)
class Say:
    letter: DonorLetter


@dataclass(frozen=True, slots=True)
class Admit:
    """Decide whether the joiner is served and take a lease of ``role``; report ``Lent`` or ``NotLent``."""

    open: Open
    version: Version
    role: Role


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Open this end of the link; ``sealing_key``: the joiner's public key, empty if payloads are not sealed."""

    scope: str
    lanes: int
    sealing_key: bytes = b""


@dataclass(frozen=True, slots=True)
class Send:
    """Queue a pull's bytes on its lane."""

    pull_id: int
    role: Role
    part: int
    offset: int
    num_bytes: int
    lane: int
    tag: int


@dataclass(frozen=True, slots=True)
class CancelSends:
    """Forget queued pulls that were not sent yet; empty: all. What is being sent goes on."""

    pull_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Acknowledge:
    key: ChunkKey


@dataclass(frozen=True, slots=True)
class Recheck:
    """Hash the chunk's memory again; report ``Rechecked``."""

    key: ChunkKey


@dataclass(frozen=True, slots=True)
class Capture:
    """Take a private lease at the next inner-step boundary; report ``Lent`` or ``NotLent``."""

    not_before: Version


@dataclass(frozen=True, slots=True)
class Finish:
    """The conversation is over.

    ``error`` None: the joiner has everything. ``grace``: the joiner was lost and may come back for its lease.
    """

    error: RecoveryError | None = None
    grace: bool = False


DonorAction = Say | Admit | OpenLink | Send | CancelSends | Acknowledge | Recheck | Capture | Finish
