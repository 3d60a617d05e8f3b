"""Simulated schedules of a whole run: ``python -m tests.protocol.simulate --seed N`` replays one, line by line."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from protos.recovery.v1 import operations_pb2
from recovery.control import run_state, succession
from recovery.control.membership import Member, Standing, placed
from recovery.control.policy import RunPolicy
from recovery.control.record import ORIGIN, HistoryRecord, Voter
from recovery.types import NO_VERSION
from tests.protocol.sim_oracle import Violation, mix
from tests.protocol.sim_world import World

FAULT_WINDOWS = (5.0, 5.0, 8.0, 16.0)
"""Until when faults strike: a run that has just begun is hit as well as one that has gone on for a while."""

QUIET_LIMIT = 240.0
BUGS = ("apply-before-commit", "forget-outcome", "trust-highest-step", "origin-by-arrival")


@dataclass(frozen=True)
class Result:
    """What a schedule came to."""

    seed: int
    violation: str
    log: list[str]
    num_inputs: int
    num_commits: int
    num_resumes: int
    num_ties: int
    faults: tuple[str, ...]
    struck: dict[str, int]


def policy_of(world_random: int) -> RunPolicy:
    return RunPolicy(
        run_id="run",
        min_participants=1 + (world_random % 4 == 0),
        origin_wait_seconds=1.0,
        gather_max_wait_seconds=6.0,
        gather_min_wait_seconds=0.5,
        stall_after_seconds=20.0,
        lease_seconds=4.0,
        return_wait_seconds=0.5 + 1.5 * (world_random % 3),
        expected_return_seconds=5.0,
        forget_after_seconds=7.0,
        offer_wait_seconds=1.0,
        offer_answer_seconds=10.0,
        max_epoch_seconds=20.0,
        seal_wait_seconds=5.0,
        adopt_wait_seconds=60.0,
        order_timeout_seconds=30.0,
    )


def simulate(seed: int, bug: str = "", *, keep_log: bool = False) -> Result:
    """Run one schedule: faults for a while, then quiet, in which the run must come to life again."""
    names = ["a", "b", "c", "d"][: 2 + seed % 3]
    world = World(seed, names, policy_of(seed // 3), bug, keep_log=keep_log)
    faults: list[str] = []
    violation = ""
    try:
        with _seeded(bug):
            world.start_coordinator()
            for name in names:
                world.at(world.random.uniform(0.0, 3.0), world.start, name)
            world.wild = world.random.random() < 0.3
            until = world.random.choice(FAULT_WINDOWS)
            _schedule_faults(world, names, until, faults)
            world.run_until(until)
            _quiet(world, names)
    except (Violation, AssertionError, RuntimeError, KeyError, ValueError, AttributeError, TypeError) as error:
        violation = f"{type(error).__name__}: {error}"
        if not isinstance(error, Violation):
            import traceback

            world.log.extend(traceback.format_exc().splitlines())
    oracle = world.oracle
    return Result(
        seed,
        violation,
        world.log,
        world.num_inputs,
        oracle.num_commits,
        oracle.num_resumes,
        oracle.num_ties,
        tuple(faults),
        dict(world.struck),
    )


def _schedule_faults(world: World, names: list[str], until: float, faults: list[str]) -> None:
    random = world.random

    def restart_coordinator() -> None:
        world.after(random.uniform(0.1, 6.0), world.start_coordinator)

    world.restart_of_coordinator = restart_coordinator

    def kill(name: str) -> None:
        world.kill(name)
        world.after(random.choice((0.1, 1.0, 8.0)) * random.uniform(0.5, 1.5), lambda: world.start(name))

    def kill_all() -> None:
        for name in names:
            kill(name)

    def crash() -> None:
        world.kill_coordinator()
        restart_coordinator()

    def crash_between_effects() -> None:
        world.crash_after = random.randrange(0, 8)

    def lose() -> None:
        world.kill_coordinator()
        world.lose_state_dir()
        restart_coordinator()

    def corrupt_state(name: str) -> None:
        process = world.processes[name]
        if process is not None and process.alive and process.held != NO_VERSION:
            process.value = mix(process.value, b"flip")
            process.lent = dict.fromkeys(process.lent, process.value)
            world.oracle.tainted.add(process.value)
            world.note(process)
            world.struck["corrupt-state"] += 1

    def slow(name: str) -> None:
        process = world.processes[name]
        if process is not None:
            process.slow = 8.0
            world.struck["slow"] += 1

    def cut(name: str) -> None:
        process = world.processes[name]
        if process is not None:
            world.cut(process)

    kinds: dict[str, Callable[[str], None]] = {
        "kill": kill,
        "kill-all": lambda name: kill_all(),
        "crash": lambda name: crash(),
        "crash-between-effects": lambda name: crash_between_effects(),
        "freeze": lambda name: world.freeze(name, random.choice((1.0, 6.0, 15.0)) * random.uniform(0.5, 1.5)),
        "cut": cut,
        "corrupt-average": world.planes.corrupt_next.add,
        "corrupt-state": corrupt_state,
        "slow": slow,
        "resync": lambda name: world.operate(operations_pb2.ResyncRequest(worker_id=name)),
        "rollback": lambda name: world.operate(operations_pb2.RollbackRequest(worker_id=name)),
        "lose-state-dir": lambda name: lose(),
    }
    weights = [5, 1, 3, 3, 4, 4, 1, 1, 1, 1, 0.5, 0.3]
    for _ in range(random.randrange(0, 7)):
        kind = random.choices(list(kinds), weights)[0]
        name, when = random.choice(names), random.uniform(2.0, until - 1.0)
        faults.append(f"{when:.2f} {kind} {name}")

        def strike(kind: str = kind, name: str = name) -> None:
            world.say(f"fault {kind} {name}")
            kinds[kind](name)

        world.at(when, strike)


def _quiet(world: World, names: list[str]) -> None:
    world.say("quiet")
    world.wild = False
    world.planes.corrupt_next.clear()
    world.crash_after = None
    world.start_coordinator()
    for name in names:
        process = world.processes[name]
        if process is not None and process.alive:
            if process.frozen:
                process.thaw()
            process.slow = 1.0
            if process.connection is not None:
                world.cut(process)  # what the wild network swallowed is made good by a new stream
        world.start(name)
    until = world.now + QUIET_LIMIT
    goal_commits = 0
    together = -1

    def goal() -> bool:
        nonlocal goal_commits, together
        oracle = world.oracle
        if oracle.num_commits != together:
            together = oracle.num_commits
            goal_commits = goal_commits + 1 if oracle.last_commit_size == len(names) else 0
        if goal_commits < 2:
            return False
        holders = [world.processes[name] for name in names]
        return len({(p.held, p.value) for p in holders if p is not None and p.alive}) == 1

    while world.now < until:
        if world.run_until(min(until, world.now + 5.0), goal):
            return
        if any("no worker has a checkpoint" in reason for reason in world.exits[-4:]) and world.is_hopeless():
            return  # said by name to whoever asked
        world.mend()
    states = ", ".join(f"{n} {p.mode} {p.held}" for n, p in world.processes.items() if p is not None)
    waits = world.machine.status(world.now) if world.machine is not None else None
    lines = "; ".join(f"{w.worker.worker_id}: {w.waiting_for}" for w in waits.workers) if waits is not None else ""
    raise Violation(f"no life {QUIET_LIMIT:g} s after the last fault: {states}. {lines}")


@contextmanager
def _seeded(bug: str) -> Iterator[None]:
    """Put a known bug into the machine: the simulation must find it."""
    if bug == "trust-highest-step":
        with mock.patch.object(run_state, "placed", _placed_by_step):
            yield
    elif bug == "origin-by-arrival":
        with mock.patch.object(succession.SuccessionDesk, "_succeed", _origin_by_arrival):
            yield
    else:
        yield


def _placed_by_step(record: HistoryRecord, member: Member, *, beginning: Voter | None) -> tuple[Standing, str]:
    found = placed(record, member, beginning=beginning)
    highest = member.held != NO_VERSION and member.held.outer_step >= record.committed.outer_step
    return (Standing.READY, "") if highest and found[0] is Standing.QUEUED else found


def _origin_by_arrival(self: succession.SuccessionDesk) -> None:
    run = self._run
    if run.live_in(*run_state.AUTHORITIES):
        run.outlook = ""
        return
    first = sorted(run.live(), key=lambda member: member.attached_at)
    if first:
        self._beginnings.begin(first[0], first[0].held.outer_step, ORIGIN)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this schedule and print it")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--bug", choices=BUGS, default="")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        result = simulate(arguments.seed, arguments.bug, keep_log=True)
        sys.stdout.write("\n".join(result.log) + "\n")
        sys.stdout.write(f"faults: {', '.join(result.faults) or 'none'}\n")
        sys.stdout.write(f"seed {result.seed}: {result.violation or 'all invariants hold'}\n")
        return int(bool(result.violation))
    started, failed, inputs, commits, resumes, ties = time.perf_counter(), 0, 0, 0, 0, 0
    for seed in range(arguments.first, arguments.first + arguments.count):
        result = simulate(seed, arguments.bug)
        inputs, commits = inputs + result.num_inputs, commits + result.num_commits
        resumes, ties = resumes + result.num_resumes, ties + result.num_ties
        if result.violation:
            failed += 1
            sys.stdout.write(f"seed {seed}: {result.violation}\n")
    took = time.perf_counter() - started
    sys.stdout.write(
        f"{arguments.count} schedules in {took:.1f} s ({arguments.count / took:.0f}/s), {failed} failed; "
        f"{inputs} inputs, {commits} commits, {resumes} resumes, {ties} pauses\n"
    )
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
