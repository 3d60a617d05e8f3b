"""Parts in memory of our own, values held, outlines."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch

from recovery.snapshot.frozen import copy_range, freeze
from recovery.snapshot.outline import Outline, bytes_in, held
from recovery.state.compare import compare
from recovery.state.extra_part import TreePart
from recovery.state.live_part import LivePart, live_part
from recovery.state.tree import join
from recovery.types import PartClass, PartName


def value() -> dict[str, object]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "double": torch.randn(5, dtype=torch.float64),
        "transposed": base.t(),
        "view": base[1:3, ::2],
        "half": torch.randn(3).to(torch.bfloat16),
        "complex": torch.randn(2, dtype=torch.complex128),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(7.5),
        "empty": torch.empty(0, 3),
        "array": np.arange(7, dtype=np.int32),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "eight": torch.zeros(3).to(torch.float8_e4m3fn),
        "number": 3,
    }


def part_of(content: object) -> LivePart:
    return live_part(PartName("part"), PartClass.PRIVATE_COPIED, content)


def bytes_of(part: LivePart) -> torch.Tensor:
    data = torch.empty(part.bytes.num_bytes, dtype=torch.uint8)
    copy_range(part, 0, data)
    return data


def test_a_frozen_part_equals_the_live_one_and_does_not_change_with_it() -> None:
    live = part_of(value())
    data = bytes_of(live)
    frozen = freeze(live, data)
    assert torch.equal(bytes_of(frozen), data)
    assert frozen.specs == live.specs
    expected = join(live.tree, list(live.leaves))
    differences = compare(expected, join(frozen.tree, frozen.tensors))
    assert {difference.path for difference in differences} == {"parameter"}  # a plain tensor holds its bytes
    for leaf in live.leaves:
        if isinstance(leaf.value, torch.Tensor):
            leaf.value.detach().zero_()
        else:
            leaf.value[...] = 0
    assert torch.equal(bytes_of(frozen), data)


def test_copying_a_range_gives_what_reading_gives() -> None:
    live = part_of({"large": torch.randn(1000), "small": torch.randn(3), "strided": torch.randn(8, 8).t()})
    for offset, size in ((0, 4000), (4, 100), (3990, 20), (4000, 12), (4005, 200)):
        out = torch.empty(size, dtype=torch.uint8)
        copy_range(live, offset, out)
        assert torch.equal(out, live.bytes.read(offset, size))


def test_a_held_value_keeps_its_scalars_its_sharing_and_its_kinds() -> None:
    shared = [1, 2]
    original = {
        "groups": [{"lr": 0.1, "betas": (0.9, [0.5])}],
        "shared": [shared, shared],
        "ordered": collections.OrderedDict(a=1),
        "counted": collections.Counter(a=2),
        "set": {1},
        "tensor": torch.ones(2),
    }
    copy = held(original)
    assert isinstance(copy, dict)
    expected = part_of(original).tree.SerializeToString(deterministic=True)
    original["groups"][0]["lr"] = 0.2  # type: ignore[index]
    original["groups"][0]["betas"][1].append(7)  # type: ignore[index]
    original["counted"]["a"] = 3  # type: ignore[index]
    original["ordered"]["b"] = 3  # type: ignore[index]
    original["set"].add(9)  # type: ignore[attr-defined]
    shared.append(3)
    assert part_of(copy).tree.SerializeToString(deterministic=True) == expected
    assert copy["tensor"] is original["tensor"]
    assert copy["shared"][0] is copy["shared"][1]


@pytest.mark.parametrize(
    "change", ["none", "scalar", "tensor", "key", "length", "type", "storage", "transposed", "trained", "zero", "nan"]
)
def test_an_outline_fits_what_differs_in_scalars_only(change: str) -> None:
    content: dict[str, object] = {
        "state": {"w": {"exp": torch.ones(3, 1)}},
        "param_groups": [{"lr": torch.tensor(0.1), "n": 1, "zero": 0.0, "nan": 1.0}],
        "list": [1, 2],
    }
    part = TreePart(PartName("part"), PartClass.PRIVATE_COPIED, lambda: content)
    outline = Outline(part, held(part.read()))
    assert [outline.part.specs[i].path for i in outline.late] == ["param_groups/0/lr"]
    state, groups = content["state"], content["param_groups"]
    assert isinstance(state, dict)
    assert isinstance(groups, list)
    if change == "scalar":
        groups[0]["n"] = 2
    elif change == "tensor":
        state["w"]["exp"] = torch.ones(3, 1)
    elif change == "key":
        state["v"] = {}
    elif change == "length":
        content["list"] = [1]
    elif change == "type":
        content["list"] = (1, 2)
    elif change == "storage":
        state["w"]["exp"].data = torch.ones(3, 1)
    elif change == "transposed":
        state["w"]["exp"].t_()  # the same memory, in another shape
    elif change == "trained":
        state["w"]["exp"].requires_grad_()
    elif change == "zero":
        groups[0]["zero"] = -0.0
    elif change == "nan":
        groups[0]["nan"] = float("nan")
    in_scalars = ("none", "scalar", "zero", "nan")
    assert outline.fits(part.read()) is (change in in_scalars)
    assert outline.holds_same_tensors(part.read()) is (change in (*in_scalars, "storage", "transposed", "trained"))
    assert outline.is_still(part.read()) is (change == "none")
    assert bytes_in(content) == 16


@pytest.mark.parametrize("change", ["joined", "parted", "key's type", "nan"])
def test_an_outline_does_not_stand_for_what_it_cannot_tell_apart(change: str) -> None:
    one, other = [1.0, 2.0], [1.0, 2.0]
    before = {
        "joined": {"a": one, "b": other},
        "parted": {"a": one, "b": one},
        "key's type": {1: one},
        "nan": {"a": float("nan")},
    }[change]
    after = {
        "joined": {"a": one, "b": one},
        "parted": {"a": one, "b": other},
        "key's type": {True: one},
        "nan": {"a": float("nan")},
    }[change]
    part = TreePart(PartName("part"), PartClass.REPLICATED, lambda: before)
    assert not Outline(part, held(before)).is_still(after)
