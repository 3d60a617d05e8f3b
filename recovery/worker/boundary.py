"""The boundary of a phase, as the training loop sees it: average, vote, outcome, apply.

State of one boundary, all on the training thread::

    arrive -> roster -> average -> vote -> outcome
      ^                    |                  |-- COMMITTED: the caller applies; the version grows at the block's end
      |                    v                  |-- ABORTED:   nothing was applied anywhere; arrive again
      +------------- epoch failed <-----------+-- EXCLUDED:  recover, leave the block (StateReplaced)
                                              +-- PAUSED:    stand here until an operator chose, then recover

Until COMMITTED nothing but the averager's own buffers is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

import blake3
import torch
from torch import Tensor

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.control.wire import from_proto
from recovery.errors import EpochAborted, MisuseError, RecoveryError, RunPaused, StateReplaced, Stop
from recovery.worker.averaging import Averager
from recovery.worker.context import Context
from recovery.worker.epochs import Epochs
from recovery.worker.groups import EpochGroups
from recovery.worker.kept_parts import KeptParts, position_of

logger = logging.getLogger(__name__)


class Trainee(Protocol):
    """What a boundary needs of the agent that owns it."""

    @property
    def weight(self) -> float:
        """Work done in this phase, 0 to 1 of a whole one."""

    @property
    def new_tokens(self) -> int:
        """Tokens trained on by this worker since the last commit."""

    def capture_kept(self) -> KeptParts | None:
        """Return a copy of the private-kept parts as they stand at this boundary."""

    def check_state(self) -> None:
        """Return if the state in memory is what the run holds; recover otherwise and raise ``StateReplaced``."""

    def replace_state(self, reason: str) -> None:
        """Take the state from elsewhere."""

    def applied(self, run_tokens: int, kept: KeptParts | None) -> None:
        """Make the state in memory the next version; ``kept`` is what ``capture_kept`` returned at its boundary."""

    def poison(self, reason: str) -> None:
        """Mark the state in memory as not verified."""


class Boundary:
    """One boundary; made by ``Agent.boundary()``, used in a ``with`` block on the training thread.

    The block averages, then applies. When it ends without an exception after ``average`` returned, the worker stands
    at the next version. If the worker's state was replaced by a recovery instead, the block is left early and
    silently: the training loop goes on with the next phase, from the new state.
    """

    def __init__(
        self, trainee: Trainee, context: Context, epochs: Epochs, groups: EpochGroups, averager: Averager
    ) -> None:
        self._trainee = trainee
        self._context = context
        self._epochs = epochs
        self._groups = groups
        self._averager = averager
        self._averaged = False
        self._run_tokens = 0
        self._kept: KeptParts | None = None

    def __enter__(self) -> Self:
        return self

    def average(self, pseudo_gradients: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        """Return the committed means of all members' pseudo-gradients, in this worker's order.

        Blocks until an epoch commits. ``pseudo_gradients`` is called again for every epoch: an aborted one leaves
        nothing behind. The returned tensors are valid until the next boundary.

        Raises:
            StateReplaced: this worker took its state from elsewhere; the ``with`` block swallows it.
            RunPaused: the members disagree, and no operator chose within ``boundary_timeout_seconds``.
            RecoveryError: the coordinator ended this worker's part in the run.
        """
        if self._averaged:
            raise MisuseError("average() was called twice in one boundary: begin the next phase first")
        while True:
            self._trainee.check_state()
            roster = self._epochs.arrive(self._trainee.weight)
            if roster is None:
                continue
            try:
                averaged, self._run_tokens = self._average_once(roster, pseudo_gradients)
            except EpochAborted as aborted:
                logger.info("%s: epoch %d is void: %s", self._context.worker, roster.epoch, aborted)
                continue
            self._context.standing.waits_for("")
            self._context.snapshots.before_outer_update()
            if self._context.snapshots.journal.begin(averaged, self._averager.take_encoded()):
                self._averager.hand_over()
            self._averaged = True
            self._epochs.pass_stage("applying")
            return averaged

    def _average_once(
        self, roster: pb.Roster, pseudo_gradients: Callable[[], Sequence[Tensor]]
    ) -> tuple[list[Tensor], int]:
        try:
            contribution = list(pseudo_gradients())
        except BaseException as error:
            # The others must not wait for a worker whose own code failed.
            self._epochs.fail(roster.epoch, f"pseudo_gradients() raised {type(error).__name__}: {error}")
            raise
        weights = [member.weight for member in roster.members]
        rank = self._epochs.rank_in(roster) or 0
        timeout = self._context.config.boundary_timeout_seconds
        self._epochs.pass_stage("averaging")
        try:
            group = self._groups.open(roster, rank)
            run_tokens = self._averager.agree(contribution, [self._trainee.new_tokens], rank, group, timeout)[0]
            averaged = self._averager.average(contribution, weights, rank, group, timeout)
        except Stop as error:
            # Averaging once more would end the same way: this worker's own code or settings differ from the others'.
            self._groups.drop(f"epoch {roster.epoch}: {error}")
            self._epochs.fail(roster.epoch, f"{type(error).__name__}: {error}")
            raise
        except (RuntimeError, RecoveryError) as error:
            # gloo raises RuntimeError for a dead peer, a closed socket and a timeout alike. The buffers of this epoch
            # may still be written by abandoned operations: the group and the buffers go.
            suspect = self._groups.suspect(roster)
            self._groups.drop(f"epoch {roster.epoch} failed: {error}")
            logger.info("%s: averaging in epoch %d failed: %s", self._context.worker, roster.epoch, error)
            self._epochs.fail(roster.epoch, _in_a_few_words(error), suspect)
            self._obey(self._epochs.outcome(roster.epoch))
            # Committed by the others although this worker could not finish: it missed the commit.
            self._trainee.replace_state(f"epoch {roster.epoch} committed without this worker")
            raise StateReplaced(f"missed the commit of epoch {roster.epoch}") from error
        self._epochs.pass_stage("averaged")
        self._kept = self._trainee.capture_kept()
        self._obey(self._epochs.vote(roster.epoch, _digest(averaged), position_of(self._kept)))
        return averaged, run_tokens

    def _obey(self, outcome: pb.Outcome) -> None:
        """Return if the epoch was committed, raise what it means otherwise."""
        if outcome.verdict == pb.VERDICT_COMMITTED:
            committed = from_proto(outcome.version)
            expected = self._context.standing.read().version.next()
            if committed != expected:
                raise RunPaused(f"epoch {outcome.epoch} committed {committed}, this worker could only reach {expected}")
            return
        self._groups.drop(f"epoch {outcome.epoch} did not commit: {outcome.reason}")
        if outcome.verdict == pb.VERDICT_ABORTED:
            raise EpochAborted(outcome.reason)
        if outcome.verdict == pb.VERDICT_EXCLUDED:
            self._trainee.replace_state(f"excluded from epoch {outcome.epoch}: {outcome.reason}")
            raise StateReplaced(outcome.reason)
        self._epochs.wait_for_operator(outcome.reason or "the run is paused: ask `recovery status`")
        raise EpochAborted("an operator chose whose state is the run's")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if kind is None:
            if not self._averaged:
                raise MisuseError("the boundary block ended without average(): nothing was committed")
            self._trainee.applied(self._run_tokens, self._kept)
            self._epochs.pass_stage("applied")
            return False
        if isinstance(error, StateReplaced):
            return True
        if self._averaged:
            # The step is committed and the others apply it; what this worker's memory holds is anybody's guess.
            self._trainee.poison(f"applying a committed step raised {kind.__name__}: {error}")
        return False


def _in_a_few_words(error: Exception) -> str:
    """Return an error of the averaging as operators read it; gloo's own text goes to the log."""
    if isinstance(error, RecoveryError):
        return f"{error.kind}: {error}"
    gloo = str(error).partition("] ")[2].partition(". ")[0]
    return f"the averaging broke off: {gloo or type(error).__name__}"


def _digest(averaged: Sequence[Tensor]) -> bytes:
    digest = blake3.blake3()
    for tensor in averaged:
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
