"""A torchdata loader is a part like any other: kept by its worker, restored from its own record when asked."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from recovery.state import RestoreMode, WorkerState
from recovery.types import PartClass, PartName
from tests.support.state_lab import describe_state, transfer

LOADER = PartName("loader")

# torchdata itself calls a function that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def worker(loader: object, part_class: PartClass) -> WorkerState:
    state = WorkerState(live=nn.Linear(2, 2), outer_params=nn.Linear(2, 2))
    state.add(LOADER, loader, part_class)  # type: ignore[arg-type]
    return state


def loader(seed: int) -> StatefulDataLoader:
    generator = torch.Generator().manual_seed(seed)
    return StatefulDataLoader(list(range(64)), batch_size=4, shuffle=True, generator=generator)


@pytest.mark.parametrize("mode", list(RestoreMode))
@pytest.mark.parametrize("started", [False, True])
def test_a_position_in_the_middle_of_an_epoch_comes_back(mode: RestoreMode, started: bool) -> None:
    theirs, own = loader(3), loader(4)
    batches = iter(theirs)
    for _ in range(5):
        next(batches)
    if started:
        next(iter(own))
    transfer(worker(theirs, PartClass.PRIVATE_COPIED), worker(own, PartClass.PRIVATE_COPIED), mode)
    assert [batch.tolist() for batch in own] == [batch.tolist() for batch in batches]


def test_a_donors_position_is_not_taken_unless_asked_for() -> None:
    theirs, own = loader(3), loader(4)
    next(iter(theirs))
    donor, joiner = worker(theirs, PartClass.PRIVATE_KEPT), worker(own, PartClass.PRIVATE_KEPT)
    manifest = describe_state(donor)
    assert LOADER in [part.name for part in manifest.parts]
    before = own.state_dict()
    transfer(donor, joiner, manifest=manifest)
    assert own.state_dict()["_num_yielded"] == before["_num_yielded"] == 0
    transfer(donor, joiner, manifest=manifest, parts=[LOADER])
    assert own.state_dict()["_num_yielded"] == 1
