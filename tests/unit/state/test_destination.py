"""Destinations: what can be written, and what is made where something is missing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from recovery.errors import LayoutMismatch
from recovery.state.destination import fits, new_leaf, staging
from recovery.state.leaf import ShardSpec, TensorKind
from recovery.state.local_tensor import bits, can_hold, can_take, copy_bits, local, may_overlap, tie_key
from recovery.state.manifest import TensorSpec
from recovery.state.part import Owner


def spec(dtype: str, shape: tuple[int, ...], **changes: object) -> TensorSpec:
    num_bytes = getattr(torch, dtype).itemsize * int(np.prod(shape, dtype=np.int64))
    made = TensorSpec(path="x", dtype=dtype, shape=shape, offset=0, num_bytes=num_bytes)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


class TestDevices:
    """A missing state tensor is made where its parameter is; step counters are special. Meta stands for a GPU."""

    ELSEWHERE = nn.Parameter(torch.empty(2, 3, device="meta"))

    def device(self, leaf: TensorSpec, owner: Owner | None) -> str:
        made = new_leaf(leaf, owner, "x")
        assert isinstance(made, Tensor)
        return made.device.type

    def test_moments_follow_the_parameter(self) -> None:
        for donors in ("cpu", "cuda"):
            assert self.device(spec("float32", (2, 3), device_kind=donors), Owner(self.ELSEWHERE, False)) == "meta"

    def test_step_counters_stay_on_the_cpu_unless_counted_on_the_device(self) -> None:
        step = spec("float32", ())
        assert self.device(step, Owner(self.ELSEWHERE, False)) == "cpu"
        assert self.device(step, Owner(self.ELSEWHERE, True)) == "meta"
        assert self.device(dataclasses.replace(step, device_kind="cuda"), Owner(self.ELSEWHERE, False)) == "meta"

    def test_what_belongs_to_nobody_is_on_the_cpu(self) -> None:
        assert self.device(spec("float32", (2,), device_kind="cuda"), None) == "cpu"


class TestNewLeaves:
    """Form of what is made."""

    def test_kind_gradient_and_memory_order_are_the_donors(self) -> None:
        parameter = new_leaf(spec("float32", (2,), kind=TensorKind.PARAMETER, requires_grad=False), None, "x")
        assert isinstance(parameter, nn.Parameter) and not parameter.requires_grad
        array = new_leaf(spec("int16", (2,), kind=TensorKind.NDARRAY), None, "x")
        assert isinstance(array, np.ndarray) and array.dtype == np.int16
        turned = new_leaf(spec("float32", (2, 3, 4), dim_order=(2, 0, 1)), None, "x")
        assert isinstance(turned, Tensor) and turned.shape == (2, 3, 4) and turned.stride() == (3, 1, 6)

    def test_a_shard_needs_a_sharded_parameter(self) -> None:
        shard = ShardSpec(global_shape=(4,), global_offset=(0,), placements=("S(0)",), mesh_shape=(2,))
        with pytest.raises(LayoutMismatch, match="a/b: the donor's is a shard of a DTensor, this worker's "):
            new_leaf(spec("float32", (2,), shard=shard), Owner(nn.Parameter(torch.zeros(2)), False), "a/b")

    def test_generators_are_not_touched(self) -> None:
        before = torch.get_rng_state()
        new_leaf(spec("float32", (20,)), None, "x")
        staging(spec("float32", (20,)))
        assert torch.equal(before, torch.get_rng_state())


class TestFits:
    """Whether what exists can take the donor's bytes."""

    @pytest.mark.parametrize(
        ("existing", "expected"),
        [
            (torch.zeros(2, 3), True),
            (torch.zeros(3, 2).t(), True),
            (nn.Parameter(torch.zeros(2, 3)), True),
            (torch.zeros(2, 3, dtype=torch.float64), False),
            (torch.zeros(3, 2), False),
            (torch.zeros(2, 1).expand(2, 3), False),
            (torch.zeros(4).as_strided((2, 3), (1, 1)), False),
            (np.zeros((2, 3), np.float32), False),
            (3.0, False),
            (None, False),
        ],
    )
    def test_tensors(self, existing: object, expected: bool) -> None:
        assert fits(existing, spec("float32", (2, 3)), whole=True) is expected

    def test_arrays(self) -> None:
        leaf = spec("float32", (2,), kind=TensorKind.NDARRAY)
        array = np.zeros(2, np.float32)
        assert fits(array, leaf, whole=True)
        array.flags.writeable = False
        assert not fits(array, leaf, whole=True)
        assert not fits(torch.zeros(2), leaf, whole=True)
        assert not fits(np.zeros(2), leaf, whole=True)

    def test_expanded_where_elements_may_share_memory(self) -> None:
        assert fits(torch.zeros(2, 1).expand(2, 3), spec("float32", (2, 3)), whole=False)
        assert not fits(torch.zeros(4).as_strided((2, 3), (1, 1)), spec("float32", (2, 3)), whole=False)


class TestBits:
    """Copying without a change of any bit."""

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), max_size=4),
        st.permutations(range(4)),
        st.booleans(),
    )
    def test_overlap_is_what_it_seems(self, dims: list[tuple[int, int]], order: list[int], expand: bool) -> None:
        """Sliced, permuted and expanded views, against the addresses of their elements."""
        shape = [size * step for size, step in dims]
        base = torch.arange(int(np.prod(shape, dtype=np.int64))).view(shape)
        view = base[tuple(slice(None, None, step) for _, step in dims)]
        view = view.permute([dim for dim in order if dim < view.dim()])
        if expand:
            view = view.unsqueeze(0).expand(2, *view.shape)
        assert may_overlap(view) == (len(set(view.reshape(-1).tolist())) < view.numel())

    def test_nan_payloads_and_complex_survive_strides(self) -> None:
        payload = torch.tensor([0x7F800001, 0x7FC12345, -1, 5], dtype=torch.int32).view(torch.float32)
        target = torch.zeros(8)[::2]
        copy_bits(target, payload)
        assert torch.equal(bits(target), bits(payload))
        source = torch.complex(torch.tensor([float("nan"), -0.0], dtype=torch.float64), torch.zeros(2).double())
        wide = torch.zeros(4, dtype=torch.complex128)[1::2]
        copy_bits(wide, source)
        assert torch.equal(bits(wide), bits(source))

    def test_expanded_targets_take_constant_sources_only(self) -> None:
        target = torch.zeros(3, 1).expand(3, 4)
        constant = torch.arange(3.0).unsqueeze(1).repeat(1, 4)
        assert can_take(target, constant) and not can_take(target, torch.arange(12.0).view(3, 4))
        copy_bits(target, constant)
        assert torch.equal(target, constant)

    def test_lazy_and_other_forms_are_not_targets(self) -> None:
        lazy = torch.zeros(2, dtype=torch.complex64).conj()
        assert not can_hold(lazy) and not can_take(lazy, torch.zeros(2, dtype=torch.complex64))
        assert not can_take(torch.zeros(2), torch.zeros(3)) and not can_take(torch.zeros(2), torch.zeros(2).double())

    def test_writing_local_memory_is_no_in_place_operation(self) -> None:
        parameter = nn.Parameter(torch.zeros(2))
        before = parameter._version
        local(parameter).fill_(1.0)
        assert parameter._version == before and parameter.tolist() == [1.0, 1.0]

    def test_ties_are_the_same_elements(self) -> None:
        base = torch.zeros(4)
        assert tie_key("x", base[:2]) == tie_key("y", base[:2])
        assert tie_key("x", base[:2]) != tie_key("x", base[2:]) != tie_key("x", base)
