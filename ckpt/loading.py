"""Two ways from an open checkpoint into a worker's state: byte by byte where it fits, merged where it does not."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ckpt.compose import Strictness, apply_values, whole_value
from ckpt.part_reading import Progress
from ckpt.reader import Checkpoint
from recovery.state.parts import LIVE_PARAMS, WorkerState
from recovery.state.restore import Restoration, RestoreMode, RestoreReport
from recovery.types import Cut, PartName, RunId, WorkerRef


class Private(enum.Enum):
    """Which private parts a worker takes."""

    OWN_ELSE_ANY = "own-else-any"
    """Its own, data position included; else the copied ones of any worker, never another's data position."""
    NONE = "none"
    """Only the replicated parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the caller of ``restore`` asked for."""

    mode: RestoreMode
    private: Private
    parts: Collection[PartName] | None
    exclude: Collection[PartName]
    tokens: int | None
    strictness: Strictness
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class Done:
    reports: Sequence[RestoreReport]
    differences: tuple[str, ...] = ()


class ExactLoad:
    """The checkpoint fits leaf by leaf: its bytes go straight to their destinations."""

    def __init__(self, state: WorkerState, request: Request) -> None:
        self._state = state
        self._request = request
        self._ready: list[Restoration] = []

    def read(self, shares: Sequence[Checkpoint], names: Sequence[PartName]) -> None:
        if not names:
            return
        (share,) = shares
        restoration = Restoration(self._state, share.manifest, mode=self._request.mode, parts=names)
        restoration.prepare()
        share.restore(restoration, names, progress=self._request.progress)
        self._ready.append(restoration)

    def commit(self, cut: Cut) -> Done:
        received = {name for restoration in self._ready for name in restoration.part_names}
        return Done([restoration.commit(live_follows=LIVE_PARAMS not in received) for restoration in self._ready])


class MergedLoad:
    """The checkpoint fits in part, or was cut for another number of ranks: values are merged, then restored."""

    def __init__(self, state: WorkerState, request: Request, run_id: RunId, worker: WorkerRef) -> None:
        self._state = state
        self._request = request
        self._run_id = run_id
        self._worker = worker
        self._values: dict[PartName, object] = {}

    def read(self, shares: Sequence[Checkpoint], names: Sequence[PartName]) -> None:
        values = {name: whole_value(shares, name) for name in names}
        self._values.update(values)

    def commit(self, cut: Cut) -> Done:
        applied = apply_values(
            self._state,
            self._values,
            strictness=self._request.strictness,
            run_id=self._run_id,
            worker=self._worker,
            cut=cut,
        )
        return Done([applied.report] if applied.report is not None else [], applied.differences)
