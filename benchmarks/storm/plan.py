"""Which fault strikes whom and when: drawn from a seed, so that a storm can be repeated."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """What happens."""

    KILL = "kill"
    """SIGKILL, and a new process of the same name."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after a while."""
    PARTITION = "partition"
    """Every packet to and from a worker vanishes for a while, and nobody is told."""
    SLOW = "slow link"
    """A worker's link has little rate and a long round trip for a while."""
    COORDINATOR = "coordinator"
    """SIGKILL of the coordinator, and a new process on its port and state."""


SECONDS = {
    Kind.KILL: (0.0, 0.0),
    Kind.STOP: (5.0, 20.0),
    Kind.PARTITION: (5.0, 20.0),
    Kind.SLOW: (10.0, 20.0),
    Kind.COORDINATOR: (0.0, 0.0),
}
"""How long a fault lasts, at least and at most. A killed process is started again at once: its absence is its start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """One fault that is due. Whoever of ``preference`` is whole when its time comes is hit; the coordinator by name."""

    number: int
    at: float
    """Seconds from the storm's beginning."""
    kind: Kind
    preference: tuple[str, ...]
    lasts: float


def draw(*, seed: int, seconds: float, faults_per_hour: float, workers: Sequence[str]) -> list[Strike]:
    """Return a Poisson process of strikes over ``seconds``, oldest first.

    The kinds come in shuffled rounds, so that a short storm has each of them as well.
    """
    if not faults_per_hour:
        return []
    rng = random.Random(seed)
    strikes: list[Strike] = []
    kinds: list[Kind] = []
    at = rng.expovariate(faults_per_hour / 3600)
    while at < seconds:
        if not kinds:
            kinds = rng.sample(list(Kind), len(Kind))
        kind = kinds.pop()
        preference = tuple(rng.sample(list(workers), len(workers)))
        lasts = rng.uniform(*SECONDS[kind])
        strikes.append(Strike(number=len(strikes), at=at, kind=kind, preference=preference, lasts=lasts))
        at += rng.expovariate(faults_per_hour / 3600)
    return strikes
