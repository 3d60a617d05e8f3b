"""What a capture of the private parts consists of: while it runs, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from recovery.snapshot.copy_jobs import CopyJobs
from recovery.snapshot.outline import Outline
from recovery.snapshot.preparation import Preparation
from recovery.state.live_part import LivePart
from recovery.types import Cut, PartName, Version


@dataclass(slots=True)
class Capture:
    """One capture while it runs. Filled by the training thread, but for the copies that ``jobs`` lists."""

    version: Version
    inner_step: int
    for_whom: str
    preparation: Preparation
    values: dict[PartName, object] = field(default_factory=dict)
    """Held values, scalars as of the cut."""
    handed: dict[PartName, Outline] = field(default_factory=dict)
    """What ``jobs`` copies."""
    jobs: CopyJobs = field(default_factory=lambda: CopyJobs(()))
    cut: Cut | None = None
    corrections: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(where, bytes): tensors that changed after they were handed to ``jobs``; written when ``jobs`` is through."""
    copied_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Captured:
    """A finished capture: frozen parts in the order of registration, and what it cost the training thread."""

    cut: Cut
    parts: tuple[LivePart, ...]
    data: tuple[torch.Tensor, ...]
    copied_on_training_thread_bytes: int
    training_thread_seconds: float
