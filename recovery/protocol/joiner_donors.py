"""What the joiner's machine knows of each donor: how far their conversation is, what is in flight, what is owed."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field

from recovery.protocol.joiner_config import JoinerConfig
from recovery.protocol.manifest_pieces import ManifestAssembler
from recovery.protocol.planner import DonorView
from recovery.protocol.ports import AT_A_CUT, DonorPeer, Role
from recovery.protocol.rate import RateMeter
from recovery.state.manifest import Manifest


class Phase(enum.Enum):
    """
    ::

        DIALLING -> OPENING -> MANIFEST -> READY -> LOST -> GONE
                                  '-> DISPUTING ----^
    """

    DIALLING = "dialling"
    OPENING = "awaiting its answer"
    MANIFEST = "awaiting its manifest"
    READY = "serving"
    DISPUTING = "lending other content"
    LOST = "lost"
    GONE = "gone"


@dataclass(slots=True)
class Donor:
    """One donor.

    Attributes:
        meter: Measures its rate.
        lane_bytes: Bytes asked for and not arrived, for each lane.
        lane_heard_at: When something came on each lane last, or was asked on one that had nothing to do.
        lane_meters: Measure each lane's rate.
        linked: Whether the link is open.
        assembler: Puts the manifest of what it lends first together, while that comes.
        private_assembler: Likewise the manifest of its private parts.
        num_damaged: Chunks that arrived damaged from it.
        moved: Its link's progress count at the last tick.
        progress_at: When anything came of it last, or something was asked of it that had nothing to do.
        arrived_bytes: Payload that came from it.
        again_bytes: What it was asked for although it owed it already.
        disputed: What it lends, if that is not what the others do.
    """

    peer: DonorPeer
    phase: Phase = Phase.DIALLING
    meter: RateMeter = field(default_factory=RateMeter)
    round_trip_seconds: float = 0.0
    lane_bytes: list[int] = field(default_factory=list)
    lane_heard_at: list[float] = field(default_factory=list)
    lane_meters: list[RateMeter] = field(default_factory=list)
    linked: bool = False
    assembler: ManifestAssembler | None = None
    private_assembler: ManifestAssembler | None = None
    next_pull_id: int = 1
    num_damaged: int = 0
    moved: int = 0
    progress_at: float = 0.0
    arrived_bytes: int = 0
    again_bytes: int = 0
    disputed: Manifest | None = None

    @property
    def name(self) -> str:
        return self.peer.name

    @property
    def alive(self) -> bool:
        return self.phase not in (Phase.LOST, Phase.GONE)

    @property
    def serving(self) -> bool:
        """Whether it can be asked for payload."""
        return self.phase is Phase.READY and self.linked

    def link_up(self, lanes: int, now: float) -> None:
        """Note that its link is open."""
        self.linked = True
        self.progress_at = now
        self.lane_bytes = [0] * lanes
        self.lane_heard_at = [now] * lanes
        self.lane_meters = [RateMeter() for _ in range(lanes)]

    def ask(self, lane: int, num_bytes: int, now: float) -> int:
        """Note that ``num_bytes`` are asked of it on a lane; return the pull's id."""
        if not any(self.lane_bytes):
            self.meter.begin(now)
            self.progress_at = now
        if not self.lane_bytes[lane]:
            self.lane_heard_at[lane] = now
            self.lane_meters[lane].begin(now)
        self.lane_bytes[lane] += num_bytes
        pull_id = self.next_pull_id
        self.next_pull_id += 1
        return pull_id

    def arrived(self, lane: int, num_bytes: int, now: float) -> None:
        """Note that ``num_bytes`` of those came."""
        self.progress_at = self.lane_heard_at[lane] = now
        self.arrived_bytes += num_bytes
        self.lane_bytes[lane] -= num_bytes
        self.lane_meters[lane].add(now, num_bytes)
        self.meter.add(now, num_bytes)
        if not self.lane_bytes[lane]:
            self.lane_meters[lane].end(now)
        if not any(self.lane_bytes):
            self.meter.end(now)

    def due_seconds(self, lane: int, now: float) -> float:
        """Return when what is in flight on a lane is to be expected: one that stands still will go on doing so."""
        silent = now - self.lane_heard_at[lane]
        lane_rate = self.meter.rate(now) / len(self.lane_bytes)
        return max(silent, self.lane_bytes[lane] / lane_rate if lane_rate > 0 else 0.0)

    def view(self, now: float, *, lent_bytes: int, in_place: bool) -> DonorView:
        """Return what the planner has to know of it."""
        return DonorView(
            name=self.name,
            rate=self.meter.rate(now),
            round_trip_seconds=self.round_trip_seconds,
            lane_bytes=tuple(self.lane_bytes),
            lane_rates=tuple(meter.rate(now) for meter in self.lane_meters) if len(self.lane_bytes) > 1 else (),
            lent_bytes=lent_bytes,
            in_place=in_place,
            again_bytes=self.again_bytes,
        )

    def owed(self, config: JoinerConfig, first: Role, *, complaint: bool) -> tuple[str, float]:
        """Return what is awaited of it (empty: nothing) and for how long it may stand still.

        Args:
            config: Has the deadlines.
            first: What it is asked to lend first.
            complaint: Whether it was asked why a chunk was damaged.
        """
        if self.phase in (Phase.OPENING, Phase.MANIFEST):
            captured = self.phase is Phase.OPENING and first in AT_A_CUT
            limit = config.private_seconds if captured else config.progress_seconds
            return self.phase.value.removeprefix("awaiting "), limit
        if self.phase is not Phase.READY:
            return "", config.progress_seconds  # dialling has its own deadline
        if any(self.lane_bytes):
            return f"{sum(self.lane_bytes)} bytes", config.progress_seconds
        if complaint:
            return "an answer to a complaint", config.progress_seconds
        if self.private_assembler is not None:
            return "its private parts", config.private_seconds
        return "", config.progress_seconds


def private_donor(donors: Collection[Donor], now: float) -> Donor | None:
    """Return who is to be asked for private parts: the one that is meant to lend them, else the fastest; None: wait."""
    serving = [donor for donor in donors if donor.serving]
    if any(donor.peer.private_parts and donor.alive and not donor.serving for donor in donors):
        return None  # it is about to be ready
    return max(serving, key=lambda each: (each.peer.private_parts, each.meter.rate(now)), default=None)
