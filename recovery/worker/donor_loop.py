"""The donor's side: who is served, how many at once, and how fast. One thread a conversation, of the peer server's."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import cast

from protos.recovery.v1.peer_pb2 import Open
from recovery.control.peer_service import DonorConversation
from recovery.control.wire import from_proto
from recovery.errors import DonorBusy, DonorRefused, LayoutMismatch, RunRefused
from recovery.protocol.ports import SnapshotSource
from recovery.protocol.session import DonorConfig, DonorSession, RateLimiter
from recovery.transport.link import Link
from recovery.transport.process_group import DONOR_RANK, open_gloo_link
from recovery.types import KeyValue
from recovery.worker.context import Context

logger = logging.getLogger(__name__)


class DonorLoop:
    """Serves joiners from the worker's snapshots; ``serve`` is called on a thread of its own for each joiner."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._limiter = RateLimiter(context.config.donor_bytes_per_second, context.clock)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._sessions: dict[DonorSession, str] = {}
        """Sessions by the transfer that they serve; empty until the joiner is admitted."""
        self._drained = False
        self._closed = ""
        self._layout_digest = b""

    def start(self) -> None:
        """Be ready to serve; from here on every joiner is admitted or told why not."""
        self._layout_digest = self._context.state.layout_digest()
        self._show_slots()

    def close(self, reason: str) -> None:
        """End every session; any thread. The peer server joins their threads."""
        with self._lock:
            self._closed = reason or "closed"
            sessions = list(self._sessions)
        for session in sessions:
            session.cancel(self._closed)

    def drain(self, drained: bool) -> None:
        """Take no more joiners, or take them again. Those being served are served to the end."""
        with self._lock:
            self._drained = drained
        self._show_slots()

    def set_rate(self, bytes_per_second: int) -> None:
        """Change the cap of all transfers together; 0: none."""
        self._limiter.set_rate(bytes_per_second)

    def cancel(self, transfer_id: str) -> None:
        """End the sessions that serve a transfer, if there are any."""
        with self._lock:
            found = [session for session, transfer in self._sessions.items() if transfer == transfer_id]
        for session in found:
            session.cancel("cancelled by an operator")

    def serve(self, conversation: DonorConversation) -> None:
        """Serve one joiner to the end; blocks."""
        context = self._context
        config = DonorConfig(
            data_host=context.host,
            progress_seconds=context.config.progress_timeout_seconds,
            seal=context.config.seals,
        )
        session = DonorSession(
            conversation,
            cast(SnapshotSource, context.snapshots),  # Future is invariant: a future of a lease is not one of a port
            scope=f"conversation/{context.worker.incarnation}/{next(self._numbers)}",
            config=config,
            admit=lambda opening: self._admit(session, opening),
            open_link=self._open_link,
            limiter=self._limiter,
            clock=context.clock,
        )
        with self._lock:
            closed = self._closed
            self._sessions[session] = ""
        if closed:
            session.cancel(closed)
        try:
            result = session.run()
        finally:
            with self._lock:
                if self._sessions.pop(session):
                    context.snapshots.journal.leave()
            self._show_slots()
        if result.error is not None:
            logger.info("%s: serving %s ended: %s", context.worker, result.joiner or "a joiner", result.error)

    def _admit(self, session: DonorSession, opening: Open) -> None:
        context = self._context
        if opening.run_id != context.config.run_id:
            raise RunRefused(
                f"{context.worker} belongs to run {context.config.run_id!r}, not to {opening.run_id[:200]!r}"
            )
        if from_proto(opening.donor) != context.worker:
            raise DonorRefused(
                f"{context.worker} was restarted since the ticket was written: ask the coordinator again"
            )
        if opening.layout_digest != self._layout_digest:
            raise LayoutMismatch(
                f"the layouts of {opening.joiner.worker_id} and {context.worker} differ (other model, optimizer or "
                "scheduler): start the joiner with the run's own code and settings"
            )
        with self._lock:
            if self._drained:
                raise DonorRefused(f"{context.worker} is drained")
            # A joiner that catches up begins one conversation after the other; the last may not have ended here yet.
            others = {transfer for transfer in self._sessions.values() if transfer} - {opening.transfer_id}
            if (served := len(others)) >= context.config.donor_slots:
                raise DonorBusy(f"{context.worker} already serves {served} joiners")
            if not self._sessions[session]:
                context.snapshots.journal.enter()
            self._sessions[session] = opening.transfer_id
        self._show_slots()

    def _open_link(self, store: KeyValue, scope: str, host: str, lanes: int, cancelled: threading.Event) -> Link:
        return open_gloo_link(
            store,
            scope,
            rank=DONOR_RANK,
            host=host,
            lanes=lanes,
            timeout_seconds=self._context.config.progress_timeout_seconds,
            cancelled=cancelled,
        )

    def _show_slots(self) -> None:
        with self._lock:
            served = sum(1 for transfer in self._sessions.values() if transfer)
            free = 0 if self._drained else max(self._context.config.donor_slots - served, 0)
        self._context.standing.update(free_slots=free)
