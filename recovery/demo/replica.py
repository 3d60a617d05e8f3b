"""One DiLoCo replica of the demo: model, offloaded outer copy, both optimizers, schedule; and digests to compare it by.

The digests here are computed by the demo itself, with nothing of the recovery service, so that equal digests on two
workers prove the service's work and not merely its agreement with itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor, nn

from recovery.demo.model import ByteTransformer, ModelSize, next_byte_loss
from recovery.errors import BadConfiguration


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """How the demo's replicas train. The same on every worker of a run."""

    size: ModelSize = field(default_factory=ModelSize)
    batch_size: int = 8
    inner_learning_rate: float = 1e-3
    warmup_inner_steps: int = 200
    """The inner learning rate rises linearly for so many steps: every joiner arrives while it still changes."""
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.warmup_inner_steps < 1:
            raise BadConfiguration("batch_size and warmup_inner_steps must be 1 or more")
        if not (self.inner_learning_rate > 0 and self.outer_learning_rate > 0 and 0 < self.outer_momentum < 1):
            raise BadConfiguration("learning rates must be positive and the outer momentum between 0 and 1")


@dataclass(frozen=True)
class WarmUp:
    """A learning rate's factor: linear up to ``steps``, never zero, then falling by the inverse square root.

    Without slots, because ``LambdaLR`` saves and restores a callable by its ``__dict__``.
    """

    steps: int

    def __call__(self, epoch: int) -> float:
        return min((epoch + 1) / self.steps, math.sqrt(self.steps / (epoch + 1)))


class Replica:
    """All that one worker trains. Not thread-safe: the training thread owns it."""

    def __init__(self, settings: TrainingSettings, *, seed: int) -> None:
        self.settings = settings
        self.model = ByteTransformer(settings.size, seed=seed)
        self.outer_params = [nn.Parameter(parameter.detach().clone()) for parameter in self.model.parameters()]
        self.names = [name for name, _ in self.model.named_parameters()]
        self.outer = self._outer_optimizer(self.outer_params)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=settings.inner_learning_rate, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.inner, WarmUp(settings.warmup_inner_steps))
        self._probe_params = [nn.Parameter(torch.empty_like(parameter)) for parameter in self.outer_params]

    def _outer_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.SGD:
        settings = self.settings
        return torch.optim.SGD(params, lr=settings.outer_learning_rate, momentum=settings.outer_momentum, nesterov=True)

    def inner_step(self, windows: Tensor) -> float:
        """Take one inner step on ``windows``; return its loss, in nats a byte."""
        loss = next_byte_loss(self.model, windows)
        loss.backward()  # type: ignore[no-untyped-call]
        self.inner.step()
        self.scheduler.step()
        self.inner.zero_grad()
        return loss.item()

    def pseudo_gradients(self) -> list[Tensor]:
        """Return outer minus live, one new tensor a parameter; calling it again gives the same values."""
        return [
            outer.detach() - live.detach()
            for outer, live in zip(self.outer_params, self.model.parameters(), strict=True)
        ]

    def outer_step(self, averaged: Sequence[Tensor]) -> None:
        """Apply one outer step with the averaged pseudo-gradients and mirror the result into the live model."""
        for parameter, gradient in zip(self.outer_params, averaged, strict=True):
            parameter.grad = gradient
        self.outer.step()
        self.outer.zero_grad()
        with torch.no_grad():
            for live, outer in zip(self.model.parameters(), self.outer_params, strict=True):
                live.copy_(outer)

    # Evidence

    @property
    def schedule_epoch(self) -> int:
        """Inner steps that the schedule has counted; a joiner takes over its donor's."""
        return int(self.scheduler.last_epoch)

    def outer_digest(self) -> str:
        """Return a digest over every outer parameter and its momentum."""
        return _digest(self._outer_tensors(self.outer_params, self.outer))

    def inner_digest(self) -> str:
        """Return a digest over every tensor of the inner optimizer's state."""
        return _digest(
            (f"{name}/{key}", value)
            for name, parameter in self.model.named_parameters()
            for key, value in sorted(self.inner.state.get(parameter, {}).items())
        )

    def momentum_norm(self) -> float:
        """Return the Euclidean norm of the outer momentum; zero before the first outer step."""
        squares = [
            float(state["momentum_buffer"].square().sum())
            for state in self.outer.state.values()
            if state.get("momentum_buffer") is not None
        ]
        return math.sqrt(sum(squares))

    def next_step_digest(self, averaged: Sequence[Tensor]) -> str:
        """Return the digest that one further outer step with ``averaged`` would give; the replica stays as it is.

        The step is taken by another optimizer on copies of the outer parameters and of their momentum, with this
        replica's own group options. Two replicas with equal results are equal in all that the outer step reads.
        """
        probe = self._outer_optimizer(self._probe_params)
        for group, mine in zip(probe.param_groups, self.outer.param_groups, strict=True):
            group.update({key: value for key, value in mine.items() if key != "params"})
        with torch.no_grad():
            for copy, outer, gradient in zip(self._probe_params, self.outer_params, averaged, strict=True):
                copy.copy_(outer)
                copy.grad = gradient
                buffer = self.outer.state.get(outer, {}).get("momentum_buffer")
                if buffer is not None:
                    probe.state[copy] = {"momentum_buffer": buffer.clone()}
        probe.step()
        digest = _digest(self._outer_tensors(self._probe_params, probe))
        probe.zero_grad()
        return digest

    def next_learning_rates(self, count: int) -> list[float]:
        """Return the learning rates of the next ``count`` inner steps, beginning with the one set now.

        They come from another scheduler that is given this one's state: the replica stays as it is.
        """
        stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=self.settings.inner_learning_rate)
        scheduler = torch.optim.lr_scheduler.LambdaLR(stand_in, WarmUp(self.settings.warmup_inner_steps))
        scheduler.load_state_dict(self.scheduler.state_dict())
        stand_in.param_groups[0]["lr"] = self.inner.param_groups[0]["lr"]
        rates = []
        for _ in range(count):
            rates.append(float(stand_in.param_groups[0]["lr"]))
            stand_in.step()
            scheduler.step()
        return rates

    def _outer_tensors(
        self, params: Sequence[nn.Parameter], optimizer: torch.optim.SGD
    ) -> Iterable[tuple[str, Tensor]]:
        for name, parameter in zip(self.names, params, strict=True):
            yield name, parameter
            buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
            if buffer is not None:
                yield f"{name}/momentum_buffer", buffer


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    hasher = xxhash.xxh3_128()
    for name, tensor in tensors:
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        hasher.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit of one parameter's outer copy that was inverted."""

    name: str
    element: int
    bit: int


def flip_random_bits(replica: Replica, *, seed: int, num_tensors: int) -> list[Flip]:
    """Invert one random mantissa bit in each of ``num_tensors`` random outer parameters; return which.

    The memory is written directly, as a failing memory module would. Mantissa bits only: a flipped exponent could
    make the weight infinite, which anybody would notice.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(replica.names), generator=generator)[:num_tensors].tolist()
    flips = []
    for index in sorted(chosen):
        words = replica.outer_params[index].detach().view(-1).view(torch.int32)
        element = int(torch.randint(words.numel(), (1,), generator=generator))
        bit = int(torch.randint(23, (1,), generator=generator))
        words[element] ^= 1 << bit
        flips.append(Flip(replica.names[index], element, bit))
    return flips
