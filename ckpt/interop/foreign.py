"""Between other systems' state dicts and named parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ckpt.reader import Checkpoint
from ckpt.record import CONVERTED
from ckpt.values import ValueSource, source_of, value_of
from recovery.errors import BadConfiguration, CheckpointRejected
from recovery.types import Cut, PartClass, PartName, RunId, Version, WorkerRef

OUTER = PartName("outer_params")
OUTER_OPTIMIZER = PartName("outer_optimizer")
RUN_PROGRESS = PartName("run_progress")
INNER_OPTIMIZER = PartName("inner_optimizer")
SCHEDULER = PartName("scheduler")
LOCAL_PROGRESS = PartName("local_progress")
BUFFERS = PartName("buffers")
FROZEN = PartName("frozen_params")

CLASSES = {
    OUTER: PartClass.REPLICATED,
    FROZEN: PartClass.REPLICATED,
    OUTER_OPTIMIZER: PartClass.REPLICATED,
    RUN_PROGRESS: PartClass.REPLICATED,
}
"""Parts that are replicated; every other one is private."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """Another system's checkpoint as parts of ours, for one local rank."""

    values: Mapping[PartName, object]
    outer_step: int
    inner_step: int = 0
    kept: Collection[PartName] = ()
    """Parts that are one worker's own: its data position."""
    records: Mapping[str, object] = field(default_factory=dict)
    origin: str = ""
    """The other system, where it says less than ours; empty: nothing is missing."""
    absent: Mapping[PartName, str] = field(default_factory=dict)
    """Parts that it does not have, and why."""

    @property
    def side_records(self) -> dict[str, object]:
        """What stands beside it once it is ours: its own records, and where it comes from."""
        if not self.origin:
            return dict(self.records)
        return {
            **self.records,
            CONVERTED: {"from": self.origin, "absent": {str(name): why for name, why in self.absent.items()}},
        }

    def renamed(self, names: Mapping[PartName, PartName]) -> Foreign:
        """Return the same with parts under other names: a data loader is called what the worker calls it.

        Raises:
            BadConfiguration: there is no part of an old name, or two get one name.
        """
        unknown = sorted(set(names) - set(self.values))
        if unknown:
            raise BadConfiguration(
                f"there is no part {', '.join(unknown)} to rename; there are {', '.join(sorted(self.values))}"
            )
        values = {names.get(name, name): value for name, value in self.values.items()}
        if len(values) != len(self.values):
            raise BadConfiguration("two parts would have one name: choose another")
        return dataclasses.replace(self, values=values, kept=[names.get(name, name) for name in self.kept])

    def source(self, *, run_id: RunId, worker: WorkerRef, lineage: int = 1) -> ValueSource:
        """Return what ``write_checkpoint`` takes, at the step that the other system had reached."""
        return source_of(
            {name: (self.part_class(name), value) for name, value in self.values.items()},
            run_id=run_id,
            worker=worker,
            cut=Cut(Version(lineage, self.outer_step)),
        )

    def part_class(self, name: PartName) -> PartClass:
        """Return a part's class."""
        if name in self.kept:
            return PartClass.PRIVATE_KEPT
        return CLASSES.get(name, PartClass.PRIVATE_COPIED)


def foreign_of(checkpoints: Sequence[Checkpoint]) -> Foreign:
    """Return the parts of our own checkpoints (replicated and private of one worker), every byte verified."""
    values: dict[PartName, object] = {}
    kept: set[PartName] = set()
    for checkpoint in checkpoints:
        for part in checkpoint.manifest.parts:
            values[part.name] = value_of(checkpoint, part.name)
            if part.part_class is PartClass.PRIVATE_KEPT:
                kept.add(part.name)
    return Foreign(
        values=values,
        outer_step=checkpoints[0].version.outer_step,
        inner_step=checkpoints[-1].manifest.cut.inner_step,
        kept=kept,
        records={name: value for name, value in checkpoints[0].record.records.items() if name != CONVERTED},
    )


def named_optimizer(state: Mapping[str, object], names: Sequence[str], where: str) -> dict[str, object]:
    """Return a torch optimizer's state dict, keyed by index, as a part keyed by parameter names.

    Args:
        state: As ``Optimizer.state_dict()`` made it, or keyed by names already.
        names: The parameters in the optimizer's order.
        where: For messages.

    Raises:
        BadConfiguration: the number of names is not that of the parameters.
    """
    groups, entries = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not isinstance(entries, Mapping):
        raise CheckpointRejected(f"{where} holds no optimizer's state dict")
    keys = [key for group in groups for key in group["params"]]
    if all(isinstance(key, str) for key in keys):
        by_key: dict[object, str] = {key: str(key) for key in keys}
    elif len(keys) == len(names):
        by_key = dict(zip(keys, names, strict=True))
    else:
        raise BadConfiguration(
            f"{where} numbers {len(keys)} parameters and {len(names)} names are known: give the names of the "
            "optimizer's parameters, in its order, as named_parameters() lists them"
        )
    return {
        "class": str(state.get("class", "")),
        "state": {by_key[key]: dict(entry) for key, entry in entries.items()},
        "param_groups": [
            {
                **{option: value for option, value in group.items() if option not in ("params", "param_names")},
                "params": [by_key[key] for key in group["params"]],
            }
            for group in groups
        ],
    }


def numbered_optimizer(part: object, where: str) -> dict[str, object]:
    """Return an optimizer part as ``Optimizer.load_state_dict`` takes it, keyed by index in the order of its groups."""
    if not isinstance(part, dict) or not isinstance(part.get("param_groups"), list):
        raise CheckpointRejected(f"{where} is no optimizer")
    order = [name for group in part["param_groups"] for name in group["params"]]
    index = {name: position for position, name in enumerate(order)}
    return {
        "state": {index[name]: dict(entry) for name, entry in part["state"].items()},
        "param_groups": [
            {**group, "params": [index[name] for name in group["params"]]} for group in part["param_groups"]
        ],
    }


def parameters_and_buffers(
    model: Mapping[str, object], names: Sequence[str] | None
) -> tuple[dict[str, object], dict[str, object]]:
    """Return a model's state dict in two: the named parameters (None: everything), and the rest."""
    if names is None:
        return dict(model), {}
    chosen = set(names)
    return (
        {name: value for name, value in model.items() if name in chosen},
        {name: value for name, value in model.items() if name not in chosen},
    )


def model_of(values: Mapping[PartName, object]) -> dict[str, torch.Tensor]:
    """Return a model's state dict: outer and frozen parameters, then buffers."""
    model: dict[str, torch.Tensor] = {}
    for name in (OUTER, FROZEN, PartName("local_params"), BUFFERS):
        part = values.get(name)
        if isinstance(part, Mapping):
            model.update({str(key): value for key, value in part.items() if isinstance(value, torch.Tensor)})
    return model


def scheduler_part(state: object) -> dict[str, object]:
    """Return a scheduler's state dict as a part; its class is not known."""
    return {"class": "", "state": state}


def scheduler_state(part: object) -> object:
    """Return a scheduler part's state dict."""
    return part["state"] if isinstance(part, dict) and set(part) == {"class", "state"} else part


def number(value: object, what: str) -> int:
    """Return a counter, which other systems keep as an int or a tensor of one element.

    Raises:
        CheckpointRejected: it is neither.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointRejected(f"{what} is no whole number but a {type(value).__name__}")
    return value
