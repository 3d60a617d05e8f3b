"""A virtual clock, network, disks and a coordinator's host, around the very machine that runs in production."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from protos.recovery.v1 import coordinator_pb2, operations_pb2
from recovery.control.inputs import Attached, Detached, Drop, Effect, Operated, Persist, Received, Tell, Tick
from recovery.control.inputs import Input as MachineInput
from recovery.control.policy import RunPolicy
from recovery.control.record import ABORTED, OPEN, EpochClosed, HistoryRecord, copy_of
from recovery.control.run import RunMachine
from recovery.types import NO_VERSION, Version, WorkerRef
from tests.protocol.sim_oracle import Oracle, Violation
from tests.protocol.sim_planes import DataPlanes
from tests.protocol.sim_worker import Process

LEASE_SECONDS = 4.0


class Connection:
    """One stream of one process to one life of the coordinator: in order and whole until it breaks, unless wild."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        self.boot = world.boot
        self.era = world.oracle.era
        self.broken = False
        self.up_at = self.down_at = 0.0

    def _times(self, last: float) -> tuple[float, ...]:
        world = self.world
        at = world.now + world.random.uniform(0.001, 0.03)
        if world.wild:
            chance = world.random.random()
            if chance < 0.02:
                return ()
            if chance < 0.04:
                return (at, at + world.random.uniform(0.0, 2.0))
            if chance < 0.08:
                return (at + world.random.uniform(0.0, 2.0),)
        return (at if at > last else last,)

    def up(self, message: coordinator_pb2.WorkerMessage) -> None:
        for at in self._times(self.up_at):
            if at > self.up_at:
                self.up_at = at
            self.world.at(at, self.world.receive, self, message)

    def down(self, message: coordinator_pb2.CoordinatorMessage) -> None:
        for at in self._times(self.down_at):
            if at > self.down_at:
                self.down_at = at
            self.world.at(at, self._deliver, message)

    def _deliver(self, message: coordinator_pb2.CoordinatorMessage) -> None:
        if not self.broken and self.process.alive and self.process.connection is self:
            kind = message.WhichOneof("kind")
            assert kind is not None
            self.process.hear(getattr(message, kind))


