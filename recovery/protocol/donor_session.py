"""Carries out what the donor's machine decides: threads, leases, sends, deadlines. Never the training thread."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from protos.recovery.v1 import peer_pb2
from protos.recovery.v1.peer_pb2 import DonorLetter
from recovery.clock import Clock, SystemClock
from recovery.errors import DonorLost, DonorRefused, MisuseError, RecoveryError
from recovery.protocol.crew import RECEIVE_SECONDS, WAIT_SECONDS, Crew
from recovery.protocol.donor import DonorConfig, DonorMachine
from recovery.protocol.donor_io import (
    Acknowledge,
    Admit,
    CancelSends,
    Capture,
    DonorAction,
    DonorEvent,
    Ended,
    Finish,
    Heard,
    Lent,
    LinkOpened,
    NotLent,
    OpenLink,
    Recheck,
    Rechecked,
    Say,
    Send,
    Sent,
    Skipped,
    Stopped,
    Tick,
    Unreadable,
    ViewsClosed,
)
from recovery.protocol.letters import sealing_context
from recovery.protocol.live_sends import LiveSends
from recovery.protocol.meeting import MeetingPoint
from recovery.protocol.ports import (
    JOURNAL,
    OUTER,
    PRIVATE,
    SCALARS,
    DonorConversation,
    Role,
    SnapshotSource,
    SourceLease,
)
from recovery.protocol.ports import Admit as AdmitPort
from recovery.protocol.ports import OpenLink as OpenLinkPort
from recovery.protocol.rate import RateLimiter
from recovery.state.manifest import manifest_digest
from recovery.transport.link import Link, Transfer
from recovery.transport.sealed import SealingKeys

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_TOLD_TOGETHER = 8
"""Finished sends that are reported together: progress within them is seen on the link."""
_SENDS_PER_LANE = 4
"""Sends posted at once on a lane: while one is on the wire the next are ready."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DonorResult:
    """How a conversation ended. ``error`` None: the joiner has everything."""

    joiner: str
    sent_bytes: int
    error: RecoveryError | None


