"""Trees: what ``split`` takes apart, ``join`` puts together, to the bit; everything else is refused by name."""

from __future__ import annotations

import collections
import enum
import struct
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from recovery.errors import UnsupportedLeaf
from recovery.state.leaf import TensorKind
from recovery.state.limits import Limits
from recovery.state.manifest import empty_leaf, specs_of
from recovery.state.tree import join, split
from tests.unit.state.build import part_of
from tests.unit.state.exact import DTYPES, random_tensor, same, trees


def over_the_wire(value: object) -> object:
    """Return ``value`` rebuilt from its tree's bytes and a copy of its logical bytes, as a receiver would."""
    part = part_of("p", value)
    fresh = [empty_leaf(spec) for spec in part.specs]
    copy = type(part.bytes)(fresh, part.specs)
    if copy.num_bytes:
        copy.write(0, part.bytes.read(0, part.bytes.num_bytes))
    tree = type(part.tree).FromString(part.tree.SerializeToString(deterministic=True))
    return join(tree, fresh)


class TestRoundTrip:
    @given(trees())
    @settings(max_examples=200, deadline=None)
    def test_join_undoes_split(self, value: object) -> None:
        assert same(join(*split(value)), value)

    @given(trees())
    @settings(max_examples=200, deadline=None)
    def test_a_receiver_rebuilds_every_bit(self, value: object) -> None:
        assert same(over_the_wire(value), value)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 3)], ids=str)
    def test_every_dtype_and_shape(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        value = {"x": random_tensor(dtype, shape, 7)}
        assert same(over_the_wire(value), value)

    def test_scalars_keep_kind_and_bits(self) -> None:
        payload = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0]
        value = [payload, -0.0, 0.0, float("-inf"), True, 1, 1.0, np.float64(1), np.bool_(True), 1 << 64, -(1 << 63)]
        value += [-(1 << 63) - 1, 10**400, "", b"", None, complex(payload, -0.0), (), [], {}, set(), torch.Size([])]
        assert same(over_the_wire(value), value)

    def test_containers_keep_kind_and_order(self) -> None:
        value = {
            "b": collections.OrderedDict([("z", 1), ("a", 2)]), "a": collections.Counter({3: 1, 5: 2}), 7: (1, [2]),
            True: None, 2.5: {1, "x", None, (1, 2)}, None: torch.Size([2, 3]), ("a", 1): torch.float8_e4m3fn,
            "device": torch.device("cuda:1"),
        }  # fmt: skip
        back = over_the_wire(value)
        assert same(back, value)
        assert isinstance(back, dict)
        assert [type(key) for key in back] == [str, str, int, bool, float, type(None), tuple, str]

    def test_a_defaultdict_comes_back_without_its_factory(self) -> None:
        back = over_the_wire(collections.defaultdict(list, {1: [2]}))
        assert isinstance(back, collections.defaultdict)
        assert back == {1: [2]}
        assert back.default_factory is None

    def test_equal_sets_have_equal_trees(self) -> None:
        names = [f"n{i}" for i in range(50)]
        assert split(set(names)).tree == split({*names[25:], *names[:25]}).tree

    def test_shared_lists_and_dicts_stay_shared(self) -> None:
        betas, state = [0.9, 0.99], {"x": 1}
        back = over_the_wire({"a": betas, "b": [betas, state], "c": state, "other": [0.9, 0.99]})
        assert isinstance(back, dict)
        assert back["a"] is back["b"][0]
        assert back["c"] is back["b"][1]
        assert back["other"] is not back["a"]

    def test_scheduler_counter_and_numpy_state(self) -> None:
        """MultiStepLR's state holds a Counter; numpy's generators an array and 128-bit ints."""
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        milestones = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3, 9]).state_dict()
        value = [milestones, np.random.RandomState(3).get_state(), np.random.PCG64(3).state, torch.get_rng_state()]
        assert same(over_the_wire(value), value)


