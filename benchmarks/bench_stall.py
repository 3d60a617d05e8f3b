"""What serving costs a training worker: step times, boundaries, throughput and memory, beside idle and a naive copy.

    python -m benchmarks.bench_stall [--layers 36] [--width 2048] [--rounds 6] [--rate-mb 50] [--threads 1]

Idle and serving phases are interleaved in one process. While it serves, another process joins over real links at a
capped rate: in one phase it takes private parts, in the next outer ones, and goes on across the outer step that ends
the phase. Training has one thread, so that each side has a core of two. Budgets: median step +1 ms, p99 +5 ms; at a
boundary at most 1.2 times the memcpy time of what had to be saved; steps per second at least 0.95 of idle, median of
the rounds. The naive copy is a blocking deep copy of what a joiner needs.
"""

from __future__ import annotations

import argparse
import os
import statistics

import torch

from benchmarks.bench_capture import Rig, copy_seconds, part_tensors, quantile, seconds_of, stall_record, write_record
from benchmarks.stall_joiner import ServedJoiner
from recovery.events import GuardCopied, Recorder, SnapshotCaptured
from recovery.snapshot import SnapshotConfig
from recovery.types import Version


def main(argv: list[str] | None = None) -> dict[str, object]:
    """Run the benchmark and return its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--inner-steps", type=int, default=8)
    parser.add_argument("--rate-mb", type=float, default=50.0)
    parser.add_argument("--threads", type=int, default=1, help="training's")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)

    rig = Rig(options.layers, options.width, options.batch)
    events = Recorder()
    steps: dict[str, list[float]] = {"idle": [], "serving": []}
    rates: dict[str, list[float]] = {"idle": [], "serving": []}
    boundaries: dict[str, list[float]] = {"idle": [], "serving": []}
    first: dict[str, float] = {}
    version = Version(1, 0)
    with rig.snapshots(events) as snapshots:
        joiner = ServedJoiner(snapshots, rig.state.layout_digest(), options.rate_mb * 1e6)
        load = os.getloadavg()[0]
        for number in range(-1, 2 * options.rounds + 2):
            kind = "serving" if number % 2 else "idle"
            serves = kind == "serving" and number > 0
            snapshots.publish(version)
            snapshots.manifest(version, 60)
            if serves:
                joiner.start(private=number % 4 == 1)
            times = [rig.inner_step(snapshots) for _ in range(options.inner_steps)]
            rig.prepare_outer()
            boundary = seconds_of(snapshots.before_outer_update)
            rig.outer_step()
            if serves:
                joiner.stop()
            version = version.next()
            if number < 0:
                continue  # lazily created state, cold memory
            if number == 1:
                first = {"worst_step_seconds": max(times), "boundary_seconds": boundary}
            if number < 2:
                continue  # the first join is reported apart
            steps[kind] += times
            rates[kind].append(len(times) / sum(times))
            boundaries[kind].append(boundary)
        joiner.close()
        names = [*rig.state.replicated_names, *rig.state.private_copied_names]
        fresh, warm = copy_seconds(part_tensors(rig.state, names))
        outer_fresh, outer_warm = copy_seconds(part_tensors(rig.state, rig.state.replicated_names))
        record: dict[str, object] = {
            "state_bytes": sum(t.nbytes for t in part_tensors(rig.state, names)),
            "steps": len(steps["idle"]),
            "step_seconds": {
                kind: {"median": statistics.median(values), "p99": quantile(values, 0.99), "worst": max(values)}
                for kind, values in steps.items()
            },
            "median_over_idle_seconds": statistics.median(steps["serving"]) - statistics.median(steps["idle"]),
            "p99_over_idle_seconds": quantile(steps["serving"], 0.99) - quantile(steps["idle"], 0.99),
            "steps_per_second_ratio": statistics.median(
                serving / idle for idle, serving in zip(rates["idle"], rates["serving"], strict=True)
            ),
            "joiner": {"sent_bytes": joiner.sent_bytes, "whole_states": joiner.whole},
            "boundary_seconds": {kind: statistics.median(values) for kind, values in boundaries.items()},
            "guard": [
                {"copied_bytes": event.copied_bytes, "seconds": event.training_thread_seconds}
                for event in events.of(GuardCopied)
            ],
            "captures": len(events.of(SnapshotCaptured)),
            "first_join": first,
            "naive_copy_seconds": {"fresh": fresh, "warm": warm},
            "outer_copy_seconds": {"fresh": outer_fresh, "warm": outer_warm},
            "peak_vault_bytes": snapshots.vault.peak_bytes,
            "stall_by_cause": stall_record(snapshots),
            "load_average": {"at_start": load, "at_end": os.getloadavg()[0]},
        }
    record["guard_without_copy_ahead"] = guard_against_memcpy(rig, version, options.rounds)
    write_record("stall", record)
    return record


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
