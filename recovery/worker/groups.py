"""The process group of the current epoch: built when the roster's group id changes, shut when an epoch fails."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import cast

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.errors import PeerUnreachable, RecoveryError
from recovery.transport.process_group import GroupHandle, open_group
from recovery.transport.sockets import endpoint
from recovery.types import KeyValue
from recovery.worker.averaging import Collectives
from recovery.worker.group_opening import GroupOpening

logger = logging.getLogger(__name__)

_ASK_SECONDS = 0.5
"""How long the other members' ends of connections are asked for, when it is found out who is out of reach."""


class EpochGroups:
    """Owns at most one group at a time.

    ``open``, ``drop`` and ``close`` belong to the training thread; ``abort`` may be called from any thread and makes
    whatever the training thread does with the group of that epoch raise within milliseconds: its members' meeting,
    their connecting, and the collectives.
    """

    def __init__(self, store: Callable[[], KeyValue], host: str, timeout_seconds: float) -> None:
        self._store = store
        self._host = host
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._epoch = 0
        self._group_id = 0
        self._handle: GroupHandle | None = None
        self._openings: list[GroupOpening] = []
        """Of groups being built: the newest, and those given up whose threads have not ended."""
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
        self.drop("the roster changed")
        if len(roster.members) == 1:
            return None
        handle = self._build(roster, rank).wait()
        with self._lock:
            self._handle, self._group_id = handle, roster.group_id
            self._raise_if_aborted()
        # A path that swallows what was sent, or a member that froze, is given up in time and not by the collectives'
        # own timeout, which is as long as a boundary may take.
        handle.sockets.give_up_after(self._timeout_seconds)
        self._store().set(_scope(roster), f"pairs/{rank}", json.dumps(handle.sockets.pairs).encode())
        return cast(Collectives, handle.group)

    def _build(self, roster: pb.Roster, rank: int) -> GroupOpening:
        store, scope = self._store(), _scope(roster)

        def build(cancelled: threading.Event) -> GroupHandle:
            return open_group(
                store,
                scope,
                rank=rank,
                size=len(roster.members),
                host=self._host,
                timeout_seconds=self._timeout_seconds,
                cancelled=cancelled,
            )

        opening = GroupOpening(build, f"recovery-group-{roster.group_id}")
        with self._lock:
            self._raise_if_aborted()
            self._openings = [each for each in self._openings if not each.is_over] + [opening]
            opening.start()
        return opening

    def suspect(self, roster: pb.Roster) -> str:
        """Return the member to whom alone this one's bytes do not get through; empty: none, several, or not known.

        To be asked after a failure and before the group is dropped. Whoever cannot reach several has a broken path of
        its own, and accuses nobody.
        """
        with self._lock:
            handle = self._handle
        unanswered = set(handle.sockets.unanswered()) if handle is not None else set()
        if handle is None or not unanswered:
            return ""
        others = [rank for rank in range(len(roster.members)) if rank != handle.rank]
        try:
            values = self._store().get(_scope(roster), [f"pairs/{rank}" for rank in others], _ASK_SECONDS)
            theirs = [{(endpoint(tuple(far)), endpoint(tuple(near))) for near, far in json.loads(v)} for v in values]
        except (RecoveryError, ValueError, TypeError) as error:
            # The group's scope is over, the coordinator is away, or somebody stored something else: nobody is accused.
            logger.info("who does not answer in epoch %d is not known: %s", roster.epoch, error)
            return ""
        found = [
            roster.members[rank].worker.worker_id
            for rank, ends in zip(others, theirs, strict=True)
            if ends & unanswered
        ]
        return found[0] if len(found) == 1 else ""

    def drop(self, reason: str) -> None:
        """Shut the group, if there is one, and forget it."""
        with self._lock:
            handle, self._handle, self._group_id = self._handle, None, 0
        if handle is not None:
            handle.shut(reason)
            handle.close()

    def close(self, reason: str) -> None:
        """Drop the group and wait for those that are still being built: at most as long as gloo's timeout."""
        self.drop(reason)
        with self._lock:
            openings, self._openings = self._openings, []
        for opening in openings:
            opening.close()

    def abort(self, epoch: int, reason: str) -> None:
        """Free the training thread from the group of ``epoch``; any thread."""
        with self._lock:
            self._newest_aborted = max(self._newest_aborted, epoch)
            if self._epoch == epoch:
                if self._openings:
                    self._openings[-1].abandon(f"epoch {epoch} was aborted: {reason}")
                if self._handle is not None:
                    self._handle.shut(reason)

    def _raise_if_aborted(self) -> None:
        if self._epoch <= self._newest_aborted:
            raise PeerUnreachable(f"epoch {self._epoch} was aborted by the coordinator")


def _scope(roster: pb.Roster) -> str:
    return f"epoch/{roster.group_id}"
