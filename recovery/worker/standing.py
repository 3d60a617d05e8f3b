"""Where this worker stands, as the coordinator and operators see it: one place that all threads read and write."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

from recovery.clock import Clock
from recovery.types import NO_VERSION, Fingerprint, Version

NO_FINGERPRINT = Fingerprint(b"")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stand:
    """One consistent reading of a worker's standing."""

    version: Version = NO_VERSION
    """Version of the outer state in memory; ``NO_VERSION`` if there is none that was verified."""
    fingerprint: Fingerprint = NO_FINGERPRINT
    """Fingerprint of that version; empty until its digest pass ended."""
    ready: bool = False
    """Takes part in the next boundary."""
    poisoned: bool = False
    """A transfer wrote into the state and was not verified."""
    free_slots: int = 0
    """Joiners that could be served beside the present ones; 0 when drained."""
    undecided_epoch: int = 0
    """Epoch voted in whose outcome is not known; 0: none."""
    trouble: str = ""
    """What failed lately without stopping training; empty: nothing, or it succeeded since."""
    waiting_for: str = ""
    waiting_since: float = 0.0


class Standing:
    """A lock around a ``Stand``. ``update`` replaces fields together."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._now = Stand()

    def read(self) -> Stand:
        with self._lock:
            return self._now

    def update(
        self,
        *,
        version: Version | None = None,
        fingerprint: Fingerprint | None = None,
        ready: bool | None = None,
        poisoned: bool | None = None,
        free_slots: int | None = None,
        undecided_epoch: int | None = None,
        trouble: str | None = None,
    ) -> None:
        """Replace the fields that are given."""
        changes: dict[str, Any] = {
            "version": version,
            "fingerprint": fingerprint,
            "ready": ready,
            "poisoned": poisoned,
            "free_slots": free_slots,
            "undecided_epoch": undecided_epoch,
            "trouble": trouble,
        }
        with self._lock:
            self._now = replace(self._now, **{name: value for name, value in changes.items() if value is not None})

    def waits_for(self, what: str) -> None:
        """Say what the training thread waits for from now on; empty: it trains."""
        with self._lock:
            if what != self._now.waiting_for:
                self._now = replace(self._now, waiting_for=what, waiting_since=self._clock.monotonic())
