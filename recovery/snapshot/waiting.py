"""Those who wait for a capture: one list, and which instant each of them wants."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from recovery.errors import DonorBusy, RecoveryError
from recovery.snapshot.lease import Lease
from recovery.types import Cut, Version


@dataclass(frozen=True, slots=True)
class Request:
    """Somebody wants the private parts, not before a version.

    ``at_boundary``: only the instant before the version's first inner step will do.
    """

    holder: str
    not_before: Version
    future: Future[Lease]
    at_boundary: bool = False

    def is_due(self, version: Version) -> bool:
        """Return whether a capture at ``version`` may be what was asked for."""
        return self.not_before <= version

    def accepts(self, cut: Cut) -> bool:
        """Return whether a capture at ``cut`` is what was asked for."""
        return cut == Cut(self.not_before) if self.at_boundary else self.is_due(cut.version)


class Waiting:
    """The requests that nobody has served yet. May be used from any thread.

    Attributes:
        lock: Re-entrant; held also by whoever acts upon there being requests, or none.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests))

    def add(self, request: Request) -> None:
        """Somebody waits from now on."""
        with self.lock:
            self._requests.append(request)

    def due(self, version: Version) -> list[Request]:
        """Return those for whom a capture at ``version`` may be the right one."""
        with self.lock:
            return [request for request in self._requests if request.is_due(version)]

    def take(self, cut: Cut) -> list[Request]:
        """Return those for whom a capture at ``cut`` is the right one; they no longer wait."""
        with self.lock:
            taken = [request for request in self._requests if request.accepts(cut)]
            self._requests = [request for request in self._requests if not request.accepts(cut)]
            return taken

    def fail(self, error: RecoveryError) -> None:
        """All get ``error``."""
        with self.lock:
            requests, self._requests = self._requests, []
        _refuse(requests, error)

    def fail_missed(self, cut: Cut) -> None:
        """Training has come to ``cut``: who wanted an instant at a boundary before it is told that it is past."""
        with self.lock:
            missed = [one for one in self._requests if one.at_boundary and one.is_due(cut.version)]
            missed = [one for one in missed if not one.accepts(cut)]
            self._requests = [request for request in self._requests if request not in missed]
        for request in missed:
            _refuse([request], DonorBusy(f"training is at {cut}: {Cut(request.not_before)} is past"))

    def forget_cancelled(self) -> None:
        """Requests that were cancelled no longer count."""
        with self.lock:
            self._requests = [request for request in self._requests if not request.future.cancelled()]


def running(requests: list[Request]) -> list[Request]:
    """Return those that were not cancelled; they cannot be cancelled any more."""
    return [request for request in requests if request.future.set_running_or_notify_cancel()]


def _refuse(requests: list[Request], error: RecoveryError) -> None:
    for request in running(requests):
        request.future.set_exception(error)