class TestTies:
    def test_tied_tensors_are_one_leaf_and_come_back_tied(self) -> None:
        weight = nn.Parameter(torch.randn(3, 2))
        model = {"embed": weight, "head": weight, "view": weight.data.view(3, 2)}
        tree, leaves = split(model)
        assert [leaf.path for leaf in leaves] == ["embed"]
        back = over_the_wire(model)
        assert isinstance(back, dict)
        assert back["embed"] is back["head"]
        assert back["embed"].data_ptr() == back["view"].data_ptr()
        assert isinstance(join(tree, leaves), dict)

    def test_views_of_one_buffer_that_show_different_bytes_are_not_tied(self) -> None:
        flat = torch.arange(12.0)
        assert len(split([flat[:6], flat[6:], flat[:6].view(2, 3), flat[:6].view(torch.int32)]).leaves) == 4

    def test_a_thousand_views_of_one_flat_buffer_cost_its_bytes(self) -> None:
        """A sender that sends whole storages moved 4 GB for these (pytorch/torchft, transport over process groups)."""
        flat = torch.randn(1_000_000)
        part = part_of("p", list(flat.view(1000, 1000)))
        assert part.bytes.num_bytes == 4_000_000

    def test_empty_tensors_are_tied_by_identity_only(self) -> None:
        empty = torch.empty(0)
        assert len(split([empty, empty, torch.empty(0)]).leaves) == 2

    def test_tied_arrays(self) -> None:
        array = np.arange(4)
        back = over_the_wire([array, array])
        assert isinstance(back, list)
        assert back[0] is back[1]


