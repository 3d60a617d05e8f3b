"""The demo's story: what happens to the run, in which order, and what is awaited after each act.

::

    3 workers start -> a 4th joins -> the first is killed and comes back -> bits flip, verify names them, resync heals
        -> all are killed -> one resumes from disk

Each act waits for what it caused, so the story goes as fast as the run and never by the clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from recovery.demo.children import Child, Children
from recovery.demo.reports import COORDINATOR, DEMO, Entry, Record, ScenarioFailed
from recovery.errors import BadConfiguration, DonorBusy
from recovery.types import Version

START_SECONDS = 90.0
"""For a process to start, import its libraries and get its state."""
STEP_SECONDS = 60.0
"""For the next few outer steps."""
ORDER_SECONDS = 30.0
"""For an operator's order."""
NUM_FLIPPED_TENSORS = 3
GATHER_MIN_WAIT_SECONDS = 20.0
"""How long a boundary waits at least for a worker that lives; a dead one is known at once."""
CHECKPOINT_EVERY = 2
"""Outer steps between two checkpoints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScenarioSettings:
    """What a user may choose of the demo."""

    workers: int = 4
    """All workers, the one that joins mid-run included."""
    outer_steps: int = 20
    """Outer steps of the first lineage, at least; it goes on until every act has taken place."""
    inner_steps: int = 12
    seed: int = 0
    run_id: str = "demo"

    def __post_init__(self) -> None:
        if self.workers < 3:
            raise BadConfiguration(f"--workers {self.workers}: the demo needs 3 or more, so that a majority survives")
        if self.outer_steps < 1 or self.inner_steps < 2:
            raise BadConfiguration("--outer-steps must be 1 or more and --inner-steps 2 or more")
        if not 0 <= self.seed < 2**31:
            raise BadConfiguration(f"--seed {self.seed} must be between 0 and {2**31 - 1}")


class Operator(Protocol):
    """What the demo asks of the coordinator, as any operator could."""

    def status(self) -> Mapping[str, object]:
        """Return what ``recovery status`` shows, as plain values."""

    def verify(self, worker_id: str, timeout_seconds: float) -> Sequence[str]:
        """Hash a worker's memory again; return the names of the tensors that differ from the sealed version."""

    def resync(self, worker_id: str, timeout_seconds: float) -> str:
        """Order a worker to take its state from peers again; return what it says when it has."""

    def watch(
        self, on_event: Callable[[str, Mapping[str, object]], None], on_lost: Callable[[str], None]
    ) -> contextlib.AbstractContextManager[None]:
        """Call ``on_event`` with the name and fields of each of the coordinator's events while the context lasts."""


