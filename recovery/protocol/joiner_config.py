"""How a joiner behaves."""

from __future__ import annotations

from dataclasses import dataclass, field

from recovery.errors import BadConfiguration
from recovery.protocol.planner import PlannerConfig
from recovery.transport.link import MAX_LANES
from recovery.transport.sockets import permits


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinerConfig:
    """How a joiner behaves.

    Attributes:
        progress_seconds: A donor that owes something and moves nothing for this long is dropped.
        private_seconds: How long a donor may take until its next inner-step boundary.
        lanes: Sockets to each donor; 0: by the path's round trip.
        bbr: Whether BBR may be used, as found on this machine if not given; few sockets are enough then.
        delta: Hash what the destination holds first and pull only what differs.
        seal: Take payload only from donors that seal it.
        planner: Sizes of pieces and windows.
    """

    progress_seconds: float = 10.0
    private_seconds: float = 600.0
    lanes: int = 0
    bbr: bool = field(default_factory=lambda: permits("bbr"))
    delta: bool = False
    seal: bool = False
    planner: PlannerConfig = field(default_factory=PlannerConfig)

    def __post_init__(self) -> None:
        if self.progress_seconds <= 0 or self.private_seconds < self.progress_seconds:
            raise BadConfiguration(
                f"deadlines of {self.progress_seconds} s (progress) and {self.private_seconds} s (private parts) "
                "are not possible: the first must be positive, the second not shorter"
            )
        if not 0 <= self.lanes <= MAX_LANES:
            raise BadConfiguration(f"{self.lanes} lanes are not possible: 0 (automatic) to {MAX_LANES}")
