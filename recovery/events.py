"""Typed events: every change of state that someone may want to see, sent to one sink.

Logs, metrics, the operator's watch and tests all read the same events. An event is a frozen dataclass whose fields
are plain values (str, int, float, bool, bytes, tuples, ``Version``, ``Cut``); units stand in the names.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from recovery.types import Cut, Version

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something happened. ``worker_id`` is whom it happened to; empty: the coordinator."""

    worker_id: str = ""


class EventSink(Protocol):
    """Where events go. Called from any thread; must return at once and never raise."""

    def __call__(self, event: Event, /) -> None: ...


# Membership


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerAttached(Event):
    incarnation: str
    held: Version


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLost(Event):
    incarnation: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRejected(Event):
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLeft(Event):
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStalled(Event):
    stalled_seconds: float


# History


@dataclass(frozen=True, kw_only=True, slots=True)
class LineageStarted(Event):
    version: Version
    cause: str
    parent: Version
    lost_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RosterIssued(Event):
    epoch: int
    version: Version
    members: tuple[str, ...]
    missing: tuple[str, ...]
    waited_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochEnded(Event):
    epoch: int
    verdict: str
    version: Version
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSealed(Event):
    version: Version
    fingerprint: str
    reporters: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FingerprintDiverged(Event):
    version: Version
    fingerprint: str
    expected: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPausedEvent(Event):
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryStage(Event):
    """A worker passed a named place of a boundary, in this order: ``arriving``, ``arrived`` (the message is on its
    way), ``rostered``, ``averaging``, ``averaged``, ``voting``, ``voted``, ``decided``, ``applying``, ``applied``,
    ``reporting``, ``reported``. An epoch that fails begins again at ``arriving``."""

    stage: str
    version: Version
    epoch: int = 0


# Transfers


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferStarted(Event):
    transfer_id: str
    attempt: int
    version: Version
    donors: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferProgress(Event):
    transfer_id: str
    verified_bytes: int
    total_bytes: int
    bytes_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkRefetched(Event):
    transfer_id: str
    part: str
    chunk: int
    donor: str
    blame: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DonorFailed(Event):
    transfer_id: str
    donor: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferEnded(Event):
    transfer_id: str
    attempt: int
    cut: Cut
    payload_bytes: int
    reused_bytes: int
    took_seconds: float
    failure: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseRestored(Event):
    """A joiner's outer parts are whole at ``version``; the run may have moved on meanwhile."""

    version: Version


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitReplayed(Event):
    """A joiner took the outer step that led to ``version`` by the run's journal; its fingerprint is the sealed one."""

    version: Version
    num_bytes: int
    fetch_seconds: float
    replay_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivatePartsReceived(Event):
    """A donor's private parts, captured at one cut, are whole and verified in the joiner's memory."""

    cut: Cut
    took_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitsForState(Event):
    """A worker without the run's state is told why nobody gives it one, and what would end that."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalarsRefreshed(Event):
    """A joiner took the scalars of a later cut: its moments are of an earlier one."""

    cut: Cut


@dataclass(frozen=True, kw_only=True, slots=True)
class CatchUpRebased(Event):
    """A joiner gives up its outer base at ``version`` and fetches a newer one."""

    version: Version
    times: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRestored(Event):
    version: Version
    source: str
    num_tensors: int
    num_bytes: int


# Donor


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseTaken(Event):
    holder: str
    version: Version
    until_boundary: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseEnded(Event):
    holder: str
    version: Version
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotCaptured(Event):
    cut: Cut
    num_bytes: int
    copied_on_training_thread_bytes: int
    training_thread_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardCopied(Event):
    version: Version
    copied_bytes: int
    void_pulls: int
    training_thread_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingThreadStalled(Event):
    """What snapshots cost the training thread from one publication to the next, one entry a cause.

    ``causes`` are named as in ``snapshot/stall.py``; ``seconds`` and ``copied_bytes`` have one entry for each.
    """

    version: Version
    causes: tuple[str, ...]
    seconds: tuple[float, ...]
    copied_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingThreadWaited(Event):
    """The training thread stood still for somebody else."""

    what: str
    for_whom: str
    waited_seconds: float


# Disk


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSaved(Event):
    url: str
    cut: Cut
    num_bytes: int
    took_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSaveFailed(Event):
    url: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointLoaded(Event):
    url: str
    cut: Cut
    num_bytes: int
    took_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSkipped(Event):
    """A checkpoint was not used; ``reason`` says why."""

    url: str
    reason: str


# Orders


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderDone(Event):
    order_id: str
    order: str
    failure: str
    detail: str


def to_json(event: Event) -> str:
    """Return the event's fields as one line of JSON; versions and cuts as their text, bytes as hex."""

    def plain(value: object) -> object:
        if isinstance(value, bytes):
            return value.hex()
        return str(value)

    return json.dumps({f.name: getattr(event, f.name) for f in dataclasses.fields(event)}, default=plain)


class LogSink:
    """Writes each event as one log line of the module's logger."""

    def __init__(self, level: int = logging.INFO) -> None:
        self._level = level

    def __call__(self, event: Event, /) -> None:
        logger.log(self._level, "%s %s", type(event).__name__, to_json(event))


class Fanout:
    """Hands each event to several sinks; a sink that raises is logged and does not keep the event from the others."""

    def __init__(self, *sinks: Callable[[Event], None]) -> None:
        self._sinks = list(sinks)

    def add(self, sink: Callable[[Event], None]) -> None:
        self._sinks.append(sink)

    def __call__(self, event: Event, /) -> None:
        for sink in tuple(self._sinks):
            try:
                sink(event)
            except Exception:  # a sink belongs to the user: its error must not reach training or a transfer
                logger.exception("an event sink failed on %s", type(event).__name__)


_E = TypeVar("_E", bound=Event)


class Recorder:
    """Keeps events in memory, for tests and for the demo's proofs. ``of`` filters by class."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event, /) -> None:
        self.events.append(event)

    def of(self, kind: type[_E]) -> list[_E]:
        """Return the recorded events of ``kind``, oldest first."""
        return [event for event in self.events if isinstance(event, kind)]
