"""How a lineage begins: the origin, a resume when everybody is gone, an operator's rollback or adoption.

One primitive serves all four. A lineage number is used up durably, one process is told to begin it with the state that
it holds, and the version is sealed with the fingerprint that the process reports. Until then the older history stands:
if the process is lost, the number stays void and every member is judged anew by the older history.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from protos.recovery.v1 import coordinator_pb2, operations_pb2
from recovery.control.boundary import BoundaryDesk
from recovery.control.membership import Member, Standing
from recovery.control.policy import REFUSE
from recovery.control.record import (
    ADOPT,
    ADOPTED,
    ORIGIN,
    RESUME,
    ROLLBACK,
    LineageBegun,
    PauseSet,
    VersionSealed,
    Voter,
)
from recovery.control.run_state import AUTHORITIES, Beginning, RunState
from recovery.control.tickets import TicketDesk
from recovery.control.wire import duration, from_proto, to_proto
from recovery.errors import BadConfiguration, NoDonorLeft, PeerUnreachable, RecoveryError, RunRefused
from recovery.events import LineageStarted
from recovery.events import VersionSealed as VersionSealedEvent
from recovery.types import NO_VERSION, Version

MAX_NUMBER = 2**48
"""No lineage and no step ever comes near it; what an adopted worker claims must not exhaust the numbers."""


@dataclass(slots=True)
class Wish:
    """An operator wants the run rolled back to a version that is on somebody's disk."""

    version: Version
    request_ids: list[str]
    asked: Voter | None = None
    """The process whose answer is waited for."""


