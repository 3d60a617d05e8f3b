"""What was seen of one run, with the machine's monotonic time of each thing."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class Fault:
    """One fault, and what became of it. Times are monotonic seconds; None: not seen, or nothing there to see."""

    number: int
    kind: str
    victim: str
    due_at: float
    struck_at: float
    struck_step: int = 0
    """The run's newest outer step when the fault struck."""
    lasts: float
    healed_at: float | None = None
    healed_step: int = 0
    """The run's newest outer step when the fault ended."""
    felt: bool = False
    """Whether it is proved that the fault reached its victim."""
    proof: str = ""
    detected_at: float | None = None
    """The coordinator lost the victim; of the coordinator: a worker lost it."""
    resumed_at: float | None = None
    """The run's next commit."""
    back_at: float | None = None
    """The victim's first commit of a step that is newer than the fault's end; of the coordinator: the run's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """One worker applied one committed step."""

    at: float
    worker: str
    version: str
    loss: float
    held_out: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Roster:
    """Who averaged in one epoch, and which live and ready worker did not."""

    at: float
    epoch: int
    members: tuple[str, ...]
    missing: tuple[str, ...]
    waited: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """The run's three numbers at one moment, as `recovery status` tells them; ``running``: processes not frozen."""

    at: float
    alive: int
    ready: int
    participating: int
    running: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """One process at one moment."""

    at: float
    rss_bytes: int
    threads: int
    descriptors: int
    cpu_seconds: float


@dataclass(kw_only=True, slots=True)
class Timeline:
    """Appended to while the run goes on; read afterwards."""

    began_at: float = 0.0
    """Every worker had committed."""
    ended_at: float = 0.0
    commits: list[Commit] = field(default_factory=list)
    rosters: list[Roster] = field(default_factory=list)
    epochs: list[tuple[float, int, str, str]] = field(default_factory=list)
    """Time, epoch, verdict, reason."""
    counted: list[Counted] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    footprints: dict[str, list[Footprint]] = field(default_factory=dict)
    """By process: name and number of its start."""
    restored: list[tuple[float, str, str, str]] = field(default_factory=list)
    """Time, worker, version, source."""
    unexplained: list[str] = field(default_factory=list)
    """Ends of processes that nobody struck, and errors that were told."""
    joins: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, worker, "joined" or "left": of a run with churn."""

    def steps(self) -> list[tuple[float, str, float]]:
        """Return each committed version once: when it was first applied, its name, the run's loss on held-out text."""
        first: dict[str, Commit] = {}
        for commit in sorted(self.commits, key=lambda c: c.at):
            first.setdefault(commit.version, commit)
        return [(commit.at, commit.version, commit.held_out) for commit in first.values()]

    def newest_step(self) -> int:
        """Return the newest committed outer step; 0: none."""
        return max((outer_step(commit.version) for commit in self.commits), default=0)

    def commit_beyond(self, step: int, worker: str = "") -> float | None:
        """Return when a worker (empty: any) first committed a later outer step than ``step``; None: not yet."""
        found = (c.at for c in self.commits if worker in ("", c.worker) and outer_step(c.version) > step)
        return next(found, None)

    def steps_within(self) -> list[tuple[float, str, float]]:
        """Return the steps between beginning and end."""
        return [step for step in self.steps() if self.began_at < step[0] <= self.ended_at]


def outer_step(version: str) -> int:
    """Return the outer step in a version's text, ``L1.k12``."""
    return int(version.partition(".k")[2])
