"""Replaying commits upon a copied state gives the bits that the donor got, for every elementwise optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recovery.errors import BadConfiguration
from recovery.state import Fragment, Manifest, Restoration, RestoreMode, WorkerState, describe
from recovery.types import Cut, Incarnation, NumericsId, RunId, Version, WorkerId, WorkerRef
from recovery.worker.replay import replay_outer_step

Make = Callable[[Iterable[Tensor]], Optimizer]

OPTIONS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD-plain": (torch.optim.SGD, {"lr": 0.7}),
    "SGD-momentum": (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9}),
    "SGD-dampened": (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "dampening": 0.1}),
    "SGD-nesterov": (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    "SGD-weight-decay": (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD-maximize": (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "maximize": True}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
    "Adam-amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
}
NOT_ELEMENTWISE = {
    "Adafactor": "second moments of rows and columns",
    "LBFGS": "dot products over all parameters; it steps by a closure, which averages cannot give",
    "Muon": "orthogonalises whole matrices, and takes nothing else",
    "SparseAdam": "takes sparse gradients; averages are dense",
}
"""Optimizers of torch that the rest of this file does not have to cover, and why."""


def made(kind: type[Optimizer], options: dict[str, Any]) -> Make:
    return lambda params: kind(params, **options)


def implementations() -> dict[str, Make]:
    """Return every case in every implementation that torch has of it on the CPU."""
    cases: dict[str, Make] = {}
    for name, (kind, options) in OPTIONS.items():
        cases[name] = made(kind, options)
        for switch in ("foreach", "fused"):
            if switch in inspect.signature(kind).parameters:
                cases[f"{name}-{switch}"] = made(kind, {**options, switch: True})
    return cases


CASES = implementations()
NESTEROV = CASES["SGD-nesterov"]
PLAIN = CASES["SGD-plain"]


class Loop:
    """A DiLoCo worker of the offloaded kind, reduced to its boundaries."""

    def __init__(self, make: Make, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3, dtype=torch.float32))
        self.outer = [nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        self.optimizer = make(self.outer)
        self.state = WorkerState(live=self.model, outer_params=self.outer, outer_optimizer=self.optimizer)

    def apply(self, averaged: list[Tensor]) -> None:
        for outer, mean in zip(self.outer, averaged, strict=True):
            outer.grad = mean.clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for live, outer in zip(self.model.parameters(), self.outer, strict=True):
                live.copy_(outer)
        self.state.run_progress.outer_step += 1

    def describe(self) -> Manifest:
        return describe(
            [self.state.read_part(name) for name in self.state.replicated_names],
            run_id=RunId("run"),
            worker=WorkerRef(WorkerId("w"), Incarnation("i")),
            cut=Cut(Version(1, self.state.run_progress.outer_step)),
            numerics_id=NumericsId("test"),
            layout_digest=self.state.layout_digest(),
        )


def copy_replicated(donor: Loop, joiner: Loop) -> None:
    restoration = Restoration(
        joiner.state, donor.describe(), mode=RestoreMode.IN_PLACE, parts=donor.state.replicated_names
    )
    restoration.prepare()
    for name in restoration.part_names:
        content = donor.state.read_part(name).bytes
        if content.num_bytes:
            restoration.destination(name).write(0, content.read(0, content.num_bytes).clone())
    restoration.commit()


def averages(loop: Loop, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator) * 0.01 for p in loop.outer]


def optimizers_of_torch() -> dict[str, type[Optimizer]]:
    return {
        name: found
        for name, found in vars(torch.optim).items()
        if isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer
    }


def test_every_optimizer_of_torch_is_a_case_here_or_said_not_to_be_elementwise() -> None:
    covered = {kind.__name__ for kind, _ in OPTIONS.values()}
    assert covered | NOT_ELEMENTWISE.keys() == optimizers_of_torch().keys()
    assert not covered & NOT_ELEMENTWISE.keys()


def rows_moved_by_other_rows(make: Make) -> bool:
    """Return whether the first rows of a matrix end otherwise if only the gradients of the others differ."""
    ends = []
    for seed in (1, 2):
        parameter = nn.Parameter(torch.linspace(-1, 1, 32).reshape(8, 4))
        optimizer = make([parameter])
        own, others = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
        for _ in range(3):
            gradient = torch.cat([torch.randn(4, 4, generator=own), torch.randn(4, 4, generator=others)])
            parameter.grad = gradient

            def closure(gradient: Tensor = gradient, parameter: Tensor = parameter) -> Tensor:
                return (gradient * parameter).sum()

            optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)  # type: ignore[arg-type]
        ends.append(parameter.detach()[:4].clone())
    return not torch.equal(*ends)


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_elementwise_means_that_no_element_moves_another(make: Make) -> None:
    assert not rows_moved_by_other_rows(make)


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_the_others_are_not_elementwise(name: str) -> None:
    kind = optimizers_of_torch()[name]
    if name == "SparseAdam":
        with pytest.raises(RuntimeError, match="dense gradients"):
            rows_moved_by_other_rows(made(kind, {}))
        return
    assert rows_moved_by_other_rows(made(kind, {"lr": 0.1}))


@pytest.mark.parametrize("make", [*CASES.values(), made(torch.optim.Adafactor, {"lr": 0.1})], ids=[*CASES, "Adafactor"])
@pytest.mark.parametrize("before", [0, 2], ids=["fresh", "with-state"])
def test_replay_is_bit_equal(make: Make, before: int) -> None:
    """The fingerprint covers every bit of parameters, optimizer state and options."""
    donor, joiner = Loop(make, 1), Loop(make, 2)
    for step in range(before):
        donor.apply(averages(donor, step))
    copy_replicated(donor, joiner)
    assert joiner.describe().fingerprint == donor.describe().fingerprint
    for step in range(before, before + 3):
        averaged = averages(donor, step)
        kept = [mean.clone() for mean in averaged]
        donor.apply(averaged)
        replay_outer_step(joiner.state, kept)
        joiner.state.run_progress.outer_step += 1
        assert joiner.describe().fingerprint == donor.describe().fingerprint
    for mine, theirs in zip(joiner.model.parameters(), donor.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.grad is None
    assert all(parameter.grad is None for parameter in joiner.outer)


def test_another_average_gives_another_fingerprint() -> None:
    """The comparison above is able to fail."""
    donor, joiner = Loop(NESTEROV, 1), Loop(NESTEROV, 2)
    copy_replicated(donor, joiner)
    averaged = averages(donor, 0)
    donor.apply(averaged)
    averaged[0].view(-1).view(torch.int32)[0].bitwise_xor_(1)
    replay_outer_step(joiner.state, averaged)
    joiner.state.run_progress.outer_step += 1
    assert joiner.describe().fingerprint != donor.describe().fingerprint


def test_frozen_outer_parameters_are_no_averages() -> None:
    """A loop that averages the trainable parameters only, while outer_params lists all of them."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    outer = [nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in model.parameters()]
    trained = [p for p in outer if p.requires_grad]
    state = WorkerState(live=model, outer_params=outer, outer_optimizer=torch.optim.SGD(trained, lr=1.0))
    expected = [p.detach() - 1 for p in trained]
    replay_outer_step(state, [torch.ones_like(p) for p in trained])
    assert all(torch.equal(p, e) for p, e in zip(trained, expected, strict=True))


def test_loops_of_another_kind_have_to_say_how_they_apply() -> None:
    model = nn.Linear(3, 2)
    synchronised = [p.detach().clone() for p in model.parameters()]
    over_live = WorkerState(
        live=model, outer_params=lambda: synchronised, outer_optimizer=torch.optim.SGD(model.parameters(), lr=1.0)
    )
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(BadConfiguration, match=r"Agent\(replay="):
        replay_outer_step(over_live, [torch.ones_like(p) for p in before])
    fragments = [
        Fragment(name, {name: p.detach().clone()}, torch.optim.SGD([nn.Parameter(p.detach().clone())], lr=1.0))
        for name, p in model.named_parameters()
    ]
    with pytest.raises(BadConfiguration, match="2 outer optimizers"):
        replay_outer_step(WorkerState(live=model, fragments=fragments), [torch.ones_like(p) for p in before])
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_averages_in_another_order_are_refused() -> None:
    loop = Loop(PLAIN, 1)
    before = loop.describe().fingerprint
    with pytest.raises(BadConfiguration, match="in their order"):
        replay_outer_step(loop.state, averages(loop, 0)[::-1])
    assert loop.describe().fingerprint == before
