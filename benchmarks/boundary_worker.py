"""A worker that does nothing but boundaries and says how long each part took: a child of ``bench_boundary``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recovery.control.security import SecurityConfig
from recovery.events import BoundaryStage, Event
from recovery.state import WorkerState
from recovery.worker import Agent, AgentConfig
from recovery.worker.averaging import Averager, Collectives


class TimedAverager(Averager):
    """Notes the seconds of the bare average: the collectives and the sums, without anything around them."""

    def __init__(self, bucket_bytes: int) -> None:
        super().__init__(bucket_bytes)
        self.seconds = 0.0

    def average(
        self,
        tensors: Sequence[Tensor],
        weights: Sequence[float],
        rank: int,
        group: Collectives | None,
        timeout: float,
    ) -> list[Tensor]:
        began = time.perf_counter()
        means = super().average(tensors, weights, rank, group, timeout)
        self.seconds = time.perf_counter() - began
        return means


class Stages:
    """When each named place of the present boundary was passed last."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def __call__(self, event: Event, /) -> None:
        if isinstance(event, BoundaryStage):
            self.at[event.stage] = time.perf_counter()


def main(plan: dict[str, Any]) -> int:
    """Take so many outer steps; print one JSON line a boundary."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    side = max(1, int((plan["num_bytes"] / 4) ** 0.5))
    model = nn.Linear(side, side, bias=False)
    outer_params = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    outer = torch.optim.SGD(outer_params, lr=0.7, momentum=0.9, nesterov=True)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    state = WorkerState(live=model, outer_params=outer_params, outer_optimizer=outer, inner_optimizer=inner)
    stages = Stages()
    config = AgentConfig(**plan["agent"], inner_steps_per_phase=1, security=SecurityConfig(insecure=True))
    agent = Agent(state, config, events=stages)
    averager = agent._averager = TimedAverager(config.bucket_bytes)
    gradients = [torch.randn_like(p) for p in outer_params]
    with agent:
        print(json.dumps({"joined": str(agent.version)}), flush=True)
        while agent.version.outer_step < int(plan["outer_steps"]):
            for _ in agent.phase():
                time.sleep(float(plan["phase_seconds"]))  # digests and seal of the last step end in here
            began = time.perf_counter()
            with agent.boundary() as boundary:
                averaged = boundary.average(lambda: gradients)
                applying = time.perf_counter()
                for parameter, mean in zip(outer_params, averaged, strict=True):
                    parameter.grad = mean
                outer.step()
                applied = time.perf_counter()
            ended = time.perf_counter()
            at = stages.at
            told = {
                "outer_step": agent.version.outer_step,
                "total": ended - began,
                "check": at["arriving"] - began,
                "roster": at["rostered"] - at["arriving"],
                "prepare": at["averaged"] - at["averaging"] - averager.seconds,
                "average": averager.seconds,
                "vote": at["decided"] - at["averaged"],
                "apply": applied - applying,
                "publish": ended - applied,
            }
            print(json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
