"""What must hold in every simulated schedule, checked at the moment at which it could break."""

from __future__ import annotations

import hashlib

from recovery.control.record import (
    ABORTED,
    COMMITTED,
    OPEN,
    Change,
    EpochClosed,
    EpochOpened,
    LineageBegun,
    VersionSealed,
)
from recovery.types import NO_VERSION, Version


class Violation(AssertionError):
    """An invariant broke."""


def mix(*parts: bytes) -> bytes:
    """Return what becomes of a state and an average, and of an average and its contributors: one digest of all."""
    return hashlib.blake2b(b"/".join(parts), digest_size=8).digest()


class Oracle:
    """Sees every durable change and every step that a model worker applies. Knows nothing of the machine's insides.

    A coordinator whose state directory was lost begins another ``era``: what it calls lineage 1 is another history.
    """

    def __init__(self) -> None:
        self.era = 0
        self.sealed: dict[tuple[int, Version], bytes] = {}
        self.newest_sealed = NO_VERSION
        self.committed: dict[tuple[int, Version], tuple[int, bytes]] = {}
        self.epochs: dict[tuple[int, int], str] = {}
        self.lineages: dict[tuple[int, int], LineageBegun] = {}
        self.tainted: set[bytes] = set()
        """States that a fault wrote, and what came of them."""
        self.num_commits = 0
        self.num_resumes = 0
        self.num_ties = 0
        self.last_commit_size = 0
        self.holders: dict[str, tuple[Version, bytes]] = {}
        """What each process that is attached now has applied."""
        self.fresh: set[str] = set()
        """Names of workers whose process holds nothing."""

    def begin_era(self) -> None:
        """The coordinator's state directory was lost."""
        self.era += 1
        self.newest_sealed = NO_VERSION

    def restarted(self) -> None:
        """What was open when the coordinator died counts as aborted from now on."""
        for (era, number), verdict in self.epochs.items():
            if era == self.era and verdict == OPEN:
                self.epochs[era, number] = ABORTED

    def stored(self, change: Change) -> None:
        """A change became durable."""
        match change:
            case EpochOpened():
                self._require((self.era, change.epoch) not in self.epochs, f"epoch {change.epoch} was given out twice")
                self.epochs[self.era, change.epoch] = OPEN
            case EpochClosed():
                before = self.epochs.get((self.era, change.epoch))
                self._require(before == OPEN, f"epoch {change.epoch} ended twice ({before}, {change.verdict})")
                self.epochs[self.era, change.epoch] = change.verdict
                if change.verdict == COMMITTED:
                    self._committed(change)
            case VersionSealed():
                self._sealed(change)
            case LineageBegun():
                self._begun(change)
            case _:
                pass

    def _committed(self, change: EpochClosed) -> None:
        key = (self.era, change.created)
        self._require(key not in self.committed, f"{change.created} was committed twice")
        self.committed[key] = (change.epoch, change.digest)
        self.num_commits += 1
        self.last_commit_size = len(change.voters)

    def _sealed(self, change: VersionSealed) -> None:
        version, fingerprint = change.version, change.fingerprint
        known = self.sealed.get((self.era, version))
        self._require(known in (None, fingerprint), f"{version} has two fingerprints: one lineage, two histories")
        self._require(version >= self.newest_sealed, f"sealed {version} after {self.newest_sealed}")
        self.newest_sealed = version
        self.sealed[self.era, version] = fingerprint
        if fingerprint in self.tainted:
            return
        committed = self.committed.get((self.era, version))
        begun = self.lineages.get((self.era, version.lineage))
        if committed is not None:
            parent = self.sealed.get((self.era, Version(version.lineage, version.outer_step - 1)))
            self._require(parent is not None, f"{version} was sealed before its parent")
            if parent is not None and parent not in self.tainted:
                expected = mix(parent, committed[1])
                self._require(fingerprint == expected, f"{version} is not its parent plus the committed average")
        elif begun is not None and begun.version == version and begun.parent != NO_VERSION:
            parent = self.sealed.get((self.era, begun.parent))
            if begun.cause == "resume":
                self._require(fingerprint == parent, f"{version} does not continue {begun.parent}: false authority")
        else:
            self._require(begun is not None and begun.version == version, f"{version} was sealed out of nowhere")

    def _begun(self, change: LineageBegun) -> None:
        lineage = change.version.lineage
        if change.cause == "adopted":
            return
        self._require((self.era, lineage) not in self.lineages, f"lineage {lineage} was begun twice")
        self.lineages[self.era, lineage] = change
        if change.cause == "origin":
            self._require(self.newest_sealed == NO_VERSION, f"{change.worker_id} became origin of a run with history")
            strangers = [name for name, (version, _) in self.holders.items() if version != NO_VERSION]
            self._require(
                not (self.era and strangers), f"an origin was named beside {strangers}, who hold an unknown history"
            )
        if change.cause == "resume":
            self.num_resumes += 1
            self._require(
                (self.era, change.parent) in self.sealed, f"{change.version} resumes {change.parent}, never sealed"
            )
            for name, (version, value) in self.holders.items():
                if (self.era, version) in self.committed and value not in self.tainted and version > change.parent:
                    good = self.sealed.get((self.era, version), value) == value
                    same = version.lineage == self.newest_sealed.lineage
                    self._require(not (good and same), f"{change.version} loses {version}, which {name} holds")

    def applied(self, name: str, epoch: int, version: Version, digest: bytes, era: int) -> None:
        """A worker applied a step that it believes committed."""
        known = self.committed.get((era, version))
        self._require(known == (epoch, digest), f"{name} applied {version} of epoch {epoch}, which is not committed")

    def trains(self, name: str, before: Version, after: Version) -> None:
        """A process goes on training from ``after``; it trained from ``before``."""
        # A lineage whose beginner was lost before its seal is void: whoever was in it goes back to the history.
        sealed = (self.era, before) in self.sealed
        self._require(after >= before or not sealed, f"{name} went back from {before} to {after}")

    @staticmethod
    def _require(condition: bool, what: str) -> None:
        if not condition:
            raise Violation(what)
