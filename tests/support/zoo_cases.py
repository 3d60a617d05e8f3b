"""The zoo's inhabitants."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lion_pytorch
import pytorch_optimizer
import schedulefree
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from recovery.state.rng import PythonRandom, add_random_generators
from recovery.types import PartClass
from tests.support import zoo_models as models
from tests.support.zoo import Case, Inner, Worker, one


class Fp32Momentum(Optimizer):
    """Momentum in float32 for parameters of any dtype; what ``load_state_dict`` would cast."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["step"] = torch.zeros(())
                        state["momentum"] = torch.zeros(parameter.shape)
                    state["step"] += 1
                    state["momentum"].mul_(0.9).add_(parameter.grad.float())
                    parameter.add_((-group["lr"] * state["momentum"]).to(parameter.dtype))


def named(cls: Callable[..., Optimizer], **options: Any) -> Inner:
    """Return a recipe for an optimizer that is given names with its parameters."""
    return lambda net: cls(list(net.named_parameters()), **options)


def two_groups(cls: Callable[..., Optimizer], **options: Any) -> Inner:
    """Return a recipe with one group for matrices and one, with its own options, for the rest."""

    def build(net: nn.Module) -> Optimizer:
        matrices = [p for p in net.parameters() if p.dim() > 1]
        rest = [p for p in net.parameters() if p.dim() <= 1]
        return cls(
            [{"params": matrices, "note": "decay"}, {"params": rest, "weight_decay": 0.0, "lr": 5e-4}], **options
        )

    return build


def muon_and_adamw(net: nn.Module) -> Mapping[str, Optimizer]:
    """Muon takes matrices only; a second inner optimizer takes the rest."""
    matrices = [p for p in net.parameters() if p.dim() == 2]
    rest = [p for p in net.parameters() if p.dim() != 2]
    return {"muon": optim.Muon(matrices, lr=1e-2), "rest": optim.AdamW(rest, lr=1e-3)}


_ADAMW = one(optim.AdamW, lr=1e-2)


