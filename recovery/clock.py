"""Time as an argument: what waits or measures takes a ``Clock``, so that tests own time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds."""

    def monotonic(self) -> float:
        """Return seconds that never go back; only differences mean anything."""

    def wall(self) -> float:
        """Return seconds since the Unix epoch; for records that people read, never for decisions."""


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on by ``seconds``, which must not be negative."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {seconds}")
        self._now += seconds
