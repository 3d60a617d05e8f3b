"""Checkpoints that workers offer when the history has to go on from a disk: who was asked, and what was answered."""

from __future__ import annotations

from protos.recovery.v1 import coordinator_pb2
from recovery.control.membership import Member
from recovery.control.record import Voter
from recovery.control.run_state import RunState
from recovery.control.tickets import TicketDesk
from recovery.control.wire import duration, from_proto, to_proto
from recovery.types import NO_VERSION, Version


class OfferDesk:
    """Asks members for checkpoints and keeps those of their answers that are of this history."""

    def __init__(self, run: RunState, tickets: TicketDesk) -> None:
        self._run = run
        self._tickets = tickets
        self._offers: dict[Voter, coordinator_pb2.RecoveryReport] = {}
        self.first_at = 0.0
        """When the first of the present offers came."""
        self.wanted = NO_VERSION
        """The only version that is taken; ``NO_VERSION``: any."""

    def ask(self, member: Member, reason: str, newest: Version = NO_VERSION) -> None:
        """Ask a member for its newest checkpoint, or its newest up to ``newest``."""
        member.asked_for_checkpoint_at = self._run.now
        member.last_no_donor = None  # the same question again wants an answer again
        message = coordinator_pb2.NoDonor(reason=reason, expected=True, resume_from_disk=True)
        message.retry_after.CopyFrom(duration(self._run.policy.retry_after_seconds))
        if newest != NO_VERSION:
            message.resume_at.CopyFrom(to_proto(newest))
        self._tickets.tell_once(member, message)

    def take(self, member: Member, message: coordinator_pb2.RecoveryReport) -> bool:
        """Take the answer of a member that was asked; False: it was not asked, or speaks of something else."""
        record = self._run.record
        if member.asked_for_checkpoint_at is None or message.transfer_id:
            return False
        version = from_proto(message.version)
        if message.HasField("failure"):
            member.has_no_checkpoint = True
        elif record.seals.get(version) != message.fingerprint or not record.on_path(version):
            self._ask_for_older(member, version)
        elif self.wanted not in (NO_VERSION, version):
            member.has_no_checkpoint = True
        else:
            if not self._offers:
                self.first_at = self._run.now
            # What it offers does not make it a holder of the history: only the new lineage's seal does.
            self._offers[member.voter] = message
        return True

    def _ask_for_older(self, member: Member, refused: Version) -> None:
        """What a member offered is not of this history (a step left behind, or never sealed): an older one may be."""
        record = self._run.record
        older = [version for version in record.seals if version < refused and record.on_path(version)]
        if self.wanted != NO_VERSION or not older:
            member.has_no_checkpoint = True
            return
        self.ask(member, f"the checkpoint of {refused} is not of this run's history", max(older))

    def has_offered(self, member: Member) -> bool:
        return member.voter in self._offers

    def best(self) -> tuple[Member, coordinator_pb2.RecoveryReport] | None:
        """Return the newest offer of a live process; of equals, the first by name."""
        live = [
            (run_member, offer) for voter, offer in self._offers.items() if (run_member := self._run.process(voter))
        ]

        def rank(found: tuple[Member, coordinator_pb2.RecoveryReport]) -> tuple[int, int, str]:
            version = from_proto(found[1].version)
            return (-version.lineage, -version.outer_step, found[0].worker_id)

        return min(live, key=rank, default=None)

    def forget(self) -> None:
        """Nobody is asked any more, and nothing is offered."""
        self._offers.clear()
        self.wanted = NO_VERSION
        for member in self._run.members.values():
            member.asked_for_checkpoint_at = None
            member.has_no_checkpoint = False
