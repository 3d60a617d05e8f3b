"""One part on its way from a donor's manifest into a worker: where bytes arrive and which leaves they end up in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import psutil
from torch import Tensor

from recovery.errors import LayoutMismatch, ManifestRejected
from recovery.state.agreement import donor_tree
from recovery.state.chunks import PartBytes
from recovery.state.destination import fits, new_leaf, raw, staging
from recovery.state.live_part import LivePart
from recovery.state.local_tensor import can_take, copy_bits
from recovery.state.manifest import PartSpec
from recovery.state.part import Owner, Part

LeafMemory = Tensor | np.ndarray


@dataclass(slots=True)
class Landing:
    """What a commit is going to do with one part."""

    leaves: list[LeafMemory]
    """What the worker will hold."""
    copies: list[tuple[LeafMemory, LeafMemory]] = field(default_factory=list)
    """(target, source) pairs that are still to be copied."""
    num_created: int = 0
    """Leaves that the worker did not have."""

    def copy(self) -> None:
        """Copy what is to be copied; every pair was checked before."""
        for target, source in self.copies:
            if isinstance(target, np.ndarray):
                target[...] = source
            else:
                assert isinstance(source, Tensor)
                copy_bits(target, source)


class Receiving:
    """Destinations of one part.

    Args of the constructor: the worker's part, the donor's description of it, the part as read now, and whether bytes
    are received beside what exists (staged) instead of into it.
    """

    def __init__(self, part: Part, spec: PartSpec, live: LivePart, *, staged: bool) -> None:
        self.part = part
        self.spec = spec
        self._staged = staged
        self._owners: Mapping[int, Owner] = {} if part.loads else part.owners(donor_tree(spec))
        self._received: list[LeafMemory] = []
        found = self._existing(live)
        self._was_missing = [existing is None for existing in found]
        self._refuse_absurd(
            sum(s.num_bytes for s, own in zip(spec.tensors, found, strict=True) if staged or own is None)
        )
        for index, existing in enumerate(found):
            if existing is None:
                self._received.append(self._make(index))
            else:
                self._received.append(staging(spec.tensors[index]) if staged else existing)
        self.bytes = PartBytes([raw(leaf) for leaf in self._received], spec.tensors)

    def land(self, read: Callable[[], LivePart]) -> Landing:
        """Return what the commit has to do; ``read`` reads the part as it is now. Nothing is changed.

        Raises:
            LayoutMismatch: the worker has changed, so that a leaf cannot take the donor's bytes any more.
        """
        if self.part.loads or not self._staged:
            created = 0 if self.part.loads else sum(self._was_missing)
            return Landing(self._received, num_created=created)
        landing = Landing([])
        for index, own in enumerate(self._existing(read())):
            received = self._received[index]
            if own is None:
                landing.num_created += 1
                # Memory made for a missing leaf has its final form; staging memory has not.
                leaf = received if self._was_missing[index] else self._make(index)
            else:
                leaf = own
            if leaf is not received:
                target, source = raw(leaf), raw(received)
                if isinstance(target, Tensor) and isinstance(source, Tensor) and not can_take(target, source):
                    raise LayoutMismatch(f"{self._at(index)}: expanded here, it cannot hold the donor's values")
                landing.copies.append((target, source))
            landing.leaves.append(leaf)
        return landing

    def _existing(self, live: LivePart) -> list[LeafMemory | None]:
        """Return for each of the donor's leaves the worker's own, where the donor's bytes can be written into it."""
        if self.part.loads:
            return [None] * len(self.spec.tensors)
        own = {leaf.path: leaf.source for leaf in live.leaves}
        found: list[LeafMemory | None] = []
        for leaf in self.spec.tensors:
            candidate = own.get(leaf.path)
            usable = isinstance(candidate, Tensor | np.ndarray) and fits(candidate, leaf, whole=not self.part.fixed)
            found.append(candidate if usable else None)  # type: ignore[arg-type]
        return found

    def _refuse_absurd(self, num_bytes: int) -> None:
        # Allocating first and failing later is no way out: the system may promise memory and end the process on use.
        here = psutil.virtual_memory().total
        if num_bytes > here:
            raise ManifestRejected(f"{self.spec.name}: {num_bytes} bytes are to be made, this machine has {here}")

    def _make(self, index: int) -> LeafMemory:
        if self.part.fixed:
            raise LayoutMismatch(f"{self._at(index)}: this worker has nothing that can hold the donor's bytes")
        return new_leaf(self.spec.tensors[index], self._owners.get(index), self._at(index))

    def _at(self, index: int) -> str:
        return f"{self.spec.name}/{self.spec.tensors[index].path}"
