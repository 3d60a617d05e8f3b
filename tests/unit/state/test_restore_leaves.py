"""Leaves of every form, extras and generators come back."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recovery.errors import LayoutMismatch, StateMismatch, UnsupportedLeaf
from recovery.state import Restoration, RestoreMode, WorkerState
from recovery.state.compare import compare
from recovery.state.rng import NumpyRandom, PythonRandom, TorchRandom, add_random_generators
from recovery.types import PartClass, PartName
from tests.support import zoo_models as models
from tests.support.state_lab import ADAMW, contents, describe_state, fill, pair, same_bits, transfer
from tests.support.zoo import Case

INNER = PartName("inner_optimizer")
OUTER = PartName("outer_params")
BUFFERS = PartName("buffers")
COPIED = PartClass.PRIVATE_COPIED
MODES = pytest.mark.parametrize("mode", list(RestoreMode))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class TestExpanded:
    """Buffers whose elements share memory."""

    def state(self, buffer: Tensor) -> WorkerState:
        return WorkerState(outer_params={"w": torch.zeros(1)}, buffers={"b": buffer})

    @MODES
    def test_take_values_that_are_constant_along_the_expansion(self, mode: RestoreMode) -> None:
        expanded = torch.zeros(3, 1).expand(3, 4)
        transfer(self.state(torch.arange(3.0).unsqueeze(1).repeat(1, 4)), self.state(expanded), mode)
        assert expanded.tolist() == [[0.0] * 4, [1.0] * 4, [2.0] * 4]

    def test_refuse_others_and_change_nothing(self) -> None:
        joiner = self.state(torch.zeros(3, 1).expand(3, 4))
        before = contents(joiner)
        with pytest.raises(LayoutMismatch, match="buffers/b: expanded here, it cannot hold the donor's values"):
            transfer(self.state(torch.arange(12.0).view(3, 4)), joiner, RestoreMode.STAGED)
        assert contents(joiner) == before
        with pytest.raises(StateMismatch, match="buffers/b: its bytes differ"):
            transfer(self.state(torch.arange(12.0).view(3, 4)), joiner, RestoreMode.IN_PLACE)

    def test_optimizer_state_becomes_dense(self) -> None:
        donor, joiner = pair(donor_phases=1, joiner_phases=1)
        parameter = joiner.live.get_parameter("0.weight")
        joiner.inner["only"].state[parameter]["exp_avg"] = torch.zeros(1, 1).expand(8, 6)
        report = transfer(donor.state, joiner.state)
        assert report.created == 1
        assert contents(joiner.state) == contents(donor.state)


class TestMemoryOrder:
    """What is made has the donor's order; what exists keeps its own."""

    @MODES
    def test_created_state_lies_as_the_donors(self, mode: RestoreMode) -> None:
        donor, joiner = pair(Case("x", ADAMW, models.conv, models.images), 1)
        transfer(donor.state, joiner.state, mode)
        for theirs, own in zip(donor.inner["only"].state.values(), joiner.inner["only"].state.values(), strict=True):
            assert theirs["exp_avg"].stride() == own["exp_avg"].stride()

    @MODES
    def test_parameters_keep_their_own(self, mode: RestoreMode) -> None:
        donor = WorkerState(outer_params={"w": torch.randn(3, 4)})
        own = torch.zeros(4, 3).t()
        transfer(donor, WorkerState(outer_params={"w": own}), mode)
        assert own.stride() == (1, 3) and same_bits(own, donor.read_outer_params()["w"])


class TestExtras:
    """Parts of the user's."""

    def book(self, start: int) -> dict[str, Any]:
        return {
            "tensor": torch.full((3,), float(start)),
            "array": np.full((2, 2), start),
            "list": [start, torch.tensor(start)],
            "nested": {"a": {"b": start}},
            "tuple": (start, "x"),
            "count": collections.Counter({start: 2}),
        }

    @MODES
    def test_a_tree_is_written_in_place(self, mode: RestoreMode) -> None:
        donor, joiner = pair()
        theirs, own = self.book(5), self.book(6) | {"surplus": torch.zeros(1)}
        del own["nested"]["a"]["b"]
        kept = (own["tensor"], own["array"], own["list"], own["list"][1], own["nested"]["a"])
        donor.state.add("book", lambda: theirs, COPIED)
        joiner.state.add("book", lambda: own, COPIED)
        transfer(donor.state, joiner.state, mode)
        assert not compare(theirs, own)
        found = (own["tensor"], own["array"], own["list"], own["list"][1], own["nested"]["a"])
        assert all(a is b for a, b in zip(kept, found, strict=True))

    @MODES
    def test_loose_tensors_are_written_in_place(self, mode: RestoreMode) -> None:
        donor, joiner = pair()
        tensors = [torch.randn(3), torch.randn(2, 2)]
        donor.state.add("loose", lambda: tuple(tensors), COPIED)
        own = [torch.zeros(3), torch.zeros(2, 2)]
        joiner.state.add("loose", lambda: tuple(own), COPIED)
        transfer(donor.state, joiner.state, mode)
        assert all(map(same_bits, tensors, own))

    @pytest.mark.parametrize(
        ("theirs", "own", "said"),
        [
            (torch.zeros(3), torch.zeros(4), r"x: the donor's is float32 \[3\], this worker's float32 \[4\]"),
            ((torch.zeros(3),), (np.zeros(3),), r"x/0: the donor's is float32 \[3\], this worker's float64 \[3\]"),
            ((1,), (2,), "x/0: the donor's is 1, this worker's 2; a getter cannot set it: add a Stateful instead"),
            ({"a": 1, "b": 2}, {"a": 1}, r"x: only one has \['b'\], and the getter returns a new mapping each time"),
            ([1, 2], [1], "x: the donor's is "),
            (torch.zeros(3), 3, "this worker's a int"),
        ],
    )
    def test_what_a_getter_cannot_take_is_refused_before(self, theirs: object, own: Any, said: str) -> None:
        donor, joiner = pair()
        donor.state.add("x", lambda: theirs, COPIED)
        # A new container at each call, over the same tensors.
        joiner.state.add("x", lambda: type(own)(own) if isinstance(own, dict | list | tuple) else own, COPIED)
        before = contents(joiner.state)
        with pytest.raises(LayoutMismatch, match=said):
            transfer(donor.state, joiner.state)
        assert contents(joiner.state) == before

    def test_progress_counters_come_back(self) -> None:
        donor, joiner = pair(donor_phases=2)
        transfer(donor.state, joiner.state)
        assert joiner.state.run_progress == donor.state.run_progress
        assert joiner.state.local_progress == donor.state.local_progress
        assert joiner.state.run_progress.outer_step == 2 and joiner.state.local_progress.inner_step == 10


