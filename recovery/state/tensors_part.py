"""Parts that are a fixed set of named tensors: outer parameters, frozen and local parameters, buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from torch import Tensor

from protos.recovery.v1 import manifest_pb2
from recovery.errors import BadConfiguration, UnsupportedLeaf
from recovery.state.leaf import dtype_name, tensor_leaf
from recovery.state.local_tensor import can_hold, local, tie_key
from recovery.state.manifest import specs_of
from recovery.state.part import Part, Slot, form
from recovery.types import PartClass, PartName


class TensorsPart(Part):
    """Named tensors that exist on every worker and are always written in place."""

    fixed: ClassVar[bool] = True

    def __init__(
        self,
        name: PartName,
        part_class: PartClass,
        getter: Callable[[], Mapping[str, Tensor]],
        *,
        changes_in_forward: bool = False,
    ) -> None:
        super().__init__(name, part_class, changes_in_forward=changes_in_forward)
        self._getter = getter
        first, second = self.read(), self.read()
        for key, tensor in first.items():
            at = f"{name}/{key}"
            if key not in second or (tensor.numel() and tie_key(at, tensor) != tie_key(at, second[key])):
                raise BadConfiguration(
                    f"{at}: the function returns another tensor at each call, and what is written into it "
                    "would be lost: return the tensors themselves"
                )

    def read(self) -> dict[str, Tensor]:
        named = dict(self._getter())
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise UnsupportedLeaf(f"{self.name}/{name} is a {type(tensor).__name__}, not a tensor")
        return named

    def differences(self, donor: object, own: object) -> Iterator[str]:
        assert isinstance(own, dict)
        if not isinstance(donor, dict) or not all(isinstance(slot, Slot) for slot in donor.values()):
            yield f"{self.name}: the donor's is not a mapping of names to tensors"
            return
        yield from _missing(self.name, donor, own)
        first_names: dict[int, str] = {}
        own_names: dict[object, str] = {}
        for name in own:
            if name not in donor:
                continue
            spec, tensor = donor[name].spec, own[name]
            here = local(tensor)
            found = specs_of([tensor_leaf(name, tensor)])[0]
            if (spec.dtype, spec.shape, spec.shard) != (found.dtype, found.shape, found.shard):
                yield f"{self.name}/{name}: the donor's is {form(spec)}, this worker's {form(found)}"
            elif not can_hold(here):
                yield f"{self.name}/{name}: overlaps itself in memory and cannot be written: clone() it"
            tied = first_names.setdefault(donor[name].index, name)
            own_tied = own_names.setdefault(tie_key(name, tensor), name)
            if own_tied != tied:
                yield f"{self.name}/{name}: the donor's is {_tie(name, tied)}, this worker's {_tie(name, own_tied)}"
        if list(donor) != list(own) and set(donor) == set(own):
            first = next(pair for pair in zip(donor, own, strict=True) if pair[0] != pair[1])
            yield f"{self.name}: another order of names: the donor has {first[0]} where this worker has {first[1]}"

    def attach(self, value: object) -> int:
        return 0

    def add_layout(self, layout: manifest_pb2.Layout) -> None:
        add_tensors(layout, self.name, self.read())


def add_tensors(layout: manifest_pb2.Layout, prefix: str, tensors: Mapping[str, Tensor]) -> None:
    """List ``tensors`` under ``prefix`` in ``layout``, tied ones with the name of the first."""
    first: dict[object, str] = {}
    for name, tensor in tensors.items():
        here = local(tensor)
        tied = first.setdefault(tie_key(f"{prefix}/{name}", tensor), name)
        layout.tensors.append(
            manifest_pb2.LayoutTensor(
                name=f"{prefix}/{name}",
                dtype=dtype_name(here),
                shape=here.shape,
                tied_to="" if tied == name else f"{prefix}/{tied}",
            )
        )


def _tie(name: str, tied: str) -> str:
    return "not tied" if tied == name else f"tied to {tied}"


def _missing(part: str, donor: Mapping[str, object], own: Mapping[str, object]) -> Iterator[str]:
    for name in donor:
        if name not in own:
            yield f"{part}/{name}: the donor has it, this worker does not"
    for name in own:
        if name not in donor:
            yield f"{part}/{name}: this worker has it, the donor does not"