class Warmup:
    """A callable object with state, as users give to LambdaLR."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return min(1.0, (step + 1) / self.steps)


def _torch_optimizers() -> Iterator[tuple[str, Inner]]:
    plain: dict[str, dict[str, Any]] = {
        "ASGD": {},
        "Adadelta": {},
        "Adagrad": {},
        "Adam": {"amsgrad": True},
        "AdamW": {"maximize": True},
        "Adamax": {},
        "NAdam": {},
        "RAdam": {},
        "RMSprop": {"momentum": 0.5, "centered": True},
        "Rprop": {},
        "SGD": {"momentum": 0.9, "dampening": 0.1},
    }
    for name, options in plain.items():
        cls = getattr(optim, name)
        for foreach in (False, True):
            yield f"{name}-{'foreach' if foreach else 'single'}", one(cls, lr=1e-3, foreach=foreach, **options)
    for name in ("Adam", "AdamW", "SGD", "Adagrad"):
        momentum = {"momentum": 0.9} if name == "SGD" else {}
        yield f"{name}-fused", one(getattr(optim, name), lr=1e-3, fused=True, **momentum)
    yield "SGD-plain", one(optim.SGD, lr=1e-2)
    yield "Adafactor", one(optim.Adafactor, lr=1e-2)
    yield "Adafactor-foreach", one(optim.Adafactor, lr=1e-2, foreach=True)
    yield "LBFGS", one(optim.LBFGS, lr=0.1, max_iter=3, history_size=4)
    yield "LBFGS-wolfe", one(optim.LBFGS, lr=0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe")
    yield "Muon", muon_and_adamw
    yield "Adam-tensor-lr", lambda net: optim.Adam(net.parameters(), lr=torch.tensor(1e-3), foreach=False)
    yield "AdamW-tensor-lr-fused", lambda net: optim.AdamW(net.parameters(), lr=torch.tensor(1e-3), fused=True)
    yield (
        "AdamW-tensor-betas",
        lambda net: optim.AdamW(net.parameters(), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False),
    )
    yield "AdamW-groups", two_groups(optim.AdamW, lr=1e-3)
    yield "AdamW-named", named(optim.AdamW, lr=1e-3)


_PYTORCH_OPTIMIZER = (
    *("shampoo", "soap", "kron", "splus", "galore"),  # preconditioners, projections
    *("lion", "tiger", "adan", "adabelief", "ademamix", "adopt", "mars", "ranger", "vsgd", "racs"),
    *("prodigy", "dadaptadam", "schedulefreeadamw"),  # find their own learning rate
    *("came", "sm3", "emofact", "apollodqn"),
)


def _third_party() -> Iterator[tuple[str, Inner]]:
    for name in _PYTORCH_OPTIMIZER:
        yield f"pytorch_optimizer-{name}", one(pytorch_optimizer.load_optimizer(name), lr=1e-3)
    yield "schedulefree-AdamW", _in_train_mode(one(schedulefree.AdamWScheduleFree, lr=1e-3))
    yield "schedulefree-SGD", _in_train_mode(one(schedulefree.SGDScheduleFree, lr=1e-2))
    yield "lion_pytorch", one(lion_pytorch.Lion, lr=1e-4)


def _in_train_mode(recipe: Inner) -> Inner:
    def build(net: nn.Module) -> Optimizer:
        optimizer = recipe(net)
        assert isinstance(optimizer, Optimizer)
        optimizer.train()  # type: ignore[attr-defined]
        return optimizer

    return build


def _schedules() -> Iterator[tuple[str, Callable[[Optimizer], LRScheduler]]]:
    s = lr_scheduler
    yield "LambdaLR", lambda o: s.LambdaLR(o, lambda step: 1 / (step + 1))
    yield "LambdaLR-object", lambda o: s.LambdaLR(o, Warmup(12))
    yield "MultiplicativeLR", lambda o: s.MultiplicativeLR(o, lambda _: 0.95)
    yield "StepLR", lambda o: s.StepLR(o, 4, 0.5)
    yield "MultiStepLR", lambda o: s.MultiStepLR(o, [3, 7, 7, 12, 20], 0.5)
    yield "ConstantLR", lambda o: s.ConstantLR(o, 0.3, 8)
    yield "LinearLR", lambda o: s.LinearLR(o, 0.1, 1.0, 15)
    yield "ExponentialLR", lambda o: s.ExponentialLR(o, 0.97)
    yield "PolynomialLR", lambda o: s.PolynomialLR(o, 30, 1.5)
    yield "CosineAnnealingLR", lambda o: s.CosineAnnealingLR(o, 9, 1e-5)
    yield "CosineAnnealingWarmRestarts", lambda o: s.CosineAnnealingWarmRestarts(o, 5, 2)
    yield "CyclicLR", lambda o: s.CyclicLR(o, 1e-4, 1e-2, 4, mode="exp_range", gamma=0.99, cycle_momentum=False)
    yield "CyclicLR-function", lambda o: s.CyclicLR(o, 1e-4, 1e-2, 4, scale_fn=lambda x: 0.9**x, cycle_momentum=False)
    yield "OneCycleLR", lambda o: s.OneCycleLR(o, 1e-2, total_steps=200)
    yield "OneCycleLR-three-phase", lambda o: s.OneCycleLR(o, 1e-2, total_steps=60, three_phase=True)
    yield "ReduceLROnPlateau", lambda o: s.ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1)
    yield (
        "SequentialLR",
        lambda o: s.SequentialLR(o, [s.LinearLR(o, 0.1, 1.0, 4), s.CosineAnnealingLR(o, 20)], milestones=[4]),
    )
    yield (
        "ChainedScheduler-nested",
        lambda o: s.ChainedScheduler(
            [s.SequentialLR(o, [s.ConstantLR(o, 0.5, 3), s.ExponentialLR(o, 0.9)], [3]), s.MultiStepLR(o, [2, 5])],
            optimizer=o,
        ),
    )
    yield "ChainedScheduler", lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.1, 6), s.ExponentialLR(o, 0.9)])
    yield "SWALR", lambda o: optim.swa_utils.SWALR(o, swa_lr=1e-4, anneal_epochs=8)


def _average(worker: Worker) -> None:
    average = optim.swa_utils.get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    ema = AveragedModel(worker.live, multi_avg_fn=average)
    worker.after_step.append(functools.partial(ema.update_parameters, worker.live))
    worker.state.add("ema", ema, PartClass.PRIVATE_COPIED)


def _gradient_scaler(worker: Worker) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

    def use() -> None:
        loss = worker.live(torch.ones(5, 6)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(next(iter(worker.inner.values())))
        scaler.update()

    worker.after_step.append(use)
    worker.state.add("scaler", scaler, PartClass.PRIVATE_COPIED, changes_in_forward=True)


def _own_tensors(worker: Worker) -> None:
    book: dict[str, Any] = {"losses": [], "norms": torch.zeros(4), "best": None, "seen": {"count": 0}}

    def note() -> None:
        step = worker.state.local_progress.inner_step
        book["losses"].append(step / 7)
        book["norms"][step % 4] = float(step)
        book["best"] = torch.full((2,), float(step))
        book["seen"]["count"] += 1

    worker.after_step.append(note)
    worker.state.add("book", lambda: book, PartClass.PRIVATE_COPIED)


def _generators(worker: Worker) -> None:
    add_random_generators(worker.state, PartClass.PRIVATE_COPIED)
    own = random.Random(worker.seed)
    worker.after_step.append(lambda: own.shuffle([1, 2, 3]))
    worker.state.add("own_random", PythonRandom(own), PartClass.PRIVATE_COPIED)


def sharded() -> nn.Module:
    """Parameters are DTensors on a mesh of one rank; a default process group must exist."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    first, second = nn.Linear(6, 8), nn.Linear(8, 4)
    for layer in (first, second):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, [Replicate()]))
    return nn.Sequential(first, nn.Tanh(), second)


