"""Whether memory holds what a manifest says, leaf by leaf."""

from __future__ import annotations

from recovery.state.digest import digest_part
from recovery.state.live_part import LivePart
from recovery.state.manifest import PartSpec, TensorSpec
from recovery.types import DigestAlgorithm


def part_differences(expected: PartSpec, found: LivePart, algorithm: DigestAlgorithm) -> list[str]:
    """Return one line for each leaf of ``found`` that is not what ``expected`` says; hashes the memory.

    A leaf's device, kind and memory order are each worker's own; its path, dtype, shape and bits are not.
    """
    name = expected.name
    their = {spec.path: spec for spec in expected.tensors}
    ours = {spec.path: spec for spec in found.specs}
    differences = [f"{name}/{path}: missing" for path in their if path not in ours]
    differences += [f"{name}/{path}: not in the manifest" for path in ours if path not in their]
    differences += [
        f"{name}/{path}: {_form(spec)} in the manifest, {_form(ours[path])} here"
        for path, spec in their.items()
        if path in ours and (spec.dtype, spec.shape) != (ours[path].dtype, ours[path].shape)
    ]
    if expected.tree.SerializeToString(deterministic=True) != found.tree.SerializeToString(deterministic=True):
        differences.append(f"{name}: scalars or structure differ")
    if differences:
        return differences
    chunks, tensors = digest_part(found.bytes, algorithm)
    for chunk, digest in zip(expected.chunks, chunks, strict=True):
        if chunk.digest == digest:
            continue
        for index in found.bytes.tensors_in(chunk.offset, chunk.num_bytes):
            spec = expected.tensors[index]
            if not spec.digest or spec.digest != tensors[index]:
                differences.append(f"{name}/{spec.path}: its bytes differ (chunk at {chunk.offset})")
    return differences


def _form(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
