"""Defects of the systems that this service descends from, found by reading and running them, as checks.

See ``tests/support/state_reports.py`` for how they are used.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from recovery.errors import LayoutMismatch
from recovery.state.restore import Restoration, RestoreMode
from recovery.types import PartClass, PartName
from tests.support import zoo_models as models
from tests.support.report_registry import ADAMW, inner, pair, report
from tests.support.state_lab import contents, describe_state, same_bits, transfer
from tests.support.zoo import Case, Worker, one
from tests.support.zoo_cases import Fp32Momentum


def _every_copy_of_a_weight_is_written() -> None:
    for style in ("offloaded", "last-synchronised", "flat"):
        donor, joiner = pair(Case("copies", ADAMW, style=style), 1)
        transfer(donor.state, joiner.state)
        for name, theirs in donor.state.read_outer_params().items():
            assert same_bits(theirs, joiner.state.read_outer_params()[name]), name
            assert same_bits(theirs, dict(joiner.live.named_parameters())[name]), name


report("Z1", "PrimeIntellect-ai/prime-diloco: recv_ckpt_from_peer leaves the offloaded list as it was")(
    _every_copy_of_a_weight_is_written
)
report("10", "learning-at-home/hivemind#417")(_every_copy_of_a_weight_is_written)


@report("Z3", "PrimeIntellect-ai/prime-diloco: offloaded list zipped with all parameters")
def frozen_parameters_do_not_shift_names() -> None:
    """A list of trainable parameters was zipped with all of them: one frozen layer shifted every pair."""
    donor, joiner = pair(Case("frozen", ADAMW, models.frozen, trainable_only=True), 1)
    assert list(donor.state.read_outer_params()) == [n for n, p in donor.live.named_parameters() if p.requires_grad]
    transfer(donor.state, joiner.state)
    for (name, theirs), ours in zip(donor.live.named_parameters(), joiner.live.parameters(), strict=True):
        assert same_bits(theirs, ours), name


@report("Z4", "PrimeIntellect-ai/prime-diloco: tensors inside lists travel inside the pickle")
def tensors_in_lists_travel_as_tensors() -> None:
    """Tensors inside ``param_groups`` were hidden in the structure."""
    donor = Worker(Case("list", lambda net: optim.Adam(net.parameters(), lr=torch.tensor(0.5), foreach=False)), 0)
    part = donor.state.read_part(PartName("inner_optimizer"))
    assert "param_groups/0/lr" in [spec.path for spec in part.specs]


@report("Z5", "PrimeIntellect-ai/prime-diloco: the receiver counts its own tensors")
def the_manifest_decides_what_is_there_afterwards() -> None:
    """A joiner with more state than its donor waited for ever, one with less failed with an index error."""
    for donor_phases, joiner_phases in ((0, 2), (2, 0), (1, 3)):
        for mode in RestoreMode:
            donor, joiner = pair(Case("count", ADAMW), donor_phases, joiner_phases)
            transfer(donor.state, joiner.state, mode)
            assert len(inner(joiner).state) == len(inner(donor).state)
            assert contents(joiner.state) == contents(donor.state)


@report("X13", "torch.optim.Optimizer.load_state_dict casts floating state to the parameter's dtype")
def state_is_not_cast_to_the_parameter() -> None:
    """A float32 moment of a bfloat16 parameter became bfloat16, silently."""
    donor, joiner = pair(Case("cast", one(Fp32Momentum), models.bf16_mlp, outer_dtype=torch.float32), 1)
    transfer(donor.state, joiner.state)
    entries = [joiner_state["momentum"] for joiner_state in inner(joiner).state.values()]
    assert {entry.dtype for entry in entries} == {torch.float32}
    assert all(map(same_bits, entries, [state["momentum"] for state in inner(donor).state.values()]))


class _Kinds:
    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.count = collections.Counter({3: seed, 7: 2})
        self.array = np.full((2, 2), float(seed))

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.bit_generator.state, "count": self.count, "array": self.array}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.bit_generator.state = state["generator"]
        self.count, self.array = state["count"], state["array"]


@report("X14", "leaf kinds in the wild: Counter, ndarray, 128-bit integers")
def kinds_in_the_wild_come_back() -> None:
    """A Counter in MultiStepLR, numpy arrays, and 128-bit integers of numpy's generators."""
    case = Case("kinds", ADAMW, schedule=lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 7], 0.5))
    donor, joiner = pair(case, 1)
    theirs, own = _Kinds(5), _Kinds(6)
    donor.state.add("kinds", theirs, PartClass.PRIVATE_COPIED)
    joiner.state.add("kinds", own, PartClass.PRIVATE_COPIED)
    transfer(donor.state, joiner.state)
    milestones = joiner.scheduler.milestones  # type: ignore[union-attr]
    assert type(milestones) is collections.Counter and milestones == {2: 2, 7: 1}
    assert type(own.count) is collections.Counter and own.count == {3: 5, 7: 2}
    assert isinstance(own.array, np.ndarray) and np.array_equal(own.array, np.full((2, 2), 5.0))
    assert own.generator.integers(1 << 62) == theirs.generator.integers(1 << 62)


@report("Q2", "torch.optim.Optimizer.load_state_dict keeps references to the tensors it is given")
def receive_buffers_are_not_kept() -> None:
    """A pooled buffer that was reused later corrupted the optimizer."""
    for mode in RestoreMode:
        donor, joiner = pair(Case("alias", ADAMW), 1)
        restoration = Restoration(joiner.state, describe_state(donor.state), mode=mode)
        restoration.prepare()
        pieces = []
        for name in restoration.part_names:
            source, into = donor.state.read_part(name).bytes, restoration.destination(name)
            for chunk in restoration.manifest.part(name).chunks:
                piece = source.read(chunk.offset, chunk.num_bytes).clone()
                into.write(chunk.offset, piece)
                pieces.append(piece)
        restoration.commit()
        for piece in pieces:
            piece.fill_(0xA5)
        assert contents(joiner.state) == contents(donor.state)


@report("T5", "meta-pytorch/torchft: unknown names are skipped silently on load")
def unknown_and_missing_parts_are_errors() -> None:
    """Names that the receiver does not know, and those that the sender does not have, were skipped silently."""
    donor, joiner = pair(Case("names", ADAMW), 1)
    donor.state.add("ema", nn.Linear(2, 2), PartClass.PRIVATE_COPIED)
    with pytest.raises(LayoutMismatch, match="ema: the donor has this part, this worker does not register it"):
        transfer(donor.state, joiner.state)
    with pytest.raises(LayoutMismatch, match="ema: this worker registers this part, the donor does not have it"):
        transfer(joiner.state, donor.state)
