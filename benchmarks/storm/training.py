"""The micro model of a storm: a byte-level transformer of 22,000 parameters on the standard library's own text."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from recovery.demo.corpus import CorpusReader, read_shard, shard_of, standard_library_files
from recovery.demo.model import ByteTransformer, ModelSize, next_byte_loss
from recovery.state import WorkerState
from recovery.types import PartClass

SIZE = ModelSize(width=32, num_layers=1, num_heads=2, context=32)
SHARDS = 4
INNER_STEPS = 10
"""H."""
_SHARD_BYTES = 256 * 1024
_BATCH = 16
_HELD_OUT_WINDOWS = 256


class Trainee:
    """Model, optimizers, schedule and data of one worker; all methods on one thread.

    Args:
        seed: Of the weights, and of where each worker begins in its data.
        shard: Which of ``SHARDS`` parts of the corpus is drawn from; one more is held out, the same for every seed.
    """

    def __init__(self, *, seed: int, shard: int) -> None:
        files = standard_library_files()
        data = read_shard(shard_of(files, index=shard, count=SHARDS + 1), max_bytes=_SHARD_BYTES)
        self.model = ByteTransformer(SIZE, seed=seed)
        self.outer_params = [nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.schedule = LambdaLR(self.inner, lambda step: min(1.0, (step + 1) / 50))
        self.outer = torch.optim.SGD(self.outer_params, lr=0.5, momentum=0.9, nesterov=True)
        self.reader = CorpusReader(data.roll(7919 * seed), worker_index=shard, batch_size=_BATCH, context=SIZE.context)
        self.state = WorkerState(
            live=self.model,
            outer_params=self.outer_params,
            outer_optimizer=self.outer,
            inner_optimizer=self.inner,
            scheduler=self.schedule,
        )
        self.state.add("data", self.reader, PartClass.PRIVATE_KEPT)
        held_out = read_shard(shard_of(files, index=SHARDS, count=SHARDS + 1), max_bytes=_SHARD_BYTES)
        starts = torch.arange(_HELD_OUT_WINDOWS) * (held_out.numel() // (_HELD_OUT_WINDOWS + 1))
        self._held_out = held_out[starts[:, None] + torch.arange(SIZE.context + 1)].long()

    def inner_step(self) -> float:
        """Take one inner step; return the loss."""
        loss = next_byte_loss(self.model, self.reader.next_batch())
        self.inner.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.inner.step()
        self.schedule.step()
        return float(loss.detach())

    def pseudo_gradients(self) -> list[Tensor]:
        """Return outer minus live parameters."""
        return [
            outer.detach() - live.detach()
            for outer, live in zip(self.outer_params, self.model.parameters(), strict=True)
        ]

    def apply(self, averaged: list[Tensor]) -> None:
        """Take one outer step and copy its result into the live model."""
        for outer, mean in zip(self.outer_params, averaged, strict=True):
            outer.grad = mean
        self.outer.step()
        with torch.no_grad():
            for live, outer in zip(self.model.parameters(), self.outer_params, strict=True):
                live.copy_(outer)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the loss on text that no worker trains on; at the beginning of a phase it is the run's."""
        return float(next_byte_loss(self.model, self._held_out))


def undisturbed(*, seed: int, outer_steps: int) -> list[float]:
    """Return the held-out loss after each outer step of the same training in one process, without any service.

    The workers take turns at their inner steps; their pseudo-gradients are averaged, and each applies the mean.
    """
    trainees = [Trainee(seed=seed, shard=shard) for shard in range(SHARDS)]
    losses = []
    for _ in range(outer_steps):
        for trainee in trainees:
            for _ in range(INNER_STEPS):
                trainee.inner_step()
        contributions = zip(*(trainee.pseudo_gradients() for trainee in trainees), strict=True)
        means = [torch.stack(parts).mean(0) for parts in contributions]
        for trainee in trainees:
            trainee.apply([mean.clone() for mean in means])
        losses.append(trainees[0].held_out_loss())
    return losses
