"""A run's history as the coordinator remembers it, and the changes of which it is made. Pure: storage is elsewhere.

Every change is stored durably before anybody is told of it, so a coordinator that restarts from the record knows
everything that any worker may have acted upon.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from recovery.types import NO_VERSION, Version

COMMITTED = "committed"
ABORTED = "aborted"
OPEN = "open"

ORIGIN = "origin"
RESUME = "resume"
ROLLBACK = "rollback"
ADOPT = "adopt"
ADOPTED = "adopted"
"""Causes of lineages. ``adopted`` is the lineage as it came, ``adopt`` the one that continues it here."""

EPOCHS_PER_ADOPTION = 10**9
"""An adopted run counts its epochs from its lineage times this."""

KEPT_EPOCHS = 4096
"""Epochs whose outcome is answered by name; whoever asks for an older one is made a joiner."""

KEPT_POSITIONS = 256
KEPT_POSITION_BYTES = 2**20
"""Data positions of one worker, so far back as a run may be resumed; the newest is kept whatever its size."""

Voter = tuple[str, str]
"""Worker id and incarnation."""


@dataclass(frozen=True, slots=True)
class RunSettled:
    """The first member's numerics id and layout digest became the run's."""

    numerics_id: str
    layout_digest: bytes


@dataclass(frozen=True, slots=True)
class LineageBegun:
    """One process was chosen to begin ``version.lineage``; void unless a version of it is sealed later."""

    version: Version
    cause: str
    parent: Version
    lost_steps: int
    worker_id: str
    incarnation: str
    started_wall_seconds: float


@dataclass(frozen=True, slots=True)
class EpochOpened:
    """A roster is about to be told: the number is used up for ever."""

    epoch: int
    version: Version
    members: tuple[Voter, ...]


@dataclass(frozen=True, slots=True)
class PositionRecorded:
    """Where a worker stood in its own data at the boundary that created ``version``."""

    worker_id: str
    version: Version
    tokens: int
    position: bytes


@dataclass(frozen=True, slots=True)
class EpochClosed:
    """The epoch's only outcome. ``voters`` of a commit hold the average of ``digest`` and may apply it."""

    epoch: int
    verdict: str
    created: Version
    digest: bytes
    voters: tuple[Voter, ...]
    reason: str
    positions: tuple[PositionRecorded, ...] = ()
    """Where the voters of a commit stood in their data, stored in one piece with it: a position never counts samples
    that reached no commit, and a commit never loses its positions."""


@dataclass(frozen=True, slots=True)
class VersionSealed:
    """``fingerprint`` is what ``version`` is, for good."""

    version: Version
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class DrainSet:
    """An operator's wish: a drained worker is not chosen as donor."""

    worker_id: str
    drained: bool


@dataclass(frozen=True, slots=True)
class PauseSet:
    """Why the run is paused; empty: it goes on."""

    reason: str


Change = RunSettled | LineageBegun | EpochOpened | EpochClosed | VersionSealed | PositionRecorded | DrainSet | PauseSet


@dataclass(slots=True)
class EpochRecord:
    """One epoch: who was in it, from which version, and how it ended."""

    version: Version
    members: tuple[Voter, ...]
    verdict: str = OPEN
    created: Version = NO_VERSION
    digest: bytes = b""
    voters: tuple[Voter, ...] = ()
    reason: str = ""


