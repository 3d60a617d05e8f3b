"""The outer state of the transfer tests' processes: parameters and momentum of a chosen size and content."""

from __future__ import annotations

import torch
from torch import nn

from recovery.state import WorkerState, describe
from recovery.types import MIB, Cut, Incarnation, NumericsId, RunId, Version, WorkerId, WorkerRef


class Outer:
    """``num_mib`` of parameters and of momentum together, in chunks of 4 MiB, and what names them as a worker's state.

    Args:
        num_mib: Bytes of both together, in MiB; a multiple of 8 gives whole chunks only.
        seed: Says what they hold; 0: zeros.
        momentum: Whether the outer optimizer has its state already.
        changed_every: Add 1 to the first value of every so many chunks; 0: of none.
        tensors: Number of parameters, if there are so many chunks.
    """

    def __init__(
        self, num_mib: int, seed: int = 0, momentum: bool = True, changed_every: int = 0, tensors: int = 8
    ) -> None:
        count = max(1, min(tensors, num_mib // 8))
        rows = num_mib * MIB // 2 // count // 4096
        generator = torch.Generator().manual_seed(seed)
        self.params = {f"w{index}": nn.Parameter(filled(rows, seed, generator)) for index in range(count)}
        self.optimizer = torch.optim.SGD(list(self.params.values()), lr=0.7, momentum=0.9, nesterov=True)
        values = [parameter.detach() for parameter in self.params.values()]
        if momentum:
            for parameter in self.params.values():
                buffer = filled(rows, seed, generator)
                self.optimizer.state[parameter]["momentum_buffer"] = buffer
                values.append(buffer)
        if changed_every:
            chunks = [
                chunk for tensor in values for chunk in torch.split(tensor.view(-1), MIB)
            ]  # 1 Mi floats are 4 MiB
            for chunk in chunks[::changed_every]:
                chunk[0] += 1
        self.state = WorkerState(outer_params=self.params, outer_optimizer=self.optimizer)

    def step(self) -> None:
        """Take an outer step with gradients of 1."""
        for parameter in self.params.values():
            if parameter.grad is None:
                parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def clear(self) -> None:
        """Set every value to zero."""
        with torch.no_grad():
            for parameter in self.params.values():
                parameter.zero_()
                for value in self.optimizer.state[parameter].values():
                    value.zero_()

    def fingerprint(self) -> str:
        """Return the fingerprint of what is in memory now, in hexadecimal."""
        manifest = describe(
            [self.state.read_part(name) for name in self.state.replicated_names],
            run_id=RunId("any"),
            worker=WorkerRef(WorkerId("any"), Incarnation("any")),
            cut=Cut(Version(1, 0)),
            numerics_id=NumericsId("any"),
            layout_digest=b"",
        )
        return manifest.fingerprint.hex()


def filled(rows: int, seed: int, generator: torch.Generator) -> torch.Tensor:
    tensor = torch.zeros(rows, 1024)
    return tensor.uniform_(generator=generator) if seed else tensor.fill_(0.0)