class TestLeaves:
    def test_paths_name_places_and_never_collide(self) -> None:
        one = torch.ones(1)
        value = {"a": {"b": one.clone()}, "a/b": one.clone(), 0: one.clone(), "0": one.clone(), "<0>": one.clone()}
        value |= {"": {"x": one.clone()}, "x": one.clone(), "~": one.clone(), "~1": one.clone(), (1, "/"): one.clone()}
        paths = [leaf.path for leaf in split(value).leaves]
        assert len(set(paths)) == len(paths)
        assert paths[:5] == ["a/b", "a~1b", "<0>", "0", "~20>"]

    def test_parameters_and_gradients(self) -> None:
        frozen, free = nn.Parameter(torch.ones(1), requires_grad=False), torch.ones(1, requires_grad=True)
        leaves = split([frozen, free, torch.ones(1), np.ones(1)]).leaves
        assert [leaf.kind for leaf in leaves] == [
            TensorKind.PARAMETER, TensorKind.TENSOR, TensorKind.TENSOR, TensorKind.NDARRAY,
        ]  # fmt: skip
        assert [leaf.requires_grad for leaf in leaves] == [False, True, False, False]

    @pytest.mark.parametrize(
        ("value", "order"),
        [
            (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
            (torch.randn(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d), (0, 2, 3, 4, 1)),
            (torch.randn(3, 4).t(), (1, 0)),
            (torch.randn(3, 1, 4), ()),
            (torch.randn(4, 4)[:, :2], ()),
            (torch.ones(1).expand(4, 4), ()),
            (np.asfortranarray(np.ones((2, 3))), (1, 0)),
        ],
    )
    def test_memory_order_is_kept_where_it_is_dense(
        self, value: torch.Tensor | np.ndarray, order: tuple[int, ...]
    ) -> None:
        (spec,) = specs_of(split(value).leaves)
        assert spec.dim_order == order
        fresh = empty_leaf(spec)
        if order:
            assert (fresh.stride() if isinstance(fresh, torch.Tensor) else fresh.strides) == (
                value.stride() if isinstance(value, torch.Tensor) else value.strides
            )
        assert same(over_the_wire(value), value)

    def test_leaves_are_references(self) -> None:
        value = torch.zeros(3)
        (leaf,) = split(value).leaves
        value.fill_(2)
        assert isinstance(leaf.value, torch.Tensor)
        assert leaf.value.sum() == 6


class Point(typing.NamedTuple):
    x: int


class Color(enum.IntEnum):
    RED = 1


class MyList(list):  # type: ignore[type-arg]
    pass


class MyTensor(torch.Tensor):
    pass


def _cycle() -> object:
    loop: list[object] = []
    loop.append({"back": loop})
    return loop


class TestRefusals:
    @pytest.mark.parametrize(
        ("value", "remedy"),
        [
            (Point(1), "_asdict"),
            (Color.RED, "enum member"),
            (MyList(), "a subclass would come back as list"),
            (lambda: None, "functions"),
            (nn.Linear(1, 1), "state_dict"),
            (Path("x"), "plain values"),
            (torch.Generator(), "get_state"),
            (np.random.default_rng(), "bit_generator.state"),
            (frozenset({1}), r"set\(value\)"),
            (bytearray(b"x"), r"bytes\(value\)"),
            (object(), "plain values"),
            (torch.ones(2).to_sparse(), "to_dense"),
            (torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
            (torch.ones(2, device="meta"), "meta"),
            (torch.ones(2).as_subclass(MyTensor), "as_subclass"),
            (torch.empty(2, dtype=torch.bits8), "dtype"),
            (np.array(["x"]), "dtype"),
            (np.array([object()]), "dtype"),
            (np.ones(2, ">f4"), "dtype"),
            (np.zeros(2, [("a", "i4")]), "dtype"),
            (np.longdouble(1), "dtype"),
            (np.datetime64("2020-01-01"), "dtype"),
            (np.ma.masked_array([1]), r"numpy.array"),
            ("\ud800", "surrogate"),
            ({"\ud800": 1}, "surrogate"),
            ({float("nan"): 1}, "NaN"),
            ({b"x": 1}, "keys"),
            ({torch.ones(1)}, "keys"),
            ({np.int64(1): 1}, "keys"),
        ],
    )
    def test_the_place_the_type_and_the_remedy_are_named(self, value: object, remedy: str) -> None:
        with pytest.raises(UnsupportedLeaf, match=rf"(?s)groups/1.*{remedy}"):
            split({"groups": [0, value]})

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_a_nested_tensor_is_refused_before_its_sizes_are_asked_for(self) -> None:
        with pytest.raises(UnsupportedLeaf, match="unbind"):
            split({"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])})

    def test_cycles(self) -> None:
        with pytest.raises(UnsupportedLeaf, match=r"x/0/back.*contains itself"):
            split({"x": _cycle()})

    def test_depth(self) -> None:
        deep: object = 1
        for _ in range(30):
            deep = {"d": deep}
        assert same(over_the_wire(deep), deep)
        with pytest.raises(UnsupportedLeaf, match="at most 30 deep"):
            split({"d": deep})

    def test_a_bomb_of_shared_tuples_is_refused(self) -> None:
        bomb: object = (1,)
        for _ in range(25):
            bomb = (bomb, bomb)
        with pytest.raises(UnsupportedLeaf, match="at most 10000 values"):
            split(bomb, Limits(nodes=10_000))

    @pytest.mark.parametrize(
        ("value", "limits"),
        [
            ("x" * 101, Limits(text_bytes=100)),
            ("é" * 51, Limits(text_bytes=100)),
            (b"x" * 101, Limits(text_bytes=100)),
            (1 << 900, Limits(text_bytes=100)),
            ([torch.ones(1), torch.ones(1)], Limits(tensors=1)),
            ({"k" * 51: 1}, Limits(path_chars=50)),
            ({"k" * 30: {"l" * 30: torch.ones(1)}}, Limits(path_chars=50)),
        ],
    )
    def test_sizes(self, value: object, limits: Limits) -> None:
        with pytest.raises(UnsupportedLeaf, match="at most"):
            split(value, limits)

    @given(st.sampled_from(["list", "dict", "tuple"]), st.integers(0, 20))
    @settings(max_examples=20, deadline=None)
    def test_what_hides_deep_inside_is_found(self, kind: str, depth: int) -> None:
        value: object = object()
        for _ in range(depth):
            value = [value] if kind == "list" else {"k": value} if kind == "dict" else (value,)
        with pytest.raises(UnsupportedLeaf):
            split(value)
