"""A DiLoCo worker in one process with every kind of part, and reference copies taken synchronously at any cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import blake3
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from recovery.clock import Clock, SystemClock
from recovery.events import Event
from recovery.snapshot import SnapshotConfig, Snapshots
from recovery.state.parts import WorkerState
from recovery.types import Incarnation, PartClass, PartName, RunId, Version, WorkerId, WorkerRef

WORKER = WorkerRef(WorkerId("donor"), Incarnation("1"))
RUN = RunId("hunt")


class Net(nn.Module):
    """Two halves, so that two inner optimizers have something each; a batch norm, so that forward changes buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        result: torch.Tensor = self.head(torch.relu(self.second(hidden)))
        return result


@dataclass
class Trainee:
    """A worker's objects. ``width`` squared times 4 bytes is about the size of the model.

    Inner optimizers: fused AdamW over the first half, whose learning rate is a tensor that its
    scheduler changes in place, foreach AdamW over the second. Extras: an average of the weights, a gradient scaler.
    """

    width: int = 64
    accumulate: int = 1
    seed: int = 0
    num_skipped: int = 0
    averages: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = Net(self.width)
        self.outer = {name: p.detach().clone().requires_grad_() for name, p in self.model.named_parameters()}
        self.outer_optimizer = torch.optim.SGD(self.outer.values(), lr=0.7, momentum=0.9, nesterov=True)
        first = [*self.model.first.parameters(), *self.model.norm.parameters()]
        second = [*self.model.second.parameters(), *self.model.head.parameters()]
        self.inner: dict[str, Optimizer] = {
            "first": torch.optim.AdamW(first, lr=torch.tensor(1e-3), fused=True),
            "second": torch.optim.AdamW(second, lr=1e-3, foreach=True),
        }
        self.schedulers = {
            name: LambdaLR(optimizer, lambda step: 1 / (1 + step / 7)) for name, optimizer in self.inner.items()
        }
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.averages.update({name: p.detach().clone() for name, p in self.model.named_parameters()})
        self.state = WorkerState(
            live=self.model,
            outer_params=self.outer,
            outer_optimizer=self.outer_optimizer,
            inner_optimizer=self.inner,
            scheduler=self.schedulers,
        )
        self.state.add("average", lambda: self.averages, PartClass.PRIVATE_COPIED)
        self.state.add("scaler", self.scaler, PartClass.PRIVATE_COPIED)

    def inner_step(self, *, overflow: bool = False) -> None:
        """One inner step with all that belongs to it. ``overflow``: the scaler finds an infinity and skips the step."""
        for optimizer in self.inner.values():
            optimizer.zero_grad(set_to_none=True)
        for _ in range(self.accumulate):
            loss = self.model(torch.randn(8, 16)).square().mean() / self.accumulate
            self.scaler.scale(loss * (float("inf") if overflow else 1.0)).backward()
        for optimizer in self.inner.values():
            self.scaler.step(optimizer)
        self.scaler.update()
        self.num_skipped += overflow
        for scheduler in self.schedulers.values():
            scheduler.step()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                self.averages[name].lerp_(p, 0.1)
        self.state.local_progress.inner_step += 1

    def outer_step(self) -> None:
        """One outer step, alone: the average of one pseudo-gradient is itself."""
        for name, p in self.model.named_parameters():
            self.outer[name].grad = self.outer[name].detach() - p.detach()
        self.outer_optimizer.step()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.outer[name])
        self.state.run_progress.outer_step += 1
        self.state.local_progress.inner_step = 0

    def snapshots(
        self,
        config: SnapshotConfig | None = None,
        *,
        events: Callable[[Event], None] = lambda event: None,
        clock: Clock | None = None,
        hooks: bool = True,
    ) -> Snapshots:
        """Return the snapshots of this worker, not started."""
        return Snapshots(
            self.state,
            config or SnapshotConfig(),
            run_id=RUN,
            worker=WORKER,
            events=events,
            clock=clock or SystemClock(),
            hooks=hooks,
        )

    def reference(self, part_class: PartClass) -> dict[str, tuple[bytes, bytes]]:
        """Return, for each part of the class, its scalars and a digest of a copy of its bytes taken here and now."""
        return {name: reference(self.state, name) for name in self.state.part_names if self.is_of(name, part_class)}

    def is_of(self, name: PartName, part_class: PartClass) -> bool:
        return self.state.part_class(name) is part_class


def reference(state: WorkerState, name: PartName) -> tuple[bytes, bytes]:
    """Return a part's tree, encoded, and the digest of its logical bytes, taken tensor by tensor, without views."""
    part = state.read_part(name)
    copies = [torch.empty(0, dtype=torch.uint8)]
    for tensor in part.tensors:
        assert isinstance(tensor, torch.Tensor)
        copies.append(tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8))
    return part.tree.SerializeToString(deterministic=True), digest_of(torch.cat(copies))


def digest_of(data: torch.Tensor) -> bytes:
    """Return BLAKE3 over a 1-d uint8 tensor."""
    return blake3.blake3(data.numpy().tobytes()).digest()


FIRST = Version(1, 0)