class World:
    """Everything outside the machine."""

    def __init__(self, seed: int, names: list[str], policy: RunPolicy, bug: str = "", *, keep_log: bool = True) -> None:
        self.keep_log = keep_log
        self.random = random.Random(seed)
        self.policy = policy
        self.bug = bug
        self.now = 0.0
        self.wild = False
        self.oracle = Oracle()
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._lives = itertools.count(1)
        self.processes: dict[str, Process | None] = dict.fromkeys(names)
        self.disks: dict[str, list[tuple[Version, bytes, int]]] = {"": []}
        self.planes = DataPlanes(self)
        self.log: list[str] = []
        self.boot = 0
        self.machine: RunMachine | None = None
        self.durable = HistoryRecord("run")
        self.streams: dict[WorkerRef, Connection] = {}
        self.crash_after: int | None = None
        """Effects that the coordinator still carries out before it dies."""
        self._wake_at: float | None = None
        self.num_inputs = 0
        self.exits: list[str] = []
        self.struck: Counter[str] = Counter()
        """Faults that reached a victim."""
        self._requests = itertools.count(1)
        self.restart_of_coordinator: Callable[[], None] = lambda: None

    # Time

    def at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (when if when > self.now else self.now, next(self._order), what, arguments))

    def after(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), what, arguments))

    def run_until(self, when: float, goal: Callable[[], bool] | None = None) -> bool:
        """Let the world run; True as soon as ``goal`` holds."""
        heap = self._heap
        while heap and heap[0][0] <= when:
            self.now, _, what, arguments = heapq.heappop(heap)
            what(*arguments)
            if goal is not None and goal():
                return True
        self.now = when
        return False

    def say(self, what: str) -> None:
        self.log.append(f"{self.now:8.3f} {what}")

    # The coordinator's host

    def start_coordinator(self) -> None:
        if self.machine is not None:
            return
        self.boot += 1
        for epoch in self.durable.epochs.values():  # as History.load does
            if epoch.verdict == OPEN:
                epoch.verdict = ABORTED
                self.durable.num_aborted += 1
        self.oracle.restarted()
        self.durable.generation += 1
        self.machine = RunMachine(self.policy, copy_of(self.durable))
        self.say(f"coordinator starts, sealed {self.durable.sealed}")
        self._feed(Tick())

    def kill_coordinator(self) -> None:
        if self.machine is None:
            return
        self.struck["crash"] += 1
        self.say("coordinator dies")
        self.machine = None
        self.crash_after = None
        for connection in list(self.streams.values()):
            self._break_at_worker(connection, self.random.uniform(0.0, 0.1))
        self.streams.clear()
        self.oracle.holders.clear()

    def lose_state_dir(self) -> None:
        """An operator begins anew under the old run id: the history is gone."""
        self.struck["lose-state-dir"] += 1
        self.say("state directory lost")
        self.oracle.begin_era()
        self.durable = HistoryRecord("run", token=f"e{self.oracle.era}-")

    def _feed(self, event: MachineInput) -> None:
        if self.machine is None:
            return
        self.num_inputs += 1
        machine = self.machine
        self._carry_out(machine.handle(event, self.now))
        wake = machine.next_wakeup()
        if wake is not None and wake <= self.now:
            raise Violation(f"the machine wants to be woken at {wake}, which is not in the future")
        if machine is self.machine and wake is not None and wake != self._wake_at:
            self._wake_at = wake
            self.at(wake, self._tick, machine, wake)

    def _tick(self, machine: RunMachine, wake: float) -> None:
        if machine is self.machine and wake == self._wake_at:
            self._wake_at = None
            self._feed(Tick())

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if self.crash_after is not None:
                if self.crash_after == 0:
                    self.struck["crash-between-effects"] += 1
                    self.kill_coordinator()
                    self.restart_of_coordinator()
                    return
                self.crash_after -= 1
            match effect:
                case Persist(record=change):
                    if self.bug != "forget-outcome" or not isinstance(change, EpochClosed):
                        self.durable.apply(change)
                    if self.keep_log:
                        self.say(f"stored {change}")
                    self.oracle.stored(change)
                case Tell(worker=worker, message=message):
                    connection = self.streams.get(worker)
                    if connection is not None:
                        connection.down(message)
                case Drop(worker=worker):
                    connection = self.streams.pop(worker, None)
                    if connection is not None:
                        self._break_at_worker(connection, self.random.uniform(0.05, 0.1))
                        self.oracle.holders.pop(worker.worker_id, None)
                case _:
                    pass

    def receive(self, connection: Connection, message: coordinator_pb2.WorkerMessage) -> None:
        if connection.boot != self.boot or self.machine is None:
            return
        if self.streams.get(connection.process.ref) is connection:
            self._feed(Received(connection.process.ref, message))

    # Streams

    def connect(self, process: Process) -> None:
        if not process.alive or process.connection is not None:
            return
        if process.frozen or self.machine is None:
            self.after(self.random.uniform(0.2, 0.8), self.connect, process)
            return
        connection = Connection(self, process)
        process.connection = connection
        self.streams[process.ref] = connection
        self.note(process)
        self.say(f"{process.ref.incarnation} attaches with {process.held} ({process.mode})")
        self._feed(Attached(process.ref, process.hello()))

    def note(self, process: Process) -> None:
        """Tell the oracle what an attached process holds."""
        connection = process.connection
        if connection is not None and self.streams.get(process.ref) is connection:
            self.oracle.holders[process.name] = (process.held, process.value)

    def _break_at_worker(self, connection: Connection, seconds: float) -> None:
        def notice() -> None:
            connection.broken = True
            process = connection.process
            if process.connection is connection:
                process.connection = None
                self.after(self.random.uniform(0.1, 0.5), self.connect, process)

        connection.broken = connection.broken or seconds == 0.0
        self.after(seconds, notice)

    def _break_at_coordinator(self, connection: Connection, seconds: float, reason: str) -> None:
        def notice() -> None:
            ref = connection.process.ref
            if connection.boot == self.boot and self.streams.get(ref) is connection:
                del self.streams[ref]
                self.oracle.holders.pop(ref.worker_id, None)
                self._feed(Detached(ref, reason))

        self.after(seconds, notice)

    def cut(self, process: Process) -> None:
        """The stream breaks; either end may take the lease's time to notice."""
        connection = process.connection
        if connection is None:
            return
        self.struck["cut"] += 1
        self.say(f"cut {process.ref.incarnation}")
        connection.broken = True
        slow = self.random.random() < 0.3
        self._break_at_worker(connection, LEASE_SECONDS if slow else self.random.uniform(0.0, 0.1))
        self._break_at_coordinator(connection, LEASE_SECONDS if slow else self.random.uniform(0.0, 0.1), "cut")

    # Processes

    def start(self, name: str) -> None:
        known = self.processes[name]
        if known is not None and known.alive:
            return
        process = Process(self, name, next(self._lives))
        self.processes[name] = process
        self.connect(process)

    def kill(self, name: str) -> None:
        process = self.processes[name]
        if process is None or not process.alive:
            return
        self.struck["kill"] += 1
        self.say(f"kill {process.ref.incarnation} in {process.mode}")
        process.alive = False
        process.task += 1
        connection = process.connection
        process.connection = None
        self.planes.others_notice(process)
        if connection is not None:
            connection.broken = True
            self._break_at_coordinator(connection, self.random.uniform(0.0, 0.1), "killed")

    def exit(self, process: Process, reason: str) -> None:
        """A process ends with a named error; somebody starts it again."""
        self.exits.append(reason)
        self.say(f"{process.ref.incarnation} exits: {reason}")
        self.kill(process.name)
        self.after(self.random.uniform(0.5, 2.0), self.start, process.name)

    def freeze(self, name: str, seconds: float) -> None:
        process = self.processes[name]
        if process is None or not process.alive or process.frozen:
            return
        self.struck["freeze"] += 1
        self.say(f"freeze {process.ref.incarnation} in {process.mode} for {seconds:.1f} s")
        process.frozen = True
        connection = process.connection

        def lease_is_over() -> None:
            if process.frozen and process.alive and connection is not None and not connection.broken:
                self._break_at_coordinator(connection, 0.0, "silent")
                self._break_at_worker(connection, 0.0)

        def wake() -> None:
            if process.alive and process.frozen:
                self.say(f"thaw {process.ref.incarnation}")
                process.thaw()

        self.after(LEASE_SECONDS, lease_is_over)
        self.after(seconds, wake)

    # Disks

    def save(self, process: Process, *, shared: bool) -> None:
        if shared or self.random.random() < 0.5:
            where = "" if shared else process.name
            self.disks.setdefault(where, []).append((process.held, process.value, self.oracle.era))

    def checkpoints_of(self, name: str) -> list[tuple[Version, bytes]]:
        found = self.disks[""] + self.disks.get(name, [])
        return [(version, value) for version, value, era in found if era == self.oracle.era]

    def is_hopeless(self) -> bool:
        """Return whether nobody alive and no disk holds any state of the history: then only a person can help."""
        if self.oracle.holders and any(version != NO_VERSION for version, _ in self.oracle.holders.values()):
            return False
        return not any(
            self.durable.on_path(version) and self.durable.seals.get(version) == value
            for disk in self.disks.values()
            for version, value, era in disk
            if era == self.oracle.era
        )

    # The operator

    def operate(self, request: object) -> None:
        self._feed(Operated(f"r{next(self._requests)}", request))  # type: ignore[arg-type]

    def mend(self) -> None:
        """Do what the run's status asks a person to do."""
        if self.machine is None:
            return
        status = self.machine.status(self.now)
        holders = [w.worker.worker_id for w in status.workers if w.alive and w.HasField("version") and not w.poisoned]
        if status.paused and holders:
            self.oracle.num_ties += 1
            self.say(f"operator: rollback to {holders[0]} because {status.paused}")
            self.operate(operations_pb2.RollbackRequest(worker_id=holders[0]))
        elif status.paused:
            self.say(f"operator: rollback to {self.durable.sealed} from disk because {status.paused}")
            self.operate(operations_pb2.RollbackRequest(version=status.sealed))
        for worker in status.workers:
            _, named, stranger = worker.waiting_for.partition("`recovery adopt --worker ")
            if worker.alive and named:
                self.say(f"operator: adopt {stranger[:-1]}")
                self.operate(operations_pb2.AdoptRequest(worker_id=stranger[:-1]))
                return
