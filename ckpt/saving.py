"""What a background saver is told, and what it tells: policies, callbacks, status, tickets."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckpt.part_writing import PartSource
from ckpt.retention import RetentionPolicy
from ckpt.writer import WriteReport
from recovery.errors import BadConfiguration, CheckpointFailed
from recovery.state.manifest import Manifest
from recovery.types import Version


class WhenFull(enum.Enum):
    """What becomes of a save while ``max_in_flight`` others are under way."""

    SKIP = "skip"
    """It is not made; an event says so."""
    WAIT = "wait"
    """The caller waits; an event says how long."""


class OnFailure(enum.Enum):
    """What a failed save does to training. It is always logged, and an event."""

    WARN = "warn"
    FAIL = "fail"
    """The next ``save`` raises, or ``close``."""
    FAIL_AFTER = "fail-after"
    """The next ``save`` raises, or ``close``, once ``fail_after`` saves in a row have failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaverConfig:
    """How a ``Saver`` behaves."""

    max_in_flight: int = 1
    """Saves under way at once, the one being written included."""
    when_full: WhenFull = WhenFull.SKIP
    on_failure: OnFailure = OnFailure.FAIL_AFTER
    fail_after: int = 3
    link_unchanged: bool = True
    """Link or copy on the server what did not change since the last save, instead of writing it."""
    verify_after: bool = False
    """Read every checkpoint back, from the page cache locally, before it is called saved."""
    retention: RetentionPolicy | None = None
    """Applied after each save; None: everything stays."""
    close_timeout_seconds: float = 600.0
    """How long ``close`` waits for saves under way."""

    def __post_init__(self) -> None:
        for name in ("max_in_flight", "fail_after", "close_timeout_seconds"):
            if getattr(self, name) <= 0:
                raise BadConfiguration(f"{name} is {getattr(self, name)}: it must be above 0")


class SaveSource(PartSource, Protocol):
    """A source that is given back after use; ``recovery.snapshot.Lease`` is one."""

    def release(self, reason: str) -> None:
        """The bytes are not needed any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveCallbacks:
    """Called around a save. What they raise is logged and ends nothing; ``before`` raises to the caller."""

    before: Callable[[Sequence[Manifest]], Mapping[str, object] | None] | None = None
    """On the calling thread; may return side records to be stored."""
    saved: Callable[[Sequence[WriteReport]], None] | None = None
    """On the saver's thread, after everything is durable."""
    failed: Callable[[CheckpointFailed], None] | None = None
    """On the saver's thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaverStatus:
    """Numbers for metrics."""

    saved: int
    failed: int
    skipped: int
    in_flight: int
    failures_in_a_row: int
    last_failure: str
    last_saved: Version | None


@dataclass(slots=True)
class SaveTicket:
    """One save under way."""

    version: Version
    reports: Sequence[WriteReport] = ()
    failure: CheckpointFailed | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Return whether it ended, well or not, within the time."""
        return self._done.wait(timeout_seconds)

    def result(self, timeout_seconds: float | None = None) -> Sequence[WriteReport]:
        """Return the reports of a save that ended well.

        Raises:
            CheckpointFailed: it failed, or has not ended in time.
        """
        if not self.wait(timeout_seconds):
            raise CheckpointFailed(f"saving {self.version} has not ended within {timeout_seconds} s")
        if self.failure is not None:
            raise self.failure
        return self.reports

    def end(self) -> None:
        """Mark it as ended. The saver's own."""
        self._done.set()
