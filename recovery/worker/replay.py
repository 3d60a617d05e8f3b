"""Replaying a commit: the outer step that the other workers took, upon a copy of the state from before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recovery.errors import BadConfiguration
from recovery.state import WorkerState

Replay = Callable[[list[Tensor]], object]
"""Does with averages what the training loop's own boundary block does with them; leaves the same bits behind."""


def replay_outer_step(state: WorkerState, averaged: Sequence[Tensor]) -> None:
    """Take one outer step: the averages become the gradients of the outer parameters, in their order.

    Fits every loop whose outer optimizer steps over the outer parameters themselves and whose block ends with copying
    them into the live model.

    Raises:
        BadConfiguration: this worker's loop is of another kind and has to say how it applies; nothing was changed.
    """
    params = _stepped(state, averaged)
    for parameter, mean in zip(params, averaged, strict=True):
        parameter.grad = mean.to(device=parameter.device, dtype=parameter.dtype)
    for optimizer in state.outer_optimizers:
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for _, outer, live in state.live_copies():
            live.copy_(outer)


def _stepped(state: WorkerState, averaged: Sequence[Tensor]) -> list[Tensor]:
    remedy = "give Agent(replay=...) the function with which the loop applies averages"
    if len(state.outer_optimizers) != 1:
        raise BadConfiguration(f"{len(state.outer_optimizers)} outer optimizers: {remedy}")
    params = list(state.read_outer_params().values())
    if len(params) != len(averaged):
        params = [parameter for parameter in params if parameter.requires_grad]
    held = {id(parameter) for group in state.outer_optimizers[0].param_groups for parameter in group["params"]}
    if held != {id(parameter) for parameter in params}:
        raise BadConfiguration(f"the outer optimizer does not step over the outer parameters themselves: {remedy}")
    if [tuple(p.shape) for p in params] != [tuple(mean.shape) for mean in averaged]:
        raise BadConfiguration(f"the averages are not one an outer parameter, in their order: {remedy}")
    return params
