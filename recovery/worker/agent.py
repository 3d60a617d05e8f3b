"""The worker's side of the service: what a training loop calls.

Which thread does what:

- **training thread** (the one that called ``start``): ``phase``, ``boundary``, recoveries, the guard (``own_state``);
- ``recovery-dispatch``: files the coordinator's messages; never blocks (``dispatch.py``);
- ``recovery-report``: fingerprints when their digest pass ends, advertisements (``reporter.py``);
- ``recovery-orders``: verify, save and rate orders (``order_desk.py``);
- one thread and its lanes for each joiner served (``donor_loop.py``); the snapshots' service thread; the saver's.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from torch import Tensor

from protos.recovery.v1 import coordinator_pb2 as pb
from recovery.clock import Clock, SystemClock
from recovery.control.client import CoordinatorClient
from recovery.control.peer_service import PeerServer
from recovery.control.wire import to_proto
from recovery.errors import MisuseError, RecoveryError, WorkerPoisoned
from recovery.events import EventSink, Fanout, LogSink
from recovery.snapshot import Snapshots
from recovery.state import WorkerState, numerics_id
from recovery.types import NO_VERSION, Address, Incarnation, RunId, Version, WorkerId, WorkerRef
from recovery.worker.addresses import host_towards
from recovery.worker.averaging import Averager, terms_digest
from recovery.worker.boundary import Boundary
from recovery.worker.chain import Chain
from recovery.worker.checkpoints import Checkpoints
from recovery.worker.config import AgentConfig
from recovery.worker.context import Context
from recovery.worker.dispatch import Dispatcher
from recovery.worker.donor_loop import DonorLoop
from recovery.worker.epochs import Epochs
from recovery.worker.gradient_codec import codec_named
from recovery.worker.groups import EpochGroups
from recovery.worker.inbox import Inbox
from recovery.worker.kept_parts import position_of
from recovery.worker.metrics import WorkerMetrics
from recovery.worker.order_desk import OrderDesk
from recovery.worker.own_state import OwnState
from recovery.worker.peer_source import PeerSource
from recovery.worker.publications import Publications
from recovery.worker.replay import Replay
from recovery.worker.reporter import Reporter
from recovery.worker.standing import Standing
from recovery.worker.troubles import Troubles

logger = logging.getLogger(__name__)

_PROTOCOL = 1


class Agent:
    """Keeps one DiLoCo worker in a run: gives it the run's state, serves that state to others, closes boundaries.

    Use it as a context manager. ``start`` blocks until the worker holds the run's state. All methods but ``close``
    belong to the training thread.
    """

    def __init__(
        self,
        state: WorkerState,
        config: AgentConfig,
        *,
        events: EventSink | None = None,
        clock: Clock | None = None,
        replay: Replay | None = None,
    ) -> None:
        """Keep the objects that a worker consists of; nothing is opened.

        Args:
            state: What this worker's state is.
            config: Settings.
            events: Where events go; None: to the log.
            clock: Source of time; None: the system's.
            replay: What the loop's boundary block does with the averages, for catching up. None: they become the
                gradients of the outer parameters, the outer optimizer steps, the live model is overwritten.
        """
        clock = clock or SystemClock()
        standing = Standing(clock)
        self._metrics = WorkerMetrics(config, clock)
        events = Fanout(Troubles(standing, events or LogSink(), clock), self._metrics)
        worker = WorkerRef(WorkerId(config.worker_id), Incarnation(uuid.uuid4().hex))
        host = config.data_host or host_towards(config.coordinator)
        snapshots = Snapshots(
            state, config.snapshots(), run_id=RunId(config.run_id), worker=worker, events=events, clock=clock
        )
        client = CoordinatorClient(
            Address.parse(config.coordinator),
            config.security,
            hello=self._hello,
            on_message=self._on_message,
            on_detached=self._on_detached,
        )
        context = Context(
            state=state,
            config=config,
            worker=worker,
            host=host,
            clock=clock,
            events=events,
            standing=standing,
            inbox=Inbox(clock),
            client=client,
            snapshots=snapshots,
        )
        self._context = context
        self._epochs = Epochs(context)
        self._groups = EpochGroups(client.key_value, host, config.progress_timeout_seconds)
        self._averager = Averager(config.bucket_bytes, codec_named(config.gradient_codec))
        self._publications = Publications(context, self._epochs)
        self._reporter = Reporter(context)
        self._checkpoints = Checkpoints(context)
        peers = PeerSource(context, lambda: [self._peer_server.address])
        chain = Chain(context, peers, self._checkpoints, replay)
        self._donors = DonorLoop(context)
        self._orders = OrderDesk(context, self._checkpoints, self._donors, peers)
        self._own = OwnState(context, self._epochs, chain, self._reporter, self._checkpoints, self._orders)
        self._dispatcher = Dispatcher(context, self._groups, self._orders, self._checkpoints)
        self._peer_server = PeerServer(
            host, config.peer_port, self._donors.serve, config.security, run_id=config.run_id, worker=worker
        )
        self._started = False
        self._closed = False
        self._travels = False

    # Life

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._see_last_step_saved()
        self.close("finished" if kind is None else f"{kind.__name__}: {error}" if str(error) else kind.__name__)

    def _see_last_step_saved(self) -> None:
        """Stay until the run has sealed this worker's last step, so that a finished run ends with it on disk."""
        version = self.version
        if self._closed or not self._checkpoints.awaits_seal(version):
            return
        inbox, timeout = self._context.inbox, self._context.config.progress_timeout_seconds
        self._context.snapshots.inner_boundary()
        try:
            sealed = inbox.wait(lambda: inbox.fingerprint_of(version) or None, timeout, meanwhile=lambda: None)
        except RecoveryError as error:  # the coordinator ended this worker's part: it leaves anyway
            logger.warning("%s: %s is not saved: %s", self._context.worker, version, error)
            return
        if sealed is None:
            logger.warning("%s: %s is not saved: it was not sealed in %.0f s", self._context.worker, version, timeout)

    def start(self) -> None:
        """Attach to the coordinator and return when this worker holds the run's state.

        Raises:
            CoordinatorUnreachable: nothing answered within ``attach_timeout_seconds``.
            RunRefused: the coordinator refuses this worker; the message says why.
            LayoutMismatch: the peers train another model.
            SourcesExhausted: neither a peer nor a checkpoint could give the state.
        """
        if self._started:
            raise MisuseError("start() was called twice: make a new Agent")
        self._started = True
        try:
            self._metrics.start(self._context)
            self._own.layout_digest = self._context.state.layout_digest()
            self._context.snapshots.start()
            self._checkpoints.start()
            self._donors.start()
            self._peer_server.start()
            self._orders.start()
            self._context.client.start()
            self._context.client.wait_attached(self._context.config.attach_timeout_seconds)
            self._reporter.start()
            self._own.recover("fresh", ask=False)
        except BaseException as error:
            self.close(f"start failed: {error}")
            raise

    def close(self, reason: str = "closed") -> None:
        """Leave the run and end every thread. Harmless when repeated. Waits for a checkpoint being written.

        Raises:
            CheckpointFailed: a save failed and nobody was told yet.
        """
        if self._closed:
            return
        self._closed = True
        self._context.standing.update(ready=False)
        self._groups.close(reason)
        self._donors.close(reason)
        self._reporter.close()
        self._orders.close()
        self._context.client.close(reason)
        self._peer_server.close()
        try:
            self._checkpoints.close()
        finally:
            self._context.snapshots.close()
            self._metrics.close()

    # What a training loop reads

    @property
    def version(self) -> Version:
        """The version of the outer state in memory."""
        return self._context.standing.read().version

    @property
    def config(self) -> AgentConfig:
        """The settings that this agent was made with."""
        return self._context.config

    @property
    def worker(self) -> WorkerRef:
        """This process's name in the run."""
        return self._context.worker

    # The phase

    def phase(self) -> Iterator[int]:
        """Yield once for each inner step that is due in this phase; the value is the inner step's index.

        Between two steps, on this thread: a recovery that an operator or the coordinator ordered takes place, after
        which the phase goes on at the donor's inner step. A worker that started its phase late stops early when the
        others stand at the boundary.

        Raises:
            WorkerPoisoned: the state was written by a transfer and not verified.
            UnsupportedLeaf: after the first inner step, a private part holds a value that has no exact form.
            RecoveryError: the coordinator ended this worker's part in the run.
        """
        context = self._context
        local = context.state.local_progress
        while True:
            context.snapshots.inner_boundary()
            self._own.obey_orders()
            if context.standing.read().poisoned:
                raise WorkerPoisoned(f"{self.worker}: the state in memory was not verified: recover again or stop")
            if local.inner_step >= context.config.inner_steps_per_phase:
                return
            if self._own.late and context.inbox.phase_ends(self.version):
                return
            began = context.clock.monotonic()
            yield local.inner_step
            local.inner_step += 1
            self._reporter.inner_step_took(context.clock.monotonic() - began)
            if not self._travels:
                self._see_that_it_travels()

    def _see_that_it_travels(self) -> None:
        """Refuse now what optimizers hold since their first step and nobody could take over exactly."""
        for name in self._context.state.private_copied_names:
            self._context.state.read_part(name)
        self._travels = True

    def count_tokens(self, tokens: int) -> None:
        """Add to the tokens that this worker trained on; summed over all workers at each commit."""
        self._context.state.local_progress.tokens += tokens

    # The boundary

    def boundary(self) -> Boundary:
        """Return the boundary that ends this phase; see ``Boundary``."""
        self._checkpoints.foresee(self.version.next())
        return Boundary(self._own, self._context, self._epochs, self._groups, self._averager)

    # For loops with an all-reduce of their own, in place of ``boundary``

    def standing(self) -> AbstractContextManager[None]:
        """Say that the training thread stays between two inner steps while the block runs, as in an all-reduce.

        A joiner whose private parts come from this worker gets them meanwhile; otherwise it waits for an inner step.
        """
        self._checkpoints.foresee(self.version.next())
        return self._context.snapshots.standing()

    def before_outer_update(self, averaged: Sequence[Tensor] | None = None) -> None:
        """Save what readers still need of the outer state, which may be overwritten from here on.

        The outer optimizer's ``step`` says so by itself; needed by loops that write outer parameters in other ways, and
        by those that have ``averaged``, the averages that they are about to apply, kept for workers that catch up:
        without them a joiner whose outer copy takes longer than a phase does not get in. Between this call and
        ``publish`` the averages should not be written; if they are, the next ones are copied.
        """
        self._context.snapshots.before_outer_update()
        if averaged is not None:
            self._context.snapshots.journal.begin([tensor.detach() for tensor in averaged])

    def publish(self, outer_step: int, *, run_tokens: int = 0) -> Version:
        """Make the state in memory the run's next version; return the version that this worker stands at afterwards.

        For loops that averaged by themselves. Nothing was voted on: the version is committed when everybody has
        published it, or a majority has and the others were waited for. Whoever published another state, or none, takes
        the majority's; if that is this worker, it has done so when this returns.

        Args:
            outer_step: Outer steps taken: one more than ``version.outer_step``.
            run_tokens: Tokens that all workers together trained on in this phase; the same on every worker.

        Raises:
            MisuseError: ``outer_step`` is not the next one.
            RunPaused: the version was not sealed within ``boundary_timeout_seconds``.
            RecoveryError: the coordinator ended this worker's part in the run, or no source could give the state.
        """
        context, version = self._context, self.version.next()
        if outer_step != version.outer_step:
            raise MisuseError(f"publish({outer_step}): this worker stands at {self.version}, the next is {version}")
        if context.standing.read().poisoned:
            raise WorkerPoisoned(f"{self.worker}: the state in memory was not verified: recover again or stop")
        kept = self._own.capture_kept()
        context.state.run_progress.outer_step = version.outer_step
        context.state.run_progress.tokens += run_tokens
        context.state.local_progress.inner_step = 0
        context.snapshots.publish(version)
        fingerprint = self._publications.seal(version, position_of(kept))
        if fingerprint is None:
            self._own.poison(f"the run did not take the state that this worker published as {version}")
            self._own.recover(f"published another {version}", ask=False)
            return self.version
        context.snapshots.journal.record(version, run_tokens)
        context.standing.update(version=version, fingerprint=fingerprint)
        self._own.begin_phase(late=False)
        self._checkpoints.consider(version, kept)
        return version

    def recover(self, reason: str) -> Version:
        """Take the run's state from elsewhere, for example after an all-reduce of one's own failed; return its version.

        Raises:
            NoDonorLeft, SourcesExhausted: no source could give it.
        """
        self._own.recover(reason)
        return self.version

    # The coordinator's side of the conversation

    def _on_message(self, message: pb.CoordinatorMessage) -> None:
        self._dispatcher(message)

    def _on_detached(self, reason: str) -> None:
        if self._context.client.refusal is None:  # a refusal is raised where the training thread meets it
            logger.warning(
                "%s lost the coordinator and goes on without it until its next boundary: %s",
                self._context.worker,
                reason,
            )

    def _hello(self) -> pb.Hello:
        context = self._context
        stand = context.standing.read()
        holds = stand.version != NO_VERSION and not stand.poisoned
        return pb.Hello(
            protocol=_PROTOCOL,
            run_id=context.config.run_id,
            worker=to_proto(context.worker),
            numerics_id=numerics_id(),
            layout_digest=terms_digest(
                self._own.layout_digest, context.config.gradient_codec, context.config.bucket_bytes
            ),
            held=to_proto(stand.version) if holds else None,
            held_fingerprint=stand.fingerprint if holds else b"",
            peer_addresses=[to_proto(self._peer_server.address)],
            data_hosts=[context.host],
            hostname=socket.gethostname(),
            process_id=os.getpid(),
            region=context.config.region,
            donor_slots=context.config.donor_slots,
            saves_checkpoints=bool(context.config.checkpoint_url),
            undecided_epoch=stand.undecided_epoch,
            last_epoch=self._epochs.last_epoch,
            inner_steps_per_phase=context.config.inner_steps_per_phase,
        )
