"""The thread that keeps house: ends leases of the silent, copies ahead what will not be sent in time, and lets memory
go once nobody joins any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from recovery.clock import Clock
from recovery.snapshot.guard import OuterSnapshot

_TICK_SECONDS = 0.25
_LINGER_SECONDS = 0.4
"""How long after the last lease its memory waits for another: with the tick before, less than a second."""


def falls_behind(
    *,
    unsaved_bytes: int,
    acknowledged_bytes: int,
    leased_seconds: float,
    elapsed_seconds: float,
    phase_seconds: float | None,
) -> bool:
    """Return whether readers, at the rate seen so far, will leave something for the guard to copy.

    Args:
        unsaved_bytes: What the guard would have to copy now.
        acknowledged_bytes: What readers verified so far.
        leased_seconds: Since the first lease of the version.
        elapsed_seconds: Since the version was published.
        phase_seconds: How long the last version stood; None if there was none: better safe, then.
    """
    if not unsaved_bytes:
        return False
    if phase_seconds is None:
        return True
    if leased_seconds < min(1.0, phase_seconds / 10):
        return False  # no rate to speak of yet
    left = max(0.0, phase_seconds - elapsed_seconds)
    return acknowledged_bytes / max(leased_seconds, 1e-3) * left < unsaved_bytes


class Keeper:
    """One thread, asleep while nobody holds a lease.

    Args:
        current: Returns the version that training stands on, or None.
        phase_seconds: Returns how long the last version stood.
        expire: Ends leases past their deadline; returns whether anybody still reads or waits.
        on_busy: Called when somebody begins to read or wait.
        on_idle: Called when nobody has read or waited for a moment.
        share: Part of its time that copying may take.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        current: Callable[[], OuterSnapshot | None],
        phase_seconds: Callable[[], float | None],
        expire: Callable[[], bool],
        on_busy: Callable[[], None],
        on_idle: Callable[[], None],
        copy_ahead: bool,
        share: float,
    ) -> None:
        self._clock = clock
        self._current = current
        self._phase_seconds = phase_seconds
        self._expire = expire
        self._on_busy = on_busy
        self._on_idle = on_idle
        self._copy_ahead = copy_ahead
        self._share = share
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """The thread runs."""
        self._thread = threading.Thread(target=self._run, name="snapshot-keeper", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Somebody took a lease, or asked for one.

        Raises:
            BaseException: what ended the thread.
        """
        if self._error is not None:
            raise self._error
        self._wake.set()

    def close(self) -> None:
        """The thread has ended. Safe twice."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._wake.wait()
                self._on_busy()
                again = True
                while again and not self._stop.is_set():
                    self._wake.clear()
                    while not self._stop.is_set() and self._expire():
                        if not (self._copy_ahead and self._copy_some()):
                            self._stop.wait(_TICK_SECONDS)
                    again = self._wake.wait(_LINGER_SECONDS)
                self._on_idle()
        except Exception as error:  # noqa: BLE001 - thread's root: raised at the owner's next wake
            self._error = error

    def _copy_some(self) -> bool:
        """Copy ahead for about a tick; return whether there was anything to copy."""
        snapshot = self._current()
        if snapshot is None or not snapshot.is_saving:
            return False
        unsaved = snapshot.unsaved()
        now = self._clock.monotonic()
        if not falls_behind(
            unsaved_bytes=snapshot.bytes_of(unsaved),
            acknowledged_bytes=snapshot.acknowledged_bytes(),
            leased_seconds=now - snapshot.leased_since_seconds,
            elapsed_seconds=now - snapshot.published_at_seconds,
            phase_seconds=self._phase_seconds(),
        ):
            return False
        ends = time.perf_counter() + _TICK_SECONDS
        for part, chunk in reversed(unsaved):  # readers begin at the front
            began = time.perf_counter()
            if began >= ends or self._stop.is_set() or not snapshot.is_open:
                break
            snapshot.save_ahead(part, chunk)
            # Asleep for the rest: training has the memory bus and the interpreter to itself then.
            self._stop.wait((time.perf_counter() - began) * (1 / self._share - 1))
        return True
