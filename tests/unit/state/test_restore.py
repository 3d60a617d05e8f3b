"""Restoring is whole and proven, or changes nothing."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from protos.recovery.v1 import manifest_pb2
from recovery.errors import LayoutMismatch, ManifestRejected, MisuseError, StateMismatch, UnsupportedLeaf
from recovery.state import Restoration, RestoreMode, WorkerState
from recovery.state.compare import compare
from recovery.state.manifest import Manifest
from recovery.state.rng import NumpyRandom, PythonRandom, TorchRandom, add_random_generators
from recovery.state.tree import split
from recovery.types import PartClass, PartName
from tests.support import zoo_models as models
from tests.support.state_lab import contents, describe_state, fill, same_bits, transfer
from tests.support.zoo import Case, Worker
from tests.support.zoo_cases import one

ADAMW = one(optim.AdamW, lr=1e-2)
SIMPLE = Case("simple", ADAMW, schedule=lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 12))
INNER = PartName("inner_optimizer")
OUTER = PartName("outer_params")
BUFFERS = PartName("buffers")
COPIED = PartClass.PRIVATE_COPIED
MODES = pytest.mark.parametrize("mode", list(RestoreMode))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def pair(case: Case = SIMPLE, donor_phases: int = 1, joiner_phases: int = 0) -> tuple[Worker, Worker]:
    donor, joiner = Worker(case, 0), Worker(case, 1)
    donor.train(donor_phases)
    joiner.train(joiner_phases)
    return donor, joiner


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


class TestIdentity:
    """In place means in place."""

    @MODES
    @pytest.mark.parametrize("style", ["offloaded", "fragments", "flat"])
    def test_parameters_and_existing_state_stay_where_they_are(self, mode: RestoreMode, style: str) -> None:
        donor, joiner = pair(Case("x", ADAMW, style=style), 2, 1)

        def places() -> dict[str, tuple[object, int]]:
            parts = [joiner.state.read_part(name) for name in joiner.state.part_names]
            leaves = {f"{part.name}/{leaf.path}": leaf for part in parts for leaf in part.leaves}
            return {
                path: (leaf.source, leaf.value.data_ptr())
                for path, leaf in leaves.items()
                if isinstance(leaf.value, Tensor) and not path.startswith("scheduler")
            }

        before = places()
        live = [(p, p.data_ptr()) for p in joiner.live.parameters()]
        states = dict(joiner.inner["only"].state)
        transfer(donor.state, joiner.state, mode)
        after = places()
        assert len(before) > 20 and before.keys() <= after.keys()
        for path, (tensor, address) in before.items():
            assert after[path][0] is tensor and after[path][1] == address, path
        for (parameter, address), now in zip(live, joiner.live.parameters(), strict=True):
            assert now is parameter and now.data_ptr() == address
        for key, entries in joiner.inner["only"].state.items():
            assert states[key] is entries

    @MODES
    def test_version_counters_and_gradients_are_not_touched(self, mode: RestoreMode) -> None:
        donor, joiner = pair(joiner_phases=1)
        parameters = list(joiner.live.parameters())
        before = [(p._version, p.requires_grad, p.grad) for p in parameters]
        transfer(donor.state, joiner.state, mode)
        assert all(
            p._version == version and p.requires_grad == grad and p.grad is gradient
            for p, (version, grad, gradient) in zip(parameters, before, strict=True)
        )

    def test_replaced_tensors_are_written_where_they_are_now(self) -> None:
        donor, joiner = pair(Case("x", ADAMW, style="last-synchronised"), 1)
        restoration = Restoration(joiner.state, describe_state(donor.state), mode=RestoreMode.STAGED)
        restoration.prepare()
        fill(restoration, donor.state)
        joiner.train(1)  # replaces the list of last-synchronised tensors
        restoration.commit()
        assert contents(joiner.state) == contents(donor.state)

    @MODES
    def test_views_of_one_flat_buffer_stay_views(self, mode: RestoreMode) -> None:
        donor, joiner = pair(Case("x", ADAMW, style="flat"), 1)
        transfer(donor.state, joiner.state, mode)
        storages = {t.untyped_storage().data_ptr() for t in joiner.state.read_outer_params().values()}
        assert len(storages) == 1

    @MODES
    def test_tied_weights_stay_tied(self, mode: RestoreMode) -> None:
        donor, joiner = pair(Case("x", ADAMW, models.Tied, models.tokens), 1)
        transfer(donor.state, joiner.state, mode)
        assert isinstance(joiner.live, models.Tied)
        assert joiner.live.head.weight is joiner.live.embedding.weight
        assert isinstance(donor.live, models.Tied)
        assert same_bits(joiner.live.head.weight, donor.live.head.weight)


class TestLiveCopies:
    """Every copy of a weight."""

    @MODES
    def test_a_live_module_of_another_dtype_gets_the_rounded_weights(self, mode: RestoreMode) -> None:
        case = Case("x", ADAMW, models.bf16_mlp, outer_dtype=torch.float32)
        donor, joiner = pair(case, 1)
        transfer(donor.state, joiner.state, mode)
        for name, live in joiner.live.named_parameters():
            assert same_bits(live, donor.state.read_outer_params()[name].to(live.dtype)), name

    def test_are_left_alone_when_outer_parameters_are_not_restored(self) -> None:
        donor, joiner = pair(joiner_phases=1)
        for parameter in joiner.live.parameters():
            parameter.data.add_(1.0)  # in the middle of an inner phase
        before = [p.detach().clone() for p in joiner.live.parameters()]
        transfer(donor.state, joiner.state, parts=[INNER, PartName("scheduler")])
        assert all(map(same_bits, before, joiner.live.parameters()))

    def test_a_shape_that_changed_is_found_before_anything_is_written(self) -> None:
        net = nn.Linear(6, 8)
        donor = WorkerState(live=nn.Linear(6, 8), outer_params=nn.Linear(6, 8))
        joiner = WorkerState(live=net, outer_params=nn.Linear(6, 8))
        restoration = Restoration(joiner, describe_state(donor), mode=RestoreMode.STAGED)
        restoration.prepare()
        fill(restoration, donor)
        before = contents(joiner)
        net.bias.data = torch.zeros(9)
        with pytest.raises(LayoutMismatch, match=r"live/bias is \[9\], its outer parameter \[8\]"):
            restoration.commit()
        assert contents(joiner) == before


class TestParts:
    """Choosing parts."""

    def test_outer_first_and_private_later_give_the_whole(self) -> None:
        donor, joiner = pair(joiner_phases=2)
        for names in (donor.state.replicated_names, donor.state.private_copied_names):
            transfer(donor.state, joiner.state, manifest=describe_state(donor.state, names))
        assert contents(joiner.state) == contents(donor.state)

    def test_chosen_parts_leave_the_others_alone(self) -> None:
        donor, joiner = pair(joiner_phases=1)
        before = contents(joiner.state)
        report = transfer(donor.state, joiner.state, parts=[OUTER])
        after = contents(joiner.state)
        assert [name for name in before if before[name] != after[name]] == [OUTER]
        assert report.num_bytes == donor.state.read_part(OUTER).bytes.num_bytes

    def test_weights_alone_fit_a_worker_with_another_optimizer(self) -> None:
        donor, joiner = Worker(SIMPLE, 0), Worker(Case("x", one(optim.SGD, lr=1.0)), 1)
        transfer(donor.state, joiner.state, parts=[OUTER])
        assert contents(joiner.state, [OUTER]) == contents(donor.state, [OUTER])
        with pytest.raises(LayoutMismatch, match=r"the donor's is a torch\.optim\.adamw\.AdamW, this worker's a torch"):
            transfer(donor.state, joiner.state)

    def test_a_part_that_the_manifest_lacks_or_named_twice_is_refused(self) -> None:
        donor, joiner = pair()
        with pytest.raises(LayoutMismatch, match="has no part nothing"):
            transfer(donor.state, joiner.state, parts=[PartName("nothing")])
        with pytest.raises(LayoutMismatch, match="named twice"):
            transfer(donor.state, joiner.state, parts=[OUTER, OUTER])

    def test_a_class_that_differs_is_refused(self) -> None:
        donor, joiner = pair()
        donor.state.add("extra", nn.Linear(2, 2), PartClass.REPLICATED)
        joiner.state.add("extra", nn.Linear(2, 2), COPIED)
        with pytest.raises(LayoutMismatch, match="extra: replicated on the donor, private-copied here"):
            transfer(donor.state, joiner.state)

    def test_a_layout_that_differs_outside_of_the_manifest_is_refused(self) -> None:
        donor, joiner = Worker(SIMPLE, 0), Worker(Case("x", one(optim.Adam, lr=1e-2), schedule=SIMPLE.schedule), 1)
        manifest = describe_state(donor.state, donor.state.replicated_names)
        with pytest.raises(LayoutMismatch, match="the digests of the two layouts differ"):
            transfer(donor.state, joiner.state, manifest=manifest)


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


def test_state_larger_than_the_machine_is_not_allocated() -> None:
    donor, joiner = pair()
    manifest = describe_state(donor.state)
    part = manifest.part(INNER)
    huge = dataclasses.replace(part.tensors[1], shape=(1 << 40,), num_bytes=1 << 42)
    parts = tuple(
        dataclasses.replace(p, tensors=(p.tensors[0], huge, *p.tensors[2:])) if p.name == INNER else p
        for p in manifest.parts
    )
    restoration = Restoration(joiner.state, dataclasses.replace(manifest, parts=parts), mode=RestoreMode.STAGED)
    with pytest.raises(ManifestRejected, match=r"inner_optimizer: \d+ bytes are to be made, this machine has \d+"):
        restoration.prepare()


class TestAllOrNothing:
    """A staged restoring that fails changes nothing; one in place says that the worker must not train."""

    def tamper(self, part: PartName) -> Callable[[PartName, Tensor], Tensor]:
        def change(name: PartName, piece: Tensor) -> Tensor:
            if name == part:
                piece[len(piece) // 2] ^= 1
            return piece

        return change

    @pytest.mark.parametrize("part", ["outer_params", "outer_optimizer", "inner_optimizer", "buffers"])
    def test_one_flipped_bit_is_found(self, part: str) -> None:
        donor, joiner = pair(joiner_phases=1)
        before = contents(joiner.state)
        live = [p.detach().clone() for p in joiner.live.parameters()]
        with pytest.raises(StateMismatch, match=rf"{part}: 1 of 1 chunks received .* nothing was changed"):
            transfer(donor.state, joiner.state, RestoreMode.STAGED, tamper=self.tamper(PartName(part)))
        assert contents(joiner.state) == before
        assert all(map(same_bits, live, joiner.live.parameters()))
        with pytest.raises(StateMismatch, match=rf"must not train:\n  {part}/.*: its bytes differ$"):
            transfer(donor.state, joiner.state, RestoreMode.IN_PLACE, tamper=self.tamper(PartName(part)))

    def test_a_chunk_that_never_came_is_found(self) -> None:
        donor, joiner = pair()
        before = contents(joiner.state)
        restoration = Restoration(joiner.state, describe_state(donor.state), mode=RestoreMode.STAGED)
        restoration.prepare()
        with pytest.raises(StateMismatch, match="nothing was changed"):
            restoration.commit()
        assert contents(joiner.state) == before
        fill(restoration, donor.state)  # the rest comes after all
        restoration.commit()
        assert contents(joiner.state) == contents(donor.state)

    def test_a_users_error_undoes_what_was_loaded_before(self) -> None:
        class Fussy:
            def __init__(self, value: int) -> None:
                self.value, self.picky = value, False

            def state_dict(self) -> dict[str, Any]:
                return {"value": self.value}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                if self.picky:
                    raise RuntimeError("no")
                self.value = state["value"]

        donor, joiner = pair(joiner_phases=1)
        first, last = Fussy(1), Fussy(2)
        last.picky = True
        for name, theirs, own in (("first", Fussy(10), first), ("last", Fussy(20), last)):
            donor.state.add(name, theirs, COPIED)
            joiner.state.add(name, own, COPIED)
        before = contents(joiner.state)
        with pytest.raises(RuntimeError, match="no"):
            transfer(donor.state, joiner.state, RestoreMode.STAGED)
        assert contents(joiner.state) == before and first.value == 1

    def test_memory_that_is_not_what_was_written_is_found(self) -> None:
        class Forgetful(nn.Linear):
            def load_state_dict(self, *_: Any, **__: Any) -> Any:
                return None

        donor, joiner = pair()
        donor.state.add("extra", Forgetful(2, 2), COPIED)
        joiner.state.add("extra", Forgetful(2, 2), COPIED)
        with pytest.raises(StateMismatch, match="extra/weight: its bytes differ\n  extra/bias: its bytes differ"):
            transfer(donor.state, joiner.state, RestoreMode.STAGED)

    def test_a_worker_that_changed_meanwhile_so_that_a_leaf_does_not_fit_is_not_changed(self) -> None:
        donor, joiner = pair()
        restoration = Restoration(joiner.state, describe_state(donor.state), mode=RestoreMode.STAGED)
        restoration.prepare()
        fill(restoration, donor.state)
        joiner.live.get_submodule("1").running_mean = torch.zeros(7)
        before = contents(joiner.state)
        with pytest.raises(LayoutMismatch, match=r"buffers/1\.running_mean: this worker has nothing that can hold"):
            restoration.commit()
        assert contents(joiner.state) == before

    def test_a_live_worker_may_train_while_bytes_come(self) -> None:
        donor, joiner = pair(donor_phases=2)
        restoration = Restoration(joiner.state, describe_state(donor.state), mode=RestoreMode.STAGED)
        restoration.prepare()
        joiner.train(1)  # makes optimizer state that did not exist
        fill(restoration, donor.state)
        joiner.train(1)
        report = restoration.commit()
        assert report.created == 0
        assert contents(joiner.state) == contents(donor.state)

    def test_state_that_went_away_while_bytes_came_is_made_again(self) -> None:
        donor, joiner = pair(donor_phases=2, joiner_phases=1)
        restoration = Restoration(joiner.state, describe_state(donor.state), mode=RestoreMode.STAGED)
        restoration.prepare()
        fill(restoration, donor.state)
        joiner.inner["only"].state.clear()
        joiner.state.expect_fewer_states(INNER)
        assert restoration.commit().created == 18
        assert contents(joiner.state) == contents(donor.state)


class TestOrderOfCalls:
    """Calls out of order are the caller's mistake, and say so."""

    def test_prepare_destination_commit_once(self) -> None:
        donor, joiner = pair()
        restoration = Restoration(joiner.state, describe_state(donor.state), mode=RestoreMode.STAGED)
        assert restoration.part_names == donor.state.part_names and restoration.mode is RestoreMode.STAGED
        for call in (restoration.commit, lambda: restoration.destination(OUTER)):
            with pytest.raises(MisuseError, match="prepare"):
                call()
        restoration.prepare()
        into = restoration.destination(OUTER)
        restoration.prepare()
        assert restoration.destination(OUTER) is into
        with pytest.raises(MisuseError, match="'nothing' is not among those restored"):
            restoration.destination(PartName("nothing"))
        fill(restoration, donor.state)
        report = restoration.commit()
        assert report.num_bytes == describe_state(donor.state).num_bytes
        for call in (restoration.commit, lambda: restoration.destination(OUTER)):
            with pytest.raises(MisuseError, match="was committed"):
                call()


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