class DonorSession:
    """One conversation with one joiner: ``run()`` serves it to its end; ``cancel()`` ends it.

    Args:
        conversation: The direct stream, already accepted.
        snapshots: Where leases come from.
        scope: Where the two groups meet; unique to this conversation.
        config: Limits.
        admit: Decides whether the joiner is served.
        open_link: Opens the donor's end of a link.
        limiter: Rate limit shared by all conversations of this donor.
        clock: Source of time.
    """

    def __init__(
        self,
        conversation: DonorConversation,
        snapshots: SnapshotSource,
        *,
        scope: str,
        config: DonorConfig,
        admit: AdmitPort,
        open_link: OpenLinkPort,
        limiter: RateLimiter,
        clock: Clock | None = None,
    ) -> None:
        self._conversation = conversation
        self._snapshots = snapshots
        self._config = config
        self._admit = admit
        self._open_link = open_link
        self._limiter = limiter
        self._clock = clock or SystemClock()
        self._keys = SealingKeys()
        self._machine = DonorMachine(config, scope, self._keys.public)
        self._meeting = MeetingPoint(lambda letter: conversation.send(DonorLetter(meeting=letter)))
        self._queue: queue.SimpleQueue[DonorEvent] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._leases: dict[Role, SourceLease] = {}
        self._crew = Crew("recovery-donor")
        self._used = threading.Lock()
        self._live = LiveSends()
        self._lanes: list[queue.SimpleQueue[Send | None]] = []
        self._cancelled_pulls: set[int] = set()
        self._cancelled_up_to = 0
        self._link: Link | None = None
        self._share = 0
        self._finish: Finish | None = None
        self._capture: Future[SourceLease] | None = None
        self._last_pull_id = 0
        self._agreed: tuple[bytes, ...] = ()

    @property
    def joiner(self) -> str:
        """Worker id of the joiner; empty until it has introduced itself."""
        return self._machine.joiner

    def cancel(self, reason: str) -> None:
        """End the conversation soon, telling the joiner why. Any thread, at any moment."""
        self._queue.put(Stopped(DonorRefused(reason)))

    def run(self) -> DonorResult:
        """Serve the joiner until the conversation is over. Blocks; no thread or socket of it is left afterwards.

        Whatever the joiner does ends up in the result, not in an exception.

        Raises:
            MisuseError: a second call.
        """
        if not self._used.acquire(blocking=False):
            raise MisuseError("a conversation is served once")
        self._crew.spawn("letters", self._listen)
        finish = Finish(DonorLost("the donor's session broke off"), grace=True)
        try:
            finish = self._loop()
        finally:
            self._close(finish)
        return DonorResult(joiner=self._machine.joiner, sent_bytes=self._machine.sent_bytes, error=finish.error)

    def _loop(self) -> Finish:
        self._carry_out(self._machine.start(self._clock.monotonic()))
        ticked = self._clock.monotonic()
        while self._finish is None:
            with contextlib.suppress(queue.Empty):
                event = self._queue.get(timeout=_TICK_SECONDS)
                self._carry_out(self._machine.handle(event, self._clock.monotonic()))
            now = self._clock.monotonic()
            if now - ticked >= _TICK_SECONDS and self._finish is None:
                ticked = now
                self._renew()
                link = self._link
                self._carry_out(self._machine.handle(Tick(link.bytes_moved() if link is not None else 0), now))
        return self._finish

    def _renew(self) -> None:
        try:
            for lease in self._leases.values():
                lease.renew()
        except RecoveryError as error:
            self._queue.put(Stopped(error))

    def _carry_out(self, actions: list[DonorAction]) -> None:
        for action in actions:
            match action:
                case Say(letter):
                    with contextlib.suppress(RecoveryError):  # the receiving side reports why the stream ended
                        self._conversation.send(letter)
                case Admit():
                    self._admit_and_lend(action)
                case OpenLink():
                    self._crew.spawn("link", functools.partial(self._link_up, action))
                case Send(pull_id=pull_id, lane=lane):
                    self._last_pull_id = pull_id
                    self._lanes[lane].put(action)
                case CancelSends(pull_ids):
                    with self._lock:
                        self._cancelled_pulls |= pull_ids
                        if not pull_ids:
                            self._cancelled_up_to = self._last_pull_id
                case Acknowledge(key):
                    with contextlib.suppress(RecoveryError):  # an ended lease is reported by the next read or renewal
                        self._leases[key.role].acknowledge(key.part, key.chunk)
                case Recheck(key):
                    try:
                        self._queue.put(Rechecked(key, self._leases[key.role].recheck(key.part, key.chunk)))
                    except RecoveryError as error:
                        self._queue.put(Stopped(error))
                case Capture(not_before):
                    self._await(PRIVATE, self._snapshots.lease_private(self._holder, not_before))
                case Finish():
                    self._finish = action

    @property
    def _holder(self) -> str:
        return f"joiner {self._machine.joiner}"

    def _admit_and_lend(self, action: Admit) -> None:
        self._agreed = sealing_context(action.open.run_id, action.open.transfer_id, action.open.attempt)
        try:
            self._admit(action.open)
            match action.role:
                case peer_pb2.MANIFEST_ROLE_PRIVATE:
                    self._await(PRIVATE, self._snapshots.lease_private(self._holder, action.version))
                case peer_pb2.MANIFEST_ROLE_SCALARS:
                    self._await(SCALARS, self._snapshots.lease_scalars(self._holder, action.version))
                case peer_pb2.MANIFEST_ROLE_JOURNAL:
                    self._queue.put(self._take(JOURNAL, self._snapshots.lease_journal(action.version, self._holder)))
                case _:
                    self._queue.put(self._take(OUTER, self._snapshots.lease_outer(action.version, self._holder)))
        except RecoveryError as error:
            self._queue.put(NotLent(action.role, error))

    def _await(self, role: Role, future: Future[SourceLease]) -> None:
        """Report a lease when it is captured: at the donor's next inner-step boundary."""
        self._capture = future
        future.add_done_callback(lambda done: self._captured(role, done))

    def _captured(self, role: Role, future: Future[SourceLease]) -> None:
        if future.cancelled():
            self._queue.put(NotLent(role, DonorRefused("the capture of private parts was cancelled")))
            return
        error = future.exception()
        if error is None:
            self._queue.put(self._take(role, future.result()))
        elif isinstance(error, RecoveryError):
            self._queue.put(NotLent(role, error))
        else:
            self._queue.put(NotLent(role, DonorRefused(f"private parts could not be captured: {error!r}")))

    def _take(self, role: Role, lease: SourceLease) -> DonorEvent:
        with self._lock:
            if self._crew.ended.is_set():  # the joiner left while the lease was made
                lease.release("nobody waits for it any more")
                return NotLent(role, DonorLost("the joiner left"))
            self._leases[role] = lease
        lease.on_closed(lambda: self._views_closed(role))
        encoded = lease.manifest_bytes
        return Lent(role, lease.manifest, encoded, manifest_digest(encoded), lease.until_boundary)

    def _views_closed(self, role: Role) -> int:
        """Note which pulls are void. On the training thread: takes a lock that nobody holds for longer than this."""
        pull_ids = self._live.take(role)
        if pull_ids:
            self._queue.put(ViewsClosed(role, pull_ids))
        return len(pull_ids)

    # Threads

    def _listen(self) -> None:
        try:
            while not self._crew.ended.is_set():
                letter = self._conversation.receive(RECEIVE_SECONDS)
                if letter is None:
                    continue
                if letter.HasField("meeting"):
                    self._meeting.heard(letter.meeting)
                else:
                    self._queue.put(Heard(letter))
        except RecoveryError as error:
            self._queue.put(Ended(error))
        except Exception as error:  # noqa: BLE001 - the thread's root: a broken stream ends this conversation only
            self._queue.put(Ended(DonorLost(f"the conversation failed: {error!r}")))

    def _link_up(self, action: OpenLink) -> None:
        try:
            link = self._open_link(self._meeting, action.scope, self._config.data_host, action.lanes, self._crew.ended)
            if action.sealing_key:
                context = (*self._agreed, action.scope.encode())
                link = self._keys.seal(link, action.sealing_key, donor=True, context=context, peer=self._holder)
        except RecoveryError as error:
            self._queue.put(Stopped(error))
            return
        except Exception as error:  # noqa: BLE001 - the thread's root, as above
            self._queue.put(Stopped(DonorLost(f"the data link failed to open: {error!r}")))
            return
        self._share = self._limiter.join(self._machine.joiner)
        with self._lock:
            self._link = link
            self._lanes = [queue.SimpleQueue() for _ in range(link.lanes)]
        for lane in range(link.lanes):
            self._crew.spawn(f"lane-{lane}", functools.partial(self._serve_lane, link, lane), of_lane=True)
        self._queue.put(LinkOpened(tuple(link.endpoints())))

    def _serve_lane(self, link: Link, lane: int) -> None:
        """Send the lane's pulls in order, a few at once; each send is waited for exactly once, also at the end."""
        waiting = self._lanes[lane]
        posted: deque[tuple[Send, Transfer]] = deque()
        untold: list[Sent] = []
        try:
            while True:
                if posted and (waiting.empty() or len(posted) >= _SENDS_PER_LANE):
                    send, transfer = posted.popleft()
                    transfer.wait(WAIT_SECONDS)
                    self._live.end(send.role, send.pull_id)
                    untold.append(Sent(send.pull_id))
                    if not posted or len(untold) >= _TOLD_TOGETHER:
                        for sent in untold:
                            self._queue.put(sent)
                        untold.clear()
                    continue
                send_or_end = waiting.get()
                if send_or_end is None:
                    break
                transfer_or_none = self._post(link, send_or_end)
                if transfer_or_none is not None:
                    posted.append((send_or_end, transfer_or_none))
        except RecoveryError as error:
            self._queue.put(Ended(error))
        except Exception as error:  # noqa: BLE001 - the thread's root, as above
            self._queue.put(Ended(DonorLost(f"sending failed: {error!r}")))
        # The link is broken or about to be shut: what is still posted ends with an error.
        for _, transfer in posted:
            with contextlib.suppress(RecoveryError):
                transfer.wait(WAIT_SECONDS)

    def _post(self, link: Link, send: Send) -> Transfer | None:
        with self._lock:
            cancelled = send.pull_id in self._cancelled_pulls or send.pull_id <= self._cancelled_up_to
        if cancelled:
            self._queue.put(Skipped(send.pull_id))
            return None
        self._limiter.acquire(self._share, send.num_bytes)
        # Noted before the bytes are lent: between the two the guard may close them.
        self._live.begin(send.role, send.pull_id)
        try:
            reading = self._leases[send.role].read(send.part, send.offset, send.num_bytes)
        except RecoveryError as error:
            self._live.end(send.role, send.pull_id)
            self._queue.put(Unreadable(send.pull_id, error))
            return None
        if not reading.live:
            self._live.end(send.role, send.pull_id)
        return link.send(send.lane, send.tag, reading.data)

    def _close(self, finish: Finish) -> None:
        reason = "the joiner has everything" if finish.error is None else str(finish.error)
        with self._lock:
            self._crew.end()
            link = self._link
            leases = list(self._leases.values())
        if self._capture is not None:
            self._capture.cancel()  # one that is made already is released by its callback
        if link is not None:
            link.shut(reason)
        if self._share:
            self._limiter.leave(self._share)
        self._conversation.close(reason)
        self._meeting.end(reason)

        def release() -> None:
            with self._lock:
                opened = self._link
            if opened is not None:
                opened.shut(reason)
            for lane in self._lanes:
                lane.put(None)

        self._crew.join(release)
        link = self._link
        if self._share:
            self._limiter.leave(self._share)
        if link is not None:
            link.close()
        for lease in leases:
            lease.release(reason, grace=finish.grace)
        self._leases.clear()
        logger.info("conversation with %s is over: %s", self._machine.joiner or "an unknown joiner", reason)
