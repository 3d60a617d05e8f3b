"""The process group of the current epoch: built when the roster's group id changes, shut when an epoch fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.errors import PeerUnreachable
from recovery.transport.process_group import GroupHandle, open_group
from recovery.types import KeyValue
from recovery.worker.averaging import Collectives


class EpochGroups:
    """Owns at most one group at a time.

    ``open`` and ``drop`` belong to the training thread; ``abort`` may be called from any thread and makes whatever the
    training thread does with the group of that epoch raise within milliseconds, the meeting of its members within half
    a second.
    """

    def __init__(self, store: Callable[[], KeyValue], host: str, timeout_seconds: float) -> None:
        self._store = store
        self._host = host
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._epoch = 0
        self._group_id = 0
        self._handle: GroupHandle | None = None
        self._meeting = threading.Event()
        self._newest_aborted = 0

    def open(self, roster: pb.Roster, rank: int) -> Collectives | None:
        """Return the roster's group, in which this worker has ``rank``, or None for a roster of one.

        Raises:
            PeerUnreachable: a member did not come, or the epoch was aborted meanwhile.
        """
        with self._lock:
            self._epoch = roster.epoch
            self._raise_if_aborted()
            if self._handle is not None and self._group_id == roster.group_id:
                return cast(Collectives, self._handle.group)
            cancelled = self._meeting = threading.Event()
        self.drop("the roster changed")
        if len(roster.members) == 1:
            return None
        handle = open_group(
            self._store(),
            f"epoch/{roster.group_id}",
            rank=rank,
            size=len(roster.members),
            host=self._host,
            timeout_seconds=self._timeout_seconds,
            cancelled=cancelled,
        )
        with self._lock:
            self._handle, self._group_id = handle, roster.group_id
            self._raise_if_aborted()
        return cast(Collectives, handle.group)

    def drop(self, reason: str) -> None:
        """Shut the group, if there is one, and forget it."""
        with self._lock:
            handle, self._handle, self._group_id = self._handle, None, 0
        if handle is not None:
            handle.shut(reason)
            handle.close()

    def abort(self, epoch: int, reason: str) -> None:
        """Free the training thread from the group of ``epoch``; any thread."""
        with self._lock:
            self._newest_aborted = max(self._newest_aborted, epoch)
            if self._epoch == epoch:
                self._meeting.set()
                if self._handle is not None:
                    self._handle.shut(reason)

    def _raise_if_aborted(self) -> None:
        if self._epoch <= self._newest_aborted:
            raise PeerUnreachable(f"epoch {self._epoch} was aborted by the coordinator")
