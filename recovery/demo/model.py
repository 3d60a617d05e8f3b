"""The demo's model: a small byte-level transformer language model with tied input and output embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from recovery.errors import BadConfiguration

VOCABULARY = 256
"""One token a byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Shape of the model. The default has 1.2 M parameters: one inner step takes about 50 ms on one CPU thread."""

    width: int = 128
    num_layers: int = 6
    num_heads: int = 4
    context: int = 64
    """Bytes that the model sees at once."""

    def __post_init__(self) -> None:
        for name in ("width", "num_layers", "num_heads", "context"):
            if getattr(self, name) < 1:
                raise BadConfiguration(f"model {name} is {getattr(self, name)}: take 1 or more")
        if self.width % self.num_heads:
            raise BadConfiguration(f"model width {self.width} is not a multiple of its {self.num_heads} heads")


class Block(nn.Module):
    """One pre-norm layer: causal self-attention, then a GELU perceptron of four times the width."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp_in = nn.Linear(size.width, 4 * size.width)
        self.mlp_out = nn.Linear(4 * size.width, size.width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        query, key, value = (
            self.query_key_value(self.attention_norm(hidden))
            .view(batch, length, 3, self.num_heads, width // self.num_heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        raised: Tensor = self.mlp_in(self.mlp_norm(hidden))
        widened: Tensor = hidden + self.mlp_out(functional.gelu(raised))
        return widened


class ByteTransformer(nn.Module):
    """Predicts the next byte. The same seed gives the same weights; the output shares the input's embedding."""

    def __init__(self, size: ModelSize, *, seed: int) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        residual_std = 0.02 / (2 * self.size.num_layers) ** 0.5
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
                elif parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    deep = name.endswith(("attention_out.weight", "mlp_out.weight"))
                    parameter.normal_(0.0, residual_std if deep else 0.02, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, 256) for int64 ``tokens`` of shape (batch, length)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens) + self.position(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats a byte, of predicting each byte of ``windows`` from those before it.

    Args:
        model: Maps int64 (batch, length) to logits (batch, length, 256).
        windows: int64, (batch, length + 1).
    """
    logits: Tensor = model(windows[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), windows[:, 1:].reshape(-1))
