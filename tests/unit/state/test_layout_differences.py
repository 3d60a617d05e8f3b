"""What does not fit is found before any payload moves, and named; trees that no worker makes are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from protos.recovery.v1 import manifest_pb2
from recovery.errors import LayoutMismatch
from recovery.state import Restoration, RestoreMode, WorkerState
from recovery.state.manifest import Manifest
from recovery.state.tree import split
from recovery.types import PartClass, PartName
from tests.support import zoo_models as models
from tests.support.state_lab import ADAMW, contents, describe_state, pair, transfer
from tests.support.zoo import Case, Worker

INNER = PartName("inner_optimizer")
OUTER = PartName("outer_params")
BUFFERS = PartName("buffers")
COPIED = PartClass.PRIVATE_COPIED
MODES = pytest.mark.parametrize("mode", list(RestoreMode))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def changed(manifest: Manifest, name: str, change: Callable[[Any], Any]) -> Manifest:
    """Return the manifest with the tree of one part put through ``change``; its tensors stay what they are."""
    parts = []
    for part in manifest.parts:
        if part.name == name:
            tree = manifest_pb2.Value()
            tree.CopyFrom(part.tree)
            part = dataclasses.replace(part, tree=change(tree) or tree)
        parts.append(part)
    return dataclasses.replace(manifest, parts=tuple(parts))


def _longer() -> nn.Module:
    net = models.mlp()
    assert isinstance(net, nn.Sequential)
    return net.append(nn.Linear(4, 4))


class TestLayoutDifferences:
    """Differences are found before any payload moves and named leaf by leaf."""

    @pytest.mark.parametrize(
        ("donor", "joiner", "said"),
        [
            (models.mlp, _longer, r"outer_params/4\.bias: this worker has it, the donor does not"),
            (models.mlp, lambda: models.mlp().double(), r"0\.weight: the donor's is float32 \[8, 6\], this .* float64"),
            (models.mlp, models.parametrised, r"outer_params/3\.weight: the donor has it, this worker does not"),
        ],
    )
    @MODES
    def test_are_named(
        self, donor: Callable[[], nn.Module], joiner: Callable[[], nn.Module], said: str, mode: RestoreMode
    ) -> None:
        first, second = Worker(Case("x", ADAMW, donor), 0), Worker(Case("x", ADAMW, joiner), 1)
        before = contents(second.state)
        with pytest.raises(LayoutMismatch, match=said):
            Restoration(second.state, describe_state(first.state), mode=mode)
        assert contents(second.state) == before

    def test_of_ties_are_named(self) -> None:
        def apart() -> nn.Module:
            net = models.Tied()
            net.head.weight = nn.Parameter(net.head.weight.detach().clone())
            return net

        def state(net: nn.Module) -> WorkerState:
            return WorkerState(live=net, outer_params=dict(net.named_parameters(remove_duplicate=False)))

        with pytest.raises(
            LayoutMismatch, match=r"head\.weight: the donor's is tied to embedding\.weight, .* not tied"
        ):
            transfer(state(models.Tied()), state(apart()))
        with pytest.raises(
            LayoutMismatch, match=r"head\.weight: the donor's is not tied, .* tied to embedding\.weight"
        ):
            transfer(state(apart()), state(models.Tied()))

    def test_of_order_are_named(self) -> None:
        tensors = {"a": torch.zeros(2), "b": torch.zeros(2)}
        swapped = {"b": torch.zeros(2), "a": torch.zeros(2)}
        with pytest.raises(LayoutMismatch, match="another order of names: the donor has a where this worker has b"):
            transfer(WorkerState(outer_params=tensors), WorkerState(outer_params=swapped))

    def test_memory_that_cannot_be_written_is_named(self) -> None:
        overlapping = {"a": torch.zeros(10).unfold(0, 4, 2)}
        with pytest.raises(LayoutMismatch, match="a: overlaps itself in memory and cannot be written"):
            transfer(WorkerState(outer_params={"a": torch.zeros(4, 4)}), WorkerState(outer_params=overlapping))

    def test_of_many_leaves_are_counted(self) -> None:
        first = {f"t{i}": torch.zeros(1) for i in range(60)}
        second = {f"t{i}": torch.zeros(2) for i in range(60)}
        with pytest.raises(LayoutMismatch, match="and 10 more"):
            transfer(WorkerState(outer_params=first), WorkerState(outer_params=second))


class TestHostileTrees:
    """A tree that no worker makes is refused, without a crash and without a change."""

    @pytest.mark.parametrize(
        ("part", "value"),
        [
            (INNER, 3),
            (INNER, {"class": "torch.optim.adamw.AdamW", "state": [], "param_groups": []}),
            (INNER, {"class": "torch.optim.adamw.AdamW", "state": {"0.weight": 1}, "param_groups": []}),
            (INNER, {"class": "torch.optim.adamw.AdamW", "state": {}, "param_groups": [{"params": "0.weight"}]}),
            (INNER, {"class": "torch.optim.adamw.AdamW", "state": {}, "param_groups": 1}),
            (PartName("scheduler"), []),
            (PartName("scheduler"), {"class": "x", "state": {}}),
            (PartName("local_progress"), {"inner_step": 1.0, "tokens": 0}),
            (PartName("local_progress"), {"inner_step": 1}),
            (PartName("run_progress"), None),
            (OUTER, [1, 2]),
            (OUTER, {"0.weight": 1}),
            (BUFFERS, {}),
        ],
    )
    def test_is_refused(self, part: PartName, value: object) -> None:
        donor, joiner = pair()
        before = contents(joiner.state)
        manifest = changed(describe_state(donor.state), part, lambda _: split(value).tree)
        with pytest.raises(LayoutMismatch, match=part):
            transfer(donor.state, joiner.state, manifest=manifest)
        assert contents(joiner.state) == before

    @pytest.mark.parametrize("name", ["optimizer", "step", "load_state_dict"])
    def test_a_scheduler_is_not_given_methods(self, name: str) -> None:
        donor, joiner = pair()

        def add(tree: manifest_pb2.Value) -> None:
            state = tree.dict.entries[1].value.dict
            state.entries.add(key=manifest_pb2.Value(text=name), value=manifest_pb2.Value(small_int=1))

        with pytest.raises(LayoutMismatch, match=f"scheduler/{name}: the donor's is no state of a scheduler"):
            transfer(donor.state, joiner.state, manifest=changed(describe_state(donor.state), "scheduler", add))

    @pytest.mark.parametrize("name", ["step", "__class__", "_hook"])
    def test_an_optimizer_is_not_given_methods(self, name: str) -> None:
        donor, joiner = pair()

        def add(tree: manifest_pb2.Value) -> None:
            entry = tree.dict.entries.add(key=manifest_pb2.Value(text="attributes"))
            entry.value.dict.entries.add(key=manifest_pb2.Value(text=name), value=manifest_pb2.Value(small_int=1))

        with pytest.raises(LayoutMismatch, match=f"attributes/{name}"):
            transfer(donor.state, joiner.state, manifest=changed(describe_state(donor.state), INNER, add))
