"""Copies that a service thread begins and the training thread finishes if it cannot wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

CopyJob = Callable[[], None]
"""One copy of a few MiB. Must be safe to run beside the others."""


class CopyJobs:
    """A list of copies that several threads work off together; each copy runs once."""

    def __init__(self, jobs: Sequence[CopyJob]) -> None:
        self._jobs = list(reversed(jobs))
        self._condition = threading.Condition()
        self._running = 0
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether every copy has ended."""
        with self._condition:
            return not self._jobs and not self._running

    @property
    def error(self) -> BaseException | None:
        """What the first failed copy raised; the copies after it were dropped."""
        return self._error

    def work(self) -> None:
        """Copies are run until none is left to begin; others may still be running on other threads."""
        while True:
            with self._condition:
                if not self._jobs:
                    return
                job = self._jobs.pop()
                self._running += 1
            try:
                job()
            except Exception as error:  # noqa: BLE001 - the copy's reader gets it, not the thread that happened to run it
                with self._condition:
                    self._error = self._error or error
                    self._jobs.clear()
            finally:
                with self._condition:
                    self._running -= 1
                    self._condition.notify_all()

    def cancel(self) -> None:
        """No further copy begins."""
        with self._condition:
            self._jobs.clear()

    def wait(self) -> bool:
        """Every copy has ended; return whether that took waiting: for the copies that run now, if ``work`` returned."""
        with self._condition:
            waited = bool(self._running)
            while self._running:
                self._condition.wait()
            return waited
