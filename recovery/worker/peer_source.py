"""State from peers: one ticket, one attempt. Training thread, except ``cancel``.

What was verified survives a failed attempt: the restoration (whose memory holds the bytes) and the ledger (which
chunks those are) go on to the next ticket. A worker that already holds a state starts from its own bytes, so that only
chunks that differ move.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.control.peer_service import Conversation, dial, probe_any
from recovery.control.security import is_loopback
from recovery.control.wire import from_proto
from recovery.errors import DonorBusy, MisuseError, RecoveryError
from recovery.protocol.session import (
    OUTER,
    Attempt,
    ChunkLedger,
    ChunkSpool,
    DonorPeer,
    JoinerConfig,
    JoinerSession,
    Role,
    TransferResult,
)
from recovery.state import Manifest, PartBytes, Restoration, RestoreMode
from recovery.transport.link import Link
from recovery.transport.process_group import JOINER_RANK, open_gloo_link
from recovery.types import NO_VERSION, Address, Fingerprint, PartName, RunId, TransferId, Version
from recovery.worker.context import Context
from recovery.worker.restored import Restored

logger = logging.getLogger(__name__)


class PeerSource:
    """Carries out tickets; owns what was received until it is committed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ledger = ChunkLedger()
        self._restorations: dict[Role, Restoration] = {}
        self._lock = threading.Lock()
        self._session: JoinerSession | None = None
        self._transfer_id = ""
        self.donor_failures: dict[str, RecoveryError] = {}
        """Donors that the last attempt dropped, by worker id."""
        self.donor_rates: dict[str, tuple[float, float]] = {}
        """Bytes per second and round trip in seconds of the last attempt's donors, where measured."""

    def restore(self, ticket: pb.Ticket) -> Restored:
        """Make the state in memory what the ticket's donors hold, verified leaf by leaf.

        Raises:
            NoDonorLeft: every donor failed; what arrived is kept for the next ticket.
            DonorBusy: the donors are busy, or moved on to the next version meanwhile; likewise.
            LayoutMismatch: the donors train another model; nothing was changed.
            StateMismatch: after everything was written, memory differs from the manifest.
            TransferCancelled: an operator cancelled it.
        """
        context = self._context
        attempt = self._attempt(ticket)
        spool = self._open_spool()
        session = JoinerSession(
            attempt,
            JoinerConfig(
                progress_seconds=context.config.progress_timeout_seconds,
                lanes=context.config.lanes,
                delta=self._holds_state(),
            ),
            dial=self._dial,
            open_link=self._open_link,
            on_manifest=self._on_manifest,
            ledger=self._ledger,
            spool=spool,
            probe=self._round_trip,
            events=context.events,
            clock=context.clock,
        )
        with self._lock:
            self._session, self._transfer_id = session, ticket.transfer_id
        try:
            result = session.run()
        finally:
            with self._lock:
                self._session, self._transfer_id = None, ""
            self.donor_failures = dict(session.machine.failures)
            self.donor_rates = session.machine.rates(context.clock.monotonic())
            if spool is not None:
                spool.close()
        return self._commit(attempt.version, result)

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

    def _attempt(self, ticket: pb.Ticket) -> Attempt:
        context = self._context
        return Attempt(
            run_id=RunId(context.config.run_id),
            transfer_id=TransferId(ticket.transfer_id),
            number=ticket.attempt,
            version=from_proto(ticket.version),
            fingerprint=Fingerprint(ticket.fingerprint),
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
                for donor in ticket.donors
            ),
        )

    def _commit(self, version: Version, result: TransferResult) -> Restored:
        if result.private is None:
            raise MisuseError("a transfer ended without private parts")
        if result.private.cut.version != version:
            raise DonorBusy(
                f"{result.private.worker} passed the boundary to {result.private.cut.version} while {version} was on "
                "its way: the newer version is asked for"
            )
        # Others may be reading this worker's present outer parts: they are saved before they are overwritten.
        self._context.snapshots.before_outer_update()
        reports = [self._restorations[role].commit() for role in sorted(self._restorations)]
        return Restored(
            version=version,
            source="peers",
            num_tensors=sum(report.num_tensors for report in reports),
            num_bytes=sum(report.num_bytes for report in reports),
            payload_bytes=result.payload_bytes,
            reused_bytes=result.reused_bytes,
        )

    def _on_manifest(self, role: Role, manifest: Manifest) -> Mapping[PartName, PartBytes]:
        kept = self._restorations.get(role)
        if kept is None or kept.manifest.parts != manifest.parts:
            kept = self._prepare(role, manifest)
        return {name: kept.destination(name) for name in kept.part_names}

    def _prepare(self, role: Role, manifest: Manifest) -> Restoration:
        state = self._context.state
        wanted = state.replicated_names if role == OUTER else state.private_copied_names
        mode = RestoreMode.STAGED if self._holds_state() else RestoreMode.IN_PLACE
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

    def _holds_state(self) -> bool:
        stand = self._context.standing.read()
        return stand.version != NO_VERSION and not stand.poisoned

    def _open_spool(self) -> ChunkSpool | None:
        path = self._context.config.spool_path
        if not path:
            return None
        spool = ChunkSpool(Path(path))
        spool.start()
        return spool

    def _dial(self, peer: DonorPeer) -> Conversation:
        return dial(
            [Address.parse(address) for address in peer.addresses],
            self._context.config.security,
            run_id=self._context.config.run_id,
            sender=self._context.worker,
            expected=peer.worker,
            peer_is_remote=not is_loopback(self._context.host),
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

    def _open_link(self, scope: str, host: str, lanes: int, cancelled: threading.Event) -> Link:
        return open_gloo_link(
            self._context.client.key_value(),
            scope,
            rank=JOINER_RANK,
            host=host,
            lanes=lanes,
            timeout_seconds=self._context.config.progress_timeout_seconds,
            cancelled=cancelled,
        )
