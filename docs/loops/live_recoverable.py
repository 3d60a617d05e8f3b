"""DiLoCo whose outer optimizer steps over the live parameters.

It starts from a list of the parameters as they were last synchronised, which is replaced at each outer step.
"""

import hashlib
import os
import sys

import torch
from torch import nn

from recovery.config import from_environment
from recovery.state import WorkerState
from recovery.worker import Agent, AgentConfig

INNER_STEPS, OUTER_STEPS = 200, int(sys.argv[1])

torch.manual_seed(0)  # everybody begins with the same weights
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
synced = [p.detach().clone() for p in model.parameters()]
inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
torch.manual_seed(int(os.environ["RANK"]))  # and draws data of its own


def inner_step():
    inputs = torch.randn(64, 32)
    loss = nn.functional.mse_loss(model(inputs), inputs[:, :8].sin())
    inner.zero_grad()
    loss.backward()
    inner.step()


def pseudo_gradients():
    return [s - p.detach() for s, p in zip(synced, model.parameters(), strict=True)]


def outer_update(averaged):
    global synced
    for p, s, gradient in zip(model.parameters(), synced, averaged, strict=True):
        p.data.copy_(s)
        p.grad = gradient
    outer.step()
    outer.zero_grad()
    synced = [p.detach().clone() for p in model.parameters()]


def train():
    while agent.version.outer_step < OUTER_STEPS:
        for _ in agent.phase():
            inner_step()
        with agent.boundary() as boundary:
            outer_update(boundary.average(pseudo_gradients))
        weights = b"".join(s.numpy().tobytes() for s in synced)
        print("outer step", agent.version.outer_step, hashlib.sha256(weights).hexdigest(), flush=True)


state = WorkerState(live=model, outer_params=lambda: synced, outer_optimizer=outer, inner_optimizer=inner)
with Agent(state, from_environment(AgentConfig, inner_steps_per_phase=INNER_STEPS), replay=outer_update) as agent:
    train()
