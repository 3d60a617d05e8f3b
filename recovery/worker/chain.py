"""The sources of a worker's state, in order: peers, then checkpoints. The coordinator says which is due.

Every source fills a ``Restoration``'s destinations with verified bytes; only then is anything committed. What the
worker holds afterwards is reported, and the coordinator's next directive says whether that is enough: behind by then
means another ticket, which moves only the chunks that changed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.control.wire import duration, from_proto, to_proto
from recovery.errors import CannotKeepUp, DonorLost, NoDonorLeft, RecoveryError, SourcesExhausted, Stop
from recovery.events import WaitsForState
from recovery.types import NO_VERSION, Fingerprint, Version
from recovery.worker.catch_up import CatchUp
from recovery.worker.checkpoints import Checkpoints
from recovery.worker.context import Context
from recovery.worker.peer_source import PeerSource
from recovery.worker.replay import Replay
from recovery.worker.restored import Restored

logger = logging.getLogger(__name__)

_FINGERPRINT_TIMEOUT_SECONDS = 600.0
_ASK_AGAIN_SECONDS = 5.0
_SLOW_LINK_SECONDS = 10.0
"""A joiner whose link is too slow for the run measures it again after so long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """The state that this worker trains on from now."""

    version: Version
    source: str
    """"origin", "peers", "disk"."""
    late: bool
    """True: the other members are somewhere in the phase that follows."""
    num_tensors: int = 0
    num_bytes: int = 0
    own_position: bool = False
    """This worker's own private-kept parts came along."""
    data_position: bytes = b""
    """Where this worker stood in its data when the run was at the version recovered, as the coordinator stored it."""
    stood_at: Version = NO_VERSION
    """The boundary of ``data_position``."""


