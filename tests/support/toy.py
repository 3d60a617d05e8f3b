"""A DiLoCo worker small enough for tests: every part kind, steps of a few milliseconds, one function a role."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from recovery.state import WorkerState
from recovery.types import PartClass


@dataclass
class Position:
    """A data position: how many samples this worker drew."""

    drawn: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


class Toy:
    """Model, optimizers, scheduler and data of one worker, written as zeroband's trainer is."""

    def __init__(self, hidden: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(16, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 4))
        self.outer_params = [nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        # Warm-up that begins above zero: a step with a learning rate of zero proves nothing.
        self.scheduler = LambdaLR(self.inner, lambda step: min(1.0, (step + 1) / 50))
        self.outer = torch.optim.SGD(self.outer_params, lr=0.7, momentum=0.9, nesterov=True)
        self.position = Position()
        self.data = torch.Generator().manual_seed(1000 + seed)
        self.state = WorkerState(
            live=self.model,
            outer_params=self.outer_params,
            outer_optimizer=self.outer,
            inner_optimizer=self.inner,
            scheduler=self.scheduler,
        )
        self.state.add("position", self.position, PartClass.PRIVATE_KEPT)

    def inner_step(self) -> float:
        """Take one inner step; return the loss."""
        inputs = torch.randn(8, 16, generator=self.data)
        loss = nn.functional.mse_loss(self.model(inputs), inputs[:, :4].roll(1, 0) ** 2)
        self.inner.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.inner.step()
        self.scheduler.step()
        self.position.drawn += 8
        return float(loss.detach())

    def next_learning_rates(self, count: int) -> list[float]:
        """Return the rate in force and the ``count`` that follow, by the schedule's closed form."""
        (base,), (schedule,) = self.scheduler.base_lrs, self.scheduler.lr_lambdas
        following = [base * schedule(self.scheduler.last_epoch + i) for i in range(1, count + 1)]
        return [float(self.inner.param_groups[0]["lr"]), *(float(rate) for rate in following)]

    def pseudo_gradients(self) -> list[Tensor]:
        return [
            outer.detach() - live.detach()
            for outer, live in zip(self.outer_params, self.model.parameters(), strict=True)
        ]

    def apply(self, averaged: list[Tensor]) -> None:
        """Take one outer step and copy its result into the live model."""
        for outer, mean in zip(self.outer_params, averaged, strict=True):
            outer.grad = mean.clone()
        self.outer.step()
        self.outer.zero_grad()
        with torch.no_grad():
            for live, outer in zip(self.model.parameters(), self.outer_params, strict=True):
                live.copy_(outer)
