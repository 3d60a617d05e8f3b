"""DiLoCo over offloaded parameters, as zeroband and OpenDiLoCo write it."""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")

INNER_STEPS, OUTER_STEPS = 200, int(sys.argv[1])

torch.manual_seed(0)  # everybody begins with the same weights
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
offloaded = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
outer = torch.optim.SGD(offloaded, lr=0.7, momentum=0.9, nesterov=True)
torch.manual_seed(int(os.environ["RANK"]))  # and draws data of its own


def inner_step():
    inputs = torch.randn(64, 32)
    loss = nn.functional.mse_loss(model(inputs), inputs[:, :8].sin())
    inner.zero_grad()
    loss.backward()
    inner.step()


def pseudo_gradients():
    return [o.detach() - p.detach() for o, p in zip(offloaded, model.parameters(), strict=True)]


def outer_update(averaged):
    for parameter, gradient in zip(offloaded, averaged, strict=True):
        parameter.grad = gradient
    outer.step()
    outer.zero_grad()
    with torch.no_grad():
        for p, o in zip(model.parameters(), offloaded, strict=True):
            p.copy_(o)


def train():
    for outer_step in range(1, OUTER_STEPS + 1):
        for _ in range(INNER_STEPS):
            inner_step()
        for gradient in (gradients := pseudo_gradients()):
            dist.all_reduce(gradient.div_(dist.get_world_size()))
        outer_update(gradients)
        weights = b"".join(o.detach().numpy().tobytes() for o in offloaded)
        print("outer step", outer_step, hashlib.sha256(weights).hexdigest(), flush=True)


train()
