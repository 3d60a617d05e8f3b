"""A DiLoCo-like state that two processes make alike from a seed."""

from __future__ import annotations

import torch

_LARGEST_BYTES = 16 << 20


def outer_state(num_bytes: int, seed: int, *, fill: bool = True) -> dict[str, dict[str, torch.Tensor]]:
    """Return outer parameters and momentum of ``num_bytes`` together; without ``fill`` they are zeros.

    Tensors of many sizes: large ones that have chunks of their own and small ones that share some.
    """
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, dict[str, torch.Tensor]] = {"outer_params": {}, "outer_optimizer": {}}
    left = num_bytes // 8  # elements of each of the two parts
    index = 0
    while left:
        wanted = _LARGEST_BYTES // 4 if index % 4 == 0 else 4096 * (index % 4)
        count = min(left, wanted)
        for part in state.values():
            tensor = torch.empty(count)
            part[f"layer{index:05d}"] = tensor.uniform_(generator=generator) if fill else tensor.zero_()
        left -= count
        index += 1
    return state
