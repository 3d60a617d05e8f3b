"""How long the training thread stands still for a save: the calls that it makes, and the guard's copies, apart."""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.bench_capture import Rig, part_tensors, seconds_of
from ckpt.local import LocalStorage
from ckpt.saver import Saver, SaverConfig
from recovery.events import Recorder
from recovery.snapshot import Lease, Snapshots, StallCause
from recovery.types import MIB, Incarnation, RunId, Version, WorkerId, WorkerRef

_WIDTH = 2048
_COPIES = (StallCause.GUARD_COPY, StallCause.CLOSE_CALLBACKS, StallCause.CAPTURE_COPY, StallCause.CAPTURE_WAIT)


class _Account:
    """What the training thread spent for the snapshots since the last look, by kind."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._before = self._read()

    def _read(self) -> tuple[float, int]:
        stalls = [self._snapshots.stall.of(cause) for cause in _COPIES]
        return sum(stall.seconds for stall in stalls), sum(stall.num_bytes for stall in stalls)

    def since(self) -> tuple[float, int]:
        """Return seconds and bytes of copies on the training thread."""
        before, self._before = self._before, self._read()
        return self._before[0] - before[0], self._before[1] - before[1]


def blocked(folder: Path, num_bytes: int, rounds: int) -> dict[str, object]:
    """Return what one save costs the training thread of a worker whose state has ``num_bytes``.

    The worker is a real one, with its snapshots: it asks for its private parts at the boundary, hands outer and private
    parts to the saver and trains on. "calls" is the time in those calls. "copies" is what the guard and the capture
    copied on the training thread until the save had ended: with the outer step coming at once, before the disk has
    anything (the worst case), and with the outer step after the save. DCP's ``async_save`` has the same tensors.
    """
    rig = Rig(max(1, num_bytes // 4 // (_WIDTH * _WIDTH * 4)), _WIDTH)
    calls: list[float] = []
    copies: dict[str, list[tuple[float, int]]] = {"outer step at once": [], "outer step after the save": []}
    theirs: list[float] = []
    version = Version(1, 0)
    worker = WorkerRef(WorkerId("bench"), Incarnation("1"))
    storage = LocalStorage(folder / "saver")
    with rig.snapshots(Recorder()) as snapshots:
        for number in range(-1, 2 * rounds):
            kind = "outer step after the save" if number % 2 else "outer step at once"
            rig.inner_step(snapshots)
            rig.prepare_outer()
            rig.outer_step()
            version = version.next()
            snapshots.publish(version)
            snapshots.manifest(version, 120)
            shutil.rmtree(folder / "saver", ignore_errors=True)
            with Saver(storage, SaverConfig(), run_id=RunId("bench"), worker=worker, events=Recorder()) as saver:
                account = _Account(snapshots)
                began = time.perf_counter()
                future = snapshots.lease_private("checkpoint", version)
                spent = time.perf_counter() - began
                while not future.done():
                    rig.inner_step(snapshots)
                leases: list[Lease] = [snapshots.lease_outer(version, "checkpoint"), future.result(120)]
                began = time.perf_counter()
                ticket = saver.save(leases)
                spent += time.perf_counter() - began
                assert ticket is not None
                if kind == "outer step at once":
                    snapshots.before_outer_update()
                ticket.result(300)
                if kind == "outer step after the save":
                    snapshots.before_outer_update()
            if number >= 0:  # the first save touches cold memory
                calls.append(spent)
                copies[kind].append(account.since())
        names = [*rig.state.replicated_names, *rig.state.private_copied_names]
        tensors = {str(n): t for n, t in enumerate(part_tensors(rig.state, names))}
        for _ in range(rounds):
            theirs.append(_async_save(folder / "async", tensors))
    record: dict[str, object] = {
        "state, MiB": round(sum(t.nbytes for t in tensors.values()) / MIB),
        "ours, calls, ms": _milliseconds(statistics.median(calls)),
        "ours, calls, worst ms": _milliseconds(max(calls)),
    }
    for kind, found in copies.items():
        record[f"ours, copies, {kind}, ms"] = _milliseconds(statistics.median(seconds for seconds, _ in found))
        record[f"ours, copies, {kind}, MiB"] = round(statistics.median(num for _, num in found) / MIB)
    record["DCP async_save, ms"] = _milliseconds(statistics.median(theirs))
    return record


def _async_save(folder: Path, tensors: dict[str, torch.Tensor]) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    futures = []
    seconds = seconds_of(lambda: futures.append(async_save(dict(tensors), checkpoint_id=folder, no_dist=True)))
    for future in futures:
        (future if hasattr(future, "result") else future.upload_completion).result()
    return seconds


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)
