"""The zoo: many ways to write a worker, each as a recipe that two processes can build, step and compare."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from recovery.state.parts import Fragment, WorkerState
from tests.support import zoo_models as models

INNER_STEPS = 5

Inner = Callable[[nn.Module], Optimizer | Mapping[str, Optimizer]]
Schedule = Callable[[Optimizer], LRScheduler]


def one(cls: Callable[..., Optimizer], **options: Any) -> Inner:
    """Return a recipe for one optimizer over all parameters that train."""
    return lambda net: cls([p for p in net.parameters() if p.requires_grad], **options)


def outer_sgd(params: Sequence[Tensor]) -> Optimizer:
    """The outer optimizer of DiLoCo."""
    return SGD(params, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class Case:
    """One recipe.

    ``donor_phases`` and ``joiner_phases`` say how long each trained before the transfer: the joiner's may be fresh,
    behind or ahead. ``staged`` chooses the mode of restoring.
    """

    name: str
    inner: Inner
    model: Callable[[], nn.Module] = models.mlp
    batch: models.Batch = models.features
    outer: Callable[[Sequence[Tensor]], Optimizer] = outer_sgd
    schedule: Schedule | None = None
    style: str = "offloaded"
    trainable_only: bool = False
    outer_dtype: torch.dtype | None = None
    extras: Callable[[Worker], None] | None = None
    donor_phases: int = 2
    joiner_phases: int = 0
    staged: bool = False


@dataclass
class Worker:
    """A built case. ``state`` is what the project sees; the rest is the training loop around it."""

    case: Case
    seed: int
    live: nn.Module = field(init=False)
    inner: dict[str, Optimizer] = field(init=False)
    scheduler: LRScheduler | None = field(init=False, default=None)
    state: WorkerState = field(init=False)
    after_step: list[Callable[[], None]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.live = self.case.model()
        made = self.case.inner(self.live)
        self.inner = dict(made) if isinstance(made, Mapping) else {"only": made}
        if self.case.schedule is not None:
            self.scheduler = self.case.schedule(next(iter(self.inner.values())))
        inner = made if isinstance(made, Mapping) else self.inner["only"]
        _STYLES[self.case.style](self, inner)
        if self.case.extras is not None:
            self.case.extras(self)

    def train(self, phases: int) -> None:
        """Train whole phases: inner steps and an outer step."""
        for _ in range(phases):
            for _ in range(INNER_STEPS):
                self.inner_step()
            self.outer_step()

    def inner_step(self) -> None:
        """Take one inner step on a batch that depends on the worker's progress alone."""
        progress = self.state.local_progress
        generator = torch.Generator().manual_seed(1000 + progress.inner_step)
        batch = self.case.batch(generator)
        torch.manual_seed(progress.inner_step)  # some optimizers draw random numbers, from any of the three generators
        numpy.random.seed(progress.inner_step)
        random.seed(progress.inner_step)

        def closure() -> Tensor:
            for optimizer in self.inner.values():
                optimizer.zero_grad()
            loss: Tensor = self.live(batch).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        loss = closure()
        for optimizer in self.inner.values():
            optimizer.step(closure if type(optimizer).__name__ == "LBFGS" else None)  # type: ignore[arg-type]
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(float(loss))
        elif self.scheduler is not None:
            self.scheduler.step()
        for callback in self.after_step:
            callback()
        progress.inner_step += 1
        progress.tokens += batch.shape[0]

    def outer_step(self) -> None:
        """Take the outer step of a run whose only worker this is."""
        self._outer_step()
        self.state.run_progress.outer_step += 1
        self.state.run_progress.tokens = self.state.local_progress.tokens

    _outer_step: Callable[[], None] = field(init=False)


def _offloaded(worker: Worker, inner: Optimizer | Mapping[str, Optimizer]) -> None:
    """Copies on the CPU with an outer optimizer over them; the live module is overwritten after each outer step."""
    case, live = worker.case, worker.live
    mirrored = [p for p in live.parameters() if p.requires_grad or not case.trainable_only]
    copies = [nn.Parameter(p.detach().clone().to(case.outer_dtype or p.dtype)) for p in mirrored]
    optimizer = case.outer([p for p, q in zip(copies, mirrored, strict=True) if q.requires_grad])

    def step() -> None:
        for outer, parameter in zip(copies, mirrored, strict=True):
            outer.grad = (outer.detach() - parameter.detach().to(outer.dtype)) if parameter.requires_grad else None
        optimizer.step()
        for outer, parameter in zip(copies, mirrored, strict=True):
            parameter.data.copy_(outer.detach())

    worker._outer_step = step
    worker.state = WorkerState(
        live=live, outer_params=copies, outer_optimizer=optimizer, inner_optimizer=inner, scheduler=worker.scheduler
    )


