"""What capturing the private parts costs the steps in which it happens, beside idle steps and a blocking copy.

    python -m benchmarks.bench_capture [--layers 16] [--width 2048] [--batch 16] [--rounds 6] [--touch-shares 0.5]

Everything is interleaved in one process. A round is, for each share: a worker that begins to serve, a first joiner (new
memory is touched for it), a second one right after it (that memory is used again), and after each as many idle steps as
its capture took. Budget: the worst step of a capture costs at most max(5 ms, copy time - forward/backward time + 20 %)
over the median idle step. Beside it stands the same figure of the idle steps (the worst of as many over the median):
what the machine does by itself.
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


@dataclass
class Window:
    """The steps from a joiner's question to the step after its capture, and as many idle ones after them."""

    asked: list[float]
    copying: float
    """The step beside which the copies ran."""
    idle: list[float]
    counted_stall_seconds: float
    copier_seconds: float
    """Processor time of the thread that touches and copies."""


def capture_window(rig: Rig, snapshots: Snapshots, events: Recorder, version: Version, holder: str) -> Window:
    """One joiner takes the private parts and leaves; then training goes on alone."""
    before = snapshots.stall.serving_seconds
    copier = thread_seconds("snapshot-copy")
    future = snapshots.lease_private(holder, version)
    asked: list[float] = []
    first_step = rig.state.local_progress.inner_step + 1
    while not future.done():
        asked.append(rig.inner_step(snapshots))
    asked.append(rig.inner_step(snapshots))
    counted = snapshots.stall.serving_seconds - before
    copier = thread_seconds("snapshot-copy") - copier
    cut = events.of(SnapshotCaptured)[-1].cut
    copying = asked[min(cut.inner_step + 1 - first_step, len(asked) - 1)]
    future.result().release("done")
    del future
    return Window(asked, copying, [rig.inner_step(snapshots) for _ in asked], counted, copier)


def thread_seconds(name: str) -> float:
    """Return the processor time that this process's thread ``name`` has used."""
    thread = next(thread for thread in threading.enumerate() if thread.name == name)
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def summary(windows: Sequence[Window], median: float) -> dict[str, float]:
    """Return medians over ``windows``, in seconds over the idle median."""
    over = {
        "worst_step_over_idle_median_seconds": [max(w.asked) - median for w in windows],
        "worst_idle_step_over_idle_median_seconds": [max(w.idle) - median for w in windows],
        "worst_step_over_worst_idle_step_seconds": [max(w.asked) - max(w.idle) for w in windows],
        "copying_step_over_idle_median_seconds": [w.copying - median for w in windows],
        "all_steps_over_idle_seconds": [sum(w.asked) - sum(w.idle) for w in windows],
        "counted_stall_seconds": [w.counted_stall_seconds for w in windows],
        "copier_processor_seconds": [w.copier_seconds for w in windows],
        "steps": [float(len(w.asked)) for w in windows],
    }
    return {name: statistics.median(values) for name, values in over.items()}


def main(argv: list[str] | None = None) -> dict[str, object]:
    """Run the benchmark and return its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1, help="training's; the copies run on another core")
    parser.add_argument("--touch-shares", type=float, nargs="+", default=[SnapshotConfig().touch_share])
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)

    rig = Rig(options.layers, options.width, options.batch)
    load = os.getloadavg()[0]
    first: dict[float, list[Window]] = {share: [] for share in options.touch_shares}
    later: dict[float, list[Window]] = {share: [] for share in options.touch_shares}
    version = Version(1, 0)
    captured_bytes = 0
    for number in range(-1, options.rounds):
        for share in options.touch_shares:
            events = Recorder()
            with rig.snapshots(events, SnapshotConfig(touch_share=share, copy_ahead=False)) as snapshots:
                snapshots.publish(version)
                snapshots.manifest(version, 60)
                rig.inner_step(snapshots)
                cold = capture_window(rig, snapshots, events, version, "first")
                # Memory is held as long as anybody is there: here a reader of outer parts.
                stays = snapshots.lease_outer(version, "stays")
                capture_window(rig, snapshots, events, version, "between")
                warm = capture_window(rig, snapshots, events, version, "later")
                stays.release("done")
                captured_bytes = events.of(SnapshotCaptured)[-1].num_bytes
                stall = stall_record(snapshots)
            version = version.next()
            if number < 0:
                continue  # lazily created state, cold memory
            first[share].append(cold)
            later[share].append(warm)
    idle = [seconds for windows in (first, later) for each in windows.values() for w in each for seconds in w.idle]
    median = statistics.median(idle)
    forward_backward = statistics.median(rig.forward_backward() for _ in range(10))
    fresh, warm_copy = copy_seconds(part_tensors(rig.state, rig.state.private_copied_names))
    record: dict[str, object] = {
        "batch": options.batch,
        "private_bytes": captured_bytes,
        "idle_step_seconds": {"median": median, "p99": quantile(idle, 0.99)},
        "forward_backward_seconds": forward_backward,
        "copy_seconds": {"warm": warm_copy, "fresh": fresh},
        "allowed_seconds": max(0.005, (warm_copy - forward_backward) * 1.2),
        "by_touch_share": {
            str(share): {
                "first_joiner": summary(first[share], median),
                "later_joiner": summary(later[share], median),
                "first_windows": [w.asked for w in first[share]],
                "later_windows": [w.asked for w in later[share]],
            }
            for share in options.touch_shares
        },
        "last_stall_by_cause": stall,
        "load_average": {"at_start": load, "at_end": os.getloadavg()[0]},
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
