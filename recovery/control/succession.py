"""Who has the history: the origin of a new run, and who goes on when nobody is left that holds the newest state."""

from __future__ import annotations

from protos.recovery.v1 import coordinator_pb2
from recovery.control.beginnings import BeginningDesk
from recovery.control.membership import Member, Standing
from recovery.control.offers import OfferDesk
from recovery.control.policy import REFUSE
from recovery.control.record import ORIGIN, RESUME
from recovery.control.run_state import AUTHORITIES, RunState
from recovery.control.tickets import TicketDesk
from recovery.control.wire import from_proto
from recovery.errors import RunRefused
from recovery.types import NO_VERSION


class SuccessionDesk:
    """Has a lineage begun where the history needs one; ``advance`` does what is due."""

    def __init__(self, run: RunState, beginnings: BeginningDesk, offers: OfferDesk, tickets: TicketDesk) -> None:
        self._run = run
        self._beginnings = beginnings
        self._offers = offers
        self._tickets = tickets
        self._gone_since: float | None = None

    def advance(self) -> None:
        """Begin a lineage if the history needs one, and say in ``outlook`` why nobody has the newest state."""
        run = self._run
        if run.beginning is not None:
            run.outlook = f"{run.beginning.version} begins at {run.beginning.voter[0]}, which has not reported yet"
            self._gone_since = None
            self._offers.forget()
        elif run.record.sealed == NO_VERSION:
            self._name_origin()
        else:
            self._succeed()

    def _name_origin(self) -> None:
        run, policy = self._run, self._run.policy
        foreign = run.live_in(Standing.FOREIGN)
        if foreign:
            run.outlook = (
                f"no origin is named while worker {foreign[0].worker_id} holds {foreign[0].held}, which this "
                "coordinator does not know: an operator may call `recovery adopt`"
            )
            return
        waiting = run.live_in(Standing.AWAITING)
        fit = [member for member in waiting if member.voter not in self._beginnings.unfit] or waiting
        run.outlook = "the run has no history yet: its origin is being chosen"
        if not fit:
            return
        due = min(member.attached_at for member in fit) + policy.origin_wait_seconds
        # Who is chosen depends on names only: an order of arrival would let a restarted straggler in.
        if run.now >= due or 0 < policy.expected_workers <= len(waiting):
            self._beginnings.begin(fit[0], 0, ORIGIN)
        else:
            run.wake(due)

    def _succeed(self) -> None:
        run, record, policy = self._run, self._run.record, self._run.policy
        if run.live_in(*AUTHORITIES):
            run.outlook = ""
            if self._gone_since is not None:
                self._gone_since = None
                if self._offers.wanted == NO_VERSION:
                    self._offers.forget()
                for member in run.live_in(Standing.IDLE):
                    run.place(member)
            return
        if self._offers.wanted != NO_VERSION:
            run.outlook = f"an operator rolls the run back to {self._offers.wanted}"
            return
        if self._gone_since is None:
            self._gone_since = run.now
        lost = sorted(m.worker_id for m in run.members.values() if not m.alive and self._held_history(m))
        awaited = [name for name in lost if not run.members[name].said_goodbye] or sorted(run.returning)
        due = self._gone_since + policy.expected_return_seconds
        if record.paused:
            run.outlook = (
                f"{record.paused} Nobody who held it is alive: `recovery rollback --version {record.sealed}` resumes "
                "from a checkpoint"
            )
        elif awaited and run.now < due:
            run.outlook = (
                f"no live worker holds {record.committed}; {', '.join(awaited)} may come back within "
                f"{policy.expected_return_seconds:g} s of being lost"
            )
            run.wake(due)
        elif foreign := run.live_in(Standing.FOREIGN):
            run.outlook = (
                f"no live worker holds {record.committed}, and worker {foreign[0].worker_id} holds {foreign[0].held}, "
                "which this coordinator does not know: an operator may call `recovery adopt`"
            )
        elif survivors := [member for member in run.live() if self._intact(member)]:
            # Everybody who held the unsealed step is gone: it counts as not committed. Or every holder asked for a
            # recovery at once, and there is nobody to ask: one of them is taken at its word.
            self._beginnings.begin(
                survivors[0],
                record.sealed.outer_step,
                RESUME,
                parent=record.sealed,
                expected_fingerprint=record.sealed_fingerprint,
            )
        elif policy.on_all_gone == REFUSE:
            self._refuse()
        else:
            self._resume()

    def _intact(self, member: Member) -> bool:
        record = self._run.record
        return (
            member.held == record.sealed
            and member.fingerprint == record.sealed_fingerprint
            and not member.poisoned
            and member.voter not in self._beginnings.unfit
        )

    def _remembers(self, member: Member) -> bool:
        """Return whether a member's memory is an earlier sealed state of this history."""
        record = self._run.record
        return (
            record.seals.get(member.held) == member.fingerprint
            and record.on_path(member.held)
            and not member.poisoned
            and member.voter not in self._beginnings.unfit
            and member.standing is not Standing.JOINING
        )

    def _keeps_memory(self, member: Member) -> bool:
        """Return whether a member is not asked for a checkpoint: loading one would cost a state, maybe the last."""
        told = member.advertisement
        newer = told.HasField("checkpoint_version") and from_proto(told.checkpoint_version) > member.held
        return self._remembers(member) and not newer

    def _held_history(self, member: Member) -> bool:
        return member.held >= self._run.record.sealed or member.standing in AUTHORITIES

    def _refuse(self) -> None:
        run = self._run
        run.outlook = (
            f"no live worker holds {run.record.committed} and the policy is to refuse: start the coordinator with "
            "--on-all-gone resume"
        )
        for member in list(run.live()):
            run.reject(member, RunRefused(f"worker {member.worker_id} may not join: {run.outlook}"))

    def _resume(self) -> None:
        run, policy = self._run, self._run.policy
        run.outlook = f"no live worker holds {run.record.committed}: the newest checkpoint is being looked for"
        open_answers = []
        for member in run.live():
            if member.standing is Standing.FOREIGN or member.has_no_checkpoint or self._keeps_memory(member):
                continue
            if member.asked_for_checkpoint_at is None:
                self._offers.ask(member, run.outlook)
            if self._offers.has_offered(member):
                continue
            asked_at = member.asked_for_checkpoint_at or run.now
            due = asked_at + policy.offer_answer_seconds
            if run.now >= due:
                member.has_no_checkpoint = True
                continue
            run.wake(due)
            open_answers.append(member)
        best = self._offers.best()
        if best is not None:
            due = self._offers.first_at + policy.offer_wait_seconds
            if open_answers and run.now < due:
                run.wake(due)
                return
            member, offer = best
            version = from_proto(offer.version)
            self._beginnings.begin(
                member, version.outer_step, RESUME, parent=version, expected_fingerprint=offer.fingerprint
            )
            return
        if open_answers:
            return
        if memories := [member for member in run.live() if self._remembers(member)]:
            newest = max(memories, key=lambda member: member.held)
            self._beginnings.begin(
                newest,
                newest.held.outer_step,
                RESUME,
                parent=newest.held,
                expected_fingerprint=newest.fingerprint,
            )
            return
        reason = f"no live worker holds {run.record.committed}, and no worker has a checkpoint that is of this history"
        for member in run.live():
            if member.standing is not Standing.FOREIGN:
                member.stand(Standing.IDLE, run.now, member.why)
                self._tickets.tell_once(member, coordinator_pb2.NoDonor(reason=reason))
