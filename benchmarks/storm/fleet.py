"""One run of real processes: a coordinator and workers in their places of a network, watched from outside."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.storm.network import HUB, Network
from benchmarks.storm.programs import Program
from benchmarks.storm.timeline import Commit, Counted, Footprint, Roster, Timeline
from benchmarks.storm.training import INNER_STEPS, SHARDS
from recovery.control.operator_client import OperatorClient
from recovery.control.security import SecurityConfig
from recovery.errors import RecoveryError
from recovery.types import Address

logger = logging.getLogger(__name__)

RUN_ID = "storm"
COORDINATOR = "coordinator"
START_SECONDS = 90.0
"""Longest wait for something that has to happen at a run's start or end."""
_COUNT_SECONDS = 0.5
_FOOTPRINT_SECONDS = 5.0


class Fleet:
    """Processes of one run, by name; use it as a context manager.

    ``timeline`` fills itself while they run. A worker that ends without being told or struck is noted there, and
    started again, as a supervisor would.
    """

    def __init__(
        self,
        folder: Path,
        network: Network,
        workers: Sequence[str],
        *,
        seed: int,
        phase_seconds: float,
        agent: dict[str, Any] | None = None,
    ) -> None:
        """Keep what a run consists of; nothing is started.

        Args:
            folder: For state and logs.
            network: Where the processes stand.
            workers: Names at the start; more may be started later.
            seed: Of the weights and the data.
            phase_seconds: Least time of an inner phase; zero: as fast as it goes.
            agent: Other fields of the workers' ``AgentConfig``.
        """
        self.folder = folder
        self.timeline = Timeline()
        self.names = list(workers)
        self.running: dict[str, Program] = {}
        self.network = network
        self._plan = {"seed": seed, "phase_seconds": phase_seconds, "insecure": True}
        self._agent = {"inner_steps_per_phase": INNER_STEPS, **(agent or {})}
        self._starts: dict[str, int] = {}
        self._expected_to_end: set[int] = set()
        self._address = Address(network.listen_host(), 0)
        self._changed = threading.Condition(threading.RLock())
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._count, name="storm-count", daemon=True),
            threading.Thread(target=self._measure, name="storm-footprints", daemon=True),
        ]

    # Life

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.start_coordinator(new_run=True)
            for name in self.names:
                self.start_worker(name)
        except BaseException:
            self._end_processes()
            raise
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._end_processes()

    def _end_processes(self) -> None:
        for program in self.running.values():
            self._expected_to_end.add(program.pid)
            program.close()

    def start_coordinator(self, *, new_run: bool = False) -> None:
        """Start the coordinator, after the first time on the same port and state; returns once it listens then."""
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        arguments = [
            *("-m", "recovery.cli.main", "coordinator", "--run-id", RUN_ID, "--json", "--insecure"),
            *("--listen", str(self._address), "--state-dir", str(self.folder / "state")),
            *("--port-file", str(port_file), "--expected-workers", str(len(self.names)), "--save-every", "0"),
            *(["--new-run"] if new_run else []),
        ]
        self._start(COORDINATOR, HUB, arguments)
        if new_run:
            self.until(lambda: self._all_alive() and self.coordinator_listens, "the coordinator listens")
            self._address = Address.parse(port_file.read_text().strip())

    @property
    def coordinator_listens(self) -> bool:
        """Whether the present coordinator takes connections."""
        port_file = self.folder / "port"
        return port_file.exists() and bool(port_file.read_text().strip())

    def start_worker(self, name: str) -> None:
        """Start a worker's process; the one before it of that name has ended."""
        if name not in self.names:
            self.names.append(name)
        agent = {
            **self._agent,
            "coordinator": str(self.network.coordinator_seen_from(name, self._address)),
            "run_id": RUN_ID,
            "worker_id": name,
            "data_host": self.network.data_host(name),
        }
        plan = {**self._plan, "shard": self.names.index(name) % SHARDS, "agent": agent}
        self._start(name, name, ["-m", "benchmarks.storm.worker", json.dumps(plan)])

    def _start(self, name: str, host: str, arguments: Sequence[str]) -> None:
        before = self.running.get(name)
        if before is not None:
            before.close()
        self._starts[name] = self._starts.get(name, 0) + 1
        self.running[name] = Program(
            name,
            arguments,
            prefix=self.network.prefix(host),
            log=self.folder / f"{name}.log",
            heard=self._heard,
            complained=self._complained,
        )

    def expect_end(self, name: str) -> Program:
        """Return a process that is about to be ended on purpose."""
        program = self.running[name]
        self._expected_to_end.add(program.pid)
        return program

    def finish(self) -> None:
        """End all workers after their present boundary, and wait until they are gone."""
        workers = [self.expect_end(name) for name in self.running if name != COORDINATOR]
        for program in workers:
            program.tell("finish")
        self.until(lambda: not any(program.alive for program in workers), "the workers end")
        for program in workers:
            if code := program.close():
                self.timeline.unexplained.append(
                    f"{program.name} ended with exit code {code} after it was told to finish"
                )

    def check_processes(self) -> None:
        """Note processes that ended by themselves; start workers again."""
        for name, program in list(self.running.items()):
            if program.alive or program.pid in self._expected_to_end:
                continue
            code = program.close()
            self.timeline.unexplained.append(f"{name} (process {program.pid}) ended by itself with exit code {code}")
            self._expected_to_end.add(program.pid)
            if name == COORDINATOR:
                self.start_coordinator()
            else:
                self.start_worker(name)

    # What is seen

    def until(self, true: Any, what: str, seconds: float = START_SECONDS) -> None:
        """Return once something is so.

        Raises:
            TimeoutError: it never was.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while not true():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"never: {what}; the logs are in {self.folder}")
                self._changed.wait(0.05)

    def begin(self) -> None:
        """Return once every worker has committed; the run's time begins."""
        self.until(self._all_committed, "every worker commits")
        self.timeline.began_at = time.monotonic()

    def _all_alive(self) -> bool:
        for name, program in self.running.items():
            if not program.alive:
                raise RuntimeError(f"{name} ended with exit code {program.close()} at the start: see {self.folder}")
        return True

    def _all_committed(self) -> bool:
        return self._all_alive() and {commit.worker for commit in self.timeline.commits} >= set(self.names)

    def operator(self) -> OperatorClient:
        """Return a client of the coordinator's operations."""
        return OperatorClient(self._address, SecurityConfig(insecure=True), run_id=RUN_ID)

    def _heard(self, program: Program, at: float, told: dict[str, Any]) -> None:
        timeline = self.timeline
        with self._changed:
            match told:
                case {"say": "commit"}:
                    timeline.commits.append(
                        Commit(
                            at=told["at"],
                            worker=program.name,
                            version=told["version"],
                            loss=told["loss"],
                            held_out=told["held_out"],
                        )
                    )
                case {"say": "event", "event": "StateRestored"}:
                    timeline.restored.append((told["at"], program.name, told["version"], told["source"]))
                case {"say": "error"}:
                    timeline.unexplained.append(f"{program.name} said {told['error']}: {told['message']}")
                case {"event": "RosterIssued", "fields": fields}:
                    timeline.rosters.append(
                        Roster(
                            at=at,
                            epoch=fields["epoch"],
                            members=tuple(fields["members"]),
                            missing=tuple(fields["missing"]),
                            waited=fields["waited_seconds"],
                        )
                    )
                case {"event": "EpochEnded", "fields": fields}:
                    timeline.epochs.append((at, fields["epoch"], fields["verdict"], fields["reason"]))
                case {"event": "WorkerLost", "fields": fields}:
                    self._detected(fields["worker_id"], at)
                case {"event": "RunPausedEvent", "fields": fields}:
                    timeline.unexplained.append(f"the run paused: {fields['reason']}")
                case {"event": "LineageStarted", "fields": fields} if fields["cause"] != "origin":
                    timeline.unexplained.append(f"a lineage began: {fields}")
            self._changed.notify_all()

    def _complained(self, program: Program, at: float, line: str) -> None:
        with self._changed:
            if "lost the coordinator" in line:
                self._detected(COORDINATOR, at)

    def _detected(self, victim: str, at: float) -> None:
        for fault in reversed(self.timeline.faults):
            if fault.victim == victim and fault.detected_at is None and fault.struck_at < at:
                fault.detected_at = at
                return

    def _count(self) -> None:
        operator = self.operator()
        try:
            while not self._closing.wait(_COUNT_SECONDS):
                try:
                    listed = operator.list(timeout_seconds=1.0)
                except RecoveryError as error:
                    logger.debug("no status: %s", error)  # the coordinator is struck now
                    continue
                running = [p for n, p in list(self.running.items()) if n != COORDINATOR and p.alive and not p.frozen]
                self.timeline.counted.append(
                    Counted(
                        at=time.monotonic(),
                        alive=listed.alive,
                        ready=listed.ready,
                        participating=listed.participating,
                        running=len(running),
                    )
                )
        finally:
            operator.close()

    def _measure(self) -> None:
        while not self._closing.wait(_FOOTPRINT_SECONDS):
            for name, program in list(self.running.items()):
                # It may end at any moment, or has not become what it will be yet.
                with contextlib.suppress(psutil.Error, OSError):
                    process = psutil.Process(program.pid)
                    times = process.cpu_times()
                    label = f"{name}#{self._starts[name]}"
                    self.timeline.footprints.setdefault(label, []).append(
                        Footprint(
                            at=time.monotonic(),
                            rss_bytes=process.memory_info().rss,
                            threads=process.num_threads(),
                            descriptors=process.num_fds(),
                            cpu_seconds=times.user + times.system,
                        )
                    )
