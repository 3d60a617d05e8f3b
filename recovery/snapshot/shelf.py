"""Which snapshots a worker has: the one it stands on, older ones that are still read, captured ones."""

from __future__ import annotations

import threading

from recovery.errors import DonorRefused
from recovery.snapshot.guard import OuterSnapshot
from recovery.snapshot.private import PrivateSnapshot
from recovery.types import Version


class Shelf:
    """Finds snapshots by version and holder. May be used from any thread; nothing is done under its lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: OuterSnapshot | None = None
        self._older: list[OuterSnapshot] = []
        self._private: list[PrivateSnapshot] = []

    @property
    def current(self) -> OuterSnapshot | None:
        """The version published last, open or not."""
        return self._current

    @property
    def num_leases(self) -> int:
        """Leases that count now, those in grace included."""
        return sum(len(snapshot.book) for snapshot in self.snapshots())

    def snapshots(self) -> list[OuterSnapshot | PrivateSnapshot]:
        """Return all of them."""
        with self._lock:
            current = [] if self._current is None else [self._current]
            return [*current, *self._older, *self._private]

    def publish(self, snapshot: OuterSnapshot) -> None:
        """``snapshot`` is what training stands on."""
        with self._lock:
            if self._current is not None:
                self._older.append(self._current)
            self._current = snapshot
        self.sweep()

    def add(self, snapshot: PrivateSnapshot) -> None:
        """``snapshot`` was captured and is leased."""
        with self._lock:
            self._private.append(snapshot)

    def find(self, version: Version) -> OuterSnapshot:
        """Return the outer parts at ``version``.

        Raises:
            DonorRefused: they are not held.
        """
        with self._lock:
            current = self._current
            for snapshot in (*([] if current is None else [current]), *reversed(self._older)):
                if snapshot.version == version:
                    return snapshot
        newest = "not published yet" if current is None else str(current.version)
        raise DonorRefused(f"{version} is not held; the newest is {newest}")

    def private_of(self, holder: str, not_before: Version) -> PrivateSnapshot | None:
        """Return the newest private snapshot, not older than ``not_before``, on which ``holder`` has a lease."""
        with self._lock:
            for snapshot in reversed(self._private):
                if snapshot.manifest.cut.version >= not_before and snapshot.book.holds(holder):
                    return snapshot
        return None

    def sweep(self) -> None:
        """Older snapshots that nobody reads any more are forgotten."""
        with self._lock:
            self._older = [snapshot for snapshot in self._older if len(snapshot.book)]
            self._private = [snapshot for snapshot in self._private if len(snapshot.book)]

    def clear(self) -> None:
        """Nothing is held."""
        with self._lock:
            self._current = None
            self._older.clear()
            self._private.clear()
