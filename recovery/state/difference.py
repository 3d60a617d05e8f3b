"""How two values differ, bit for bit: the words for it, and the walk that finds it."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from protos.recovery.v1 import manifest_pb2
from recovery.state.chunks import PartBytes
from recovery.state.codec import float_to_bits, path_step
from recovery.state.leaf import TORCH_DTYPES, dtype_name, local_of


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where two states differ. ``what`` names what was expected and what was found."""

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path or '(root)'}: {self.what}"


def describe_differences(differences: Sequence[Difference], at_most: int = 20) -> str:
    """Return the differences as lines for an error's message; says how many are left out."""
    lines = [f"  {difference}" for difference in differences[:at_most]]
    if len(differences) > at_most:
        lines.append(f"  and {len(differences) - at_most} more")
    return "\n".join(lines)


class ValueComparison:
    """Walks two values side by side; a pair of containers is compared once."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()

    def run(self, ours: object, theirs: object, path: str) -> Iterator[Difference]:
        if _is_array(ours) and _is_array(theirs):
            yield from self._arrays(ours, theirs, path)
        elif type(ours) is not type(theirs):
            yield Difference(path, f"{short(ours)} expected, {short(theirs)} found")
        elif isinstance(ours, dict) and isinstance(theirs, dict):
            if self._first_time(ours, theirs):
                yield from self._mappings(ours, theirs, path)
        elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
            if self._first_time(ours, theirs):
                if len(ours) != len(theirs):
                    kind = type(ours).__name__
                    yield Difference(path, f"a {kind} of {len(ours)} items expected, of {len(theirs)} found")
                for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
                    yield from self.run(a, b, f"{path}/{position}" if path else str(position))
        elif not _same_scalar(ours, theirs):
            yield Difference(path, f"{short(ours)} expected, {short(theirs)} found")

    def _first_time(self, ours: object, theirs: object) -> bool:
        pair = (id(ours), id(theirs))
        if pair in self._seen:
            return False
        self._seen.add(pair)
        return True

    def _mappings(self, ours: dict[object, object], theirs: dict[object, object], path: str) -> Iterator[Difference]:
        prefix = path + "/" if path else ""
        # By step, because 1, 1.0 and True are one key to Python and three to us.
        mine = {path_step(key): value for key, value in ours.items()}
        others = {path_step(key): value for key, value in theirs.items()}
        for step, value in mine.items():
            if step in others:
                yield from self.run(value, others[step], prefix + step)
            else:
                yield Difference(prefix + step, f"missing; {short(value)} expected")
        for step, value in others.items():
            if step not in mine:
                yield Difference(prefix + step, f"not expected; {short(value)} found")
        if [s for s in mine if s in others] != [s for s in others if s in mine]:
            yield Difference(path, f"entries in the order {some_of(others)}, expected {some_of(mine)}")

    def _arrays(self, ours: object, theirs: object, path: str) -> Iterator[Difference]:
        if type(ours) is not type(theirs):
            yield Difference(path, f"{type(ours).__name__} expected, {type(theirs).__name__} found")
        a, b = local_of(ours), local_of(theirs)
        if dtype_name(a) != dtype_name(b) or tuple(a.shape) != tuple(b.shape):
            yield Difference(path, f"{dtype_name(a)} {list(a.shape)} expected, {dtype_name(b)} {list(b.shape)} found")
            return
        flags = [isinstance(value, torch.Tensor) and value.requires_grad for value in (ours, theirs)]
        if flags[0] != flags[1]:
            yield Difference(path, f"requires_grad {flags[0]} expected, {flags[1]} found")
        what = content_difference(a, b)
        if what:
            yield Difference(path, what)


def content_difference(ours: torch.Tensor | np.ndarray, theirs: torch.Tensor | np.ndarray) -> str:
    """Return how two tensors of equal dtype and shape differ, bit for bit; empty: they do not.

    Says how many elements differ and the largest absolute difference among those that are numbers on both sides.
    """
    first, second = PartBytes([ours]), PartBytes([theirs])
    count, total = 0, int(np.prod(ours.shape, dtype=np.int64))
    largest, numbers = 0.0, 0
    item = first.num_bytes // max(1, total)
    step = (4 << 20) // max(1, item) * max(1, item)
    for offset in range(0, first.num_bytes, max(1, step)):
        size = min(step, first.num_bytes - offset)
        a, b = first.read(offset, size), second.read(offset, size)
        if torch.equal(a, b):
            continue
        differs = (a.view(-1, item) != b.view(-1, item)).any(dim=1)
        count += int(differs.sum())
        gaps = _gaps(a, b, differs, ours)
        numbers += gaps.numel()
        if gaps.numel():
            largest = max(largest, float(gaps.max()))
    if not count:
        return ""
    note = f", by at most {largest:.6g}" if numbers else ", none of them by a finite amount"
    return f"{count} of {total} elements differ{note}"


def _gaps(a: torch.Tensor, b: torch.Tensor, differs: torch.Tensor, like: torch.Tensor | np.ndarray) -> torch.Tensor:
    dtype = TORCH_DTYPES[dtype_name(like)]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    # Cloned: a view needs its storage aligned to the element, and a piece of a packed chunk need not be.
    gaps = (a.clone().view(dtype)[differs].to(wide) - b.clone().view(dtype)[differs].to(wide)).abs()
    return gaps[torch.isfinite(gaps)]


def _is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _same_scalar(ours: object, theirs: object) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float) and type(ours) is float:
        return float_to_bits(ours) == float_to_bits(theirs)
    if isinstance(ours, complex) and isinstance(theirs, complex) and type(ours) is complex:
        return (float_to_bits(ours.real), float_to_bits(ours.imag)) == (
            float_to_bits(theirs.real),
            float_to_bits(theirs.imag),
        )
    if isinstance(ours, np.generic) and isinstance(theirs, np.generic):
        return ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()
    return bool(ours == theirs)


def short(value: object) -> str:
    """Return a value in a few words for an error's message."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"a {type(value).__name__} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, dict | list | tuple | set | collections.abc.Mapping):
        return f"a {type(value).__name__} of {len(value)} items"
    if isinstance(value, bytes) and len(value) in (16, 32):
        return value.hex()
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"{type(value).__name__} {text}" if type(value) in (int, bool, float, str) else text


def some_of(steps: dict[str, object] | dict[str, manifest_pb2.Value]) -> str:
    """Return the first steps of a mapping."""
    names = list(steps)
    return "[" + ", ".join(names[:8]) + (", ...]" if len(names) > 8 else "]")
