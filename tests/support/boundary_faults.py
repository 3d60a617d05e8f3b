"""Faults at named places of a boundary: a run of real processes in which one of them is hit exactly there.

Whoever is hit stands still at the place when it happens (``halt`` of ``tests.support.worker_process``), and every fault
proves that it reached its victim before anything else is looked at.
"""

from __future__ import annotations

import enum
import functools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from recovery.control.operator_client import OperatorClient
from recovery.types import Address
from tests.support.cut_proxy import CutProxy
from tests.support.fleet import WAIT_SECONDS, Fleet, Worker

PLACES = (
    "arriving",
    "arrived",
    "rostered",
    "averaging",
    "averaged",
    "voting",
    "voted",
    "decided",
    "applying",
    "applied",
    "reporting",
    "reported",
)
"""In the order of ``recovery.events.BoundaryStage``."""

REPLICATED = ("outer_params", "outer_optimizer", "run_progress")

INNER_STEPS = 15
STEP_SECONDS = 0.05
"""A phase of 0.75 s: several times what a transfer takes, or joiners would chase the others."""

AWAY_STEPS = 2
"""Boundaries that the survivors commit while the victim is away: the one at which it was hit may be the first."""


class Fault(enum.Enum):
    """What happens to a process."""

    KILL = "kill"
    STOP = "stop"
    """SIGSTOP, and SIGCONT once the others went on."""
    CUT = "cut"
    """Every byte to and from the coordinator vanishes, and nobody is told."""
    CUT_DATA = "cut-data"
    """Every packet of the group that averages vanishes at the victim, and nobody is told; its letters arrive."""


def step_of(version: str) -> int:
    return int(version.split(".k")[1])


def newest(worker: Worker) -> int:
    """Return the newest outer step that the worker reached."""
    return max((step_of(applied["version"]) for applied in commits(worker)), default=0)


def commits(worker: Worker) -> list[dict[str, Any]]:
    """Return the events of the commits that the worker applied; a state that it took from a peer is none."""
    return [m for m in list(worker.heard) if m.get("event") == "BoundaryStage" and m["stage"] == "applied"]


def wait_commit(worker: Worker, outer_step: int) -> None:
    """Return once the worker applied a commit that created ``outer_step`` or a later one, and said what it holds."""
    worker.wait(
        lambda m: m.get("stage") == "applied" and step_of(m["version"]) >= outer_step, f"applied step {outer_step}"
    )
    worker.wait_boundary(outer_step)


def until(true: Callable[[], bool], what: str) -> None:
    """Return once something is so; fails the test if it never is."""
    deadline = time.monotonic() + WAIT_SECONDS
    poll = threading.Event()
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        poll.wait(0.05)


def killed(process: subprocess.Popen[bytes]) -> None:
    """Return once the kernel says that the process ended by SIGKILL."""
    until(lambda: process.poll() is not None, f"process {process.pid} ended")
    assert process.returncode == -signal.SIGKILL


def stopped(process: subprocess.Popen[bytes]) -> None:
    """Return once the kernel says that the process stands still."""
    flags = os.WSTOPPED | os.WNOWAIT | os.WNOHANG
    until(lambda: os.waitid(os.P_PID, process.pid, flags) is not None, f"process {process.pid} stopped")


