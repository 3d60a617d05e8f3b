"""Parts that the user adds: objects that load themselves, trees behind a getter; and progress counters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from protos.recovery.v1 import manifest_pb2
from recovery.state.leaf import dtype_name
from recovery.state.local_tensor import can_hold, local
from recovery.state.part import Part, Slot
from recovery.types import PartClass, PartName


@runtime_checkable
class Stateful(Protocol):
    """What data loaders, gradient scalers and modules have in common."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a tree; tensors may be live."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take the state over; tensors given may be kept."""


class StatefulPart(Part):
    """An object that saves and loads itself."""

    loads: ClassVar[bool] = True

    def __init__(
        self, name: PartName, part_class: PartClass, stateful: Stateful, *, changes_in_forward: bool = False
    ) -> None:
        super().__init__(name, part_class, changes_in_forward=changes_in_forward)
        self._stateful = stateful

    def read(self) -> object:
        return self._stateful.state_dict()

    def differences(self, donor: object, own: object) -> Iterator[str]:
        if not isinstance(donor, dict):
            yield f"{self.name}: the donor's is a {type(donor).__name__}, not a state dict"

    def attach(self, value: object) -> int:
        assert isinstance(value, dict)
        self._stateful.load_state_dict(value)
        return 0

    def add_layout(self, layout: manifest_pb2.Layout) -> None:
        pass


class TreePart(Part):
    """A tree of the user's own tensors, arrays and containers, written in place."""

    def __init__(
        self, name: PartName, part_class: PartClass, getter: Callable[[], object], *, changes_in_forward: bool = False
    ) -> None:
        super().__init__(name, part_class, changes_in_forward=changes_in_forward)
        self._getter = getter

    def read(self) -> object:
        return self._getter()

    def differences(self, donor: object, own: object) -> Iterator[str]:
        # A getter that builds a new container at each call can hand out tensors, but nothing can be put into it.
        replaceable = isinstance(own, MutableMapping | list) and own is self._getter()
        yield from _tree_differences(self.name, donor, own, replaceable)

    def attach(self, value: object) -> int:
        _write(self._getter(), value)
        return 0

    def add_layout(self, layout: manifest_pb2.Layout) -> None:
        pass


@dataclass(slots=True)
class RunProgress:
    """Progress of the run at its last outer step; the agent advances it. Equal on every worker."""

    outer_step: int = 0
    tokens: int = 0


@dataclass(slots=True)
class LocalProgress:
    """Progress of this worker; the training loop advances ``tokens``, the agent ``inner_step``."""

    inner_step: int = 0
    tokens: int = 0


class ProgressPart(Part):
    """Counters in the fields of a dataclass."""

    def __init__(self, name: PartName, part_class: PartClass, progress: RunProgress | LocalProgress) -> None:
        super().__init__(name, part_class)
        self._progress = progress

    def read(self) -> dict[str, int]:
        return {field.name: getattr(self._progress, field.name) for field in dataclasses.fields(self._progress)}

    def differences(self, donor: object, own: object) -> Iterator[str]:
        assert isinstance(own, dict)
        if not isinstance(donor, dict) or donor.keys() != own.keys() or any(type(n) is not int for n in donor.values()):
            yield f"{self.name}: the donor's does not hold the whole numbers {', '.join(own)}"

    def attach(self, value: object) -> int:
        assert isinstance(value, dict)
        for name, number in value.items():
            setattr(self._progress, name, number)
        return 0

    def add_layout(self, layout: manifest_pb2.Layout) -> None:
        pass


def _tree_differences(at: str, donor: object, own: object, replaceable: bool) -> Iterator[str]:
    """Yield where ``own`` cannot become ``donor`` by writing into tensors and mutable containers."""
    if isinstance(donor, Slot):
        spec = donor.spec
        if isinstance(own, Tensor):
            here = local(own)
            if (spec.dtype, spec.shape) == (dtype_name(here), tuple(here.shape)) and can_hold(here):
                return
            found = f"{dtype_name(here)} {list(here.shape)}"
        elif isinstance(own, np.ndarray):
            if (spec.dtype, spec.shape) == (dtype_name(own), own.shape) and own.flags.writeable:
                return
            found = f"{own.dtype} {list(own.shape)}"
        else:
            found = f"a {type(own).__name__}"
        if not replaceable:
            yield f"{at}: the donor's is {spec.dtype} {list(spec.shape)}, this worker's {found}"
    elif isinstance(donor, dict) and isinstance(own, MutableMapping):
        # Keys may come and go only where the container is the user's own.
        if not replaceable and (odd := donor.keys() ^ own.keys()):
            yield f"{at}: only one has {sorted(map(str, odd))}, and the getter returns a new mapping each time"
        for key in donor.keys() & own.keys():
            yield from _tree_differences(f"{at}/{key}", donor[key], own[key], replaceable)
    elif isinstance(donor, list) and isinstance(own, list) and (replaceable or len(donor) == len(own)):
        for i, (their, our) in enumerate(zip(donor, own, strict=False)):
            yield from _tree_differences(f"{at}/{i}", their, our, replaceable)
    elif isinstance(donor, tuple) and isinstance(own, tuple) and len(donor) == len(own):
        for i, (their, our) in enumerate(zip(donor, own, strict=True)):
            yield from _tree_differences(f"{at}/{i}", their, our, replaceable)
    elif not replaceable and (type(donor) is not type(own) or donor != own):
        yield f"{at}: the donor's is {donor!r}, this worker's {own!r}; a getter cannot set it: add a Stateful instead"


def _write(own: object, value: object) -> None:
    """Make the mutable container ``own`` hold ``value``, keeping containers that exist."""
    if isinstance(own, MutableMapping) and isinstance(value, dict):
        for key in [key for key in own if key not in value]:
            del own[key]
        merged = {key: _merged(own.get(key), item) for key, item in value.items()}
        if list(own) != list(value):
            own.clear()  # the donor's order
        own.update(merged)
    elif isinstance(own, list) and isinstance(value, list):
        own[:] = [_merged(own[i] if i < len(own) else None, item) for i, item in enumerate(value)]


def _merged(own: object, value: object) -> object:
    if (isinstance(own, MutableMapping) and isinstance(value, dict)) or (
        isinstance(own, list) and isinstance(value, list)
    ):
        _write(own, value)
        return own
    return value
