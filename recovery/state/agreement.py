"""Whether a donor's manifest fits a worker, leaf by leaf, before any payload moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recovery.errors import LayoutMismatch
from recovery.state.manifest import Manifest, PartSpec
from recovery.state.part import Slot
from recovery.state.parts import WorkerState
from recovery.state.tree import join
from recovery.types import PartClass, PartName


def parts_to_restore(state: WorkerState, manifest: Manifest, chosen: Sequence[PartName] | None) -> list[PartName]:
    """Return the names of the parts to restore, in the manifest's order.

    Raises:
        LayoutMismatch: a chosen part is not in the manifest, or is named twice.
    """
    listed = [part.name for part in manifest.parts]
    if chosen is None:
        # A donor's private-kept part (its data position, its generators) is never taken without being asked for.
        return [part.name for part in manifest.parts if _own_class(state, part) is not PartClass.PRIVATE_KEPT]
    if absent := [name for name in chosen if name not in listed]:
        raise LayoutMismatch(f"the manifest of {manifest.worker} has no part {', '.join(absent)}; it has {listed}")
    if len(set(chosen)) != len(chosen):
        raise LayoutMismatch(f"parts named twice: {list(chosen)}")
    return [name for name in listed if name in set(chosen)]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """How a manifest does not fit a worker, in lines to read."""

    by_part: Mapping[PartName, list[str]]
    """Parts that cannot be restored. The others can, each whole."""
    general: list[str]
    """What is not a matter of one part that the manifest lists."""

    @property
    def lines(self) -> list[str]:
        return [line for lines in self.by_part.values() for line in lines] + self.general


def layout_differences(state: WorkerState, manifest: Manifest, parts: Sequence[PartName] | None = None) -> Disagreement:
    """Return how the chosen parts of ``manifest`` do not fit the worker, leaf by leaf; nothing is changed.

    A manifest that lists any part of a class must list all of the worker's parts of it, and is compared with the
    worker's whole layout, unless ``parts`` chooses some.

    Raises:
        LayoutMismatch: a chosen part is not in the manifest.
    """
    names = parts_to_restore(state, manifest, parts)
    own = set(state.part_names)
    by_part = {}
    for name in names:
        spec = manifest.part(name)
        if name not in own:
            by_part[name] = [f"{name}: the donor has this part, this worker does not register it"]
        elif spec.part_class is not state.part_class(name):
            by_part[name] = [f"{name}: {spec.part_class.value} on the donor, {state.part_class(name).value} here"]
        elif lines := list(state.part(name).differences(donor_tree(spec), state.part(name).read())):
            by_part[name] = lines
    general = _left_out(state, manifest) if parts is None else []
    same = not manifest.layout_digest or manifest.layout_digest == state.layout_digest()
    if parts is None and not by_part and not general and not same:
        general.append(
            "the digests of the two layouts differ though the parts listed agree: a class, a tie, the dtype of a live "
            f"parameter, or a part that is not listed here ({', '.join(sorted(own - set(names))) or 'none'})"
        )
    return Disagreement(by_part, general)


def donor_tree(spec: PartSpec) -> object:
    """Return the donor's tree with a ``Slot`` at the place of each tensor.

    Raises:
        ManifestRejected: the tree is malformed.
    """
    return join(spec.tree, [Slot(index, leaf) for index, leaf in enumerate(spec.tensors)])  # type: ignore[misc]


def _left_out(state: WorkerState, manifest: Manifest) -> list[str]:
    listed = {part.name for part in manifest.parts}
    classes = {part.part_class for part in manifest.parts} - {PartClass.PRIVATE_KEPT}
    return [
        f"{name}: this worker registers this part, the donor does not have it"
        for name in state.part_names
        if name not in listed and state.part_class(name) in classes
    ]


def _own_class(state: WorkerState, part: PartSpec) -> PartClass:
    return state.part_class(part.name) if part.name in state.part_names else part.part_class
