"""Bytes from the donors of a ticket, received and verified; ``catch_up`` says which. Training thread, ``cancel`` aside.

What was verified survives a failed attempt: the restoration (whose memory holds the bytes) and the ledger (which
chunks those are) go on to the next ticket. A worker that already holds a state starts from its own bytes, so that only
chunks that differ move.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.control.peer_service import Conversation, dial_at_once, probe_any
from recovery.control.security import is_loopback
from recovery.control.wire import from_proto
from recovery.errors import DonorRefused, RecoveryError
from recovery.events import Event, TransferProgress
from recovery.protocol.carry_over import carry_over
from recovery.protocol.ports import OnManifest
from recovery.protocol.session import (
    JOURNAL,
    OUTER,
    PRIVATE,
    Attempt,
    ChunkLedger,
    ChunkSpool,
    DonorPeer,
    JoinerConfig,
    JoinerSession,
    Role,
    TransferResult,
)
from recovery.state import Manifest, PartBytes, Restoration, RestoreMode, RestoreReport
from recovery.state.parts import LIVE_PARAMS
from recovery.transport.link import Link
from recovery.transport.process_group import JOINER_RANK, open_gloo_link
from recovery.types import Address, Fingerprint, KeyValue, PartName, RunId, TransferId, Version
from recovery.worker.context import Context

logger = logging.getLogger(__name__)


class PeerSource:
    """Runs the conversations of tickets; owns what was received until it is committed.

    Args:
        context: The worker.
        reachable_at: Where this worker's own peer server listens: donors prove the way back to it.
    """

    def __init__(self, context: Context, reachable_at: Callable[[], Sequence[Address]] = tuple) -> None:
        self._context = context
        self._reachable_at = reachable_at
        self._ledger = ChunkLedger()
        self._restorations: dict[Role, Restoration] = {}
        self._staged = False
        self._lock = threading.Lock()
        self._session: JoinerSession | None = None
        self._transfer_id = ""
        self.donor_failures: dict[str, RecoveryError] = {}
        """Donors that failed the present ticket, by worker id."""
        self.donor_rates: dict[str, tuple[float, float]] = {}
        """Bytes per second and round trip in seconds of its donors, where measured."""
        self.last_failures: dict[str, RecoveryError] = {}
        """Donors that failed in the last conversation alone."""
        self.payload_bytes = 0
        """Bytes that came over links in this recovery, in conversations that brought all that was asked for."""
        self.reused_bytes = 0
        """Bytes of theirs that were in place before."""

    def begin_recovery(self) -> None:
        """Count from here."""
        self.payload_bytes = self.reused_bytes = 0

    def begin(self, *, staged: bool) -> None:
        """A new ticket is carried out.

        Args:
            staged: What is received must not touch the worker's state before it is whole: the worker has one.
        """
        self._staged = staged
        self.donor_failures, self.donor_rates = {}, {}

    def fetch(
        self,
        ticket: pb.Ticket,
        *,
        version: Version,
        fingerprint: Fingerprint,
        first: Role = OUTER,
        donors: Sequence[pb.Donor] | None = None,
        want_private: bool = False,
        on_manifest: OnManifest | None = None,
        on_progress: Callable[[TransferProgress, JoinerSession], None] | None = None,
    ) -> TransferResult:
        """Hold one conversation with each donor and return when everything asked for is verified in its destination.

        Args:
            ticket: Whose attempt this belongs to.
            version: What is asked for; of what is captured at a cut, the least version.
            fingerprint: That outer parts must have.
            first: What the donors lend first.
            donors: Those of the ticket to ask; None: all.
            want_private: Ask for private-copied parts after it.
            on_manifest: Makes destinations; None: the worker's own parts.
            on_progress: Sees the transfer's progress, on this thread.

        Raises:
            NoDonorLeft: every donor failed; what arrived is kept for the next ticket.
            DonorBusy: every donor is busy; likewise.
            LayoutMismatch: the donors train another model; nothing was changed.
            TransferCancelled: an operator cancelled it.
        """
        context = self._context
        spool = self._open_spool() if on_manifest is None else None

        def sink(event: Event, /) -> None:
            context.events(event)
            if isinstance(event, TransferProgress) and on_progress is not None:
                on_progress(event, session)

        session = JoinerSession(
            self._attempt(
                ticket, version, fingerprint, first, ticket.donors if donors is None else donors, want_private
            ),
            JoinerConfig(
                progress_seconds=context.config.progress_timeout_seconds,
                lanes=context.config.lanes,
                delta=self._staged and first == OUTER,
                seal=context.config.seals,
            ),
            dial=self._dial,
            open_link=self._open_link,
            on_manifest=on_manifest or self._on_manifest,
            # What does not stay in the worker's own memory is nothing that a later attempt could find there.
            ledger=self._ledger if on_manifest is None else ChunkLedger(),
            spool=spool,
            probe=self._round_trip,
            events=sink,
            clock=context.clock,
        )
        with self._lock:
            self._session, self._transfer_id = session, ticket.transfer_id
        try:
            result = session.run()
            self.payload_bytes += result.payload_bytes
            self.reused_bytes += result.reused_bytes
            return result
        finally:
            with self._lock:
                self._session, self._transfer_id = None, ""
            self.last_failures = dict(session.machine.failures)
            if first != JOURNAL:  # an entry that is not kept is nobody's failure
                self.donor_failures |= self.last_failures
            self.donor_rates |= session.machine.rates(context.clock.monotonic())
            if spool is not None:
                spool.close()

    @property
    def all_refused(self) -> bool:
        """Whether the last conversation ended because no donor lends what was asked for."""
        failures = self.last_failures.values()
        return bool(failures) and all(isinstance(failure, DonorRefused) for failure in failures)

    def holds(self, role: Role) -> bool:
        """Return whether something was received that ``commit`` has not made the worker's state."""
        return role in self._restorations

    def commit(self, role: Role) -> RestoreReport:
        """Make what was received the worker's state. Others may be reading its present outer parts: they are saved.

        Raises:
            StateMismatch: after everything was written, memory differs from the manifest.
        """
        if role == OUTER:
            self._context.snapshots.before_outer_update()
        # Fragments in the middle of their inner training are private: what was received of them must stay.
        received_live = PRIVATE in self._restorations and LIVE_PARAMS in self._context.state.part_names
        report = self._restorations[role].commit(live_follows=not received_live)
        del self._restorations[role]
        return report

    def cancel(self, transfer_id: str) -> None:
        """End the transfer, if it is under way; any thread."""
        with self._lock:
            session = self._session if self._transfer_id == transfer_id else None
        if session is not None:
            session.cancel("ordered by an operator")

    def forget(self) -> None:
        """Give up what was kept for a next attempt: the state in memory is whole, or comes from elsewhere."""
        self._restorations.clear()
        self._ledger = ChunkLedger()
        if self._context.config.spool_path:
            Path(self._context.config.spool_path).unlink(missing_ok=True)

    def _attempt(
        self,
        ticket: pb.Ticket,
        version: Version,
        fingerprint: Fingerprint,
        first: Role,
        donors: Sequence[pb.Donor],
        want_private: bool,
    ) -> Attempt:
        context = self._context
        return Attempt(
            run_id=RunId(context.config.run_id),
            transfer_id=TransferId(ticket.transfer_id),
            number=ticket.attempt,
            version=version,
            fingerprint=fingerprint,
            token=ticket.token,
            joiner=context.worker,
            layout_digest=context.state.layout_digest(),
            data_host=context.host,
            donors=tuple(
                DonorPeer(
                    worker=from_proto(donor.worker),
                    addresses=tuple(str(from_proto(address)) for address in donor.peer_addresses),
                    private_parts=donor.private_parts,
                    measured_rate=donor.measured_rate,
                )
                for donor in donors
            ),
            want_private=want_private,
            first=first,
        )

    def _on_manifest(self, role: Role, manifest: Manifest) -> Mapping[PartName, PartBytes]:
        kept = self._restorations.get(role)
        if kept is not None and kept.manifest.parts == manifest.parts:
            return _destinations(kept)
        made = _destinations(self._prepare(role, manifest))
        if kept is not None:
            # What the worker has no tensors for yet (an optimizer's first state) is in the last attempt's memory only.
            carry_over(self._ledger, manifest, _destinations(kept), made)
        return made

    def _prepare(self, role: Role, manifest: Manifest) -> Restoration:
        state = self._context.state
        wanted = state.replicated_names if role == OUTER else state.private_copied_names
        mode = RestoreMode.STAGED if self._staged else RestoreMode.IN_PLACE
        restoration = Restoration(state, manifest, mode=mode, parts=list(wanted))
        restoration.prepare()
        self._restorations[role] = restoration
        if mode is RestoreMode.IN_PLACE:
            self._context.standing.update(poisoned=True)
            return restoration
        for name in restoration.part_names:
            mine, destination = state.read_part(name).bytes, restoration.destination(name)
            if mine.num_bytes == destination.num_bytes:
                for chunk in manifest.part(name).chunks:
                    destination.write(chunk.offset, mine.read(chunk.offset, chunk.num_bytes))
        return restoration

    def _open_spool(self) -> ChunkSpool | None:
        path = self._context.config.spool_path
        if not path:
            return None
        spool = ChunkSpool(Path(path))
        spool.start()
        return spool

    def _dial(self, peer: DonorPeer) -> Conversation:
        return dial_at_once(
            [Address.parse(address) for address in peer.addresses],
            self._context.config.security,
            run_id=self._context.config.run_id,
            sender=self._context.worker,
            expected=peer.worker,
            peer_is_remote=not is_loopback(self._context.host),
            dial_back=self._reachable_at(),
        )

    def _round_trip(self, peer: DonorPeer) -> float:
        return probe_any(
            [Address.parse(address) for address in peer.addresses],
            self._context.config.security,
            run_id=self._context.config.run_id,
            sender=self._context.worker,
            expected=peer.worker,
            peer_is_remote=not is_loopback(self._context.host),
        ).round_trip_seconds

    def _open_link(self, store: KeyValue, scope: str, host: str, lanes: int, cancelled: threading.Event) -> Link:
        return open_gloo_link(
            store,
            scope,
            rank=JOINER_RANK,
            host=host,
            lanes=lanes,
            timeout_seconds=self._context.config.progress_timeout_seconds,
            cancelled=cancelled,
        )


def _destinations(restoration: Restoration) -> dict[PartName, PartBytes]:
    return {name: restoration.destination(name) for name in restoration.part_names}
