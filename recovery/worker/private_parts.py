"""A donor's private-copied parts, captured at one cut, and their scalars at a later one. Training thread.

Moments of an inner optimizer age well, so they may come first and the scalars once more at the end. Where the time left
in the phase allows it, everything is fetched again instead: then all of it is of one cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.errors import DonorBusy, NoDonorLeft, RecoveryError
from recovery.events import PrivatePartsReceived, ScalarsRefreshed
from recovery.protocol.ports import OnManifest
from recovery.protocol.session import PRIVATE, SCALARS, Role, TransferResult
from recovery.state import Manifest, PartBytes
from recovery.state.loose import LooseParts
from recovery.state.scalars import restore_scalars
from recovery.types import MIB, Cut, Fingerprint, PartName, Version
from recovery.worker.context import Context
from recovery.worker.pace import Pace, Watch
from recovery.worker.peer_source import PeerSource

_SCALARS_LIMIT_BYTES = 256 * MIB


class PrivateParts:
    """Fetches them; what is received waits in ``peers`` until it is committed."""

    def __init__(self, context: Context, peers: PeerSource, pace: Pace) -> None:
        self._context = context
        self._peers = peers
        self._pace = pace
        self._seconds = 0.0

    def fetch(self, ticket: pb.Ticket, at_least: Version) -> Version:
        """Return the version of the cut at which a donor's private parts were captured; they are not committed yet.

        Raises:
            NoDonorLeft, DonorBusy: no donor of the ticket could give them.
        """
        began = self._context.clock.monotonic()
        result = self._from_one(ticket, PRIVATE, at_least, self._pace.watch(all_donors=False), None)
        self.received(result.first.cut, self._context.clock.monotonic() - began)
        return result.first.cut.version

    def received(self, cut: Cut, took_seconds: float) -> None:
        """Note that private parts came, and how long that took: the next time it will be about the same."""
        self._seconds = took_seconds
        self._context.events(
            PrivatePartsReceived(worker_id=self._context.worker.worker_id, cut=cut, took_seconds=took_seconds)
        )

    @property
    def fit_into_the_phase(self) -> bool:
        """Whether fetching them once more would end before the run's next boundary, as far as is known."""
        inbox = self._context.inbox
        return bool(self._seconds) and self._pace.fits_into_the_phase(
            self._seconds, inbox.seconds_since_seal, inbox.outer_periods
        )

    def refresh_scalars(self, ticket: pb.Ticket, at: Version) -> Version:
        """Take the scalars of now: learning rates, schedules and progress follow the run, whatever the moments' age.

        Returns:
            The version of their cut. A later one than ``at`` means that nothing was changed: the run has moved on.

        Raises:
            NoDonorLeft, DonorBusy: no donor of the ticket could give them.
        """
        received: list[LooseParts] = []

        def on_manifest(role: Role, manifest: Manifest) -> Mapping[PartName, PartBytes]:
            received.append(LooseParts(manifest, _SCALARS_LIMIT_BYTES))
            return received[-1].destinations

        cut = self._from_one(ticket, SCALARS, at, None, on_manifest).first.cut
        if cut.version == at:
            restore_scalars(self._context.state, received[-1])
            self._context.events(ScalarsRefreshed(worker_id=self._context.worker.worker_id, cut=cut))
        return cut.version

    def _from_one(
        self, ticket: pb.Ticket, first: Role, at_least: Version, watch: Watch | None, on_manifest: OnManifest | None
    ) -> TransferResult:
        """Fetch what is captured at a cut from one donor, the ticket's choice first."""
        failure: RecoveryError = NoDonorLeft(f"transfer {ticket.transfer_id}: the ticket names no donor")
        for donor in sorted(ticket.donors, key=lambda donor: not donor.private_parts):
            try:
                return self._peers.fetch(
                    ticket,
                    version=at_least,
                    fingerprint=Fingerprint(b""),
                    first=first,
                    donors=[donor],
                    on_manifest=on_manifest,
                    on_progress=watch,
                )
            except (NoDonorLeft, DonorBusy) as error:
                failure = error
            except RecoveryError as error:
                judged = error if watch is None else watch.judge(error)
                if judged is error:
                    raise
                raise judged from error
        raise failure
