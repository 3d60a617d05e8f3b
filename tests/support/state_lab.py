"""Two workers in one process and a transfer between them, for tests of state and restoring."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, optim
from torch.optim import lr_scheduler

from recovery.state.digest import numerics_id
from recovery.state.manifest import Manifest, decode, encode
from recovery.state.parts import WorkerState, describe
from recovery.state.restore import Restoration, RestoreMode, RestoreReport
from recovery.types import Cut, Incarnation, PartName, RunId, Version, WorkerId, WorkerRef
from tests.support.zoo import Case, Worker, one

ADAMW = one(optim.AdamW, lr=1e-2)
SIMPLE = Case("simple", ADAMW, schedule=lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 12))

Tamper = Callable[[PartName, Tensor], Tensor]


def describe_state(state: WorkerState, parts: Sequence[PartName] | None = None) -> Manifest:
    """Return the manifest of a worker as it is now, once through its encoding."""
    manifest = describe(
        [state.read_part(name) for name in parts or state.part_names],
        run_id=RunId("lab"),
        worker=WorkerRef(WorkerId("donor"), Incarnation("1")),
        cut=Cut(Version(1, state.run_progress.outer_step), state.local_progress.inner_step),
        numerics_id=numerics_id(),
        layout_digest=state.layout_digest(),
    )
    return decode(encode(manifest))


def fill(restoration: Restoration, donor: WorkerState, tamper: Tamper | None = None, seed: int = 0) -> None:
    """Write the donor's bytes into the destinations, chunks in any order."""
    for name in restoration.part_names:
        source, into = donor.read_part(name).bytes, restoration.destination(name)
        chunks = list(restoration.manifest.part(name).chunks)
        random.Random(seed).shuffle(chunks)
        for chunk in chunks:
            piece = source.read(chunk.offset, chunk.num_bytes).clone()
            into.write(chunk.offset, piece if tamper is None else tamper(name, piece))
            piece.fill_(0xA5)  # a pooled buffer that is used again must not be anybody's state


def transfer(
    donor: WorkerState,
    joiner: WorkerState,
    mode: RestoreMode = RestoreMode.IN_PLACE,
    *,
    manifest: Manifest | None = None,
    parts: Sequence[PartName] | None = None,
    lenient: bool = False,
    tamper: Tamper | None = None,
) -> RestoreReport:
    """Restore ``joiner`` from ``donor``."""
    manifest = manifest or describe_state(donor)
    restoration = Restoration(joiner, manifest, mode=mode, parts=parts, lenient=lenient)
    restoration.prepare()
    fill(restoration, donor, tamper)
    return restoration.commit()


def contents(state: WorkerState, parts: Sequence[PartName] | None = None) -> dict[str, object]:
    """Return every part's structure and bytes, to compare a worker with what it was."""
    found: dict[str, object] = {}
    for name in parts or state.part_names:
        part = state.read_part(name)
        data = bytes(part.bytes.read(0, part.bytes.num_bytes).numpy())
        found[name] = (part.tree.SerializeToString(deterministic=True), part.specs, data)
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors agree in dtype, shape and every bit."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(
        a.detach().contiguous().view(-1).view(torch.uint8), b.detach().contiguous().view(-1).view(torch.uint8)
    )


def pair(case: Case = SIMPLE, donor_phases: int = 1, joiner_phases: int = 0) -> tuple[Worker, Worker]:
    """Return a donor and a joiner that were built from different seeds and trained so long."""
    donor, joiner = Worker(case, 0), Worker(case, 1)
    donor.train(donor_phases)
    joiner.train(joiner_phases)
    return donor, joiner
