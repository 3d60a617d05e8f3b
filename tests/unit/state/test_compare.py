"""Differences: named by place, by what differs, and by how much; none between equals."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from protos.recovery.v1 import manifest_pb2
from recovery.errors import MisuseError
from recovery.state.chunks import CHUNK_BYTES
from recovery.state.compare import Difference, compare, compare_states, damaged_tensors, describe_differences
from recovery.state.tree import split
from recovery.types import DigestAlgorithm, NumericsId, PartClass, PartName
from tests.unit.state.build import Part, manifest_of, part_of, part_spec
from tests.unit.state.exact import same, trees

VALUE_CASES: list[tuple[object, object, str]] = [
    ({"lr": 0.1}, {"lr": 0.2}, "lr: float 0.1 expected, float 0.2 found"),
    ({"n": 1}, {"n": True}, "n: int 1 expected, bool True found"),
    ({"n": 1}, {"n": 1.0}, "n: int 1 expected, float 1.0 found"),
    ({"n": 0.0}, {"n": -0.0}, "n: float 0.0 expected, float -0.0 found"),
    ([1, 2], (1, 2), "(root): a list of 2 items expected, a tuple of 2 items found"),
    ([1, 2], [1], "(root): a list of 2 items expected, of 1 found"),
    ({"a": 1}, {}, "a: missing; int 1 expected"),
    ({}, {"a": 1}, "a: not expected; int 1 found"),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "(root): entries in the order [b, a], expected [a, b]"),
    ({1: 2}, {True: 2}, "<1>: missing; int 2 expected"),
    ({"s": {1}}, {"s": {2}}, "s: a set of 1 items expected, a set of 1 items found"),
    (OrderedDict(), {}, "(root): a OrderedDict of 0 items expected, a dict of 0 items found"),
    (torch.ones(2), [1, 1], "(root): a Tensor float32 [2] expected, a list of 2 items found"),
    (torch.ones(2), torch.ones(3), "(root): float32 [2] expected, float32 [3] found"),
    (torch.ones(2), torch.ones(2).double(), "(root): float32 [2] expected, float64 [2] found"),
    (torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 2.5, 3]), "(root): 1 of 3 elements differ, by at most 0.5"),
    (torch.tensor([1.0]), torch.tensor([math.nan]), "(root): 1 of 1 elements differ, none of them by a finite amount"),
    (torch.tensor([0.0]), torch.tensor([-0.0]), "(root): 1 of 1 elements differ, by at most 0"),
    (torch.tensor([3 + 4j]), torch.tensor([0j]), "(root): 1 of 1 elements differ, by at most 5"),
    (torch.tensor([7]), torch.tensor([9]), "(root): 1 of 1 elements differ, by at most 2"),
    (torch.tensor([True]), torch.tensor([False]), "(root): 1 of 1 elements differ, by at most 1"),
    (torch.ones(2).bfloat16(), torch.zeros(2).bfloat16(), "(root): 2 of 2 elements differ, by at most 1"),
    (np.arange(3), np.array([0, 1, 5]), "(root): 1 of 3 elements differ, by at most 3"),
    (np.float32(1), np.float32(2), "(root): np.float32(1.0) expected, np.float32(2.0) found"),
    (nn.Parameter(torch.ones(1)), torch.ones(1), "(root): Parameter expected, Tensor found"),
]  # fmt: skip


class TestValues:
    @pytest.mark.parametrize(("expected", "found", "text"), VALUE_CASES, ids=lambda x: x if isinstance(x, str) else "")
    def test_one_line_says_what_differs(self, expected: object, found: object, text: str) -> None:
        assert text in [str(difference) for difference in compare(expected, found)]

    @given(trees(), trees())
    @settings(max_examples=200, deadline=None)
    def test_no_difference_exactly_for_equals(self, a: object, b: object) -> None:
        assert (compare(a, b) == []) == same(a, b)
        assert compare(a, copy.deepcopy(a)) == []

    def test_strides_do_not_count(self) -> None:
        value = torch.randn(6, 4)
        assert compare({"x": value}, {"x": torch.empty(4, 6).t().copy_(value)}) == []

    def test_a_large_tensor_is_compared_in_pieces(self) -> None:
        value = torch.zeros(3_000_000)
        other = value.clone()
        other[[5, 1_500_000, 2_999_999]] = torch.tensor([1.0, -4.0, 2.0])
        assert [str(d) for d in compare(value, other)] == ["(root): 3 of 3000000 elements differ, by at most 4"]

    def test_requires_grad(self) -> None:
        found = compare(torch.ones(1), torch.ones(1, requires_grad=True))
        assert [str(d) for d in found] == ["(root): requires_grad False expected, True found"]

    def test_shared_containers_are_compared_once(self) -> None:
        def tower() -> object:
            value: object = [1]
            for _ in range(40):
                value = [value, value]
            return value

        assert compare(tower(), tower()) == []


class TestManifests:
    def test_who_took_it_does_not_count(self) -> None:
        values = {"p": {"x": torch.ones(3), "lr": 0.1}}
        assert compare(manifest_of(values), manifest_of(values, run_id="other")) == []

    def test_every_kind_of_difference_is_named(self) -> None:
        large = torch.zeros(2 * CHUNK_BYTES + 1, dtype=torch.uint8)
        changed = large.clone()
        changed[-1] = 1
        expected = manifest_of({
            "p": {"x": torch.ones(3), "y": torch.ones(2), "big": large, "lr": 0.1, "n": [1, 2], "t": {"a": 1}},
            "q": 1, "gone": 1,
        })  # fmt: skip
        found = manifest_of({
            "p": {"x": torch.ones(3), "y": torch.zeros(2), "big": changed, "lr": 0.2, "n": [1], "t": {"b": 1}},
            "q": "1", "new": 1,
        })  # fmt: skip
        assert {str(difference) for difference in compare(expected, found)} == {
            "p/y: its bytes differ",
            "p/big: its bytes differ in 1 of 3 chunks",
            "p/lr: float 0.1 expected, float 0.2 found",
            "p/n: a list of 2 items expected, of 1 found",
            "p/t/a: missing; int 1 expected",
            "p/t/b: not expected; int 1 found",
            "q: int 1 expected, str '1' found",
            "gone: this part is missing",
            "new: this part is not expected",
        }

    def test_heads(self) -> None:
        manifest = manifest_of({"p": torch.ones(1)})
        other = replace(manifest, numerics_id=NumericsId("torch-1/cpu/NEON"), layout_digest=b"M" * 32)
        assert [difference.path for difference in compare(manifest, other)] == ["numerics_id", "layout_digest"]

    def test_digests_of_two_algorithms_say_nothing_about_bytes(self) -> None:
        values = {"p": [torch.ones(2), torch.ones(3)], "q": torch.zeros(CHUNK_BYTES, dtype=torch.uint8)}
        found = compare(manifest_of(values), manifest_of(values, DigestAlgorithm.BLAKE3))
        assert [difference.path for difference in found] == ["digest_algorithm"]

    def test_tensors_of_other_shape_kind_or_tie(self) -> None:
        one = torch.ones(2)
        first = part_spec(part_of("p", {"a": one, "b": one.clone(), "c": nn.Parameter(one.clone())}))
        second = part_spec(part_of("p", {"a": one, "b": one, "c": one.double()}))
        assert {str(difference) for difference in compare(first, second)} == {
            "p/b: tied to 'b' expected, tied to 'a' found",
            "p/c: float32 [2] expected, float64 [2] found",
            "p/c: a parameter expected, a tensor found",
            "p/c: requires_grad True expected, False found",
        }
        assert compare(first, replace(first, part_class=PartClass.PRIVATE_KEPT)) == [
            Difference("p", "replicated expected, private-kept found")
        ]

    def test_shared_and_equal_containers_are_equal_trees(self) -> None:
        betas = [0.9]
        shared, apart = split([betas, betas]).tree, split([[0.9], [0.9]]).tree
        assert compare(shared, apart) == []
        assert compare(apart, shared) == []
        assert [str(d) for d in compare(shared, split([betas, [0.8]]).tree)] == [
            "1/0: float 0.9 expected, float 0.8 found"
        ]

    @given(trees(), trees())
    @settings(max_examples=100, deadline=None)
    def test_trees_agree_with_values(self, a: object, b: object) -> None:
        first, second = part_spec(part_of("p", a)), part_spec(part_of("p", b))
        assert compare(first, part_spec(part_of("p", copy.deepcopy(a)))) == []
        if compare(first, second) == []:
            assert same(a, b)

    def test_different_sorts_of_things(self) -> None:
        with pytest.raises(MisuseError, match="cannot be compared"):
            compare(manifest_of({}), {})
        with pytest.raises(MisuseError, match="cannot be compared"):
            compare(manifest_pb2.Value(), 1)


def test_long_lists_are_cut() -> None:
    lines = describe_differences([Difference(f"p{i}", "differs") for i in range(25)], at_most=2).splitlines()
    assert lines == ["  p0: differs", "  p1: differs", "  and 23 more"]


class TestMemory:
    @pytest.mark.parametrize("algorithm", list(DigestAlgorithm))
    def test_damage_is_attributed_to_its_tensor(self, algorithm: DigestAlgorithm) -> None:
        values = {
            "a": torch.ones(3), "none": torch.empty(0), "b": torch.ones(2, 3).t(), "big": torch.zeros(3_000_000),
            "c": torch.ones(2), "alone": torch.zeros(CHUNK_BYTES, dtype=torch.uint8), "d": torch.ones(1),
        }  # fmt: skip
        part = part_of("p", values)
        spec = part_spec(part, algorithm)
        assert damaged_tensors(part, spec, algorithm) == []
        for name in ("a", "b", "big", "c", "alone", "d"):
            values[name].view(-1)[-1:].add_(1) if values[name].is_contiguous() else values[name].add_(1)
            assert damaged_tensors(part, spec, algorithm) == [name]
            values[name].view(-1)[-1:].sub_(1) if values[name].is_contiguous() else values[name].sub_(1)
        values["a"].add_(1)
        values["big"][0] = 1
        assert damaged_tensors(part, spec, algorithm) == ["a", "big"]

    def test_another_part(self) -> None:
        with pytest.raises(MisuseError, match="other tensors"):
            damaged_tensors(part_of("p", [torch.ones(1)]), part_spec(part_of("p", [])), DigestAlgorithm.XXH3_128)


class _State:
    def __init__(self, **values: object) -> None:
        self.values = values

    @property
    def part_names(self) -> Sequence[PartName]:
        return [PartName(name) for name in self.values]

    def read_part(self, name: PartName) -> Part:
        return part_of(name, self.values[name])


def test_states_are_compared_part_by_part() -> None:
    first = _State(p={"x": torch.ones(2)}, q=1, gone=1)
    second = _State(p={"x": torch.zeros(2)}, q=1, new=2)
    assert [str(difference) for difference in compare_states(first, second)] == [
        "p/x: 2 of 2 elements differ, by at most 1",
        "gone: this part is missing",
        "new: this part is not expected",
    ]
    assert compare_states(first, first) == []
