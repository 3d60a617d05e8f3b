"""What operators order of the history itself: roll back, adopt."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from recovery.control.beginnings import BeginningDesk
from recovery.control.membership import Member, Standing
from recovery.control.offers import OfferDesk
from recovery.control.record import ADOPT, ADOPTED, ROLLBACK, LineageBegun, Voter
from recovery.control.run_state import AUTHORITIES, RunState
from recovery.control.wire import from_proto
from recovery.errors import BadConfiguration, NoDonorLeft, RecoveryError, RunRefused
from recovery.types import NO_VERSION, Version

MAX_NUMBER = 2**48
"""No lineage and no step ever comes near it; what an adopted worker claims must not exhaust the numbers."""


@dataclass(slots=True)
class Wish:
    """An operator wants the run rolled back to a version that is on somebody's disk."""

    version: Version
    request_id: str
    asked: Voter | None = None
    """The process whose answer is waited for."""


class LineageOrderDesk:
    """Begins the lineages that operators want; ``advance`` does what is due."""

    def __init__(self, run: RunState, beginnings: BeginningDesk, offers: OfferDesk) -> None:
        self._run = run
        self._beginnings = beginnings
        self._offers = offers
        self._wish: Wish | None = None

    def advance(self) -> None:
        """Ask the next worker for the checkpoint that an operator wants; turn away whom nobody adopted."""
        self._turn_foreigners_away()
        if self._wish is not None:
            self._watch_wish(self._wish)

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
        self._beginnings.begin(
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
        self._offers.forget()
        self._wish = Wish(version, request_id)
        self._offers.wanted = version

    def _watch_wish(self, wish: Wish) -> None:
        run = self._run
        if run.beginning is not None:
            self._end_wish(wish, RunRefused(f"{run.beginning.version} began ({run.beginning.cause}) in the meantime"))
            return
        found = self._offers.best()
        if found is not None:
            member, offer = found
            self._wish = None
            self._offers.forget()
            version = from_proto(offer.version)
            self._beginnings.begin(
                member,
                version.outer_step,
                ROLLBACK,
                parent=version,
                expected_fingerprint=offer.fingerprint,
                request_ids=[wish.request_id],
            )
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
            self._offers.ask(left[0], f"an operator rolls the run back to {wish.version}", wish.version)
            run.wake(run.now + run.policy.offer_answer_seconds)
            return
        self._end_wish(
            wish,
            NoDonorLeft(
                f"no worker that could be asked has {wish.version} on its disk: `recovery ckpt list URL` lists the "
                "steps that are kept; take one of those, or name a worker that holds it in memory with --worker"
                + self._spared(ready)
            ),
        )

    def _spared(self, ready: list[Member]) -> str:
        """Say who was not asked, if anybody."""
        if not ready or ready[0].asked_for_checkpoint_at is not None:
            return ""
        return (
            f" ({ready[0].worker_id} is not asked, because it would give up the newest state for it: with another "
            "worker attached, that one is)"
        )

    def _end_wish(self, wish: Wish, error: RecoveryError) -> None:
        self._wish = None
        self._offers.forget()
        self._run.answer(wish.request_id, error)

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
        self._beginnings.begin(
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
