"""The decisions of a boundary: when a gathering ends, how an epoch ends, what a version's fingerprint is.

Pure functions of what is known. None of them looks at how high a step is or who came first.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from recovery.control.record import Voter
from recovery.types import Version


@dataclass(frozen=True, slots=True)
class Arrival:
    """A member stands at the boundary."""

    voter: Voter
    inner_steps_done: int
    weight: float
    at: float


@dataclass(slots=True)
class Gather:
    """One boundary's gathering, from its first arrival to the roster."""

    version: Version
    opened_at: float
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    deadlines: dict[str, float] = field(default_factory=dict)
    """Until when each expected member is waited for; settled when it is first expected."""


@dataclass(slots=True)
class EpochState:
    """One roster at work."""

    epoch: int
    version: Version
    members: tuple[Voter, ...]
    group_id: int
    issued_at: float
    roster: bytes
    """The roster as it was told, so that it can be told again."""
    votes: dict[Voter, bytes] = field(default_factory=dict)
    positions: dict[Voter, bytes] = field(default_factory=dict)
    """Data positions that came with the votes."""
    withdrawn: set[Voter] = field(default_factory=set)
    """Members whose state is being replaced, or was: they cannot apply what the epoch decides."""


@dataclass(frozen=True, slots=True)
class GatherVerdict:
    """``close``: issue the roster now. Otherwise wait for ``missing``, at the latest until ``until`` (None: for ever,
    because there are too few)."""

    close: bool
    missing: tuple[str, ...]
    until: float | None


def member_deadline(
    opened_at: float,
    *,
    remaining_seconds: float | None,
    factor: float,
    min_wait: float,
    max_wait: float,
) -> float:
    """Return until when a gathering waits for one member.

    Args:
        opened_at: When the first member arrived, or this one became expected.
        remaining_seconds: What the member's own announcements say it still needs; None: it announced nothing.
        factor: How many times that is granted.
        min_wait: Seconds that everybody is granted.
        max_wait: Seconds that nobody is granted more of.
    """
    if remaining_seconds is None:
        return opened_at + max_wait
    return opened_at + min(max(min_wait, factor * remaining_seconds), max_wait)


def gather_verdict(
    arrived: Collection[str],
    deadlines: Mapping[str, float],
    returning: Collection[str],
    returning_until: float,
    min_participants: int,
    now: float,
) -> GatherVerdict:
    """Return whether a gathering is over.

    Args:
        arrived: Live members at the boundary.
        deadlines: Expected live members, and until when each is waited for; arrived ones do not matter.
        returning: Members of the last roster that the restarted coordinator has not seen yet.
        returning_until: Until when those are waited for.
        min_participants: With fewer there is no roster, whatever the time.
        now: The time.
    """
    waits = {name: until for name, until in deadlines.items() if name not in arrived}
    waits.update({name: returning_until for name in returning if name not in arrived})
    missing = tuple(sorted(waits))
    open_until = max(waits.values(), default=now)
    if len(arrived) < max(1, min_participants):
        return GatherVerdict(False, missing, open_until if open_until > now else None)
    if open_until > now:
        return GatherVerdict(False, missing, open_until)
    return GatherVerdict(True, missing, None)


class Ending(enum.Enum):
    """How an epoch stands."""

    UNDECIDED = "undecided"
    COMMIT = "commit"
    ABORT = "abort"
    TIE = "tie"


@dataclass(frozen=True, slots=True)
class Tally:
    """An epoch's state of votes. ``excluded`` voted for another digest than the majority."""

    ending: Ending
    digest: bytes = b""
    voters: tuple[Voter, ...] = ()
    excluded: tuple[Voter, ...] = ()
    waiting_for: tuple[str, ...] = ()
    reason: str = ""


def tally(
    members: Collection[Voter], live: Collection[Voter], votes: Mapping[Voter, bytes], min_participants: int
) -> Tally:
    """Return how an epoch ends with these votes, if it does.

    A vote says: "I hold the complete average, and this is its digest." So once every live member has voted, the dead do
    not matter: voted or not, their part is in the average. Before that, a member that died without a vote cannot be
    averaged with, and whoever waits for it must be freed: abort.

    Args:
        members: The roster.
        live: Those of it whose stream is open.
        votes: Digest by voter, of live and dead members.
        min_participants: Fewer equal votes do not commit.
    """
    waiting = tuple(
        sorted(
            name for name, incarnation in members if (name, incarnation) in live and (name, incarnation) not in votes
        )
    )
    gone = sorted(voter[0] for voter in members if voter not in live and voter not in votes)
    if waiting and gone:
        return Tally(Ending.ABORT, reason=f"lost before its vote: {', '.join(gone)}", waiting_for=waiting)
    if not votes:
        if gone and not waiting:
            return Tally(Ending.ABORT, reason=f"all members were lost before a vote: {', '.join(gone)}")
        return Tally(Ending.UNDECIDED, waiting_for=waiting)
    if waiting:
        return Tally(Ending.UNDECIDED, waiting_for=waiting)
    if not any(voter in live for voter in votes):
        # Everybody is out of reach; those who voted hold the average and will come back to ask.
        return Tally(Ending.UNDECIDED, waiting_for=tuple(sorted(voter[0] for voter in votes)))
    (digest, most), *others = Counter(votes.values()).most_common()
    if others and 2 * most <= len(votes):
        sides = "; ".join(
            f"{candidate.hex()[:8]}: {', '.join(sorted(v[0] for v, d in votes.items() if d == candidate))}"
            for candidate in sorted(set(votes.values()))
        )
        return Tally(Ending.TIE, reason=f"no majority for one average ({sides})")
    voters = tuple(voter for voter in members if votes.get(voter) == digest)
    excluded = tuple(voter for voter in members if voter in votes and votes[voter] != digest)
    if len(voters) < min_participants:
        return Tally(
            Ending.ABORT,
            excluded=excluded,
            reason=f"{len(voters)} equal votes, {min_participants} are needed",
        )
    return Tally(Ending.COMMIT, digest, voters, excluded)


@dataclass(frozen=True, slots=True)
class SealVerdict:
    """``fingerprint``: the version is sealed with it. ``tie``: no majority is possible any more."""

    fingerprint: bytes = b""
    tie: str = ""
    waiting_for: tuple[str, ...] = ()


def seal_verdict(reports: Mapping[str, bytes], outstanding: Collection[str], waited_enough: bool) -> SealVerdict:
    """Return the fingerprint with which a committed version is sealed, once a majority has reported it.

    Args:
        reports: Fingerprint by live worker that applied the step.
        outstanding: Live workers that may still apply it.
        waited_enough: Whether those are not waited for any longer.
    """
    if not reports:
        return SealVerdict(waiting_for=tuple(sorted(outstanding)))
    electorate = len(reports) if waited_enough else len(reports) + len(outstanding)
    fingerprint, most = Counter(reports.values()).most_common(1)[0]
    if 2 * most > electorate:
        return SealVerdict(fingerprint)
    if outstanding and not waited_enough:
        return SealVerdict(waiting_for=tuple(sorted(outstanding)))
    sides = "; ".join(
        f"{candidate.hex()[:8]}: {', '.join(sorted(name for name, f in reports.items() if f == candidate))}"
        for candidate in sorted(set(reports.values()))
    )
    return SealVerdict(tie=f"no majority for one state ({sides})")
