"""What goes into the joiner's machine and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from protos.recovery.v1.peer_pb2 import DonorLetter, JoinerLetter
from recovery.errors import RecoveryError
from recovery.events import Event
from recovery.protocol.planner import ChunkKey
from recovery.protocol.ports import DonorPeer, Role
from recovery.state.manifest import Manifest

# Events


@dataclass(frozen=True, slots=True)
class Dialled:
    """The stream to a donor is open."""

    donor: str
    round_trip_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Heard:
    donor: str
    letter: DonorLetter


@dataclass(frozen=True, slots=True)
class LinkOpened:
    donor: str
    lanes: int
    endpoints: tuple[str, ...] = ()
    round_trip_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A donor's dialling, stream or link failed."""

    donor: str
    error: RecoveryError


@dataclass(frozen=True, slots=True)
class Quiet:
    """After ``Drop``: no receive of this donor is posted any more; memory that it could write is ours again."""

    donor: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """A receive has ended; its bytes are not verified."""

    donor: str
    pull_id: int


@dataclass(frozen=True, slots=True)
class Checked:
    """A flight's bytes were hashed. ``written``: they are in the destination, hashed there or copied after it."""

    flight: int
    good: bool
    written: bool


@dataclass(frozen=True, slots=True)
class Written:
    """A held flight's bytes are in the destination."""

    flight: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """The manifest's destinations exist.

    ``viewable``: chunks whose destination can be received into directly. ``candidates``: chunks that may be there
    already; each is answered by ``Probed``.
    """

    role: Role
    viewable: frozenset[ChunkKey]
    candidates: frozenset[ChunkKey]


@dataclass(frozen=True, slots=True)
class Probed:
    """A candidate's memory (or spooled copy) was hashed. ``present``: the destination holds the chunk."""

    key: ChunkKey
    present: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed and every earlier event was handled. ``moved``: each link's progress count."""

    moved: Mapping[str, int] = field(default_factory=dict)


JoinerEvent = Dialled | Heard | LinkOpened | Ended | Quiet | Arrived | Checked | Written | Prepared | Probed | Tick


# Actions


@dataclass(frozen=True, slots=True)
class Dial:
    peer: DonorPeer


@dataclass(frozen=True, slots=True)
class Say:
    donor: str
    letter: JoinerLetter


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Open this end of the link; ``sealing_key``: the donor's public key, empty if payloads are not sealed."""

    donor: str
    scope: str
    lanes: int
    sealing_key: bytes = b""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Have destinations made for a manifest, then report ``Prepared``."""

    role: Role
    manifest: Manifest


class PostedPull(NamedTuple):
    """One receive to post: ``offset`` counts from the start of the chunk."""

    pull_id: int
    offset: int
    num_bytes: int
    lane: int
    tag: int


@dataclass(frozen=True, slots=True)
class Post:
    """Post some of a flight's receives, before anything that is said after it.

    ``direct``: into the destination itself; otherwise into a bounce buffer of the flight's own.
    """

    donor: str
    flight: int
    key: ChunkKey
    direct: bool
    pulls: tuple[PostedPull, ...]


@dataclass(frozen=True, slots=True)
class Fork:
    """Begin a flight's bounce buffer with a copy of what another flight of the chunk has brought by now.

    ``direct``: the other one's bytes are in the destination. What it still awaits is copied too, and comes again.
    """

    flight: int
    twin: int
    key: ChunkKey
    direct: bool


@dataclass(frozen=True, slots=True)
class Check:
    """Hash a flight's bytes. ``write``: if they are good and in a bounce buffer, copy them to the destination."""

    flight: int
    key: ChunkKey
    write: bool


@dataclass(frozen=True, slots=True)
class Write:
    """Copy a held flight's bytes to the destination."""

    flight: int
    key: ChunkKey


@dataclass(frozen=True, slots=True)
class Forget:
    """The flight is over: its bounce buffer, if any, may be used again."""

    flight: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Hash what the destination holds at this place."""

    key: ChunkKey


@dataclass(frozen=True, slots=True)
class Drop:
    """Shut the donor's link, close its stream, end its threads, then report ``Quiet``."""

    donor: str
    reason: str


@dataclass(frozen=True, slots=True)
class Emit:
    event: Event


@dataclass(frozen=True, slots=True)
class Finish:
    """Everything is verified and in place."""


@dataclass(frozen=True, slots=True)
class Fail:
    error: RecoveryError


JoinerAction = (
    Dial | Say | OpenLink | Prepare | Post | Fork | Check | Write | Forget | Probe | Drop | Emit | Finish | Fail
)
