"""DiLoCo by fragments that take turns, as Streaming DiLoCo and torchft write it.

Each of the two fragments is synchronised every 200 inner steps, one of them every 100: an outer step is one fragment's.
"""

import hashlib
import os
import sys

import torch
from torch import nn

from recovery.config import from_environment
from recovery.state import Fragment, WorkerState
from recovery.worker import Agent, AgentConfig

INNER_STEPS, OUTER_STEPS = 100, int(sys.argv[1])

torch.manual_seed(0)  # everybody begins with the same weights
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
inner = torch.optim.AdamW(model.parameters(), lr=1e-3)


def make_fragment(layer):
    backup = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters() if n.startswith(layer)}
    return layer, backup, torch.optim.SGD(backup.values(), lr=0.7, momentum=0.9, nesterov=True)


fragments = [make_fragment("0"), make_fragment("2")]
state = WorkerState(live=model, fragments=[Fragment(*each) for each in fragments], inner_optimizer=inner)
torch.manual_seed(int(os.environ["RANK"]))  # and draws data of its own


def inner_step():
    inputs = torch.randn(64, 32)
    loss = nn.functional.mse_loss(model(inputs), inputs[:, :8].sin())
    inner.zero_grad()
    loss.backward()
    inner.step()


def due():
    return state.run_progress.outer_step % len(fragments)


def pseudo_gradients():
    _, backup, _ = fragments[due()]
    return [b.detach() - model.get_parameter(n).detach() for n, b in backup.items()]


def outer_update(averaged):
    _, backup, outer = fragments[due()]
    for parameter, gradient in zip(backup.values(), averaged, strict=True):
        parameter.grad = gradient
    outer.step()
    outer.zero_grad()
    with torch.no_grad():
        for n, b in backup.items():
            model.get_parameter(n).copy_(b)


def train():
    while agent.version.outer_step < OUTER_STEPS:
        for _ in agent.phase():
            inner_step()
        with agent.boundary() as boundary:
            outer_update(boundary.average(pseudo_gradients))
        weights = b"".join(b.detach().numpy().tobytes() for _, backup, _ in fragments for b in backup.values())
        print("outer step", agent.version.outer_step, hashlib.sha256(weights).hexdigest(), flush=True)


with Agent(state, from_environment(AgentConfig, inner_steps_per_phase=INNER_STEPS), replay=outer_update) as agent:
    train()