class SuccessionDesk:
    """Decides who begins a lineage; ``advance`` does what is due."""

    def __init__(self, run: RunState, boundary: BoundaryDesk, tickets: TicketDesk) -> None:
        self._run = run
        self._boundary = boundary
        self._tickets = tickets
        self._gone_since: float | None = None
        self._offers: dict[Voter, coordinator_pb2.RecoveryReport] = {}
        self._first_offer_at = 0.0
        self._unfit: set[Voter] = set()
        """Processes that were told to begin a lineage and did not."""
        self._wish: Wish | None = None
        begun = run.record.unsealed_lineage
        self._restored = begun is not None
        if begun is not None:
            voter = (begun.worker_id, begun.incarnation)
            expected = run.record.seals.get(begun.parent, b"")
            run.beginning = Beginning(begun.version, begun.cause, voter, 0.0, expected)

    # Beginnings

    def begin(
        self,
        member: Member,
        outer_step: int,
        cause: str,
        *,
        parent: Version = NO_VERSION,
        expected_fingerprint: bytes = b"",
        request_ids: list[str] | None = None,
    ) -> Version:
        """Use up a lineage number and tell ``member`` to begin it with the state that it holds."""
        run, record = self._run, self._run.record
        self._boundary.abandon(f"a new lineage begins ({cause})")
        version = Version(record.newest_lineage + 1, outer_step)
        lost = max(0, record.committed.outer_step - outer_step) if cause in (RESUME, ROLLBACK) else 0
        wall = run.now + run.wall_offset_seconds
        run.persist(LineageBegun(version, cause, parent, lost, *member.voter, wall))
        if record.paused:
            run.persist(PauseSet(""))
        run.beginning = Beginning(
            version, cause, member.voter, run.now, expected_fingerprint, None, list(request_ids or ())
        )
        self._forget_offers()
        for other in run.live():
            if other.standing is Standing.JOINING:
                run.end_attempt(other)
                other.standing = Standing.QUEUED
        run.forget_transfer(member)
        run.place_all()
        run.tell(member, coordinator_pb2.BecomeOrigin(version=to_proto(version)))
        run.emit(
            LineageStarted(worker_id=member.worker_id, version=version, cause=cause, parent=parent, lost_steps=lost)
        )
        return version

    def reported(self, member: Member, version: Version, fingerprint: bytes) -> None:
        """The process that was told to begin reports its state: seal it, if it is what it had promised."""
        run, beginning = self._run, self._run.beginning
        if beginning is None or member.voter != beginning.voter or version != beginning.version or not fingerprint:
            return
        if beginning.expected_fingerprint and fingerprint != beginning.expected_fingerprint:
            self._void(
                RunRefused(
                    f"worker {member.worker_id} began {version} with {fingerprint.hex()[:16]}, not with the promised "
                    f"{beginning.expected_fingerprint.hex()[:16]}"
                )
            )
            return
        run.persist(VersionSealed(version, fingerprint))
        member.held, member.fingerprint = version, fingerprint
        run.beginning = None
        self._unfit.clear()
        run.outlook = ""
        run.emit(VersionSealedEvent(version=version, fingerprint=fingerprint.hex(), reporters=(member.worker_id,)))
        run.place_all()
        self._boundary.seals.announce()
        for request_id in beginning.request_ids:
            run.answer(request_id, _done(beginning, fingerprint))

    def remind(self, member: Member) -> None:
        """The process that was told to begin is back: its report or the order may have been lost."""
        run, beginning = self._run, self._run.beginning
        if beginning is None or member.voter != beginning.voter:
            return
        beginning.lost_at = None
        if member.held == beginning.version:
            self.reported(member, member.held, member.fingerprint)
        else:
            run.tell(member, coordinator_pb2.BecomeOrigin(version=to_proto(beginning.version)))

    def _void(self, error: RecoveryError) -> None:
        run, beginning = self._run, self._run.beginning
        if beginning is None:
            return
        self._unfit.add(beginning.voter)
        run.beginning = None
        run.place_all()
        for request_id in beginning.request_ids:
            run.answer(request_id, error)

    # What is due

    def advance(self) -> None:
        """Begin a lineage if the history needs one."""
        run = self._run
        self._turn_foreigners_away()
        if run.beginning is not None:
            self._watch(run.beginning)
        if run.beginning is not None:
            run.outlook = f"{run.beginning.version} begins at {run.beginning.voter[0]}, which has not reported yet"
            return
        if run.record.sealed == NO_VERSION:
            self._name_origin()
        else:
            self._succeed()
        self._watch_wish()

    def _watch(self, beginning: Beginning) -> None:
        run = self._run
        if self._restored:
            beginning.since = beginning.lost_at = run.now
            self._restored = False
        name = beginning.voter[0]
        if run.process(beginning.voter) is not None:
            beginning.lost_at = None
            due = beginning.since + run.policy.origin_apply_seconds
            what = f"did not report its state within {run.policy.origin_apply_seconds:g} s"
        else:
            if beginning.lost_at is None:
                beginning.lost_at = run.now
            due, what = beginning.lost_at + run.policy.origin_wait_seconds, "was lost"
            known = run.members.get(name)
            if known is not None and (known.voter != beginning.voter or known.said_goodbye):
                due = run.now
        if run.now >= due:
            self._void(PeerUnreachable(f"worker {name} {what} before it began {beginning.version}"))
        else:
            run.wake(due)

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
        fit = [member for member in waiting if member.voter not in self._unfit] or waiting
        run.outlook = "the run has no history yet: its origin is being chosen"
        if not fit:
            return
        due = min(member.attached_at for member in fit) + policy.origin_wait_seconds
        # Who is chosen depends on names only: an order of arrival would let a restarted straggler in.
        if run.now >= due or 0 < policy.expected_workers <= len(waiting):
            self.begin(fit[0], 0, ORIGIN)
        else:
            run.wake(due)

    def _succeed(self) -> None:
        run, record, policy = self._run, self._run.record, self._run.policy
        if run.live_in(*AUTHORITIES):
            run.outlook = ""
            if self._gone_since is not None:
                self._gone_since = None
                self._forget_offers()
                for member in run.live_in(Standing.IDLE):
                    run.place(member)
            return
        if self._wish is not None:
            run.outlook = f"an operator rolls the run back to {self._wish.version}"
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
            self.begin(
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
            and member.voter not in self._unfit
        )

    def _remembers(self, member: Member) -> bool:
        """Return whether a member's memory is an earlier sealed state of this history."""
        record = self._run.record
        return (
            record.seals.get(member.held) == member.fingerprint
            and record.on_path(member.held)
            and not member.poisoned
            and member.voter not in self._unfit
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
                self._ask(member, run.outlook, NO_VERSION)
            if member.voter in self._offers:
                continue
            asked_at = member.asked_for_checkpoint_at or run.now
            due = asked_at + policy.offer_answer_seconds
            if run.now >= due:
                member.has_no_checkpoint = True
                continue
            run.wake(due)
            open_answers.append(member)
        offers = {voter: offer for voter, offer in self._offers.items() if run.process(voter) is not None}
        if offers:
            due = self._first_offer_at + policy.offer_wait_seconds
            if open_answers and run.now < due:
                run.wake(due)
                return
            voter = min(offers, key=lambda v: (_newest_first(from_proto(offers[v].version)), v))
            self._begin_from(voter, offers[voter], RESUME, [])
            return
        if open_answers:
            return
        if memories := [member for member in run.live() if self._remembers(member)]:
            newest = max(memories, key=lambda member: member.held)
            self.begin(
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

    def _begin_from(
        self, voter: Voter, offer: coordinator_pb2.RecoveryReport, cause: str, request_ids: list[str]
    ) -> None:
        member = self._run.process(voter)
        if member is None:
            return
        version = from_proto(offer.version)
        self.begin(
            member,
            version.outer_step,
            cause,
            parent=version,
            expected_fingerprint=offer.fingerprint,
            request_ids=request_ids,
        )

    # Offers of checkpoints

    def _ask(self, member: Member, reason: str, newest: Version) -> None:
        member.asked_for_checkpoint_at = self._run.now
        member.last_no_donor = None  # the same question again wants an answer again
        message = coordinator_pb2.NoDonor(reason=reason, expected=True, resume_from_disk=True)
        message.retry_after.CopyFrom(duration(self._run.policy.retry_after_seconds))
        if newest != NO_VERSION:
            message.resume_at.CopyFrom(to_proto(newest))
        self._tickets.tell_once(member, message)

    def offer(self, member: Member, message: coordinator_pb2.RecoveryReport) -> bool:
        """Take the answer of a member that was asked for a checkpoint; False: it was not asked, or answers else."""
        run, record = self._run, self._run.record
        if member.asked_for_checkpoint_at is None or message.transfer_id:
            return False
        version = from_proto(message.version)
        known = record.seals.get(version)
        wish = self._wish
        if message.HasField("failure"):
            member.has_no_checkpoint = True
        elif known != message.fingerprint or not record.on_path(version):
            self._ask_for_older(member, version)
        elif wish is not None and version == wish.version:
            self._wish = None
            member.held, member.fingerprint = version, message.fingerprint
            self._begin_from(member.voter, message, ROLLBACK, wish.request_ids)
        elif wish is not None:
            member.has_no_checkpoint = True
        else:
            if not self._offers:
                self._first_offer_at = run.now
            # What it offers does not make it a holder of the history: only the new lineage's seal does.
            self._offers[member.voter] = message
        return True

    def _ask_for_older(self, member: Member, refused: Version) -> None:
        """What a member offered is not of this history (a step left behind, or never sealed): an older one may be."""
        record = self._run.record
        older = [version for version in record.seals if version < refused and record.on_path(version)]
        if self._wish is not None or not older:
            member.has_no_checkpoint = True
            return
        self._ask(member, f"the checkpoint of {refused} is not of this run's history", max(older))

    def _forget_offers(self) -> None:
        self._offers.clear()
        for member in self._run.members.values():
            if self._wish is None:
                member.asked_for_checkpoint_at = None
                member.has_no_checkpoint = False

    # Operators

    def rollback(self, request_id: str, version: Version, worker_id: str) -> None:
        """Begin a new lineage at a version that a worker holds, or that is on somebody's disk."""
        run = self._run
        if run.beginning is not None:
            run.answer(request_id, RunRefused(f"{run.beginning.version} is just beginning: ask again when it has"))
            return
        if not worker_id:
            self._rollback_to_disk(request_id, version)
            return
        member = run.members.get(worker_id)
        error: RecoveryError | None = None
        if member is None or not member.alive:
            error = BadConfiguration(f"worker {worker_id!r} is not attached: see `recovery status`")
        elif member.held == NO_VERSION or member.poisoned or member.standing is Standing.JOINING:
            error = BadConfiguration(f"worker {worker_id} holds no whole state: choose another")
        elif member.standing is Standing.FOREIGN:
            error = BadConfiguration(
                f"worker {worker_id} holds {member.held}, which is not in this history: use `recovery adopt`"
            )
        elif member.standing is Standing.APPLYING:
            error = RunRefused(f"worker {worker_id} is just applying {run.record.committed}: ask again when it has")
        elif version not in (NO_VERSION, member.held):
            error = BadConfiguration(f"worker {worker_id} holds {member.held}, not {version}")
        if error is not None or member is None:
            run.answer(request_id, error or BadConfiguration(f"worker {worker_id!r} is not attached"))
            return
        self.begin(
            member,
            member.held.outer_step,
            ROLLBACK,
            parent=member.held,
            expected_fingerprint=member.fingerprint,
            request_ids=[request_id],
        )

    def _rollback_to_disk(self, request_id: str, version: Version) -> None:
        run, record = self._run, self._run.record
        if not record.on_path(version) or version not in record.seals:
            run.answer(
                request_id,
                BadConfiguration(f"{version} is not a sealed version of this history, whose newest is {record.sealed}"),
            )
            return
        if self._wish is not None:
            run.answer(request_id, RunRefused(f"a rollback to {self._wish.version} is under way: ask again after it"))
            return
        self._forget_offers()
        self._wish = Wish(version, [request_id])

    def _watch_wish(self) -> None:
        run, wish = self._run, self._wish
        if wish is None:
            return
        asked = run.process(wish.asked) if wish.asked is not None else None
        if asked is not None and not asked.has_no_checkpoint:
            due = (asked.asked_for_checkpoint_at or run.now) + run.policy.offer_answer_seconds
            if run.now < due:
                run.wake(due)
                return
            asked.has_no_checkpoint = True
        # One after the other, and the last holder of the newest state never: asking may cost it that state.
        ready = run.live_in(Standing.READY)
        others = [m for m in run.live() if m.standing not in (*AUTHORITIES, Standing.FOREIGN)]
        left = [m for m in (*others, *ready[1:]) if m.asked_for_checkpoint_at is None]
        if left:
            wish.asked = left[0].voter
            self._ask(left[0], f"an operator rolls the run back to {wish.version}", wish.version)
            run.wake(run.now + run.policy.offer_answer_seconds)
            return
        self._wish = None
        self._forget_offers()
        for request_id in wish.request_ids:
            run.answer(
                request_id,
                NoDonorLeft(
                    f"no live worker offered a checkpoint of {wish.version} (the last holder of the newest is not "
                    "asked): attach another worker, or choose one with --worker"
                ),
            )

    def adopt(self, request_id: str, worker_id: str) -> None:
        """Make a history that this coordinator does not know the run's."""
        run = self._run
        holders = [member for member in run.live() if member.held != NO_VERSION and not member.poisoned]
        foreign = [member for member in holders if member.standing is Standing.FOREIGN]
        chosen: Member | None = None
        if run.beginning is not None:
            error: RecoveryError = RunRefused(f"{run.beginning.version} is just beginning: ask again when it has")
        elif not foreign:
            error = BadConfiguration("no attached worker holds a history that this coordinator does not know")
        elif worker_id:
            chosen = next((member for member in foreign if member.worker_id == worker_id), None)
            error = BadConfiguration(f"worker {worker_id!r} holds no unknown history: see `recovery status`")
        else:
            counts = Counter((member.held, member.fingerprint) for member in holders)
            (state, most) = counts.most_common(1)[0]
            chosen = next((m for m in foreign if (m.held, m.fingerprint) == state and 2 * most > len(holders)), None)
            states = ", ".join(f"{m.worker_id} {m.held}" for m in holders)
            error = BadConfiguration(f"no majority holds one unknown state ({states}): name one with --worker")
        if chosen is not None and max(chosen.held.lineage, chosen.held.outer_step) >= MAX_NUMBER:
            error = BadConfiguration(f"worker {chosen.worker_id} holds {chosen.held}: not a real version")
            chosen = None
        if chosen is None:
            run.answer(request_id, error)
            return
        held, wall = chosen.held, run.now + run.wall_offset_seconds
        if held.lineage > run.record.newest_lineage:
            # The lineage as it came is written down too: its other holders are members of the past, not strangers.
            run.persist(LineageBegun(Version(held.lineage, 0), ADOPTED, NO_VERSION, 0, *chosen.voter, wall))
        self.begin(
            chosen,
            held.outer_step,
            ADOPT,
            parent=held,
            expected_fingerprint=chosen.fingerprint,
            request_ids=[request_id],
        )

    def _turn_foreigners_away(self) -> None:
        run = self._run
        for member in run.live_in(Standing.FOREIGN):
            due = member.since + run.policy.adopt_wait_seconds
            if run.now < due:
                run.wake(due)
                continue
            run.reject(
                member,
                RunRefused(
                    f"worker {member.worker_id} holds {member.held}, which is not in this coordinator's history, and "
                    f"nobody called `recovery adopt` within {run.policy.adopt_wait_seconds:g} s: give the coordinator "
                    "the run's --state-dir, or adopt, or start the worker without its state"
                ),
            )


def _done(beginning: Beginning, fingerprint: bytes) -> operations_pb2.AdoptResponse | operations_pb2.RollbackResponse:
    version = to_proto(beginning.version)
    if beginning.cause == ADOPT:
        return operations_pb2.AdoptResponse(version=version, fingerprint=fingerprint)
    return operations_pb2.RollbackResponse(version=version)


def _newest_first(version: Version) -> tuple[int, int]:
    return (-version.lineage, -version.outer_step)
