"""What this worker's state is in the run: recovered, trained on, averaged, applied, or poisoned. Training thread."""

from __future__ import annotations

import logging

from recovery.errors import RecoveryError, StateReplaced
from recovery.events import StateRestored
from recovery.types import Cut, Fingerprint, RunId, Version
from recovery.worker.chain import Chain, Recovered
from recovery.worker.checkpoints import Checkpoints
from recovery.worker.context import Context
from recovery.worker.epochs import Epochs
from recovery.worker.kept_parts import KeptParts, capture_kept, position_of, restore_kept
from recovery.worker.order_desk import OrderDesk
from recovery.worker.reporter import Reporter

logger = logging.getLogger(__name__)


class OwnState:
    """A worker's state through phases, boundaries and recoveries; a boundary's ``Trainee``.

    Attributes:
        layout_digest: Of the worker's state; empty before the agent starts.
        late: The phase was begun while the others were somewhere in it.
    """

    def __init__(
        self,
        context: Context,
        epochs: Epochs,
        chain: Chain,
        reporter: Reporter,
        checkpoints: Checkpoints,
        orders: OrderDesk,
    ) -> None:
        self._context = context
        self._epochs = epochs
        self._chain = chain
        self._reporter = reporter
        self._checkpoints = checkpoints
        self._orders = orders
        self.layout_digest = b""
        self.late = False
        self._lineage = 0
        """Of the last recovery; 0: none yet."""
        self._first_inner_step = 0
        self._tokens_at_commit = 0

    @property
    def version(self) -> Version:
        """The version of the outer state in memory."""
        return self._context.standing.read().version

    @property
    def weight(self) -> float:
        """Work done in this phase, 0 to 1 of a whole one."""
        done = self._context.state.local_progress.inner_step - self._first_inner_step
        return max(0.0, min(1.0, done / self._context.config.inner_steps_per_phase))

    @property
    def new_tokens(self) -> int:
        """Tokens trained on by this worker since the last commit."""
        return self._context.state.local_progress.tokens - self._tokens_at_commit

    def check_state(self) -> None:
        """Return if the state in memory is what the run holds; recover otherwise and raise ``StateReplaced``."""
        if self.obey_orders():
            raise StateReplaced("recovered before the boundary")
        context = self._context
        self._reporter.wait_for_fingerprint(context.config.boundary_timeout_seconds)
        if not context.config.verify_before_average:
            return
        damaged = context.snapshots.damaged()
        if damaged:
            names = ", ".join(damaged[:5]) + (", ..." if len(damaged) > 5 else "")
            self.replace_state(f"memory of {names} changed since {self.version} was published")
            raise StateReplaced(f"memory of {names} was damaged")

    def replace_state(self, reason: str) -> None:
        """Take the state from elsewhere, and return when this worker holds the run's state again."""
        self.recover(reason)

    def capture_kept(self) -> KeptParts | None:
        """Return a copy of the private-kept parts as they stand at this boundary."""
        return capture_kept(
            self._context.state,
            run_id=RunId(self._context.config.run_id),
            worker=self._context.worker,
            cut=Cut(self.version.next()),
            layout_digest=self.layout_digest,
        )

    def applied(self, run_tokens: int, kept: KeptParts | None) -> None:
        """Make the state in memory the next version; called at the end of the boundary's block."""
        context = self._context
        version = self.version.next()
        context.state.run_progress.outer_step = version.outer_step
        context.state.run_progress.tokens += run_tokens
        context.state.local_progress.inner_step = 0
        self.begin_phase(late=False)
        context.snapshots.publish(version)
        context.snapshots.journal.record(version, run_tokens)
        context.standing.update(version=version, fingerprint=Fingerprint(b""))
        self._reporter.report_applied(self._epochs.last_epoch, version, position_of(kept))
        self._checkpoints.consider(version, kept)

    def poison(self, reason: str) -> None:
        """Mark the state in memory as not verified; only a recovery lifts that."""
        logger.error("%s: the state is poisoned: %s", self._context.worker, reason)
        self._context.standing.update(poisoned=True, ready=False)

    def recover(self, reason: str, *, ask: bool = True, from_worker: str = "") -> Recovered:
        """Take the state from elsewhere; see ``Chain.recover``."""
        recovered = self._chain.recover(reason, ask=ask, from_worker=from_worker)
        self.begin_phase(late=recovered.late)
        if recovered.version.lineage != self._lineage:  # a new process, or the run went back
            self._lineage = recovered.version.lineage
            self._take_position_back(recovered)
        self._context.events(
            StateRestored(
                worker_id=self._context.worker.worker_id,
                version=recovered.version,
                source=recovered.source,
                num_tensors=recovered.num_tensors,
                num_bytes=recovered.num_bytes,
            )
        )
        return recovered

    def _take_position_back(self, recovered: Recovered) -> None:
        """Go on drawing data where this worker, or its predecessor, stood at its newest boundary of this history."""
        if not recovered.data_position or recovered.own_position or recovered.source == "origin":
            return
        logger.info("%s draws data on from where it stood at %s", self._context.worker, recovered.stood_at)
        restore_kept(self._context.state, recovered.data_position)

    def begin_phase(self, *, late: bool) -> None:
        """The state in memory is what a phase begins with; ``late``: the others are somewhere in it."""
        local = self._context.state.local_progress
        self.late = late
        self._first_inner_step = local.inner_step
        self._tokens_at_commit = local.tokens

    def obey_orders(self) -> bool:
        """Recover if the coordinator or an operator wants it; return whether the state was replaced."""
        order = self._context.inbox.take_resync()
        if order is not None:
            try:
                self.recover("resync", from_worker=order.resync.from_worker_id)
            except RecoveryError as error:
                self._orders.answer(order, error)
                raise
            self._orders.answer(order, None)
            return True
        if self._context.inbox.has_directive():
            self.recover("ordered by the coordinator", ask=False)
            return True
        return False
