"""A run of joins and leaves: every few steps one worker goes, and one that the run has never seen comes."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.storm.fleet import START_SECONDS, Fleet
from benchmarks.storm.timeline import outer_step

FIRST_STEP = 10
"""Before it nothing happens."""


def churn(fleet: Fleet, rounds: int, outer_steps: int, tell: Callable[[str], None] = lambda _: None) -> None:
    """Let ``rounds`` workers leave and as many join, spread over ``outer_steps``; return when those are taken.

    In turns: the longest-serving worker is killed, then one with a new name comes; the newcomer comes first, then the
    longest-serving one says goodbye. So there is one worker too few as often as one too many.
    """
    members = list(fleet.names)
    every = (outer_steps - 2 * FIRST_STEP) / rounds
    for number in range(rounds):
        _reach(fleet, round(FIRST_STEP + number * every))
        leaver, newcomer = members.pop(0), f"n{number}"
        if number % 2 == 0:
            _leave(fleet, leaver, abruptly=True)
        took = _join(fleet, newcomer)
        if number % 2:
            _leave(fleet, leaver, abruptly=False)
        members.append(newcomer)
        tell(f"{leaver} left, {newcomer} was in after {took:.1f} s")
    _reach(fleet, outer_steps)
    fleet.timeline.ended_at = time.monotonic()


def _leave(fleet: Fleet, name: str, *, abruptly: bool) -> None:
    program = fleet.expect_end(name)
    if abruptly:
        program.kill()
    else:
        program.tell("finish")
        fleet.until(lambda: not program.alive, f"{name} leaves")
    fleet.timeline.joins.append((time.monotonic(), name, "left"))
    program.close()
    del fleet.running[name]


def _join(fleet: Fleet, name: str) -> float:
    """Start a new worker; return, once it has committed, how long that took."""
    began, step = time.monotonic(), fleet.timeline.newest_step()
    fleet.start_worker(name)
    fleet.until(lambda: fleet.timeline.commit_beyond(step, name) is not None, f"{name} commits")
    fleet.timeline.joins.append((time.monotonic(), name, "joined"))
    return time.monotonic() - began


def _reach(fleet: Fleet, step: int) -> None:
    def reached() -> bool:
        fleet.check_processes()
        return bool(fleet.timeline.commits) and outer_step(fleet.timeline.commits[-1].version) >= step

    fleet.until(reached, f"step {step}", START_SECONDS + 10.0 * step)
