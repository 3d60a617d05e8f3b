"""Small models whose parameters and buffers are awkward in every way that was ever reported."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

Batch = Callable[[torch.Generator], Tensor]
"""Draws one batch."""


def features(generator: torch.Generator) -> Tensor:
    """A batch for the models that take six features."""
    return torch.randn(5, 6, generator=generator)


def images(generator: torch.Generator) -> Tensor:
    """A batch for the convolutional model."""
    return torch.randn(3, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)


def tokens(generator: torch.Generator) -> Tensor:
    """A batch for the models that look tokens up."""
    return torch.randint(0, 11, (4, 3), generator=generator)


def mlp() -> nn.Module:
    """Two matrices, biases, and batch statistics as buffers."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def bf16_mlp() -> nn.Module:
    """The same in bfloat16 (its batch statistics stay float32)."""

    class Bf16(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8).bfloat16()
            self.norm = nn.BatchNorm1d(8)
            self.second = nn.Linear(8, 4).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.norm(self.first(x.bfloat16()).float())
            return self.second(torch.tanh(hidden).bfloat16()).float()  # type: ignore[no-any-return]

    return Bf16()


def conv() -> nn.Module:
    """Convolutions whose weights lie in memory channels-last."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def sparse_lookup() -> nn.Module:
    """An embedding with sparse gradients."""
    return nn.Embedding(11, 5, sparse=True)


class Tied(nn.Module):
    """Input and output embedding are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(x))))  # type: ignore[no-any-return]


def frozen() -> nn.Module:
    """The first layer does not train."""
    net = mlp()
    for parameter in next(iter(net.children())).parameters():
        parameter.requires_grad_(False)
    return net


class Unused(nn.Module):
    """A layer that no forward touches: it never has a gradient, so most optimizers keep no state for it."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)
        self.used = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def parametrised() -> nn.Module:
    """Weights computed from other parameters and buffers."""
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(8, 4)),
    )


class OddShapes(nn.Module):
    """Parameters of no, one and zero elements, a transposed one, and buffers of the same kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.single = nn.Parameter(torch.randn(1))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.strided = nn.Parameter(torch.randn(8, 6)[::2])
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("hidden", torch.randn(2, 3), persistent=False)
        self.register_buffer("expanded", torch.randn(3, 1).expand(3, 5))
        self.register_buffer("sliced", torch.randn(6, 4)[:, 1:3])

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("count").add_(1)
        self.get_buffer("hidden").mul_(0.5).add_(self.scale.detach())
        self.get_buffer("sliced").add_(x.mean())
        return x @ self.transposed * self.scale + self.single + (x @ self.strided.t()) + self.nothing.sum()


_SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -2.5, 1e-40]
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class EveryDtype(nn.Module):
    """A buffer of each dtype, with NaN payloads, infinities, negative zeros and the ends of each range."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        draw = int(torch.randint(0, 100, ()))
        for name in _FLOATS + _FP8:
            values = torch.tensor([*_SPECIAL, float(draw)], dtype=torch.float64).to(getattr(torch, name))
            self.register_buffer(f"as_{name}", values)
        payload = torch.tensor([0x7FC01234 + draw, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
        scales = torch.tensor([0, 127, 254, 255, draw], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        self.register_buffer("as_float8_e8m0fnu", scales)
        self.register_buffer("nan_payloads", payload, persistent=False)
        for name in _INTS:
            dtype = getattr(torch, name)
            info = torch.iinfo(dtype)
            self.register_buffer(f"as_{name}", torch.tensor([info.min, info.max, draw], dtype=dtype))
        self.register_buffer("as_bool", torch.tensor([True, False, draw % 2 == 0]))
        self.register_buffer("as_complex64", torch.complex(torch.randn(3), torch.tensor([-0.0, float("nan"), 1.0])))
        self.register_buffer("as_complex128", torch.randn(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight
