"""What serving costs a training worker: step times, boundaries, throughput and memory, beside idle and a naive copy.

    python -m benchmarks.bench_stall [--layers 16] [--width 2048] [--batch 64] [--rounds 5] [--inner-steps 36]
                                     [--rate-mb 50] [--placements split free]

Idle and serving phases are interleaved in one process. While it serves, another process joins over real links at a
capped rate: it takes private parts, then outer ones, then private ones again, and goes on across the outer step that
ends the phase. A serving phase in which no capture ended counts for nothing: the run fails. Training has one thread.

*split*: all of the donor's threads share one core, the joiner has the other; so whatever serving costs in processor
time is taken from training. *free*: both may use both cores. Budgets: median step +1 ms, p99 +5 ms (free); steps per
second at least 0.95 of idle, median of the rounds (split); at a boundary at most 1.2 times the memcpy time of what had
to be saved. The naive copy is a blocking deep copy of what a joiner needs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.bench_capture import Rig, copy_seconds, part_tensors, quantile, seconds_of, stall_record, write_record
from benchmarks.stall_joiner import ServedJoiner
from recovery.events import GuardCopied, Recorder, SnapshotCaptured
from recovery.snapshot import SnapshotConfig, Snapshots
from recovery.types import GIB, Version

PLACEMENTS = {"split": ({0}, {1}), "free": ({0, 1}, {0, 1})}
"""Cores of the donor and of the joiner."""


@dataclass
class Phases:
    """What was seen in phases of one kind."""

    steps: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    worst: list[float] = field(default_factory=list)
    boundaries: list[float] = field(default_factory=list)
    captures: list[int] = field(default_factory=list)
    service_shares: list[float] = field(default_factory=list)
    """Processor time of all threads but the training one, over the phase's time."""

    def add(self, times: list[float], boundary: float, captures: int, service_seconds: float) -> None:
        self.steps += times
        self.rates.append(len(times) / sum(times))
        self.worst.append(max(times))
        self.boundaries.append(boundary)
        self.captures.append(captures)
        self.service_shares.append(service_seconds / sum(times))

    def record(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "step_seconds": {
                "median": statistics.median(self.steps),
                "mean": statistics.fmean(self.steps),
                "p99": quantile(self.steps, 0.99),
                "worst": max(self.steps),
            },
            "steps": len(self.steps),
            "worst_step_of_each_phase": self.worst,
            "steps_per_second": self.rates,
            "boundary_seconds": statistics.median(self.boundaries),
            "captures": self.captures,
            "service_share_of_a_core": statistics.median(self.service_shares),
        }


