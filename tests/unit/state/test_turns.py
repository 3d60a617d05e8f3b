"""Long loops off the training thread offer it the interpreter; what they make is the same."""

from __future__ import annotations

import pytest
import torch

from recovery.state import tree, turns
from recovery.state.live_part import live_part
from recovery.types import PartClass, PartName


def test_a_tree_is_taken_apart_in_turns_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    given = 0

    def give() -> None:
        nonlocal given
        given += 1

    monkeypatch.setattr(turns, "give_turn", give)
    monkeypatch.setattr(tree, "give_turn", give)
    value = {f"p{i}": {"step": torch.tensor(float(i)), "exp_avg": torch.full((3,), i)} for i in range(1000)}
    whole = live_part(PartName("part"), PartClass.PRIVATE_COPIED, value)
    assert given == 0
    in_slices = live_part(PartName("part"), PartClass.PRIVATE_COPIED, value, turns=True)
    assert given >= 3 * (2000 // turns.TURN), "the tree, the specs, the memory"
    assert in_slices.tree == whole.tree
    assert in_slices.specs == whole.specs
    assert torch.equal(in_slices.bytes.read(0, whole.bytes.num_bytes), whole.bytes.read(0, whole.bytes.num_bytes))
