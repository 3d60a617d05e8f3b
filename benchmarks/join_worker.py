"""A worker of a given size that paces its inner steps and says when everything happened: a child of ``bench_join``.

Each line on standard output is a JSON object with ``what`` and ``at`` (seconds of the machine's monotonic clock, which
all its processes share).
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from recovery.control.security import SecurityConfig
from recovery.events import (
    BaseRestored,
    BoundaryStage,
    CatchUpRebased,
    CommitReplayed,
    Event,
    PrivatePartsReceived,
    ScalarsRefreshed,
    StateRestored,
    TransferEnded,
    TransferStarted,
)
from recovery.state import WorkerState
from recovery.worker import Agent, AgentConfig

_TOLD = (
    BaseRestored,
    CatchUpRebased,
    CommitReplayed,
    PrivatePartsReceived,
    ScalarsRefreshed,
    StateRestored,
    TransferEnded,
    TransferStarted,
)
_LAYERS = 4


def say(what: str, **fields: object) -> None:
    """Write one line."""
    print(json.dumps({"what": what, "at": time.monotonic(), **fields}, default=str), flush=True)


def tell(event: Event, /) -> None:
    """Say what belongs to a recovery, and which boundaries were averaged."""
    if isinstance(event, _TOLD) or (isinstance(event, BoundaryStage) and event.stage in ("arriving", "applied")):
        fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
        say(type(event).__name__, **fields)


def main(plan: dict[str, Any]) -> int:
    """Train until the parent ends this process."""
    say("started")
    torch.set_num_threads(1)
    torch.manual_seed(int(plan["seed"]))
    side = max(8, int((plan["num_bytes"] / 4 / _LAYERS) ** 0.5))
    model = nn.ModuleList(nn.Linear(side, side, bias=False) for _ in range(_LAYERS))
    outer_params = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    outer = torch.optim.SGD(outer_params, lr=0.7, momentum=0.9, nesterov=True)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = LambdaLR(inner, lambda step: min(1.0, (step + 1) / 50))
    state = WorkerState(
        live=model, outer_params=outer_params, outer_optimizer=outer, inner_optimizer=inner, scheduler=scheduler
    )
    gradients = [torch.randn_like(p) * 1e-3 for p in outer_params]
    agent = Agent(state, AgentConfig(**plan["agent"], security=SecurityConfig(insecure=True)), events=tell)
    say("agent")
    with agent:
        say("joined", version=agent.version)
        stepped = False
        while True:
            for inner_step in agent.phase():
                began = time.monotonic()
                if not stepped:
                    stepped = True
                    say("step", inner_step=inner_step)
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.grad = gradient
                inner.step()
                scheduler.step()
                agent.count_tokens(1)
                time.sleep(max(0.0, float(plan["step_seconds"]) - (time.monotonic() - began)))
            entered = time.monotonic()
            with agent.boundary() as boundary:
                averaged = boundary.average(
                    lambda: [o.detach() - p.detach() for o, p in zip(outer_params, model.parameters(), strict=True)]
                )
                for parameter, mean in zip(outer_params, averaged, strict=True):
                    parameter.grad = mean.clone()
                outer.step()
                with torch.no_grad():
                    for live, whole in zip(model.parameters(), outer_params, strict=True):
                        live.copy_(whole)
            say("boundary", version=agent.version, seconds=time.monotonic() - entered)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