def main(argv: list[str] | None = None) -> dict[str, object]:
    """Run the benchmark and return its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inner-steps", type=int, default=36)
    parser.add_argument("--rate-mb", type=float, default=50.0)
    parser.add_argument("--threads", type=int, default=1, help="training's")
    parser.add_argument("--placements", nargs="+", choices=sorted(PLACEMENTS), default=["split", "free"])
    parser.add_argument("--prefault", action="store_true", help="keep memory touched also while nobody joins")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)

    rig = Rig(options.layers, options.width, options.batch)
    config = SnapshotConfig(budget_bytes=8 * GIB, prefault=options.prefault)
    load = os.getloadavg()[0]
    version = Version(1, 0)
    record: dict[str, object] = {"batch": options.batch, "prefault": options.prefault}
    for placement in options.placements:
        events = Recorder()
        with rig.snapshots(events, config) as snapshots:
            joiner = ServedJoiner(snapshots, rig.state.layout_digest(), options.rate_mb * 1e6)
            donor_cores, joiner_cores = PLACEMENTS[placement]
            pin(os.getpid(), donor_cores)
            pin(joiner.pid, joiner_cores)
            found, version = serve_and_rest(
                rig, snapshots, joiner, events, version, options.rounds, options.inner_steps
            )
            joiner.close()
            record[placement] = {
                **found,
                "joiner": {"sent_bytes": joiner.sent_bytes, "whole_parts": joiner.whole},
                "peak_vault_bytes": snapshots.vault.peak_bytes,
                "guard": [
                    {"copied_bytes": event.copied_bytes, "seconds": event.training_thread_seconds}
                    for event in events.of(GuardCopied)
                ],
                "stall_by_cause": stall_record(snapshots),
            }
    pin(os.getpid(), set(range(os.cpu_count() or 1)))
    names = [*rig.state.replicated_names, *rig.state.private_copied_names]
    fresh, warm = copy_seconds(part_tensors(rig.state, names))
    outer_fresh, outer_warm = copy_seconds(part_tensors(rig.state, rig.state.replicated_names))
    private_fresh, private_warm = copy_seconds(part_tensors(rig.state, rig.state.private_copied_names))
    record |= {
        "state_bytes": sum(t.nbytes for t in part_tensors(rig.state, names)),
        "naive_copy_seconds": {"fresh": fresh, "warm": warm},
        "outer_copy_seconds": {"fresh": outer_fresh, "warm": outer_warm},
        "private_copy_seconds": {"fresh": private_fresh, "warm": private_warm},
        "load_average": {"at_start": load, "at_end": os.getloadavg()[0]},
        "guard_without_copy_ahead": guard_against_memcpy(rig, version, options.rounds),
    }
    write_record("stall", record)
    return record


def serve_and_rest(
    rig: Rig,
    snapshots: Snapshots,
    joiner: ServedJoiner,
    events: Recorder,
    version: Version,
    rounds: int,
    inner_steps: int,
) -> tuple[dict[str, object], Version]:
    """Train ``rounds`` idle and as many serving phases in turn; return what was seen, and the version after them.

    Raises:
        SystemExit: no capture ended within a serving phase: what would be recorded is not what was asked for.
    """
    kinds = {"idle": Phases(), "serving": Phases()}
    first: dict[str, object] = {}
    for number in range(-1, 2 * rounds + 2):
        kind = "serving" if number % 2 else "idle"
        serves = kind == "serving" and number > 0
        snapshots.publish(version)
        snapshots.manifest(version, 60)
        if serves:
            joiner.start()
        captures = len(events.of(SnapshotCaptured))
        service = time.process_time() - time.thread_time()
        times = [rig.inner_step(snapshots) for _ in range(inner_steps if number >= 0 else 3)]
        service = time.process_time() - time.thread_time() - service
        captures = len(events.of(SnapshotCaptured)) - captures
        rig.prepare_outer()
        boundary = seconds_of(snapshots.before_outer_update)
        rig.outer_step()
        if serves:
            joiner.stop()
        version = version.next()
        if number < 0:
            continue  # lazily created state, cold memory
        if serves and not captures:
            raise SystemExit(f"no capture ended within a serving phase of {sum(times):.1f} s: take longer phases")
        if number < 2:  # the first join is reported apart, and the idle phase before it serves nothing
            if serves:
                alone = Phases()
                alone.add(times, boundary, captures, service)
                first = alone.record()
            continue
        kinds[kind].add(times, boundary, captures, service)
    idle, serving = kinds["idle"], kinds["serving"]
    ratios = [with_joiner / without for without, with_joiner in zip(idle.rates, serving.rates, strict=True)]
    worse = [with_joiner - without for without, with_joiner in zip(idle.worst, serving.worst, strict=True)]
    return {
        "idle": idle.record(),
        "serving": serving.record(),
        "median_over_idle_seconds": statistics.median(serving.steps) - statistics.median(idle.steps),
        "p99_over_idle_seconds": quantile(serving.steps, 0.99) - quantile(idle.steps, 0.99),
        "worst_step_over_worst_idle_step_seconds": statistics.median(worse),
        "steps_per_second_ratio": statistics.median(ratios),
        "steps_per_second_ratios": ratios,
        "first_join": first,
    }, version


def pin(pid: int, cores: set[int]) -> None:
    """All threads of ``pid`` run on ``cores``, and so do those that they start."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def guard_against_memcpy(rig: Rig, version: Version, rounds: int) -> dict[str, float]:
    """Return the guard's time for a version of which nothing is verified, over a memcpy of the same bytes.

    Both in turn, in one run, into memory touched before; a reader is frozen with a view in its hands.
    """
    tensors = part_tensors(rig.state, rig.state.replicated_names)
    copies = [tensor.detach().clone() for tensor in tensors]

    def memcpy() -> None:
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor.detach())

    guards, memcpys = [], []
    with rig.snapshots(Recorder(), SnapshotConfig(copy_ahead=False)) as snapshots:
        for number in range(rounds + 1):
            snapshots.publish(version)
            lease = snapshots.lease_outer(version, f"frozen-{number}")
            in_flight = lease.read(0, 0, 1)
            guard = seconds_of(snapshots.before_outer_update)
            again = seconds_of(memcpy)
            lease.release("done")
            del in_flight
            version = version.next()
            if number:  # the first joiner's is not typical
                guards.append(guard)
                memcpys.append(again)
    ratios = [guard / memcpy_ for guard, memcpy_ in zip(guards, memcpys, strict=True)]
    return {
        "guard_seconds": statistics.median(guards),
        "memcpy_seconds": statistics.median(memcpys),
        "over_memcpy": statistics.median(ratios),
    }


if __name__ == "__main__":
    main()