@dataclass(slots=True)
class HistoryRecord:
    """Everything durable. Changed only by ``apply``; owned by one machine."""

    run_id: str
    generation: int = 1
    """How often the history was opened; makes ids that never repeat across restarts."""
    numerics_id: str = ""
    layout_digest: bytes = b""
    lineages: list[LineageBegun] = field(default_factory=list)
    epochs: dict[int, EpochRecord] = field(default_factory=dict)
    seals: dict[Version, bytes] = field(default_factory=dict)
    positions: dict[str, PositionRecorded] = field(default_factory=dict)
    """Newest position by worker."""
    trails: dict[str, list[PositionRecorded]] = field(default_factory=dict)
    """Each worker's last positions, oldest first, the newest included."""
    drained: set[str] = field(default_factory=set)
    paused: str = ""
    last_epoch: int = 0
    num_committed: int = 0
    num_aborted: int = 0
    sealed: Version = NO_VERSION
    committed: Version = NO_VERSION
    committed_epoch: int = 0
    """The epoch that created ``committed``; zero: a lineage's beginning did."""
    token: str = ""
    """Made at the run's creation: ids of a coordinator that lost its history differ from the lost ones."""

    def apply(self, change: Change) -> None:
        """Take in one change; the same change again alters nothing."""
        match change:
            case RunSettled():
                self.numerics_id = change.numerics_id
                self.layout_digest = change.layout_digest
            case LineageBegun():
                if change not in self.lineages:
                    self.lineages.append(change)
                if change.cause == ADOPT:
                    # The workers remember epochs of the lost history: a number must never mean two epochs.
                    self.last_epoch = max(self.last_epoch, change.version.lineage * EPOCHS_PER_ADOPTION)
            case EpochOpened():
                self.epochs.setdefault(change.epoch, EpochRecord(change.version, change.members))
                self.last_epoch = max(self.last_epoch, change.epoch)
                while len(self.epochs) > KEPT_EPOCHS:
                    del self.epochs[next(iter(self.epochs))]
            case EpochClosed():
                self._close(change)
            case VersionSealed():
                self.seals.setdefault(change.version, change.fingerprint)
                if change.version > self.sealed:
                    self.sealed = change.version
                if change.version > self.committed:
                    self.committed = change.version
                    self.committed_epoch = 0
            case PositionRecorded():
                known = self.positions.get(change.worker_id)
                if known is None or change.version >= known.version:
                    self.positions[change.worker_id] = change
                    self._lengthen_trail(change)
            case DrainSet():
                (self.drained.add if change.drained else self.drained.discard)(change.worker_id)
            case PauseSet():
                self.paused = change.reason

    def tokens_of(self, worker_id: str) -> int:
        """Return the run's tokens as the worker last reported them; 0: never."""
        known = self.positions.get(worker_id)
        return known.tokens if known is not None else 0

    def position_at(self, worker_id: str, version: Version) -> PositionRecorded | None:
        """Return where the worker stood in its data at the newest boundary that ``version`` contains.

        Steps that the run left behind are none of its: what was drawn for them is drawn again.
        """
        for position in reversed(self.trails.get(worker_id, ())):
            if position.position and self._leads_to(position.version, version):
                return position
        return None

    def _lengthen_trail(self, change: PositionRecorded) -> None:
        trail = self.trails.setdefault(change.worker_id, [])
        if trail and trail[-1].version == change.version:
            trail.pop()
        trail.append(change)
        total = sum(len(position.position) for position in trail)
        while len(trail) > KEPT_POSITIONS or (len(trail) > 1 and total > KEPT_POSITION_BYTES):
            total -= len(trail.pop(0).position)

    def _close(self, change: EpochClosed) -> None:
        epoch = self.epochs.get(change.epoch)
        if epoch is None or epoch.verdict != OPEN:
            return
        epoch.verdict, epoch.created, epoch.digest = change.verdict, change.created, change.digest
        epoch.voters, epoch.reason = change.voters, change.reason
        if change.verdict == COMMITTED:
            self.num_committed += 1
            self.committed, self.committed_epoch = change.created, change.epoch
            for position in change.positions:
                self.apply(position)
        else:
            self.num_aborted += 1

    @property
    def id_prefix(self) -> str:
        """What makes this coordinator's ids of transfers and orders different from those of every other."""
        return f"{self.token}{self.generation}"

    @property
    def sealed_fingerprint(self) -> bytes:
        """Fingerprint of the newest sealed version; empty: nothing is sealed."""
        return self.seals.get(self.sealed, b"")

    @property
    def newest_lineage(self) -> int:
        """The highest lineage number ever given out, void ones included; zero: none."""
        return max((begun.version.lineage for begun in self.lineages), default=0)

    @property
    def unsealed_lineage(self) -> LineageBegun | None:
        """The newest lineage if nothing of it is sealed yet."""
        if self.lineages and self.lineages[-1].version.lineage > self.sealed.lineage:
            return self.lineages[-1]
        return None

    def begun(self, lineage: int) -> LineageBegun | None:
        """Return how ``lineage`` began, or None if this coordinator never began it."""
        return next((begun for begun in self.lineages if begun.version.lineage == lineage), None)

    def on_path(self, version: Version) -> bool:
        """Return whether ``version`` is the committed version or one of its ancestors.

        A step that a lineage left behind (a rollback, a resume from an older checkpoint) is not on the path, though
        its number is lower than the newest.
        """
        return self._leads_to(version, self.committed)

    def _leads_to(self, version: Version, tip: Version) -> bool:
        while tip != NO_VERSION:
            begun = self.begun(tip.lineage)
            if version.lineage == tip.lineage:
                return version.outer_step <= tip.outer_step and (
                    begun is None or version.outer_step >= begun.version.outer_step
                )
            # What an adopted history's earlier steps were, this coordinator cannot know.
            tip = begun.parent if begun is not None and begun.cause != ADOPT else NO_VERSION
        return False


def copy_of(record: HistoryRecord) -> HistoryRecord:
    """Return an independent copy, as a restart would load it."""
    return dataclasses.replace(
        record,
        lineages=list(record.lineages),
        epochs={number: dataclasses.replace(epoch) for number, epoch in record.epochs.items()},
        seals=dict(record.seals),
        positions=dict(record.positions),
        trails={worker_id: list(trail) for worker_id, trail in record.trails.items()},
        drained=set(record.drained),
    )
