"""Restoring is whole and proven, or changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from recovery.errors import LayoutMismatch, ManifestRejected, MisuseError, StateMismatch
from recovery.state import Restoration, RestoreMode, WorkerState
from recovery.types import PartClass, PartName
from tests.support import zoo_models as models
from tests.support.state_lab import ADAMW, SIMPLE, contents, describe_state, fill, pair, same_bits, transfer
from tests.support.zoo import Case, Worker, one

INNER = PartName("inner_optimizer")
OUTER = PartName("outer_params")
BUFFERS = PartName("buffers")
COPIED = PartClass.PRIVATE_COPIED
MODES = pytest.mark.parametrize("mode", list(RestoreMode))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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
