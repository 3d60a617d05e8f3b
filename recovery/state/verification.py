"""Whether memory holds what a manifest says, leaf by leaf."""

from __future__ import annotations

from recovery.state.compare import compare, damaged_tensors
from recovery.state.digest import part_digests
from recovery.state.live_part import LivePart
from recovery.state.manifest import PartSpec
from recovery.state.part import form
from recovery.types import DigestAlgorithm


def part_differences(expected: PartSpec, found: LivePart, algorithm: DigestAlgorithm) -> list[str]:
    """Return one line for each leaf of ``found`` that is not what ``expected`` says; hashes the memory.

    A leaf's device, kind and memory order are each worker's own; its path, dtype, shape, ties, bits and, for scalars,
    its type are not.
    """
    name = expected.name
    their = {spec.path: spec for spec in expected.tensors}
    ours = {spec.path: spec for spec in found.specs}
    differences = [f"{name}/{path}: missing" for path in their if path not in ours]
    differences += [f"{name}/{path}: not in the manifest" for path in ours if path not in their]
    differences += [
        f"{name}/{path}: {form(spec)} in the manifest, {form(ours[path])} here"
        for path, spec in their.items()
        if path in ours and form(spec) != form(ours[path])
    ]
    if expected.tree.SerializeToString(deterministic=True) != found.tree.SerializeToString(deterministic=True):
        # Bytes differ too where equal lists are one object on one side only: that is no difference.
        differences += [f"{name}/{difference}" for difference in compare(expected.tree, found.tree)]
    if differences:
        return differences
    if part_digests(found.bytes, algorithm) == [chunk.digest for chunk in expected.chunks]:
        return []
    return [f"{name}/{path}: its bytes differ" for path in damaged_tensors(found, expected, algorithm)]