class Scene:
    """A run of ``size`` workers, each behind a proxy of its own; use it as a context manager.

    ``hit`` and ``heal`` deal with one victim at a time; the victim's name stays the same when its process is replaced.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        *,
        coordinator_options: tuple[str, ...] = (),
        progress_timeout_seconds: float = 5.0,
        plan: dict[str, Any] | None = None,
    ) -> None:
        self._folder = folder
        self._plan: dict[str, Any] = {} if plan is None else plan
        self._progress_timeout_seconds = progress_timeout_seconds
        self._size = size
        self._stack = ExitStack()
        self._fleet = Fleet(folder, *coordinator_options)
        self._proxies: dict[str, CutProxy] = {}
        self._starts = 0
        self.workers: dict[str, Worker] = {}

    def __enter__(self) -> Self:
        with self._stack as stack:
            stack.enter_context(self._fleet)
            target = Address.parse(self._fleet.address)
            for name in (f"w{number}" for number in range(self._size)):
                self._proxies[name] = stack.enter_context(CutProxy(target))
                self.start(name)
            for worker in self.workers.values():
                wait_commit(worker, 1)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def start(self, name: str) -> Worker:
        """Start a process of that name; the one before it, if any, has ended."""
        self._starts += 1
        agent: dict[str, Any] = {
            "coordinator": str(self._proxies[name].address),
            "inner_steps_per_phase": INNER_STEPS,
            "progress_timeout_seconds": self._progress_timeout_seconds,
            "boundary_timeout_seconds": 600.0,  # nothing that a test waits for is freed by it
        }
        plan = {"step_seconds": STEP_SECONDS, **self._plan}
        worker = self._fleet.worker(name, seed=self._starts, agent=agent, **plan)
        self.workers[name] = worker
        return worker

    def others(self, name: str) -> list[Worker]:
        return [worker for other, worker in self.workers.items() if other != name]

    def average_together(self) -> None:
        """Return once everybody took part in one commit: all of them have the connections of one group."""
        until(
            lambda: bool(set.intersection(*({m["epoch"] for m in commits(w)} for w in self.workers.values()))),
            "all workers averaged together",
        )

    def operator(self) -> AbstractContextManager[OperatorClient]:
        """A client of the run's operations."""
        return self._fleet.operator()

    def stand_at(self, name: str, place: str) -> Worker:
        """Return the worker once it stands still at a place of its next boundary."""
        worker = self.workers[name]
        since = len(worker.heard)
        worker.command(do="halt", plan={"event": "BoundaryStage", "when": {"stage": place}})
        halted = worker.wait_said("halted", since=since)
        assert halted["stage"] == place
        return worker

    # A worker is hit

    def hit(self, name: str, place: str, fault: Fault) -> None:
        """Let a fault meet the worker at a place; returns when it is certain that it did."""
        worker = self.stand_at(name, place)
        match fault:
            case Fault.KILL:
                assert worker.process.poll() is None
                worker.signal(signal.SIGKILL)
                killed(worker.process)
                worker.close()
            case Fault.STOP:
                worker.signal(signal.SIGSTOP)
                stopped(worker.process)
            case Fault.CUT:
                proxy = self._proxies[name]
                before = proxy.swallowed
                proxy.cut()
                worker.command(do="go_on")
                until(lambda: proxy.swallowed > before, f"{name} felt that it is cut off")
            case Fault.CUT_DATA:
                raise AssertionError("a data path is cut by ``data_case``")

    def heal(self, name: str, fault: Fault) -> None:
        """End the fault: another process of the same name, or the same one goes on."""
        worker = self.workers[name]
        match fault:
            case Fault.KILL:
                self.start(name)
            case Fault.STOP:
                worker.command(do="go_on")
                worker.signal(signal.SIGCONT)
            case Fault.CUT:
                self._proxies[name].mend()
            case Fault.CUT_DATA:
                raise AssertionError("a cut data path heals with the next group")

    def data_case(self, name: str, place: str) -> None:
        """Cut the connections of one worker's group at a place: the epoch fails, and all go on on a new group."""
        worker = self.workers[name]
        reached = max(newest(each) for each in self.workers.values())
        since = len(worker.heard)
        plan = {"event": "BoundaryStage", "when": {"stage": place}, "cut": True}
        worker.command(do="halt", plan=plan)
        cut = worker.wait_said("data_cut", since=since)
        assert cut["connections"] == self._size - 1, f"{name} averages with {cut['connections']} others"
        worker.wait_said("dropped", since=since)
        for each in self.workers.values():
            wait_commit(each, reached + AWAY_STEPS)
        self.all_go_on()

    def worker_case(self, name: str, place: str, fault: Fault) -> None:
        """Hit one worker at a place: the others go on without it, it comes back, and everybody holds the same."""
        reached = max(newest(worker) for worker in self.workers.values())
        self.hit(name, place, fault)
        for worker in self.others(name):
            wait_commit(worker, reached + AWAY_STEPS)
        self.heal(name, fault)
        self.all_go_on()

    # The coordinator is hit

    def coordinator_case(self, name: str, place: str, fault: Fault) -> None:
        """Hit the coordinator while one worker stands at a place; it comes back, and everybody goes on."""
        worker = self.stand_at(name, place)
        noticed = self.hit_coordinator(fault)
        worker.command(do="go_on")
        self.wait_for_losses(list(self.workers.values()), noticed)
        self.heal_coordinator(fault)
        self.all_go_on()

    def joint_case(self, name: str, place: str, fault: Fault) -> None:
        """Hit one worker at a place, and the coordinator by a kill at the same moment."""
        reached = max(newest(worker) for worker in self.workers.values())
        self.hit(name, place, fault)
        noticed = self.hit_coordinator(Fault.KILL)
        self.wait_for_losses(self.others(name), noticed)
        self.heal_coordinator(Fault.KILL)
        for worker in self.others(name):
            wait_commit(worker, reached + AWAY_STEPS)
        self.heal(name, fault)
        self.all_go_on()

    def hit_coordinator(self, fault: Fault) -> dict[str, int]:
        """Let a fault meet the coordinator; return how often each worker had lost it before."""
        noticed = {each.name: self._losses(each) for each in self.workers.values()}
        coordinator = self._fleet.coordinator
        assert coordinator is not None
        assert coordinator.poll() is None
        match fault:
            case Fault.KILL:
                coordinator.send_signal(signal.SIGKILL)
                killed(coordinator)
            case Fault.STOP:
                coordinator.send_signal(signal.SIGSTOP)
                stopped(coordinator)
            case Fault.CUT:
                for proxy in self._proxies.values():
                    proxy.cut()
            case Fault.CUT_DATA:
                raise AssertionError("a coordinator has no data path")
        return noticed

    def wait_for_losses(self, workers: list[Worker], before: dict[str, int]) -> None:
        for each in workers:
            lost_again = functools.partial(self._lost_more_than, each, before[each.name])
            until(lost_again, f"{each.name} lost the coordinator")

    def _lost_more_than(self, worker: Worker, times: int) -> bool:
        return self._losses(worker) > times

    def heal_coordinator(self, fault: Fault) -> None:
        coordinator = self._fleet.coordinator
        assert coordinator is not None
        match fault:
            case Fault.KILL:
                self._fleet.start_coordinator()
            case Fault.STOP:
                coordinator.send_signal(signal.SIGCONT)
            case Fault.CUT:
                for proxy in self._proxies.values():
                    proxy.mend()
            case Fault.CUT_DATA:
                raise AssertionError("a coordinator has no data path")

    @staticmethod
    def _losses(worker: Worker) -> int:
        return sum("lost the coordinator" in line for line in worker.stderr)

    # What must hold

    def all_go_on(self) -> None:
        """Return once every worker committed more, and held what the others held at every version that they share."""
        reached = max(newest(worker) for worker in self.workers.values())
        for worker in self.workers.values():
            wait_commit(worker, reached + 1)
        self.assert_one_history()

    def reasons_of_aborts(self) -> list[str]:
        """Return why the coordinator ended epochs without a commit."""
        log = (self._folder / "coordinator.log").read_text(errors="replace")
        return [line for line in log.splitlines() if " EpochEnded {" in line and '"aborted"' in line]

    def assert_one_history(self) -> None:
        """Everything that any process, dead or alive, ever held at a version is the same; there is one lineage."""
        held: dict[str, tuple[str, dict[str, str]]] = {}
        for worker in self._fleet.workers:
            for message in [m for m in list(worker.heard) if m["say"] in ("boundary", "joined")]:
                version, parts = message["version"], message["parts"]
                first, expected = held.setdefault(version, (worker.name, parts))
                differing = [part for part in REPLICATED if parts[part] != expected[part]]
                assert not differing, f"{differing} of {version} differ between {first} and {worker.name}"
        with self._fleet.operator() as operator:
            listed = operator.list()
        assert [entry.lineage for entry in listed.lineages] == [1]
        assert not listed.paused
