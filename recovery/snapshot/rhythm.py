"""When between two inner steps each private-copied part may be read."""

from __future__ import annotations

import enum

from recovery.state.optimizer_part import OptimizerPart
from recovery.state.parts import LIVE_PARAMS, LOCAL_PARAMS, WorkerState
from recovery.types import PartName


class Rhythm(enum.Enum):
    """When a private-copied part may be read."""

    CHANGES_IN_FORWARD = "changes in forward"
    """Buffers and the like: right after the step, on the training thread."""
    CHANGES_IN_STEP = "changes in optimizer steps only"
    """Optimizer state and unsynchronised parameters: at leisure until the next step. Scalars: at the end."""
    CHANGES_BETWEEN = "changes between steps"
    """Schedulers, scalers, averages, progress: once the training loop has done all that belongs to the step."""


def rhythm(state: WorkerState, name: PartName) -> Rhythm:
    """Return when part ``name`` may be read."""
    if state.changes_in_forward(name):
        return Rhythm.CHANGES_IN_FORWARD
    if name in (LIVE_PARAMS, LOCAL_PARAMS) or isinstance(state.part(name), OptimizerPart):
        return Rhythm.CHANGES_IN_STEP
    return Rhythm.CHANGES_BETWEEN
