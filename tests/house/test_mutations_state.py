"""Each protection of state and restoring is removed in turn: the check of its report must notice.

A check that passes without its protection proves nothing. Where two protections stand behind each other (the right
order of writing, and the comparison with the manifest at the end), each is removed alone and both together.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recovery.state.agreement as agreement
import recovery.state.chunks as chunks
import recovery.state.destination as destination
import recovery.state.naming as naming
import recovery.state.parts as parts
import recovery.state.receiving as receiving
import recovery.state.restore as restore
from recovery.errors import RecoveryError, StateMismatch
from recovery.state.extra_part import StatefulPart
from recovery.state.optimizer_part import OptimizerPart
from recovery.state.parts import WorkerState
from recovery.state.restore import Restoration
from recovery.state.scheduler_part import SchedulerPart, class_name
from recovery.state.tensors_part import TensorsPart
from tests.support import state_reports, state_reports_origin  # noqa: F401 (they register their checks)
from tests.support.report_registry import REPORTS

_ATTACH = OptimizerPart.attach
_READ_PART = WorkerState.read_part
_READ = OptimizerPart.read


@dataclass(frozen=True)
class Mutation:
    """Replaces attributes; ``rows`` name the checks that must fail, each with one of ``failures``."""

    name: str
    rows: tuple[str, ...]
    patches: tuple[tuple[Any, str, Any], ...]
    failures: tuple[type[BaseException], ...] = field(default=(AssertionError, RecoveryError))


def _nothing(*_: object, **__: object) -> None:
    return None


def _zero(*_: object, **__: object) -> int:
    return 0


def _no_lines(*_: object) -> Iterator[str]:
    return iter(())


NO_PROOF = (Restoration, "_prove", _nothing)


def _attach_state_only(self: OptimizerPart, value: Any) -> int:
    groups = [dict(group) for group in self.optimizer.param_groups]
    removed = _ATTACH(self, value)
    for group, before in zip(self.optimizer.param_groups, groups, strict=True):
        group.clear()
        group.update(before)
    return removed


def _attach_kind_of_the_joiner(self: OptimizerPart, value: Any) -> int:
    before = [group["lr"] for group in self.optimizer.param_groups]
    removed = _ATTACH(self, value)
    for group, old in zip(self.optimizer.param_groups, before, strict=True):
        group["lr"] = torch.tensor(float(group["lr"])) if isinstance(old, Tensor) else float(group["lr"])
    return removed


def _attach_without_removing(self: OptimizerPart, value: Any) -> int:
    surplus = dict(self.optimizer.state)
    _ATTACH(self, value)
    for parameter, entries in surplus.items():
        self.optimizer.state.setdefault(parameter, entries)
    return 0


def _attach_by_load_state_dict(self: OptimizerPart, value: Any) -> int:
    names = [name for group in value["param_groups"] for name in group["params"]]
    state = {names.index(name): entries for name, entries in value["state"].items()}
    groups = [group | {"params": [names.index(name) for name in group["params"]]} for group in value["param_groups"]]
    self.optimizer.load_state_dict({"state": state, "param_groups": groups})
    return 0


def _read_part_cached() -> Callable[[WorkerState, Any], Any]:
    seen: dict[tuple[int, str], Any] = {}
    alive = []

    def read_part(self: WorkerState, name: Any) -> Any:
        alive.append(self)
        if (id(self), name) not in seen:
            part = _READ_PART(self, name)
            kept = [leaf.value.clone() if isinstance(leaf.value, Tensor) else leaf.value for leaf in part.leaves]
            seen[id(self), name] = type(part)(
                part.name, part.part_class, part.tree, part.specs, part.leaves, chunks.PartBytes(kept)
            )
        return seen[id(self), name]

    return read_part


def _names_by_position(self: naming.ParameterNames, optimizer: Any) -> list[list[tuple[str, Tensor]]]:
    numbers = iter(range(10_000))
    return [[(str(next(numbers)), p) for p in group["params"]] for group in optimizer.param_groups]


def _zip_with_all(params: Any, live: nn.Module | None) -> dict[str, Tensor]:
    assert live is not None
    return dict(params) if hasattr(params, "keys") else dict(zip(dict(live.named_parameters()), params, strict=False))


def _like_the_parameter(spec: Any, owner: Any, at: str) -> Any:
    made = destination.new_leaf(spec, owner, at)
    if owner is not None and isinstance(made, Tensor) and made.is_floating_point():
        return made.to(owner.parameter.dtype)
    return made


def _make_by_stepping(self: receiving.Receiving, index: int) -> Any:
    made = _MAKE(self, index)
    owner = self._owners.get(index)
    if owner is not None:
        with torch.no_grad():
            owner.parameter.add_(0.001)
    return made


_MAKE = receiving.Receiving._make


def _only_parts_with_bytes(state: Any, manifest: Any, chosen: Any) -> list[Any]:
    return [part.name for part in manifest.parts if part.num_bytes]


def _every_part(state: Any, manifest: Any, chosen: Any) -> list[Any]:
    return chosen or [part.name for part in manifest.parts]


def _read_without_tensor_options(self: OptimizerPart) -> Any:
    tree = _READ(self)
    groups = tree["param_groups"]
    assert isinstance(groups, list)
    tree["param_groups"] = [
        {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items()} for group in groups
    ]
    return tree


def _read_plain_dicts(self: SchedulerPart) -> Any:
    state = {
        key: dict(value) if isinstance(value, collections.Counter) else value
        for key, value in self.scheduler.state_dict().items()
        if not callable(value) and key != "optimizer"
    }
    return {"class": class_name(self.scheduler), "state": state}


def _load_plain(self: StatefulPart, value: Any) -> int:
    self._stateful.load_state_dict(
        {key: item.tolist() if isinstance(item, np.ndarray) else item for key, item in value.items()}
    )
    return 0


class _Keeping(chunks.PartBytes):
    """Keeps the memory that it is given, where a piece holds whole tensors, instead of copying from it."""

    def __init__(self, tensors: Any, specs: Any = None) -> None:
        super().__init__(tensors, specs)
        self._tensors = tensors

    def write(self, offset: int, data: Tensor) -> None:
        super().write(offset, data)
        for index in self.tensors_in(offset, data.numel()):
            start, size = self.tensor_range(index)
            whole = offset <= start and start + size <= offset + data.numel()
            if whole and self._tensors[index].dtype == torch.float32 and (start - offset) % 4 == 0:
                piece = data[start - offset : start - offset + size].view(torch.float32)
                self._tensors[index].data = piece.view(self._tensors[index].shape)


MUTATIONS = [
    Mutation(
        "groups are not written", ("29", "31", "32", "37", "42"), ((OptimizerPart, "attach", _attach_state_only),)
    ),
    Mutation(
        "groups are not written, nor compared",
        ("29", "31", "32", "37", "42"),
        ((OptimizerPart, "attach", _attach_state_only), NO_PROOF),
        (AssertionError,),
    ),
    Mutation("parts are cached", ("30",), ((WorkerState, "read_part", _read_part_cached()),)),
    Mutation(
        "the joiner's kind of learning rate stays",
        ("32",),
        ((OptimizerPart, "attach", _attach_kind_of_the_joiner), NO_PROOF),
        (AssertionError,),
    ),
    Mutation(
        "the joiner's kind of learning rate stays, and is compared",
        ("32",),
        ((OptimizerPart, "attach", _attach_kind_of_the_joiner),),
        (StateMismatch,),
    ),
    Mutation("tensors that exist are replaced", ("32",), ((receiving, "fits", lambda *_, **__: False),)),
    Mutation("less state than before is published", ("34",), ((OptimizerPart, "_refuse_fewer", _nothing),)),
    Mutation(
        "optimizers are not compared before",
        ("36", "40", "41"),
        ((OptimizerPart, "differences", _no_lines),),
        (AssertionError, RecoveryError, KeyError, ValueError),
    ),
    Mutation("parts without tensors are left out", ("37",), ((restore, "parts_to_restore", _only_parts_with_bytes),)),
    Mutation("new state takes the parameter's dtype", ("38", "X13"), ((receiving, "new_leaf", _like_the_parameter),)),
    Mutation("state is keyed by position", ("40",), ((naming.ParameterNames, "of", _names_by_position),)),
    Mutation("lenient restores what does not fit", ("41",), ((restore, "layout_differences", _nothing),), (Exception,)),
    Mutation("schedulers are loaded last", ("42",), ((SchedulerPart, "loads", False),), (StateMismatch,)),
    Mutation("schedulers are not loaded", ("42",), ((SchedulerPart, "attach", _zero), NO_PROOF), (AssertionError,)),
    Mutation("what is not contiguous is not written", ("45",), ((chunks, "_copy_strided", _nothing),)),
    Mutation("tensors are not compared before", ("47",), ((TensorsPart, "differences", _no_lines),), (Exception,)),
    Mutation(
        "pieces keep their dtype",
        ("49",),
        ((chunks.PartBytes, "_flat_of", lambda self, index: self._holders[index].reshape(-1)),),
        (Exception,),
    ),
    Mutation("every part is taken", ("51",), ((restore, "parts_to_restore", _every_part),)),
    Mutation("buffers are left out", ("52",), ((WorkerState, "_register_buffers", _nothing),)),
    Mutation("state is made by stepping", ("53", "3", "Z2"), ((receiving.Receiving, "_make", _make_by_stepping),)),
    Mutation("what is kept is a reference", ("55",), ((copy, "deepcopy", lambda value: value),)),
    Mutation("received bytes are not checked", ("56",), ((Restoration, "_check_received", _nothing),)),
    Mutation("the live copy is not written", ("Z1", "10"), ((Restoration, "_write_live_copies", _nothing), NO_PROOF)),
    Mutation(
        "the live copy is not written, but compared",
        ("Z1", "10"),
        ((Restoration, "_write_live_copies", _nothing),),
        (StateMismatch,),
    ),
    Mutation("names are those of all parameters", ("Z3",), ((parts, "name_outer_params", _zip_with_all),)),
    Mutation("tensor options are scalars", ("Z4",), ((OptimizerPart, "read", _read_without_tensor_options),)),
    Mutation("surplus state stays", ("Z5",), ((OptimizerPart, "attach", _attach_without_removing), NO_PROOF)),
    Mutation("surplus state stays, but is seen", ("Z5",), ((OptimizerPart, "attach", _attach_without_removing),)),
    Mutation("torch loads the optimizer", ("X13",), ((OptimizerPart, "attach", _attach_by_load_state_dict), NO_PROOF)),
    Mutation("a Counter is a dict", ("X14",), ((SchedulerPart, "read", _read_plain_dicts),)),
    Mutation("an array is a list", ("X14",), ((StatefulPart, "attach", _load_plain), NO_PROOF)),
    Mutation(
        "pieces are kept by reference",
        ("Q2",),
        ((receiving, "PartBytes", _Keeping), (receiving, "raw", lambda leaf: leaf)),
    ),
    Mutation("parts without counterpart are skipped", ("T5",), ((agreement, "_left_out", lambda *_: []),)),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Models of a hundred numbers only lose by more threads."""
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("mutation", "row"),
    [pytest.param(mutation, row, id=f"{row}:{mutation.name}") for mutation in MUTATIONS for row in mutation.rows],
)
def test_a_check_notices_that_its_protection_is_gone(
    mutation: Mutation, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for target, name, replacement in mutation.patches:
        assert hasattr(target, name)
        monkeypatch.setattr(target, name, replacement)
    with pytest.raises((*mutation.failures, pytest.fail.Exception)):
        REPORTS[row][1]()


def test_every_report_has_a_mutation() -> None:
    assert set(REPORTS) == {row for mutation in MUTATIONS for row in mutation.rows}
