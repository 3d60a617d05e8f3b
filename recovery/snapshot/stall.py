"""What serving costs the training thread: every copy and every wait there, by cause."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class StallCause(enum.Enum):
    """Why the training thread did not train."""

    PUBLISH = "publish"
    """Reading the replicated parts after an outer step: no copy, once a version, also when nobody joins."""
    GUARD_COPY = "guard-copy"
    """Saving leased chunks before the outer step overwrites them."""
    CLOSE_CALLBACKS = "close-callbacks"
    """Telling readers that the live views are closed."""
    CAPTURE_MEASURE = "capture-measure"
    """Reading which tensors the private parts hold, to reserve memory for them."""
    CAPTURE_COPY = "capture-copy"
    """Copying what forward or backward would change, and the scalars."""
    CAPTURE_WAIT = "capture-wait"
    """Finishing the copy of the inner optimizers' tensors before the next inner step changes them."""
    JOURNAL_COPY = "journal-copy"
    """Copying averages for the journal, where the training loop writes into what it is given."""
    DIGEST_WAIT = "digest-wait"
    """Waiting for a version's fingerprint, or hashing its memory again: a boundary asks for that, joiners or not."""


_OWN = frozenset({StallCause.PUBLISH, StallCause.DIGEST_WAIT})
"""What a worker spends on its own run's behalf, also when nobody reads."""


@dataclass(frozen=True, slots=True)
class Stall:
    """The sum of one cause. ``worst_seconds`` is its longest single stretch."""

    times: int = 0
    seconds: float = 0.0
    worst_seconds: float = 0.0
    num_bytes: int = 0


class Span:
    """One stretch being measured. The measured code adds the bytes that it copied to ``num_bytes``."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.seconds = 0.0


class StallAccount:
    """Sums of seconds and bytes by cause, of the thread that is bound. Read by any.

    What other threads do while the training thread stands at a boundary is not its stall and is not counted.

    Seconds are measured by ``time.perf_counter``, not by the injected clock: they are an observation that no decision
    depends on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = 0
        self._stalls = {cause: Stall() for cause in StallCause}
        self._told = dict(self._stalls)

    def bind(self) -> None:
        """The calling thread is the one that trains. Before the first call every thread counts."""
        self._thread = threading.get_ident()

    @contextmanager
    def measure(self, cause: StallCause) -> Iterator[Span]:
        """Account the block's time to ``cause``, also if it raises, if the training thread runs it."""
        span = Span()
        began = time.perf_counter()
        try:
            yield span
        finally:
            if self._thread in (0, threading.get_ident()):
                span.seconds = time.perf_counter() - began
                self._add(cause, span.seconds, span.num_bytes)

    def of(self, cause: StallCause) -> Stall:
        """Return the sum of one cause so far."""
        return self._stalls[cause]

    def by_cause(self) -> dict[str, Stall]:
        """Return all sums, keyed by the cause's text, for metrics and status."""
        return {cause.value: stall for cause, stall in self._stalls.items()}

    @property
    def total_seconds(self) -> float:
        """Seconds of all causes together."""
        return sum(stall.seconds for stall in self._stalls.values())

    @property
    def serving_seconds(self) -> float:
        """Seconds that would not have been spent had nobody held a lease."""
        return sum(stall.seconds for cause, stall in self._stalls.items() if cause not in _OWN)

    def since_told(self) -> dict[str, Stall]:
        """Return what came since the last call, by cause; causes without any are left out. ``worst_seconds`` is of
        all time. One caller."""
        told, self._told = self._told, dict(self._stalls)
        return {
            cause.value: Stall(
                times=now.times - told[cause].times,
                seconds=now.seconds - told[cause].seconds,
                worst_seconds=now.worst_seconds,
                num_bytes=now.num_bytes - told[cause].num_bytes,
            )
            for cause, now in self._told.items()
            if now.times > told[cause].times
        }

    def _add(self, cause: StallCause, seconds: float, num_bytes: int) -> None:
        with self._lock:
            old = self._stalls[cause]
            self._stalls[cause] = Stall(
                times=old.times + 1,
                seconds=old.seconds + seconds,
                worst_seconds=max(old.worst_seconds, seconds),
                num_bytes=old.num_bytes + num_bytes,
            )
