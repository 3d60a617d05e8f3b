"""A run whose boundaries take place when the test says so, and not by the clock: load changes nothing in its order."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from tests.support.fleet import WAIT_SECONDS, Fleet, Worker

PATIENT = ("--gather-min-wait", "100", "--stall-after", "1000")
"""Options of a coordinator that waits for members at their gates, however short their phases are otherwise."""


def step_of(version: str) -> int:
    return int(version.split(".k")[1])


def heard(worker: Worker, event: str) -> list[dict[str, Any]]:
    return [m for m in worker.heard if m["say"] == "event" and m["event"] == event]


class SteeredRun:
    """Members behind gates, and joiners that run freely until they stand at a boundary with the members.

    Args:
        fleet: Whose processes these are; its coordinator is ``PATIENT``.
        plan: Of every worker, as ``Fleet.worker`` takes it.
        gate: The inner step before which members stand until their boundary may take place.
    """

    def __init__(self, fleet: Fleet, plan: dict[str, Any], gate: int = 5) -> None:
        self.fleet = fleet
        self.members: list[Worker] = []
        self.outer_step = 0
        self._plan = plan
        self._gate = gate
        self._joiners: list[Worker] = []
        self._number = 0

    def fill_up(self, count: int) -> None:
        """Have so many members, all of them at the gate."""
        new = [self._start(gate=self._gate) for _ in range(count - len(self.members))]
        self.members += new
        for worker in new:
            worker.wait_said("joined")
        for worker in new:
            worker.wait_said("at_gate")

    def joiner(self, **plan: Any) -> Worker:
        """Start a worker that the run does not have yet."""
        joiner = self._start(**plan)
        self._joiners.append(joiner)
        return joiner

    def advance(self, count: int = 1, *, without: Worker | None = None) -> None:
        """Let so many boundaries take place and return when every member (but one) has taken them."""
        going = [worker for worker in self.members if worker is not without]
        for _ in range(count):
            self.release(*going)
            self.outer_step += 1
            for worker in going:
                worker.wait_boundary(self.outer_step)

    def tell_seal(self, worker: Worker) -> None:
        """Return when a worker knows that the run's newest version is sealed."""
        worker.command(do="hear_seal", outer_step=self.outer_step)
        worker.wait(
            lambda m: m["say"] == "seal_heard" and m["outer_step"] == self.outer_step, f"seal of {self.outer_step}"
        )

    def release(self, *members: Worker) -> None:
        """Let members go to the next boundary; it takes place when all have arrived."""
        for worker in members:
            worker.command(do="pass", outer_step=self.outer_step + 1)

    def admitted(self, joiner: Worker) -> dict[str, Any]:
        """Return what a joiner said when it had joined, once the coordinator waits for it at boundaries, too."""
        joined = joiner.wait_said("joined")
        deadline, pause = time.monotonic() + WAIT_SECONDS, threading.Event()
        with self.fleet.operator() as operator:
            while not any(w.ready and w.worker.worker_id == joiner.name for w in operator.list().workers):
                assert time.monotonic() < deadline, joiner.complaint("was ready")
                pause.wait(0.05)
        return joined

    def kill(self, member: Worker) -> None:
        """End a member's process."""
        self.members.remove(member)
        member.signal(signal.SIGKILL)
        member.end()

    def end_joiners(self) -> None:
        """End every joiner's process: the run is its members again."""
        while self._joiners:
            joiner = self._joiners.pop()
            if joiner.process.poll() is None:
                joiner.signal(signal.SIGKILL)
                joiner.end()

    def _start(self, **plan: Any) -> Worker:
        number, self._number = self._number, self._number + 1
        merged = {**self._plan, **plan, "agent": {**self._plan.get("agent", {}), **plan.get("agent", {})}}
        return self.fleet.worker(f"w{number}", seed=number, **merged)
