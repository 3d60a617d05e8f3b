"""Memory for the next capture, and what the parts looked like when it was reserved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch

from recovery.errors import DonorBusy
from recovery.snapshot.outline import Outline, bytes_in
from recovery.snapshot.vault import Arena, Vault
from recovery.state.parts import WorkerState
from recovery.types import PartName

_ALIGNMENT_BYTES = 64


class Preparation:
    """Gets ready in two stages, each of which any thread may do: places are laid out, then their pages are touched.

    A capture needs the places. If the pages are touched too it costs what copying costs; if not, about twice that.

    Args:
        values: The private-copied parts as they were read, held.

    Attributes:
        outlines: The parts, taken apart; empty before ``lay_out``.
        regions: Where each part's bytes go; empty before ``lay_out``.
        ready: Whether the pages are touched.
    """

    def __init__(self, values: Mapping[PartName, object]) -> None:
        self.outlines: dict[PartName, Outline] = {}
        self.regions: dict[PartName, torch.Tensor] = {}
        self.ready = False
        self._values = values
        self._lock = threading.Lock()
        self._arena: Arena | None = None

    @property
    def num_bytes(self) -> int:
        """About how much will be captured."""
        return sum(map(bytes_in, self._values.values()))

    def lay_out(self, state: WorkerState, vault: Vault, *, turns: bool = False) -> None:
        """Every part has its place. Nothing happens the second time; waits for another thread that is at it.

        ``turns``: the calling thread is not the one that trains, and offers it the interpreter.

        Raises:
            DonorBusy: the vault has no room.
            UnsupportedLeaf: a part has no exact form.
        """
        with self._lock:
            if self._arena is not None:
                return
            outlines = {name: Outline(state.part(name), value, turns=turns) for name, value in self._values.items()}
            total = sum(aligned(outline.part.bytes.num_bytes) for outline in outlines.values())
            arena = vault.reserve(total)
            if arena is None:
                raise DonorBusy(
                    f"{total} bytes of private state do not fit beside {vault.used_bytes} in use into the "
                    f"snapshot budget of {vault.budget_bytes} bytes"
                )
            start = 0
            for name, outline in outlines.items():
                size = outline.part.bytes.num_bytes
                self.regions[name] = arena.data[start : start + size]
                start += aligned(size)
            self.outlines = outlines
            self._arena = arena

    def touch(self, pace: Callable[[float], bool] | None = None) -> None:
        """The pages are there. May take long: not for the training thread, unless there are few.

        ``pace``: as for ``Arena.touch``.
        """
        assert self._arena is not None
        self._arena.touch(pace)
        self.ready = True


def aligned(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to where the next part may begin."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
