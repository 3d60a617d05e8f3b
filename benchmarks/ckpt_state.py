"""The state that the checkpoint benchmarks save: that of a DiLoCo worker, in matrices of 16 MiB."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ckpt.values import Bytes, ValueSource, source_of
from recovery.types import MIB, Cut, Incarnation, PartClass, PartName, RunId, Version, WorkerId, WorkerRef

RUN = RunId("bench")
WORKER = WorkerRef(WorkerId("w0"), Incarnation("bench"))
PARTS = ("outer_params", "outer_optimizer", "exp_avg", "exp_avg_sq")


class Live(ValueSource):
    """The same bytes as a lease lends them while they are live: each is copied before it is written."""

    def read(self, part: int, offset: int, num_bytes: int) -> Bytes:
        return Bytes(super().read(part, offset, num_bytes).data, live=True)


def state_of(num_bytes: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return parts of matrices of 16 MiB, as many as ``num_bytes`` holds."""
    matrices = max(1, num_bytes // len(PARTS) // (16 * MIB))
    return {part: {f"layers.{i}.weight": torch.randn(2048, 2048) for i in range(matrices)} for part in PARTS}


def source(state: dict[str, dict[str, torch.Tensor]], kind: type[ValueSource], step: int) -> ValueSource:
    """Return the state as what ``write_checkpoint`` takes."""
    values: dict[PartName, tuple[PartClass, object]] = {
        PartName(name): (PartClass.REPLICATED, tensors) for name, tensors in state.items()
    }
    made = source_of(values, run_id=RUN, worker=WORKER, cut=Cut(Version(1, step)))
    return kind(made.manifest, made._parts)


def flat(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return every tensor under one name, as the other systems take them."""
    return {f"{part}.{name}": tensor for part, tensors in state.items() for name, tensor in tensors.items()}


def seconds(work: Callable[[], None]) -> float:
    """Return how long ``work`` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
