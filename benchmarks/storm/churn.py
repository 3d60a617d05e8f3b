"""A run of joins and leaves: every few steps a worker goes, and one that the run has never seen comes."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.storm.fleet import START_SECONDS, Fleet
from benchmarks.storm.timeline import outer_step

FIRST_STEP = 10
"""Before it nothing happens."""


def churn(fleet: Fleet, rounds: int, outer_steps: int, tell: Callable[[str], None] = lambda _: None) -> None:
    """Let ``rounds`` workers leave and as many join, spread over ``outer_steps``; return when those are taken.

    The longest-serving worker leaves, every other time by SIGKILL; the newcomer has a new name. The next one leaves
    only when the newcomer has committed.
    """
    timeline = fleet.timeline
    members = list(fleet.names)
    every = (outer_steps - 2 * FIRST_STEP) / rounds
    for number in range(rounds):
        _reach(fleet, round(FIRST_STEP + number * every))
        leaver, newcomer = members.pop(0), f"n{number}"
        program = fleet.expect_end(leaver)
        if number % 2:
            program.kill()
        else:
            program.tell("finish")
            fleet.until(lambda program=program: not program.alive, f"{leaver} leaves")
        timeline.joins.append((time.monotonic(), leaver, "left"))
        program.close()
        del fleet.running[leaver]
        began = time.monotonic()
        fleet.start_worker(newcomer)
        fleet.until(
            lambda newcomer=newcomer, began=began: fleet.commits_of(newcomer, began) is not None,
            f"{newcomer} commits",
        )
        members.append(newcomer)
        timeline.joins.append((time.monotonic(), newcomer, "joined"))
        tell(f"{leaver} left, {newcomer} is in after {time.monotonic() - began:.1f} s")
    _reach(fleet, outer_steps)
    timeline.ended_at = time.monotonic()


def _reach(fleet: Fleet, step: int) -> None:
    def reached() -> bool:
        fleet.check_processes()
        return bool(fleet.timeline.commits) and outer_step(fleet.timeline.commits[-1].version) >= step

    fleet.until(reached, f"step {step}", START_SECONDS + 10.0 * step)
