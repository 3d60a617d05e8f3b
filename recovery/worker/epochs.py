"""What a worker says and hears about one boundary: arrival, roster, vote, outcome. Training thread only."""

from __future__ import annotations

import logging

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.control.wire import from_proto, to_proto
from recovery.errors import RecoveryError, RunPaused
from recovery.events import BoundaryStage
from recovery.worker.context import Context

logger = logging.getLogger(__name__)

_REPLACED = object()


class Epochs:
    """The conversation with the coordinator about boundaries; says again what a restarted coordinator may have lost."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._last_epoch = 0

    @property
    def last_epoch(self) -> int:
        """The newest epoch that this worker saw a roster of."""
        return self._last_epoch

    def arrive(self, weight: float) -> pb.Roster | None:
        """Report at the boundary; return the roster that this worker is a member of.

        Returns None if the coordinator or an operator wants this worker to take its state from elsewhere: the directive
        or order stays in the inbox.

        Raises:
            RunPaused: no roster came within ``boundary_timeout_seconds``.
        """
        context = self._context
        stand = context.standing.read()
        arrival = pb.WorkerMessage(
            boundary_arrival=pb.BoundaryArrival(
                version=to_proto(stand.version),
                inner_steps_done=context.state.local_progress.inner_step,
                weight=weight,
                fingerprint=stand.fingerprint,
            )
        )

        def take() -> object | None:
            if context.inbox.has_directive() or context.inbox.has_resync():
                return _REPLACED
            return context.inbox.take_roster(stand.version, self._last_epoch)

        said_at = -1

        def meanwhile() -> None:
            nonlocal said_at
            if said_at != context.inbox.attachments:
                said_at = context.inbox.attachments
                self.pass_stage("arriving")
                context.client.send(arrival)
                self.pass_stage("arrived")

        context.standing.waits_for(f"the roster of the boundary after {stand.version}")
        while True:
            with context.snapshots.standing():
                found = context.inbox.wait(take, context.config.boundary_timeout_seconds, meanwhile)
            if found is None:
                raise RunPaused(
                    f"{context.worker}: no roster for the boundary after {stand.version} within "
                    f"{context.config.boundary_timeout_seconds} s: ask `recovery status` whom the run waits for"
                )
            if not isinstance(found, pb.Roster):
                return None
            self._last_epoch = found.epoch
            if self.rank_in(found) is not None:
                # From here on every Hello asks for this epoch's outcome: a coordinator that restarts closes open
                # epochs, and nobody else could free a member that waits for a frozen one.
                context.standing.update(undecided_epoch=found.epoch)
                self.pass_stage("rostered")
                context.standing.waits_for(f"the members of epoch {found.epoch} to average")
                return found

    def wait_for_operator(self, reason: str) -> None:
        """Stand at the boundary of a paused run until an operator has chosen; the choice stays in the inbox.

        Raises:
            RunPaused: no choice came within ``boundary_timeout_seconds``; the message names the choices.
        """
        context = self._context
        logger.error("%s: the run is paused: %s", context.worker, reason)
        context.standing.waits_for(f"an operator: {reason}")
        with context.snapshots.standing():
            chosen = context.inbox.wait(
                lambda: context.inbox.has_directive() or None, context.config.boundary_timeout_seconds, lambda: None
            )
        if chosen is None:
            raise RunPaused(f"{context.worker}: {reason}")

    def pass_stage(self, stage: str) -> None:
        """Tell the event sink that this worker is at a named place of the boundary."""
        stand = self._context.standing.read()
        self._context.events(
            BoundaryStage(
                worker_id=self._context.worker.worker_id, stage=stage, version=stand.version, epoch=self._last_epoch
            )
        )

    def rank_in(self, roster: pb.Roster) -> int | None:
        """Return this worker's rank in the roster's group, or None if it is not a member."""
        members = [from_proto(member.worker) for member in roster.members]
        return members.index(self._context.worker) if self._context.worker in members else None

    def fail(self, epoch: int, reason: str, suspect: str = "") -> None:
        """Tell the coordinator that this worker cannot finish the epoch, and because of whom, if that is known."""
        message = pb.EpochFailure(epoch=epoch, failure=to_proto(RecoveryError(reason)), suspect_worker_id=suspect)
        self._context.client.send(pb.WorkerMessage(epoch_failure=message))

    def vote(self, epoch: int, digest: bytes, position: bytes) -> pb.Outcome:
        """Tell the coordinator what this worker averaged, and return the outcome. Nothing may be applied before.

        ``position`` is the worker's data position at this boundary; the coordinator stores it with the commit.
        """
        context = self._context
        context.standing.update(undecided_epoch=epoch)
        version = to_proto(context.standing.read().version)
        vote = pb.WorkerMessage(vote=pb.Vote(epoch=epoch, version=version, digest=digest, data_position=position))
        self.pass_stage("voting")
        context.client.send(vote)
        self.pass_stage("voted")
        return self.outcome(epoch, again=vote)

    def outcome(self, epoch: int, again: pb.WorkerMessage | None = None) -> pb.Outcome:
        """Return what became of the epoch. When the coordinator came back, it is asked, and told ``again``.

        Raises:
            RunPaused: the outcome is not known after ``boundary_timeout_seconds``; nothing was applied.
        """
        context = self._context
        query = pb.WorkerMessage(outcome_query=pb.OutcomeQuery(epoch=epoch))
        said_at = context.inbox.attachments

        def meanwhile() -> None:
            nonlocal said_at
            if said_at != context.inbox.attachments:
                said_at = context.inbox.attachments
                if again is not None:
                    context.client.send(again)
                context.client.send(query)

        context.standing.waits_for(f"the outcome of epoch {epoch}")
        outcome = context.inbox.wait(
            lambda: context.inbox.take_outcome(epoch), context.config.boundary_timeout_seconds, meanwhile
        )
        if outcome is None:
            raise RunPaused(
                f"{context.worker}: the outcome of epoch {epoch} is not known after "
                f"{context.config.boundary_timeout_seconds} s; nothing was applied: ask `recovery status`"
            )
        context.standing.update(undecided_epoch=0)
        self.pass_stage("decided")
        return outcome