class Scenario:
    """Runs the story once. ``connect`` makes the operator's client for the coordinator's address."""

    def __init__(
        self,
        settings: ScenarioSettings,
        record: Record,
        children: Children,
        folder: Path,
        connect: Callable[[str], contextlib.AbstractContextManager[Operator]],
    ) -> None:
        self._settings = settings
        self._record = record
        self._children = children
        self._folder = folder
        self._connect = connect
        self._address = ""
        self._workers: dict[str, Child] = {}

    def run(self) -> None:
        """Run all acts.

        Raises:
            ScenarioFailed: a process ended by itself, or something awaited did not happen in time.
        """
        self._start_coordinator()
        with self._connect(self._address) as operator, operator.watch(self._on_coordinator_event, self._record.fail):
            self._start_run()
            self._join()
            self._kill_and_return()
            self._flip_and_heal(operator)
            self._train_to_the_end(operator)
            self._lose_everything()
            self._resume(operator)

    # Acts

    def _start_coordinator(self) -> None:
        self._act("the coordinator starts")
        port_file = self._folder / "coordinator.port"
        state = self._folder / "coordinator"
        state.mkdir(parents=True, exist_ok=True)
        child = self._children.start_coordinator(
            [
                *("--listen", "127.0.0.1:0", "--new-run", "--run-id", self._settings.run_id),
                *("--state-dir", str(state), "--port-file", str(port_file)),
                *("--expected-workers", str(self._settings.workers - 1)),
                *("--inner-steps", str(self._settings.inner_steps)),
                *("--save-every", str(CHECKPOINT_EVERY)),
                # Several workers share a core here: a slow one is a busy machine, not a straggler to leave out.
                *("--gather-min-wait", str(GATHER_MIN_WAIT_SECONDS)),
                # All workers are killed on purpose here: nobody is expected back.
                *("--expected-return", "1"),
            ]
        )
        deadline = time.monotonic() + START_SECONDS
        while not (port_file.is_file() and port_file.read_text().strip()):
            if not child.running:
                raise ScenarioFailed(f"the coordinator ended before it listened:\n{child.log_tail()}")
            if time.monotonic() > deadline:
                raise ScenarioFailed(f"the coordinator did not write {port_file} within {START_SECONDS:.0f} s")
            time.sleep(0.02)
        self._address = port_file.read_text().strip()

    def _start_run(self) -> None:
        first = self._worker_ids[:-1]
        self._act(f"{len(first)} workers start: the coordinator makes one the origin, it gives its state to the others")
        for worker_id in first:
            self._start_worker(worker_id)
        for worker_id in first:
            self._await_state(worker_id)
        self._await_applied(first, more_steps=2)

    def _join(self) -> None:
        newcomer = self._worker_ids[-1]
        self._act(f"{newcomer} joins while the others train")
        self._start_worker(newcomer)
        self._await_state(newcomer)
        self._await_applied(self._worker_ids, more_steps=2)

    def _kill_and_return(self) -> None:
        victim = self._worker_ids[0]
        survivors = self._worker_ids[1:]
        self._act(f"{victim}, which the run began with, is killed (SIGKILL) while all average: that epoch is void")
        child = self._workers[victim]
        began = self._record.seconds
        child.command({"command": "hold", "stage": "averaging"})
        self._record.wait_for(
            f"{victim} in the middle of a boundary",
            lambda entries: _last(entries, began, lambda e: e.kind == "held" and e.process == _process(child)),
            timeout_seconds=STEP_SECONDS,
        )
        child.kill()
        self._await_applied(survivors, more_steps=1)
        self._act(f"{victim} starts again")
        self._start_worker(victim)
        self._await_state(victim)
        self._await_applied(self._worker_ids, more_steps=2)

    def _flip_and_heal(self, operator: Operator) -> None:
        worker_id = self._worker_ids[1]
        child = self._workers[worker_id]
        self._act(f"random bits flip in the outer copy of {worker_id}, chosen by that process itself")
        self._verify(operator, worker_id, "before")
        self._await_inner_step(worker_id)
        began = self._record.seconds
        child.command({"command": "flip", "seed": self._settings.seed, "num_tensors": NUM_FLIPPED_TENSORS})
        self._record.wait_for(
            f"the flip in {worker_id}",
            lambda entries: _last(entries, began, lambda e: e.kind == "flipped" and e.process == _process(child)),
            timeout_seconds=STEP_SECONDS,
        )
        self._verify(operator, worker_id, "damaged")
        self._act(f"resync of {worker_id} is ordered by RPC")
        with ThreadPoolExecutor(1, "demo-resync") as thread:
            resync = thread.submit(operator.resync, worker_id, ORDER_SECONDS)
            child.command({"command": "go_on"})
            detail = resync.result()
        self._record.add(DEMO, "resynced", {"worker": worker_id, "detail": detail})
        self._await_state(worker_id, since=began)
        self._verify(operator, worker_id, "healed")
        self._await_applied(self._worker_ids, more_steps=2)

    def _train_to_the_end(self, operator: Operator) -> None:
        target = Version(1, self._settings.outer_steps)
        self._act(f"the run goes on to outer step {target.outer_step}")
        self._record.wait_for(
            f"outer step {target.outer_step}",
            lambda entries: _last(entries, 0.0, lambda e: e.kind == "VersionSealed" and e.version >= target),
            timeout_seconds=STEP_SECONDS + 3.0 * self._settings.outer_steps,
        )
        self._record.wait_for(
            "a saved checkpoint",
            lambda entries: _last(entries, 0.0, lambda e: e.kind == "CheckpointSaved"),
            timeout_seconds=STEP_SECONDS,
        )
        self._status(operator, "lineage 1")

    def _lose_everything(self) -> None:
        self._act("all workers are killed (SIGKILL)")
        began = self._record.seconds
        for child in self._workers.values():
            child.kill()

        def all_noticed(entries: Sequence[Entry]) -> bool | None:
            lost = {e.text("worker_id") for e in _since(entries, began) if e.kind == "WorkerLost"}
            return lost.issuperset(self._worker_ids) or None

        self._record.wait_for("the coordinator's notice of every loss", all_noticed, timeout_seconds=STEP_SECONDS)

    def _resume(self, operator: Operator) -> None:
        worker_id = self._worker_ids[1]
        self._act(f"{worker_id} starts alone: the newest verified checkpoint begins a new lineage")
        child = self._start_worker(worker_id)
        state = self._await_state(worker_id)
        self._await_applied([worker_id], more_steps=2)
        self._status(operator, "lineage 2")
        child.expect_end()
        child.command({"command": "finish", "at": state.version.outer_step + 3})
        code = child.wait(STEP_SECONDS)
        if code != 0:
            raise ScenarioFailed(f"{worker_id} was told to finish and ended with exit code {code}\n{child.log_tail()}")

    # Pieces

    @property
    def _worker_ids(self) -> list[str]:
        return [f"worker-{index}" for index in range(self._settings.workers)]

    def _act(self, what: str) -> None:
        self._record.add(DEMO, "act", {"what": what})

    def _start_worker(self, worker_id: str) -> Child:
        index = self._worker_ids.index(worker_id)
        launch = self._children.launches(worker_id) + 1
        settings = {
            "coordinator": self._address,
            "run_id": self._settings.run_id,
            "worker_id": worker_id,
            "worker_index": index,
            "num_workers": self._settings.workers,
            "inner_steps": self._settings.inner_steps,
            "checkpoint_url": str(self._folder / "checkpoints"),
            "checkpoint_every": CHECKPOINT_EVERY,
            "seed": self._settings.seed + 1000 * index + launch,
        }
        child = self._children.start_worker(worker_id, settings)
        self._workers[worker_id] = child
        return child

    def _on_coordinator_event(self, name: str, fields: Mapping[str, object]) -> None:
        self._record.add(COORDINATOR, name, fields)

    def _verify(self, operator: Operator, worker_id: str, when: str) -> None:
        deadline = time.monotonic() + ORDER_SECONDS
        while True:
            try:
                different = sorted(operator.verify(worker_id, ORDER_SECONDS))
                break
            except DonorBusy:
                # The worker took its outer step while its memory was hashed: the next version is asked instead.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self._record.add(DEMO, "verified", {"worker": worker_id, "when": when, "different": different})

    def _status(self, operator: Operator, when: str) -> None:
        self._record.add(DEMO, "status", {"when": when, **operator.status()})

    def _await_state(self, worker_id: str, *, since: float = 0.0) -> Entry:
        process = _process(self._workers[worker_id])
        return self._record.wait_for(
            f"the state of {worker_id}",
            lambda entries: _last(entries, since, lambda e: e.kind == "state" and e.process == process),
            timeout_seconds=START_SECONDS,
        )

    def _await_inner_step(self, worker_id: str) -> Entry:
        """Return the worker's next inner step that is neither the first nor the last of its phase."""
        process = _process(self._workers[worker_id])
        began = self._record.seconds
        middle = range(1, max(2, self._settings.inner_steps - 1))
        return self._record.wait_for(
            f"an inner step of {worker_id}",
            lambda entries: _last(
                entries,
                began,
                lambda e: e.kind == "inner" and e.process == process and e.number("inner_step") in middle,
            ),
            timeout_seconds=STEP_SECONDS,
        )

    def _await_applied(self, worker_ids: Sequence[str], *, more_steps: int) -> None:
        """Return when all of ``worker_ids`` applied the same ``more_steps`` versions from now on, sealed."""
        began = self._record.seconds
        processes = [_process(self._workers[worker_id]) for worker_id in worker_ids]

        def common(entries: Sequence[Entry]) -> bool | None:
            recent = _since(entries, began)
            by_process: dict[tuple[str, int], set[Version]] = {process: set() for process in processes}
            sealed = set()
            for entry in recent:
                if entry.kind == "applied" and entry.process in by_process:
                    by_process[entry.process].add(entry.version)
                elif entry.kind == "VersionSealed":
                    sealed.add(entry.version)
            return len(sealed.intersection(*by_process.values())) >= more_steps or None

        self._record.wait_for(
            f"{more_steps} outer step(s) by {', '.join(worker_ids)}", common, timeout_seconds=STEP_SECONDS
        )


def _process(child: Child) -> tuple[str, int]:
    return child.source, child.launch


def _since(entries: Sequence[Entry], seconds: float) -> Iterator[Entry]:
    """Yield the entries later than ``seconds``, newest first."""
    for entry in reversed(entries):
        if entry.seconds < seconds:
            return
        yield entry


def _last(entries: Sequence[Entry], since: float, matches: Callable[[Entry], bool]) -> Entry | None:
    return next((entry for entry in _since(entries, since) if matches(entry)), None)
