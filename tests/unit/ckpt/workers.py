"""A small DiLoCo worker that really trains, for tests that restore one."""

from __future__ import annotations

import torch
from torch import nn

from ckpt.local import LocalStorage
from ckpt.values import standing_source
from ckpt.writer import WriteReport, write_checkpoint
from recovery.state.compare import compare
from recovery.state.parts import WorkerState
from recovery.types import Cut, PartClass, Version, WorkerRef
from tests.unit.ckpt.states import RUN, W0


class DataPosition:
    """A data loader's state: where it stands."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, object]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, object], /) -> None:
        at = state_dict["at"]
        assert isinstance(at, int)
        self.at = at


class Worker:
    """One worker: model with a buffer, outer copies, both optimizers, a scheduler, a data position."""

    def __init__(self, seed: int, ref: WorkerRef = W0, width: int = 8) -> None:
        torch.manual_seed(seed)
        self.ref = ref
        self.model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
        self.outer = [p.detach().clone().requires_grad_() for p in self.model.parameters()]
        self.outer_optimizer = torch.optim.SGD(self.outer, lr=0.7, momentum=0.9, nesterov=True)
        self.inner_optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.inner_optimizer, lambda n: 1 / (1 + n))
        self.data = DataPosition()
        self.state = WorkerState(
            live=self.model,
            outer_params=self.outer,
            outer_optimizer=self.outer_optimizer,
            inner_optimizer=self.inner_optimizer,
            scheduler=self.scheduler,
        )
        self.state.add("data", self.data, PartClass.PRIVATE_KEPT)

    def train(self, outer_steps: int = 1, inner_steps: int = 3) -> Worker:
        """Take outer steps of a few inner steps each, on data that the position decides."""
        for _ in range(outer_steps):
            for _ in range(inner_steps):
                random = torch.Generator().manual_seed(self.data.at)
                loss = self.model(torch.randn(5, 4, generator=random)).square().mean()
                self.inner_optimizer.zero_grad()
                loss.backward()
                self.inner_optimizer.step()
                self.scheduler.step()
                self.data.at += 1
                self.state.local_progress.inner_step += 1
            for outer, live in zip(self.outer, self.model.parameters(), strict=True):
                outer.grad = outer.detach() - live.detach()
            self.outer_optimizer.step()
            with torch.no_grad():
                for outer, live in zip(self.outer, self.model.parameters(), strict=True):
                    live.copy_(outer)
            self.state.run_progress.outer_step += 1
            self.state.run_progress.tokens += 100
        return self

    @property
    def version(self) -> Version:
        return Version(1, self.state.run_progress.outer_step)

    def save(self, storage: LocalStorage, version: Version | None = None) -> list[WriteReport]:
        """Write all parts as they are now."""
        cut = Cut(version or self.version)
        source = standing_source(self.state, self.state.part_names, run_id=RUN, worker=self.ref, cut=cut, copy=False)
        return write_checkpoint(storage, [source])


def differences(a: Worker, b: Worker, *, parts: list[str] | None = None) -> list[str]:
    """Return how two workers' states differ, live weights included if all are asked for."""
    found = []
    names = parts if parts is not None else list(a.state.part_names)
    for name in names:
        mine, theirs = (w.state.part(name).read() for w in (a, b))  # type: ignore[arg-type]
        found += [f"{name}/{difference}" for difference in compare(mine, theirs)]
    if parts is None:
        found += [f"live/{difference}" for difference in compare(a.model.state_dict(), b.model.state_dict())]
    return found