def _last_synchronised(worker: Worker, inner: Optimizer | Mapping[str, Optimizer]) -> None:
    """An outer optimizer over the live parameters, and a list of tensors that each outer step replaces."""
    live = worker.live
    optimizer = worker.case.outer(list(live.parameters()))
    last = [[p.detach().clone() for p in live.parameters()]]

    def step() -> None:
        for parameter, before in zip(live.parameters(), last[0], strict=True):
            parameter.grad = before - parameter.detach()
            parameter.data = before.clone() if parameter.dim() == 0 else parameter.data.copy_(before)
        optimizer.step()
        last[0] = [p.detach().clone() for p in live.parameters()]

    worker._outer_step = step
    worker.state = WorkerState(
        live=live,
        outer_params=lambda: last[0],
        outer_optimizer=optimizer,
        inner_optimizer=inner,
        scheduler=worker.scheduler,
    )


def _fragments(worker: Worker, inner: Optimizer | Mapping[str, Optimizer]) -> None:
    """Two fragments with backups and outer optimizers of their own; at a boundary only one of them steps."""
    live = worker.live
    named = dict(live.named_parameters())
    half = len(named) // 2
    backups, optimizers, fragments = [], [], []
    for number, names in enumerate([list(named)[:half], list(named)[half:]]):
        backup = {name: named[name].detach().clone() for name in names}
        optimizer = worker.case.outer([named[name] for name in names])
        backups.append(backup)
        optimizers.append(optimizer)
        fragments.append(Fragment(f"f{number}", backup, optimizer))

    def step() -> None:
        which = worker.state.run_progress.outer_step % 2
        for name, before in backups[which].items():
            named[name].grad = before - named[name].detach()
            named[name].data.copy_(before)
        optimizers[which].step()
        for name, before in backups[which].items():
            before.copy_(named[name].detach())

    worker._outer_step = step
    worker.state = WorkerState(live=live, fragments=fragments, inner_optimizer=inner, scheduler=worker.scheduler)


def _flat(worker: Worker, inner: Optimizer | Mapping[str, Optimizer]) -> None:
    """All outer parameters are views of one flat buffer, which is what the outer optimizer steps."""
    live = worker.live
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in live.parameters()]))
    views, position = {}, 0
    for name, parameter in live.named_parameters():
        views[name] = flat.data[position : position + parameter.numel()].view(parameter.shape)
        position += parameter.numel()
    optimizer = worker.case.outer([flat])

    def step() -> None:
        flat.grad = flat.detach() - torch.cat([p.detach().reshape(-1) for p in live.parameters()])
        optimizer.step()
        for name, parameter in live.named_parameters():
            parameter.data.copy_(views[name])

    worker._outer_step = step
    worker.state = WorkerState(
        live=live, outer_params=views, outer_optimizer=optimizer, inner_optimizer=inner, scheduler=worker.scheduler
    )


_STYLES: dict[str, Callable[[Worker, Optimizer | Mapping[str, Optimizer]], None]] = {
    "offloaded": _offloaded,
    "last-synchronised": _last_synchronised,
    "fragments": _fragments,
    "flat": _flat,
}


def next_learning_rates(worker: Worker, count: int = 20) -> list[list[float]]:
    """Return the learning rates of every group after each of the next ``count`` scheduler steps.

    The scheduler and its optimizer move on: call it last.
    """
    rates = []
    for number in range(count):
        if isinstance(worker.scheduler, ReduceLROnPlateau):
            worker.scheduler.step(10.0 + number)
        elif worker.scheduler is not None:
            with warnings.catch_warnings():
                # Of the order of steps, and of the epoch that SequentialLR passes to its children.
                warnings.simplefilter("ignore", UserWarning)
                worker.scheduler.step()
        rates.append([float(group["lr"]) for one in worker.inner.values() for group in one.param_groups])
    return rates
