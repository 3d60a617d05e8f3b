"""Learning-rate schedulers as parts: everything that decides the next learning rates, except the user's functions."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterator
from typing import ClassVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from protos.recovery.v1 import manifest_pb2
from recovery.state.part import Part, qualified_name
from recovery.types import PartClass, PartName

_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    type,
    weakref.ref,
    Optimizer,
)


class SchedulerPart(Part):
    """One scheduler. The tree is ``{"class", "state"}``; functions and the optimizer stay each worker's own."""

    loads: ClassVar[bool] = True

    def __init__(self, name: PartName, part_class: PartClass, scheduler: LRScheduler) -> None:
        super().__init__(name, part_class)
        self.scheduler = scheduler

    def read(self) -> dict[str, object]:
        return {"class": class_name(self.scheduler), "state": _without_code(self.scheduler.state_dict())}

    def differences(self, donor: object, own: object) -> Iterator[str]:
        assert isinstance(own, dict)
        if not isinstance(donor, dict) or not isinstance(donor.get("state"), dict):
            yield f"{self.name}: the donor's is not a scheduler"
        elif donor.get("class") != own["class"]:
            yield f"{self.name}: the donor's is a {donor.get('class')}, this worker's a {own['class']}"
        else:
            for key in donor["state"]:
                # Loading sets attributes of these names.
                if key == "optimizer" or callable(getattr(type(self.scheduler), str(key), None)):
                    yield f"{self.name}/{key}: the donor's is no state of a scheduler"

    def attach(self, value: object) -> int:
        assert isinstance(value, dict)
        for key in self.read()["state"].keys() - value["state"].keys():  # type: ignore[attr-defined]
            self.scheduler.__dict__.pop(key, None)
        self.scheduler.load_state_dict(value["state"])
        return 0

    def add_layout(self, layout: manifest_pb2.Layout) -> None:
        layout.schedulers.append(manifest_pb2.LayoutScheduler(part=self.name, class_name=class_name(self.scheduler)))


def class_name(scheduler: LRScheduler) -> str:
    """Return the class's name, with those of the schedulers inside it: ``SequentialLR(LinearLR, StepLR)``."""
    inner = getattr(scheduler, "_schedulers", None)
    nested = f"({', '.join(class_name(child) for child in inner)})" if inner else ""
    return qualified_name(scheduler) + nested


def _without_code(value: object) -> object:
    """Return ``value`` with functions, classes and optimizers left out of its mappings."""
    if type(value) is dict:
        return {key: _without_code(item) for key, item in value.items() if not isinstance(item, _CODE)}
    if type(value) is list:
        return [_without_code(item) for item in value]
    return value


def schedules(scheduler: object) -> Optimizer | None:
    """Return the optimizer whose learning rates ``scheduler`` sets, if it tells."""
    optimizer = getattr(scheduler, "optimizer", None)
    return optimizer if isinstance(optimizer, Optimizer) else None
