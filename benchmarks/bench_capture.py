"""What capturing the private parts costs the step in which it happens, beside idle steps and a blocking copy.

    python -m benchmarks.bench_capture [--layers 16] [--width 2048] [--rounds 12] [--threads 1]

Idle and capturing steps are interleaved in one process. Budget: the worst step of a capture costs at most
max(5 ms, copy time - forward/backward time + 20 %) over the median idle step; the first capture is reported apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from recovery.clock import SystemClock
from recovery.events import EventSink, Recorder, SnapshotCaptured
from recovery.snapshot import SnapshotConfig, Snapshots
from recovery.state.parts import WorkerState
from recovery.types import GIB, Incarnation, PartName, RunId, Version, WorkerId, WorkerRef

RESULTS = Path(__file__).parent / "results"


@dataclass
class Rig:
    """A DiLoCo worker of ``layers`` square matrices, alone: its outer average is its own pseudo-gradient."""

    layers: int
    width: int
    batch: int = 16

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(self.layers)]
        self.model = nn.Sequential(*blocks, nn.BatchNorm1d(self.width))
        self.outer = {name: p.detach().clone().requires_grad_() for name, p in self.model.named_parameters()}
        self.outer_optimizer = torch.optim.SGD(self.outer.values(), lr=0.7, momentum=0.9, nesterov=True)
        self.inner_optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.inner_optimizer, lambda step: 1 / (1 + step / 100))
        self.state = WorkerState(
            live=self.model,
            outer_params=self.outer,
            outer_optimizer=self.outer_optimizer,
            inner_optimizer=self.inner_optimizer,
            scheduler=self.scheduler,
        )
        self.input = torch.randn(self.batch, self.width)

    def forward_backward(self) -> float:
        """One forward and backward; return its seconds."""
        began = time.perf_counter()
        self.inner_optimizer.zero_grad()
        self.model(self.input).square().mean().backward()
        return time.perf_counter() - began

    def inner_step(self, snapshots: Snapshots) -> float:
        """One whole inner step, as the agent runs it; return its seconds."""
        began = time.perf_counter()
        self.forward_backward()
        self.inner_optimizer.step()
        self.scheduler.step()
        self.state.local_progress.inner_step += 1
        snapshots.inner_boundary()
        return time.perf_counter() - began

    def prepare_outer(self) -> None:
        """Pseudo-gradients stand in the outer parameters' gradients."""
        for name, p in self.model.named_parameters():
            self.outer[name].grad = self.outer[name].detach() - p.detach()

    def outer_step(self) -> None:
        """The outer step; its pre-hook is the guard."""
        self.outer_optimizer.step()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.outer[name])
        self.state.run_progress.outer_step += 1
        self.state.local_progress.inner_step = 0

    def snapshots(self, events: EventSink, config: SnapshotConfig | None = None) -> Snapshots:
        """Return this worker's snapshots, not started."""
        worker = WorkerRef(WorkerId("bench"), Incarnation("1"))
        return Snapshots(
            self.state,
            config or SnapshotConfig(budget_bytes=8 * GIB),
            run_id=RunId("bench"),
            worker=worker,
            events=events,
            clock=SystemClock(),
        )


def part_tensors(state: WorkerState, names: Sequence[PartName]) -> list[torch.Tensor]:
    """Return the live tensors of these parts."""
    found = []
    for name in names:
        found += [tensor for tensor in state.read_part(name).tensors if isinstance(tensor, torch.Tensor)]
    return found


def seconds_of(action: Callable[[], object]) -> float:
    """Return how long ``action`` takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def copy_seconds(tensors: list[torch.Tensor], repeats: int = 5) -> tuple[float, float]:
    """Return the seconds of a copy into fresh memory, and the median of copies into memory touched before."""
    began = time.perf_counter()
    copies = [tensor.clone() for tensor in tensors]
    fresh = time.perf_counter() - began

    def again() -> None:
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)

    return fresh, statistics.median(seconds_of(again) for _ in range(repeats))


def quantile(values: list[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def write_record(name: str, record: dict[str, object]) -> Path:
    """Write the record with the machine's facts, dated, and print it."""
    RESULTS.mkdir(exist_ok=True)
    whole = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
            "load_average": os.getloadavg()[0],
        },
        **record,
    }
    path = RESULTS / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.json"
    text = json.dumps(whole, indent=2)
    path.write_text(text + "\n")
    print(text)
    return path


def main(argv: list[str] | None = None) -> dict[str, object]:
    """Run the benchmark and return its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1, help="training's; the copies run on another core")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)

    rig = Rig(options.layers, options.width, options.batch)
    events = Recorder()
    idle: list[float] = []
    captures: list[dict[str, float]] = []
    version = Version(1, 0)
    with rig.snapshots(events) as snapshots:
        snapshots.publish(version)
        for _ in range(3):
            rig.inner_step(snapshots)
        for number in range(options.rounds):
            idle += [rig.inner_step(snapshots) for _ in range(6)]
            before = snapshots.stall.serving_seconds
            future = snapshots.lease_private(f"joiner-{number}", version)
            steps = []
            while not future.done():
                steps.append(rig.inner_step(snapshots))
            steps.append(rig.inner_step(snapshots))
            lease = future.result()
            lease.release("done")
            del lease, future
            threading.Event().wait(0.3)  # the memory goes back, as between two joiners
            captures.append(
                {
                    "steps": len(steps),
                    "worst_step_seconds": max(steps),
                    "counted_stall_seconds": snapshots.stall.serving_seconds - before,
                }
            )
        forward_backward = statistics.median(rig.forward_backward() for _ in range(10))
        fresh, warm = copy_seconds(part_tensors(rig.state, rig.state.private_copied_names))
        stall = stall_record(snapshots)

    captured = events.of(SnapshotCaptured)
    median = statistics.median(idle)
    allowed = max(0.005, (warm - forward_backward) * 1.2)
    later = captures[1:]
    worst = statistics.median(c["worst_step_seconds"] for c in later) - median
    record: dict[str, object] = {
        "private_bytes": captured[-1].num_bytes,
        "copied_on_training_thread_bytes": captured[-1].copied_on_training_thread_bytes,
        "idle_step_seconds": {"median": median, "p99": quantile(idle, 0.99)},
        "forward_backward_seconds": forward_backward,
        "copy_seconds": {"warm": warm, "fresh": fresh},
        "first_capture": captures[0],
        "later_captures": {
            "worst_step_over_idle_median_seconds": worst,
            "allowed_seconds": allowed,
            "counted_stall_seconds": statistics.median(c["counted_stall_seconds"] for c in later),
        },
        "stall_by_cause": stall,
        "captures": captures,
    }
    write_record("capture", record)
    return record


def stall_record(snapshots: Snapshots) -> dict[str, dict[str, float]]:
    """Return the stall account in plain values."""
    return {
        cause: {"times": s.times, "seconds": s.seconds, "worst_seconds": s.worst_seconds, "bytes": s.num_bytes}
        for cause, s in snapshots.stall.by_cause().items()
    }


if __name__ == "__main__":
    main()