class Chain:
    """Recovers one worker; training thread only."""

    def __init__(
        self, context: Context, peers: PeerSource, checkpoints: Checkpoints, replay: Replay | None = None
    ) -> None:
        self._context = context
        self._peers = peers
        self._checkpoints = checkpoints
        self._catch_up = CatchUp(context, peers, replay)
        self._from_disk: Restored | None = None
        self._no_checkpoint = ""
        """Why this worker could not offer one when it was asked last."""
        self._told = ""
        """Why nobody gives this worker a state, as it was told last."""
        self._too_slow = ""
        """What rate the last ticket would have needed, if that is what it failed for."""

    def recover(self, reason: str, *, ask: bool, from_worker: str = "") -> Recovered:
        """Do what the coordinator says until this worker holds the run's state.

        Args:
            reason: Why, for the coordinator, the log and status.
            ask: False if the coordinator already knows (it ordered this, or this worker has just attached).
            from_worker: The donor that an operator wants; empty: the coordinator's choice.

        Raises:
            NoDonorLeft: no source within ``recover_timeout_seconds``.
            CannotKeepUp: the link is too slow for the run, or replaying its commits gives another state.
            SourcesExhausted: no peer is expected and no checkpoint can be restored.
            LayoutMismatch: the donors train another model.
        """
        context = self._context
        context.standing.update(ready=False)
        self._told = ""
        self._catch_up.begin()
        request = pb.WorkerMessage(recovery_request=pb.RecoveryRequest(reason=reason, from_worker_id=from_worker))
        deadline = context.clock.monotonic() + context.config.recover_timeout_seconds
        said_at = -1 if ask else context.inbox.attachments

        def meanwhile() -> None:
            nonlocal said_at
            if said_at != context.inbox.attachments:
                said_at = context.inbox.attachments
                context.client.send(request)

        unanswered = False
        position = pb.RecordedPosition()
        while True:
            context.standing.waits_for(f"a source of state ({reason})")
            left = max(deadline - context.clock.monotonic(), 0.0)
            if unanswered and left > _ASK_AGAIN_SECONDS:
                # A coordinator that was restarted, or asked on an earlier stream, may take this worker for ready and
                # have nothing to say.
                directive = context.inbox.wait(context.inbox.take_directive, _ASK_AGAIN_SECONDS, meanwhile)
                unanswered, said_at = False, said_at if directive is not None else -1
                if directive is None:
                    continue
            else:
                directive = context.inbox.wait(context.inbox.take_directive, left, meanwhile)
            recovered: Recovered | None = None
            if isinstance(directive, pb.BecomeOrigin | pb.Ticket):
                position = directive.data_position
            match directive:
                case None if self._too_slow:
                    raise CannotKeepUp(f"{context.worker}: {self._too_slow}", final=True)
                case None:
                    raise NoDonorLeft(
                        f"{context.worker}: no source of state within {context.config.recover_timeout_seconds} s "
                        f"({reason}): ask `recovery status` which workers are ready"
                    )
                case pb.BecomeOrigin():
                    recovered = self._begin_history(from_proto(directive.version))
                case pb.Ticket():
                    self._too_slow = ""
                    recovered = self._from_peers(directive)
                    unanswered = recovered is None
                    if self._too_slow:
                        self._wait_for_a_faster_link(deadline)
                        said_at = -1
                case pb.NoDonor():
                    recovered = self._without_donor(directive)
                    unanswered = directive.resume_from_disk
            if recovered is not None:
                context.standing.waits_for("")
                return replace(recovered, data_position=position.position, stood_at=from_proto(position.version))

    def _begin_history(self, version: Version) -> Recovered:
        """Declare the state in memory to be ``version``: the run's origin, or a checkpoint under a new lineage."""
        context = self._context
        context.state.run_progress.outer_step = version.outer_step
        fingerprint = self._stand_at(version)
        context.client.send(
            pb.WorkerMessage(
                applied=pb.Applied(
                    version=to_proto(version),
                    fingerprint=fingerprint,
                    tokens=context.state.run_progress.tokens,
                )
            )
        )
        restored, self._from_disk = self._from_disk, None
        if restored is None:
            return Recovered(version=version, source="origin", late=False)
        return Recovered(
            version=version,
            source=restored.source,
            late=False,
            num_tensors=restored.num_tensors,
            num_bytes=restored.num_bytes,
            own_position=restored.own_position,
        )

    def _from_peers(self, ticket: pb.Ticket) -> Recovered | None:
        context = self._context
        names = ", ".join(donor.worker.worker_id for donor in ticket.donors)
        context.standing.waits_for(f"state from {names} (transfer {ticket.transfer_id}, attempt {ticket.attempt})")
        began = context.clock.monotonic()
        report = pb.RecoveryReport(
            transfer_id=ticket.transfer_id, attempt=ticket.attempt, source=pb.RECOVERY_SOURCE_PEERS
        )
        try:
            restored = self._catch_up.carry_out(ticket)
        except Stop:
            raise
        except CannotKeepUp as error:
            report.failure.CopyFrom(to_proto(error))
            self._send_report(report)
            if error.final:
                raise
            self._too_slow = str(error)
            return None
        except RecoveryError as error:
            logger.warning(
                "%s: attempt %d of transfer %s failed: %s", context.worker, ticket.attempt, ticket.transfer_id, error
            )
            # Whether no donor is left at all is for the coordinator to say: it knows of others, and of those to come.
            told = DonorLost(str(error)) if isinstance(error, NoDonorLeft) else error
            report.failure.CopyFrom(to_proto(told))
            self._send_report(report)
            return None
        version, fingerprint = restored.version, context.standing.read().fingerprint
        context.standing.update(poisoned=False, ready=True)
        report.version.CopyFrom(to_proto(version))
        report.fingerprint = fingerprint
        report.payload_bytes = restored.payload_bytes
        report.reused_bytes = restored.reused_bytes
        report.took.CopyFrom(duration(context.clock.monotonic() - began))
        self._send_report(report)
        return Recovered(
            version=version,
            source=restored.source,
            late=True,
            num_tensors=restored.num_tensors,
            num_bytes=restored.num_bytes,
        )

    def _wait_for_a_faster_link(self, deadline: float) -> None:
        """Stay out of the run for a while, with the rate that is needed in the status; then it is tried again."""
        context = self._context
        logger.warning("%s: %s", context.worker, self._too_slow)
        context.standing.waits_for(self._too_slow)
        left = min(max(deadline - context.clock.monotonic(), 0.0), _SLOW_LINK_SECONDS)
        context.inbox.wait(lambda: context.inbox.has_directive() or None, left, lambda: None)

    def _send_report(self, report: pb.RecoveryReport) -> None:
        for worker_id, failure in self._peers.donor_failures.items():
            report.donor_failures.add(worker_id=worker_id, failure=to_proto(failure))
        for worker_id, (rate, round_trip) in self._peers.donor_rates.items():
            report.donor_rates.add(worker_id=worker_id, bytes_per_second=rate, round_trip=duration(round_trip))
        self._context.client.send(pb.WorkerMessage(recovery_report=report))

    def _without_donor(self, directive: pb.NoDonor) -> Recovered | None:
        context = self._context
        if directive.resume_from_disk:
            context.standing.waits_for("a checkpoint")
            self._offer_checkpoint(from_proto(directive.resume_at) if directive.HasField("resume_at") else None)
            return None
        if not directive.expected:
            mine = f"; {self._no_checkpoint}" if self._no_checkpoint else ""
            raise SourcesExhausted(f"{context.worker}: {directive.reason}{mine}")
        if directive.reason != self._told:
            # At once, and where people look: some of these waits need a person to end them.
            self._told = directive.reason
            logger.warning("%s waits for state: %s", context.worker, directive.reason)
            context.events(WaitsForState(worker_id=context.worker.worker_id, reason=directive.reason))
        context.standing.waits_for(f"a donor: {directive.reason}")
        return None

    def _offer_checkpoint(self, at_most: Version | None) -> None:
        """Restore the newest checkpoint that verifies, and tell the coordinator; it decides what that means.

        If there is none, that is told too: another worker may have one, or hold the state after all.
        """
        context = self._context
        try:
            self._from_disk = self._checkpoints.restore_newest(at_most)
        except SourcesExhausted as error:
            self._no_checkpoint = str(error)
            context.client.send(
                pb.WorkerMessage(
                    recovery_report=pb.RecoveryReport(source=pb.RECOVERY_SOURCE_DISK, failure=to_proto(error))
                )
            )
            return
        fingerprint = self._stand_at(self._from_disk.version, ready=False)
        self._catch_up.begin()  # what it holds now is the checkpoint's
        report = pb.RecoveryReport(
            version=to_proto(self._from_disk.version),
            fingerprint=fingerprint,
            source=pb.RECOVERY_SOURCE_DISK,
            payload_bytes=self._from_disk.payload_bytes,
        )
        context.client.send(pb.WorkerMessage(recovery_report=report))

    def _stand_at(self, version: Version, *, ready: bool = True) -> Fingerprint:
        """Publish the state in memory as ``version``, and lift the poison; returns its fingerprint."""
        context = self._context
        context.snapshots.publish(version)
        fingerprint = context.snapshots.manifest(version, _FINGERPRINT_TIMEOUT_SECONDS).fingerprint
        context.standing.update(version=version, fingerprint=fingerprint, poisoned=False, ready=ready)
        return fingerprint
