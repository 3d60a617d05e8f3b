"""Strikes a run with what the plan drew, proves that each fault reached its victim, and ends it."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.storm.fleet import COORDINATOR, Fleet
from benchmarks.storm.plan import Kind, Strike
from benchmarks.storm.timeline import Fault

LEAST_WHOLE = 1
"""Workers that nothing strikes at any moment: without a holder of the history there is no live recovery to look at."""
_TICK_SECONDS = 0.05
BACK_SECONDS = 120.0
"""A victim that is not back so long after the last fault's end counts as not recovered."""


class Weather:
    """Faults of one run, on one thread.

    Args:
        fleet: The run.
        strikes: What is due, oldest first.
        tell: Hears of each strike and return.
        patience_seconds: A worker that is frozen or cut off stays so for up to so much longer, until the coordinator
            has lost it and the others have committed: on a machine however slow, what a test wants to see has happened.
    """

    def __init__(
        self,
        fleet: Fleet,
        strikes: list[Strike],
        tell: Callable[[str], None] = lambda _: None,
        *,
        patience_seconds: float = 0.0,
    ) -> None:
        self._patience_seconds = patience_seconds
        self._fleet = fleet
        self._due = list(strikes)
        self._ongoing: list[Fault] = []
        self._tell = tell

    def blow(self, seconds: float) -> None:
        """Strike for so long after the fleet's beginning, then end what still lasts and wait for the last victim."""
        began = self._fleet.timeline.began_at
        while (now := time.monotonic()) < began + seconds:
            while self._due and began + self._due[0].at <= now and self._strike(self._due[0], began):
                del self._due[0]
            self._look(now)
        self._fleet.timeline.ended_at = began + seconds
        lasting = max((fault.lasts for fault in self._ongoing), default=0.0)
        deadline = time.monotonic() + BACK_SECONDS + self._patience_seconds + lasting
        while not all(fault.back_at for fault in self._fleet.timeline.faults) and time.monotonic() < deadline:
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        for fault in list(self._ongoing):
            if now >= fault.struck_at + fault.lasts + self._longer(fault):
                self._ongoing.remove(fault)
                self._heal(fault)
        for fault in self._fleet.timeline.faults:
            self._follow(fault)
        self._fleet.check_processes()
        time.sleep(_TICK_SECONDS)

    def _longer(self, fault: Fault) -> float:
        if Kind(fault.kind) not in (Kind.STOP, Kind.PARTITION):
            return 0.0
        return self._patience_seconds if fault.detected_at is None or fault.resumed_at is None else 0.0

    def _follow(self, fault: Fault) -> None:
        """Note the run's and the victim's first commits."""
        timeline = self._fleet.timeline
        if fault.resumed_at is None:
            fault.resumed_at = timeline.commit_beyond(fault.struck_step)
        if fault.healed_at is None or fault.back_at is not None:
            return
        victim = "" if fault.victim == COORDINATOR else fault.victim
        fault.back_at = timeline.commit_beyond(fault.healed_step, victim)
        if fault.back_at is not None:
            self._tell(f"{fault.kind} of {fault.victim}: back after {fault.back_at - fault.struck_at:.1f} s")

    def _strike(self, strike: Strike, began: float) -> bool:
        """Strike if somebody may be struck now; otherwise the strike waits."""
        victim = self._victim(strike)
        if victim is None:
            return False
        fleet, now = self._fleet, time.monotonic()
        fault = Fault(
            number=strike.number,
            kind=strike.kind.value,
            victim=victim,
            due_at=began + strike.at,
            struck_at=now,
            struck_step=fleet.timeline.newest_step(),
            lasts=strike.lasts,
        )
        fleet.timeline.faults.append(fault)
        self._tell(f"{strike.kind.value} of {victim}" + (f" for {strike.lasts:.1f} s" if strike.lasts else ""))
        match strike.kind:
            case Kind.KILL:
                fault.felt = fleet.expect_end(victim).kill()
                fault.proof = "ended by SIGKILL"
            case Kind.STOP:
                fault.felt = fleet.running[victim].freeze()
                fault.proof = "the kernel showed it stopped at the fault's beginning and end"
            case Kind.PARTITION:
                fleet.network.cut(victim)
                fault.proof = "packets of it vanished"
            case Kind.SLOW:
                fleet.network.slow(victim)
                fault.proof = "packets of it were late"
            case Kind.COORDINATOR:
                fault.felt = fleet.expect_end(COORDINATOR).kill()
                fault.proof = "ended by SIGKILL"
        self._ongoing.append(fault)
        return True

    def _victim(self, strike: Strike) -> str | None:
        struck = {fault.victim for fault in self._fleet.timeline.faults if fault.back_at is None}
        if strike.kind is Kind.COORDINATOR:
            return COORDINATOR if COORDINATOR not in struck and self._fleet.coordinator_listens else None
        whole = [name for name in strike.preference if name not in struck]
        return whole[0] if len(whole) > LEAST_WHOLE else None

    def _heal(self, fault: Fault) -> None:
        fleet = self._fleet
        match Kind(fault.kind):
            case Kind.KILL:
                fleet.start_worker(fault.victim)
            case Kind.STOP:
                fault.felt = fault.felt and fleet.running[fault.victim].frozen
                fleet.running[fault.victim].thaw()
            case Kind.PARTITION:
                fault.felt = fleet.network.mend(fault.victim)
            case Kind.SLOW:
                fault.felt = fleet.network.speed_up(fault.victim)
            case Kind.COORDINATOR:
                fleet.start_coordinator()
        fault.healed_at, fault.healed_step = time.monotonic(), fleet.timeline.newest_step()
