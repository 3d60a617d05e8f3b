"""The record of a demo, sorted for the proofs: who held what, from whom, until when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recovery.demo.reports import COORDINATOR, DEMO, Entry
from recovery.types import Version

Process = tuple[str, int]
"""A worker and which of its launches."""

PEERS = "peers"
DISK = "disk"
ORIGIN = "origin"


class NotProved(Exception):
    """A proof's claim is false, or nothing was seen that could show it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """How much had to happen for the proofs to mean anything."""

    workers: int
    outer_steps: int
    num_learning_rates: int = 20

    @property
    def live_recoveries(self) -> int:
        """States from peers: all first workers but the origin, the newcomer, the one that returned, the resync."""
        return self.workers + 1


class History:
    """The record, sorted for the proofs."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = list(entries)
        self.processes: list[Process] = []
        for entry in entries:
            if entry.kind == "started" and entry.source not in (COORDINATOR, DEMO):
                self.processes.append(entry.process)

    def of(self, kind: str, process: Process | None = None) -> list[Entry]:
        """Return the entries of ``kind``, of one process if given, oldest first."""
        return [e for e in self.entries if e.kind == kind and (process is None or e.process == process)]

    def one(self, kind: str, what: str, matches: Callable[[Entry], bool] = lambda _: True) -> Entry:
        """Return the last entry of ``kind`` that matches, or say that there is none."""
        found = [entry for entry in self.of(kind) if matches(entry)]
        if not found:
            raise NotProved(f"never seen: {what}")
        return found[-1]

    def outer_digests(self, version: Version, *, besides: Process | None = None) -> dict[Process, str]:
        """Return each process's digest of the outer state at ``version``."""
        return {
            e.process: e.text("outer_digest")
            for e in self.entries
            if e.kind in ("applied", "state") and e.process != besides and e.version == version
        }

    def live_restorations(self) -> list[Entry]:
        """Return the states that came from peers while the run went on."""
        return [entry for entry in self.of("state") if entry.text("source") == PEERS]

    def until_replaced(self, state: Entry, kind: str) -> list[Entry]:
        """Return a process's entries of ``kind`` from ``state`` until its state was replaced again."""
        found = []
        for entry in self.entries[self.entries.index(state) + 1 :]:
            if entry.process == state.process and entry.kind == "state":
                break
            if entry.process == state.process and entry.kind == kind:
                found.append(entry)
        return found

    def at_epoch(self, processes: Sequence[Process], epoch: float, *, earlier: bool = False) -> list[Entry]:
        """Return what the processes reported of their inner state after ``epoch`` inner steps of the schedule.

        ``earlier``: after ``epoch`` steps, or fewer.
        """
        return [
            e
            for e in self.entries
            if e.kind in ("inner", "state")
            and e.process in processes
            and (e.number("epoch") == epoch or (earlier and e.number("epoch") < epoch))
        ]

    def took_scalars_later(self, state: Entry) -> bool:
        """Return whether this state was caught up: its scalars are of a later cut than its moments."""
        for entry in reversed(self.entries[: self.entries.index(state)]):
            if entry.process != state.process:
                continue
            if entry.kind == "ScalarsRefreshed":
                return True
            if entry.kind in ("state", "inner", "started"):
                return False
        return False

    def donors_of(self, state: Entry) -> list[Process]:
        """Return the processes that gave this state: the launches of its donors that lived then."""
        alive: dict[str, Process] = {}
        for entry in self.entries:
            if entry is state:
                break
            if entry.kind == "started":
                alive[entry.source] = entry.process
        return [alive[donor] for donor in state.texts("donors") if donor in alive]
