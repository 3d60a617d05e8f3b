"""How soon a run commits again after a fault: beyond the usual time, from the moment at which the failure is known.

Three workers of ``tests.support`` on loopback; one is hit where it stands in the averaging, or the coordinator is hit
while one stands there. Known is a worker's loss when the coordinator says so, a coordinator's when it is back: its port
open again, its process awake, its path mended. Measured is by how much the next commit comes later than the later of
that moment and the time at which it was due: one usual period after the last commit.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from recovery.errors import RecoveryError
from tests.support.boundary_faults import Fault, Scene, commits, newest, until, wait_commit

FAULTS = (Fault.KILL, Fault.STOP, Fault.CUT)
SIZE = 3
_POLL_SECONDS = 0.002
_UNDISTURBED = 8
"""Commits from which the usual period is taken."""


class Clockwork:
    """Notes when each worker said that it applied a step, and when the coordinator said that it lost one."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._over = threading.Event()
        self._seen: dict[int, int] = {}
        self.commits: list[tuple[float, int]] = []
        """When a step was first applied anywhere, and which."""
        self.losses: list[tuple[float, str]] = []
        self._threads = [
            threading.Thread(target=self._watch_workers, name="bench-commits"),
            threading.Thread(target=self._watch_coordinator, name="bench-losses", daemon=True),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._threads[0].join()

    def _watch_workers(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            for worker in list(self._scene.workers.values()):
                at = self._seen.get(id(worker), 0)
                heard = worker.heard[at:]
                self._seen[id(worker)] = at + len(heard)
                for message in heard:
                    if message.get("event") == "BoundaryStage" and message["stage"] == "applied":
                        step = int(message["version"].split(".k")[1])
                        if not self.commits or step > self.commits[-1][1]:
                            self.commits.append((time.monotonic(), step))

    def _watch_coordinator(self) -> None:
        while not self._over.is_set():
            try:
                with self._scene.operator() as operator:
                    for response in operator.watch():
                        if response.event == "WorkerLost":
                            self.losses.append((time.monotonic(), response.fields_json))
            except RecoveryError:  # it is the coordinator that was hit: watched again when it is back
                self._over.wait(0.05)

    def lost_since(self, moment: float) -> float | None:
        """Return when the first loss after ``moment`` was known."""
        return next((at for at, _ in list(self.losses) if at >= moment), None)

    def beyond(self, known: float, period: float) -> float | None:
        """Return by how much the first commit after ``known`` was late; None: there is none yet."""
        found = list(self.commits)
        after = next((index for index, (at, _) in enumerate(found) if at >= known), None)
        if after is None:
            return None
        due = max(known, found[after - 1][0] + period) if after else known
        return found[after][0] - due


def usual_period(clock: Clockwork) -> float:
    """Return the median time between two undisturbed commits."""
    already = len(clock.commits)
    until(lambda: len(clock.commits) > already + _UNDISTURBED, "undisturbed commits")
    times = [at for at, _ in clock.commits[already:]]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def hit_worker(scene: Scene, clock: Clockwork, name: str, fault: Fault, period: float) -> dict[str, float]:
    """Hit one worker in the averaging; the others commit without it; it comes back."""
    hit_at = time.monotonic()
    scene.hit(name, "averaging", fault)
    struck_at = time.monotonic()
    until(lambda: clock.lost_since(hit_at) is not None, f"the coordinator lost {name}")
    known = clock.lost_since(hit_at) or struck_at
    until(lambda: clock.beyond(known, period) is not None, "the next commit")
    beyond = clock.beyond(known, period)
    for other in scene.others(name):
        wait_commit(other, max(newest(each) for each in scene.others(name)))
    scene.heal(name, fault)
    scene.all_go_on()
    return {"beyond": beyond or 0.0, "noticed": max(0.0, known - struck_at)}


def hit_coordinator(scene: Scene, clock: Clockwork, name: str, fault: Fault, period: float) -> dict[str, float]:
    """Hit the coordinator while a worker stands in the averaging, until all have noticed; then it comes back."""
    worker = scene.stand_at(name, "averaging")
    struck_at = time.monotonic()
    noticed = scene.hit_coordinator(fault)
    worker.command(do="go_on")
    scene.wait_for_losses(list(scene.workers.values()), noticed)
    all_noticed = time.monotonic()
    scene.heal_coordinator(fault)
    known = time.monotonic()
    until(lambda: clock.beyond(known, period) is not None, "the next commit")
    beyond = clock.beyond(known, period)
    scene.all_go_on()
    return {"beyond": beyond or 0.0, "noticed": all_noticed - struck_at}


def measure(repeats: int) -> list[dict[str, Any]]:
    """Return a row a role and fault: medians and worst, in seconds."""
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Scene(Path(folder), SIZE) as scene,
        Clockwork(scene) as clock,
    ):
        scene.average_together()
        period = usual_period(clock)
        for role, hit in (("worker", hit_worker), ("coordinator", hit_coordinator)):
            for fault in FAULTS:
                found = [hit(scene, clock, f"w{turn % SIZE}", fault, period) for turn in range(repeats)]
                beyond = [each["beyond"] for each in found]
                rows.append(
                    {
                        "hit": role,
                        "fault": fault.value,
                        "repeats": repeats,
                        "beyond_median_s": round(statistics.median(beyond), 3),
                        "beyond_worst_s": round(max(beyond), 3),
                        "noticed_median_s": round(statistics.median(each["noticed"] for each in found), 3),
                        "usual_period_s": round(period, 3),
                    }
                )
                print(rows[-1], flush=True)
        assert all(commits(worker) for worker in scene.workers.values())
    return rows