def _sharded_batch(generator: torch.Generator) -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(models.features(generator), init_device_mesh("cpu", (1,)), [Replicate()])


def all_cases() -> list[Case]:
    """Return every case in both modes of restoring; the ages of donor and joiner rotate."""
    cases = [Case(name, inner) for name, inner in itertools.chain(_torch_optimizers(), _third_party())]
    cases.append(Case("SparseAdam", one(optim.SparseAdam, lr=1e-2), models.sparse_lookup, models.tokens))
    cases += [Case(f"schedule-{name}", one(optim.SGD, lr=1e-2), schedule=schedule) for name, schedule in _schedules()]
    tensor_lr: Inner = lambda net: optim.AdamW(net.parameters(), lr=torch.tensor(1e-2), fused=True)  # noqa: E731
    cases += [
        Case(f"schedule-{name}-tensor-lr", tensor_lr, schedule=schedule)
        for name, schedule in _schedules()
        if name in ("LambdaLR", "LinearLR", "SequentialLR", "CosineAnnealingLR")
    ]
    cases += [
        Case("bf16-fp32-momentum", one(Fp32Momentum), models.bf16_mlp, outer_dtype=torch.float32),
        Case("bf16-adamw", _ADAMW, models.bf16_mlp, outer_dtype=torch.float32),
        Case("channels-last", _ADAMW, models.conv, models.images),
        Case("tied", _ADAMW, models.Tied, models.tokens),
        Case("tied-last-synchronised", _ADAMW, models.Tied, models.tokens, style="last-synchronised"),
        Case("frozen", _ADAMW, models.frozen),
        Case("frozen-offloaded-trainable-only", _ADAMW, models.frozen, trainable_only=True),
        Case("unused", _ADAMW, models.Unused),
        Case("parametrised", _ADAMW, models.parametrised),
        Case("odd-shapes", _ADAMW, models.OddShapes),
        Case("odd-shapes-last-synchronised", _ADAMW, models.OddShapes, style="last-synchronised"),
        Case("every-dtype", _ADAMW, models.EveryDtype),
        Case("flat", _ADAMW, style="flat"),
        Case("fragments", _ADAMW, style="fragments"),
        Case("last-synchronised", _ADAMW, style="last-synchronised"),
        Case("dtensor", _ADAMW, sharded, _sharded_batch),
        Case("dtensor-last-synchronised", _ADAMW, sharded, _sharded_batch, style="last-synchronised"),
        Case("outer-adamw", _ADAMW, outer=lambda params: optim.AdamW(params, lr=0.1)),
        Case("outer-plain-sgd", _ADAMW, outer=lambda params: optim.SGD(params, lr=1.0)),
        Case("extra-ema", _ADAMW, extras=_average),
        Case("extra-scaler", _ADAMW, extras=_gradient_scaler),
        Case("extra-own-tensors", _ADAMW, extras=_own_tensors),
        Case("extra-random-generators", _ADAMW, extras=_generators),
    ]
    aged = []
    for number, case in enumerate(cases):
        for staged in (False, True):
            donor, joiner = _AGES[(number + 3 * staged) % len(_AGES)]
            aged.append(_aged(case, donor, joiner, staged))
    core = Case("core", two_groups(optim.AdamW, lr=1e-2), schedule=lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 12))
    return aged + [_aged(core, donor, joiner, staged) for donor, joiner in _AGES for staged in (False, True)]


_AGES = [(2, 0), (1, 0), (2, 1), (0, 0), (1, 3), (0, 2), (3, 3)]
"""Phases that donor and joiner trained: the joiner is fresh, behind, ahead, or as old as the donor."""


def _aged(case: Case, donor: int, joiner: int, staged: bool) -> Case:
    name = f"{case.name}[{donor}to{joiner}-{'staged' if staged else 'in-place'}]"
    return dataclasses.replace(case, name=name, donor_phases=donor, joiner_phases=joiner, staged=staged)
