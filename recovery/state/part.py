"""The port between a worker's state and restoring: what one registered part can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from protos.recovery.v1 import manifest_pb2
from recovery.state.manifest import TensorSpec
from recovery.types import PartClass, PartName


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands where a donor's tree has a tensor: ``index`` into the part's tensors, and what the manifest says of it."""

    index: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Owner:
    """The parameter to which a state tensor belongs. It decides where a missing one is created."""

    parameter: Tensor
    counts_on_device: bool
    """The optimizer keeps step counters beside the parameter (capturable or fused) instead of on the CPU."""


class Part(ABC):
    """A named piece of a worker's state, read when it is asked for and never cached.

    All methods run on the thread that owns the state (the training thread).
    """

    loads: ClassVar[bool] = False
    """Restored by the user's ``load_state_dict``, which takes the tensors over, instead of by writing into memory."""
    fixed: ClassVar[bool] = False
    """Holds tensors that nobody may replace: each must exist, with the donor's shape and dtype, to be written."""

    def __init__(self, name: PartName, part_class: PartClass, *, changes_in_forward: bool = False) -> None:
        self.name = name
        self.part_class = part_class
        self.changes_in_forward = changes_in_forward

    @abstractmethod
    def read(self) -> object:
        """Return the part's tree now; its tensors are the live ones, not copies."""

    @abstractmethod
    def differences(self, donor: object, own: object) -> Iterator[str]:
        """Yield one line for each difference of layout; ``donor`` has a ``Slot`` wherever its tree has a tensor."""

    @abstractmethod
    def attach(self, value: object) -> int:
        """Make ``value`` the part's content and return the number of surplus tensors removed.

        Tensors of ``value`` that are the part's own already hold their new content.
        """

    @abstractmethod
    def add_layout(self, layout: manifest_pb2.Layout) -> None:
        """Add to ``layout`` what must agree between two workers before bytes move."""

    def owners(self, donor: object) -> Mapping[int, Owner]:
        """Return for each slot's index the parameter that it belongs to, where there is one."""
        return {}

    def restored(self) -> None:  # noqa: B027 (most parts remember nothing)
        """Called after ``attach``: what was seen before no longer counts."""


def slots(value: object) -> Iterator[Slot]:
    """Yield every slot of a donor's tree, in its order."""
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from slots(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from slots(item)


def qualified_name(thing: object) -> str:
    """Return module and name of ``thing``'s class."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def form(spec: TensorSpec) -> str:
    """Return dtype and shape, and of a shard its place in the global tensor, as errors name them."""
    shard = f" shard {', '.join(spec.shard.placements)} of {list(spec.shard.global_shape)}" if spec.shard else ""
    return f"{spec.dtype} {list(spec.shape)}{shard}"
