"""The queue of workers that need state, and the tickets that send them to donors."""

from __future__ import annotations

import hashlib

from protos.recovery.v1 import common_pb2, coordinator_pb2
from recovery.control.gathering import GatherDesk
from recovery.control.matching import DonorView, JoinerView, Match, match
from recovery.control.membership import Member, Standing, Transfer
from recovery.control.run_state import RunState
from recovery.control.wire import duration, from_proto, seconds, to_proto
from recovery.errors import BadConfiguration
from recovery.events import DonorFailed, TransferEnded, TransferStarted
from recovery.types import NO_VERSION, Cut, checked_id

REASONS = ("fresh", "behind", "resync", "diverged")


class TicketDesk:
    """Answers requests and reports of joiners; ``advance`` serves the queue."""

    def __init__(self, run: RunState, gathering: GatherDesk) -> None:
        self._run = run
        self._gathering = gathering

    # What joiners say

    def request(self, member: Member, message: coordinator_pb2.RecoveryRequest) -> None:
        """A worker asks for state."""
        run = self._run
        if member.standing in (Standing.AWAITING, Standing.ORIGIN, Standing.FOREIGN):
            member.last_no_donor = None
            return
        if member.standing in (Standing.APPLIED, Standing.APPLYING) and not member.poisoned:
            member.postponed = message  # its report decides the seal: first that, then its wish
            return
        transfer = member.transfer
        if transfer is not None and message.transfer_id not in ("", transfer.transfer_id):
            transfer = None
        new_failures = [d for d in message.failed_donors if transfer is None or d not in transfer.failures]
        if member.standing is Standing.JOINING and transfer is not None and transfer.donors and not new_failures:
            told_here = transfer.told_turn >= member.attached_turn
            if told_here and message.from_worker_id in ("", transfer.wanted_donor):
                return  # the request crossed the ticket on this very stream
        if transfer is None or not message.transfer_id:
            run.forget_transfer(member)
            transfer = self._new_transfer(message.transfer_id)
        else:
            run.end_attempt(member)
        for donor in message.failed_donors:
            if donor not in run.members:
                continue
            transfer.failures.setdefault(donor, 1)
        drained = message.from_worker_id in run.record.drained
        transfer.wanted_donor = "" if drained else message.from_worker_id
        member.transfer = transfer
        if member.standing in (Standing.READY, Standing.APPLIED, Standing.APPLYING):
            if run.gather is not None:
                run.gather.arrivals.pop(member.worker_id, None)
                run.gather.deadlines.pop(member.worker_id, None)
            why = message.reason if message.reason in REASONS else "resync"
        else:
            why = member.why or ("fresh" if member.held == NO_VERSION else "behind")
        member.last_no_donor = None
        member.stand(Standing.QUEUED, run.now, why)

    def _new_transfer(self, transfer_id: str = "") -> Transfer:
        run = self._run
        run.num_transfers += 1
        if transfer_id:
            try:
                # A transfer of before the coordinator's restart: its attempts are numbered on, never again.
                checked_id("transfer id", transfer_id)
                taken = any(m.transfer is not None and m.transfer.transfer_id == transfer_id for m in run.live())
                if not taken:
                    return Transfer(transfer_id, 1000 * run.record.generation, "", since=run.now)
            except BadConfiguration:
                pass  # an id that this coordinator never gave: the joiner is given a good one
        return Transfer(f"t{run.record.id_prefix}-{run.num_transfers}", 0, "", since=run.now)

    def report(self, member: Member, message: coordinator_pb2.RecoveryReport) -> None:
        """One attempt ended."""
        run = self._run
        for rate in message.donor_rates:
            if rate.worker_id in run.members and 0.0 < rate.bytes_per_second < float("inf"):
                run.rates[member.worker_id, rate.worker_id] = rate.bytes_per_second
        attempt = (message.transfer_id, message.attempt)
        transfer = member.transfer
        if not message.transfer_id and member.standing in (Standing.JOINING, Standing.QUEUED, Standing.IDLE):
            self._late_offer(member, message)
            return
        if member.ended_attempts.get(attempt) and message.HasField("failure") and member.standing is Standing.READY:
            # It took up an attempt that it had ended well, and lost its state over it.
            member.held, member.fingerprint = NO_VERSION, b""
            member.stand(Standing.QUEUED, run.now, "behind")
        if transfer is None or member.standing is not Standing.JOINING or attempt in member.ended_attempts:
            return
        if attempt != (transfer.transfer_id, transfer.attempt):
            self._late_success(member, message)
            return
        member.ended_attempts[attempt] = not message.HasField("failure")
        tried = transfer.donors
        run.end_attempt(member)
        failed = message.HasField("failure")
        self._blame(member, transfer, message, tried)
        run.emit(
            TransferEnded(
                worker_id=member.worker_id,
                transfer_id=transfer.transfer_id,
                attempt=transfer.attempt,
                cut=Cut(from_proto(message.version)),
                payload_bytes=message.payload_bytes,
                reused_bytes=message.reused_bytes,
                took_seconds=seconds(message.took),
                failure=message.failure.message if failed else "",
            )
        )
        member.held = from_proto(message.version) if message.HasField("version") else NO_VERSION
        member.fingerprint = message.fingerprint
        if failed:
            self._failed(member, transfer, message.failure.next_action)
        else:
            self._succeeded(member, transfer, tried)

    def _late_offer(self, member: Member, message: coordinator_pb2.RecoveryReport) -> None:
        """It turned to a checkpoint because nobody else was there; now somebody is."""
        run = self._run
        run.end_attempt(member)
        if not message.HasField("failure"):
            member.held, member.fingerprint = from_proto(message.version), message.fingerprint
        member.last_no_donor = None
        member.stand(Standing.QUEUED, run.now, member.why or ("fresh" if member.held == NO_VERSION else "behind"))

    def _late_success(self, member: Member, message: coordinator_pb2.RecoveryReport) -> None:
        """An attempt succeeded while a newer ticket was under way, as after the coordinator's restart."""
        run, record = self._run, self._run.record
        if message.HasField("failure") or record.committed > record.sealed:
            return
        if from_proto(message.version) == record.sealed and message.fingerprint == record.sealed_fingerprint:
            member.ended_attempts[message.transfer_id, message.attempt] = True
            member.held, member.fingerprint = record.sealed, message.fingerprint
            run.end_attempt(member)
            self._succeeded(member, member.transfer or self._new_transfer(), ())

    def _succeeded(self, member: Member, transfer: Transfer, tried: tuple[str, ...]) -> None:
        run, record = self._run, self._run.record
        member.poisoned_in_a_row = 0
        member.standing = Standing.QUEUED
        run.place(member)
        if member.standing is Standing.READY:
            member.transfer = None
            member.began_late_at = member.held
            self._gathering.phase_ending(member)
        elif member.standing is Standing.QUEUED:
            if member.held == record.sealed and member.fingerprint != record.sealed_fingerprint:
                for donor in tried:
                    transfer.failures[donor] = transfer.failures.get(donor, 0) + 1
            member.transfer = transfer

    def _failed(self, member: Member, transfer: Transfer, action: int) -> None:
        run = self._run
        why = member.why
        intact = member.held == run.record.sealed and member.fingerprint == run.record.sealed_fingerprint
        gives_up = transfer.cancelled or action in (
            common_pb2.NEXT_ACTION_NEXT_SOURCE,
            common_pb2.NEXT_ACTION_STOP,
        )
        if gives_up and why == "resync" and intact:
            member.standing = Standing.QUEUED
            run.place(member)
        elif gives_up:
            member.stand(Standing.IDLE, run.now, why)
        else:
            member.stand(Standing.QUEUED, run.now, why)

    def _blame(
        self,
        member: Member,
        transfer: Transfer,
        message: coordinator_pb2.RecoveryReport,
        tried: tuple[str, ...],
    ) -> None:
        known = self._run.members
        blamed = {told.worker_id: told.failure for told in message.donor_failures if told.worker_id in known}
        if not blamed and message.failure.next_action == common_pb2.NEXT_ACTION_OTHER_DONOR:
            blamed = dict.fromkeys(tried, message.failure)
        for donor, failure in blamed.items():
            if failure.kind != "DonorBusy":  # busy is no failure: its slot is waited for
                transfer.failures[donor] = transfer.failures.get(donor, 0) + 1
            self._run.emit(
                DonorFailed(
                    worker_id=member.worker_id,
                    transfer_id=transfer.transfer_id,
                    donor=donor,
                    reason=f"{failure.kind}: {failure.message}",
                )
            )

    # The queue

    def advance(self) -> None:
        """Give a ticket to everybody for whom there is a donor; tell the others what they wait for."""
        run = self._run
        queue, waiting = [], []
        for member in run.members.values():
            if not member.alive:
                if member.transfer is not None and run.now - member.lost_at >= run.policy.expected_return_seconds:
                    run.end_attempt(member)
                continue
            if member.postponed is not None and member.standing not in (Standing.APPLIED, Standing.APPLYING):
                postponed, member.postponed = member.postponed, None
                self.request(member, postponed)
            if member.standing is Standing.QUEUED:
                queue.append(member)
            elif member.standing is Standing.AWAITING or member.standing is Standing.FOREIGN:
                waiting.append(member)
        queue.sort(key=lambda member: (member.since, member.worker_id))
        position = 0
        for member in queue:
            if run.outlook and member.asked_for_checkpoint_at is not None:
                continue  # its answer is waited for, not a donor
            if run.beginning is not None and member.held != NO_VERSION:
                continue  # it gets a ticket when the lineage has begun, and goes on as before if that comes to nothing
            found = self._match(member)
            if found.donors:
                self._issue(member, found.donors)
                continue
            position += found.waits_for_slot
            self._tell_no_donor(member, found, position if found.waits_for_slot else 0)
            if not found.expected and not run.outlook:
                member.stand(Standing.IDLE, run.now, member.why)
        for member in waiting:
            self._tell_waiting(member)

    def _match(self, member: Member) -> Match:
        run, record = self._run, self._run.record
        if run.outlook:
            return Match(reason=run.outlook, expected=True)
        if record.committed > record.sealed:
            return Match(reason=f"{record.committed} is committed and not sealed yet", expected=True)
        if member.transfer is None:
            member.transfer = self._new_transfer()
        wanted = member.transfer.wanted_donor
        joiner = JoinerView(member.worker_id, member.hello.region, member.transfer.failures, wanted)
        return match(
            joiner,
            self.donors(),
            run.rates,
            max_donors=run.policy.max_donors,
            max_failures=run.policy.donor_failures_per_transfer,
        )

    def donors(self) -> list[DonorView]:
        """Return every live worker as a possible donor; slots are counted here, not by what workers announce late."""
        run = self._run
        taken: dict[str, int] = {}
        for joiner in run.live_in(Standing.JOINING):
            for donor in joiner.transfer.donors if joiner.transfer is not None else ():
                taken[donor] = taken.get(donor, 0) + 1
        return [
            DonorView(
                worker_id=member.worker_id,
                region=member.hello.region,
                holds_sealed=member.standing is Standing.READY and not member.poisoned,
                drained=member.worker_id in run.record.drained,
                free_slots=member.hello.donor_slots - taken.get(member.worker_id, 0),
            )
            for member in run.live()
        ]

    def _issue(self, member: Member, donors: tuple[str, ...]) -> None:
        run, transfer = self._run, member.transfer
        if transfer is None:
            return
        transfer.told_turn = run.turn
        transfer.attempt += 1
        transfer.donors = donors
        transfer.version = run.record.sealed
        transfer.reason = member.why
        member.stand(Standing.JOINING, run.now, member.why)
        member.last_no_donor = None
        self._tell_ticket(member, transfer)
        run.emit(
            TransferStarted(
                worker_id=member.worker_id,
                transfer_id=transfer.transfer_id,
                attempt=transfer.attempt,
                version=transfer.version,
                donors=donors,
                reason=transfer.reason,
            )
        )

    def _tell_ticket(self, member: Member, transfer: Transfer) -> None:
        run = self._run
        ticket = coordinator_pb2.Ticket(
            transfer_id=transfer.transfer_id,
            attempt=transfer.attempt,
            version=to_proto(transfer.version),
            fingerprint=run.record.seals.get(transfer.version, b""),
            reason=transfer.reason,
            token=hashlib.blake2b(
                f"{run.policy.run_id}/{transfer.transfer_id}/{transfer.attempt}/{member.ref.worker_id}".encode(),
                key=run.policy.ticket_secret,
                digest_size=32,
            ).digest(),
        )
        if (position := run.data_position(member, transfer.version)) is not None:
            ticket.data_position.CopyFrom(position)
        if run.period_seconds:
            ticket.outer_period.CopyFrom(duration(run.period_seconds))
        for index, name in enumerate(transfer.donors):
            ticket.donors.append(self.donor_of(run.members[name], member, private_parts=index == 0))
        run.tell(member, ticket)

    def donor_of(self, donor: Member, joiner: Member, *, private_parts: bool) -> coordinator_pb2.Donor:
        """Return how ``joiner`` reaches ``donor``."""
        return coordinator_pb2.Donor(
            worker=to_proto(donor.ref),
            peer_addresses=donor.hello.peer_addresses,
            data_hosts=donor.hello.data_hosts,
            measured_rate=self._run.rates.get((joiner.worker_id, donor.worker_id), 0.0),
            private_parts=private_parts,
        )

    def _tell_no_donor(self, member: Member, found: Match, position: int) -> None:
        message = coordinator_pb2.NoDonor(reason=found.reason, expected=found.expected, queue_position=position)
        if found.expected:
            message.retry_after.CopyFrom(duration(self._run.policy.retry_after_seconds))
        self.tell_once(member, message)

    def _tell_waiting(self, member: Member) -> None:
        if member.standing is Standing.FOREIGN:
            reason = (
                f"worker {member.worker_id} holds {member.held}, which is not in this coordinator's history: an "
                f"operator can make it the run's with `recovery adopt --worker {member.worker_id}`"
            )
        else:
            reason = self._run.outlook or "the run has no history yet: its origin is being chosen"
        message = coordinator_pb2.NoDonor(reason=reason, expected=True)
        message.retry_after.CopyFrom(duration(self._run.policy.retry_after_seconds))
        self.tell_once(member, message)

    def tell_once(self, member: Member, message: coordinator_pb2.NoDonor) -> None:
        """Tell a member why it has no donor, unless it was told the same last."""
        if member.last_no_donor != message:
            member.last_no_donor = message
            self._run.tell(member, message)