class TestGenerators:
    """Random generators as extras."""

    def test_are_private_kept_unless_asked_for(self) -> None:
        donor, joiner = pair()
        add_random_generators(donor.state)
        add_random_generators(joiner.state)
        assert joiner.state.private_kept_names == ["random", "numpy_random", "torch_random"]
        before = contents(joiner.state, joiner.state.private_kept_names)
        manifest = describe_state(donor.state)
        torch.rand(1)
        np.random.rand()
        moved = contents(joiner.state, joiner.state.private_kept_names)
        transfer(donor.state, joiner.state, manifest=describe_state(donor.state))
        assert contents(joiner.state, joiner.state.private_kept_names) == moved != before
        del manifest

    @MODES
    def test_go_on_with_the_same_numbers(self, mode: RestoreMode) -> None:
        import random

        donor, joiner = pair()
        theirs = (random.Random(1), np.random.default_rng(1), np.random.RandomState(1), torch.Generator())
        own = (random.Random(2), np.random.default_rng(2), np.random.RandomState(2), torch.Generator())
        theirs[3].manual_seed(5)
        theirs[0].gauss(0, 1)
        for state, (python, numpy, legacy, generator) in ((donor.state, theirs), (joiner.state, own)):
            state.add("python", PythonRandom(python), COPIED)
            state.add("numpy", NumpyRandom(numpy), COPIED)
            state.add("legacy", NumpyRandom(legacy), COPIED)
            state.add("torch", TorchRandom(generator), COPIED)
        transfer(donor.state, joiner.state, mode)
        assert theirs[0].gauss(0, 1) == own[0].gauss(0, 1)
        assert theirs[1].integers(1 << 62) == own[1].integers(1 << 62)
        assert theirs[2].randn() == own[2].randn()
        assert same_bits(torch.rand(3, generator=theirs[3]), torch.rand(3, generator=own[3]))

    def test_of_other_devices_are_refused(self) -> None:
        generator = TorchRandom()
        state = generator.state_dict() | {"cuda": [torch.get_rng_state()] * 77}
        with pytest.raises(UnsupportedLeaf, match="generators of 77 CUDA devices"):
            generator.load_state_dict(state)


TENSORS = st.dictionaries(
    st.text("abcd.", min_size=1, max_size=6),
    st.tuples(
        st.sampled_from(["float32", "bfloat16", "int64", "uint8", "complex64", "float8_e5m2", "bool"]),
        st.lists(st.integers(0, 4), max_size=3),
        st.booleans(),
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(TENSORS, st.randoms(use_true_random=False), st.sampled_from(list(RestoreMode)))
def test_any_tensors_come_back(specs: dict[str, Any], random: Any, mode: RestoreMode) -> None:
    """Random sets of tensors, chunks in random order, transposed destinations."""

    def tensor(dtype: str, shape: list[int], transposed: bool) -> Tensor:
        kind = getattr(torch, dtype)
        data = torch.tensor([random.randrange(2 if dtype == "bool" else 256) for _ in range(_bytes(kind, shape))])
        made = data.to(torch.uint8).view(kind).view(shape) if data.numel() else torch.empty(shape, dtype=kind)
        return made.t().contiguous().t() if transposed and made.dim() == 2 else made

    donor = WorkerState(outer_params={name: tensor(dtype, shape, False) for name, (dtype, shape, _) in specs.items()})
    joiner = WorkerState(outer_params={name: tensor(*spec) for name, spec in specs.items()})
    restoration = Restoration(joiner, describe_state(donor), mode=mode)
    restoration.prepare()
    fill(restoration, donor, seed=random.randrange(1000))
    restoration.commit()
    for name, theirs in donor.read_outer_params().items():
        assert same_bits(theirs, joiner.read_outer_params()[name])


def _bytes(dtype: torch.dtype, shape: list[int]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
