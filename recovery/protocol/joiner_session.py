"""Carries out what the joiner's machine decides: threads, memory, hashing, deadlines."""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from protos.recovery.v1 import peer_pb2
from protos.recovery.v1.peer_pb2 import JoinerLetter
from recovery import events
from recovery.clock import Clock, SystemClock
from recovery.errors import MisuseError, RecoveryError, TransferCancelled
from recovery.events import EventSink
from recovery.protocol.chunk_memory import ChunkMemory
from recovery.protocol.joiner import JoinerMachine
from recovery.protocol.joiner_config import JoinerConfig
from recovery.protocol.joiner_io import (
    Check,
    Checked,
    Dial,
    Drop,
    Emit,
    Fail,
    Finish,
    Forget,
    Fork,
    JoinerAction,
    JoinerEvent,
    OpenLink,
    Post,
    Prepare,
    Prepared,
    Probe,
    Probed,
    Say,
    Tick,
    Write,
    Written,
)
from recovery.protocol.joiner_line import DonorLine
from recovery.protocol.ledger import ChunkLedger
from recovery.protocol.letters import sealing_context
from recovery.protocol.ports import Attempt, DonorPeer, OnManifest
from recovery.protocol.ports import Dial as DialPort
from recovery.protocol.ports import OpenLink as OpenLinkPort
from recovery.protocol.spool import ChunkSpool
from recovery.state.manifest import Manifest
from recovery.transport.link import Link
from recovery.transport.sealed import SealingKeys
from recovery.types import Cut

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_MOST_AT_ONCE = 64
"""Events that are handled together if so many wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferResult:
    """What a finished attempt did.

    Attributes:
        first: Manifest of what was lent first, all of it verified in its destinations.
        private: Manifest of the private-copied parts after it, likewise; None if none were wanted.
        payload_bytes: Bytes that came over links.
        reused_bytes: Bytes that were in place before.
        verified_seconds: Until the last byte was verified in its destination.
        took_seconds: Until every thread and receive had ended too.
        failures: Donors that were dropped, with the reason.
        rates: Bytes per second and round trip of each donor, where measured.
    """

    first: Manifest
    private: Manifest | None
    payload_bytes: int
    reused_bytes: int
    verified_seconds: float
    took_seconds: float
    failures: dict[str, RecoveryError] = field(default_factory=dict)
    rates: dict[str, tuple[float, float]] = field(default_factory=dict)


class _Stop:
    """Ends the checking thread."""


_Work = Check | Write | Probe | _Stop


def _nothing() -> None:
    """What is done when some of a chunk's receives have ended, and others of them have not been posted."""


class JoinerSession:
    """One attempt of a transfer: ``run()`` moves and verifies everything, or raises; ``cancel()`` ends it.

    Destination memory belongs to the session until ``run`` has returned or raised; then no thread of it is left and no
    receive is posted.

    Args:
        attempt: What the ticket orders.
        config: How to go about it.
        dial: Opens a direct stream.
        open_link: Opens the joiner's end of a link.
        on_manifest: Makes destinations for a verified manifest.
        ledger: Kept by the caller across attempts; what is verified is noted there also when the attempt fails.
        spool: Kept across restarts of the process; None: not kept.
        probe: Measures a donor's round trip in seconds if ``dial`` did not; None: then it is not measured.
        events: Where events go.
        clock: Source of time.
    """

    def __init__(
        self,
        attempt: Attempt,
        config: JoinerConfig,
        *,
        dial: DialPort,
        open_link: OpenLinkPort,
        on_manifest: OnManifest,
        events: EventSink,
        ledger: ChunkLedger | None = None,
        spool: ChunkSpool | None = None,
        probe: Callable[[DonorPeer], float] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._attempt = attempt
        self._config = config
        self._dial = dial
        self._probe = probe
        self._open_link = open_link
        self._on_manifest = on_manifest
        self._events = events
        self._clock = clock or SystemClock()
        self._keys = SealingKeys() if config.seal else None
        self._machine = JoinerMachine(attempt, config, self._keys.public if self._keys is not None else b"")
        self._memory = ChunkMemory(ledger if ledger is not None else ChunkLedger(), spool)
        self._queue: queue.SimpleQueue[JoinerEvent | BaseException] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._lines: dict[str, DonorLine] = {}
        self._checked: list[JoinerEvent] = []
        self._used = threading.Lock()
        self._failure: BaseException | None = None
        self._finished = False
        self._verified_at = 0.0

    @property
    def machine(self) -> JoinerMachine:
        """The machine, for its counters; read only."""
        return self._machine

    def cancel(self, reason: str) -> None:
        """Have ``run`` raise ``TransferCancelled`` soon, with nothing left behind. Any thread, at any moment."""
        self._queue.put(TransferCancelled(f"transfer {self._attempt.transfer_id} was cancelled: {reason}"))

    def run(self) -> TransferResult:
        """Move and verify everything. Blocks; ``on_manifest`` is called on this thread.

        Raises:
            NoDonorLeft: every donor failed; the message has a line for each.
            DonorBusy: every donor was busy; says when to ask again.
            TransferCancelled: ``cancel`` was called.
            MisuseError: a second call.
            RecoveryError: what ``on_manifest`` raised, for example ``LayoutMismatch``.

        *If it raises*, destinations may have been written in part; what was verified is in the ledger.
        """
        if not self._used.acquire(blocking=False):
            raise MisuseError("a session runs once; make another for the next attempt")
        began = time.monotonic()
        attempt = self._attempt
        self._events(
            events.TransferStarted(
                worker_id=attempt.joiner.worker_id,
                transfer_id=attempt.transfer_id,
                attempt=attempt.number,
                version=attempt.version,
                donors=tuple(peer.name for peer in attempt.donors),
                reason="",
            )
        )
        checker = threading.Thread(target=self._check, name="recovery-joiner-check", daemon=True)
        checker.start()
        try:
            self._loop()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            reason = "done" if self._failure is None else f"the joiner ends: {self._failure}"
            goodbye = JoinerLetter(goodbye=peer_pb2.JoinerGoodbye(done=False, reason=reason))
            for line in self._lines.values():
                if self._failure is not None:
                    line.say(goodbye)
                line.drop(reason)
            for line in self._lines.values():
                line.join()
            self._work.put(_Stop())
            checker.join()
            machine = self._machine
            newest = machine.private or machine.first
            self._events(
                events.TransferEnded(
                    worker_id=attempt.joiner.worker_id,
                    transfer_id=attempt.transfer_id,
                    attempt=attempt.number,
                    cut=newest.cut if newest is not None else Cut(attempt.version),
                    payload_bytes=machine.payload_bytes,
                    reused_bytes=machine.reused_bytes,
                    took_seconds=time.monotonic() - began,
                    failure="" if self._failure is None else f"{type(self._failure).__name__}: {self._failure}",
                )
            )
        if machine.first is None:
            raise MisuseError("a transfer ended without a manifest")
        return TransferResult(
            first=machine.first,
            private=machine.private,
            payload_bytes=machine.payload_bytes,
            reused_bytes=machine.reused_bytes,
            verified_seconds=self._verified_at - began,
            took_seconds=time.monotonic() - began,
            failures=dict(machine.failures),
            rates=machine.rates(self._clock.monotonic()),
        )

    def _loop(self) -> None:
        self._carry_out(self._machine.start(self._clock.monotonic()))
        ticked = self._clock.monotonic()
        while not self._finished:
            try:
                event = self._queue.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                pass
            else:
                self._take(event)
            now = self._clock.monotonic()
            if now - ticked >= _TICK_SECONDS:
                # What happened before is handled before time is judged: a long ``on_manifest`` is nobody's silence.
                for line in self._lines.values():
                    line.tell()
                waiting = self._queue.qsize()
                while waiting > 0 and not self._finished:
                    waiting -= self._take(self._queue.get())
                ticked = now
                moved = {name: count for name, line in self._lines.items() if (count := line.bytes_moved()) is not None}
                if not self._finished:
                    self._carry_out(self._machine.handle(Tick(moved), self._clock.monotonic()))

    def _take(self, first: JoinerEvent | BaseException) -> int:
        """Handle an event and those that wait behind it; return how many."""
        events: list[JoinerEvent] = []
        more: JoinerEvent | BaseException | None = first
        while more is not None:
            if isinstance(more, BaseException):
                raise more
            events.append(more)
            more = self._queue.get() if len(events) < _MOST_AT_ONCE and not self._queue.empty() else None
        self._carry_out(self._machine.handle_all(events, self._clock.monotonic()))
        while self._checked and not self._finished:
            checked, self._checked = self._checked, []
            self._carry_out(self._machine.handle_all(checked, self._clock.monotonic()))
        return len(events)

    def _carry_out(self, actions: list[JoinerAction]) -> None:
        broken: set[str] = set()
        for action in actions:
            match action:
                case Dial(peer):
                    line = DonorLine(
                        peer,
                        self._queue.put,
                        dial=self._dial,
                        probe=self._probe,
                        open_link=self._open_link,
                        seal=self._seal,
                        data_host=self._attempt.data_host,
                    )
                    self._lines[peer.name] = line
                    line.start()
                case Say(donor, letter):
                    if donor not in broken:
                        self._lines[donor].say(letter)
                case OpenLink(donor, scope, lanes, sealing_key):
                    self._lines[donor].open_link(scope, lanes, sealing_key)
                case Prepare(role, manifest):
                    destinations = self._on_manifest(role, manifest)
                    viewable, candidates = self._memory.prepare(role, manifest, destinations, delta=self._config.delta)
                    self._queue.put(Prepared(role, viewable, candidates))
                case Post(donor, flight, key, direct, pulls):
                    memory = self._memory.open_flight(flight, key, direct=direct)
                    all_of_it = sum(pull.num_bytes for pull in pulls) == memory.numel()
                    whole = functools.partial(self._memory.hash, flight, key) if all_of_it else _nothing
                    if donor not in broken and not self._lines[donor].post(memory, pulls, whole):
                        broken.add(donor)  # nothing may be asked for that no receive is posted for
                case Fork(flight, twin, key, direct):
                    self._memory.fork(flight, twin, key, direct=direct)
                case Check(flight, key):
                    found = self._memory.check_hashed(flight, key)
                    if found is not None:
                        self._checked.append(Checked(flight, *found))
                    else:
                        self._work.put(action)
                case Write() | Probe():
                    self._work.put(action)
                case Forget(flight):
                    self._memory.close_flight(flight)
                case Drop(donor, reason):
                    self._lines[donor].drop(reason)
                case Emit(event):
                    self._events(event)
                case Finish():
                    self._finished = True
                    self._verified_at = time.monotonic()
                case Fail(error):
                    raise error

    def _seal(self, link: Link, far_key: bytes, scope: str, donor: str) -> Link:
        if self._keys is None:
            return link
        attempt = self._attempt
        context = (*sealing_context(attempt.run_id, attempt.transfer_id, attempt.number), scope.encode())
        return self._keys.seal(link, far_key, donor=False, context=context, peer=donor)

    def _check(self) -> None:
        """Hash and copy, in the order asked, beside the wire."""
        try:
            while not isinstance(work := self._work.get(), _Stop):
                match work:
                    case Check(flight, key, write):
                        good, written = self._memory.check(flight, key, write=write)
                        self._queue.put(Checked(flight, good, written))
                    case Write(flight, key):
                        self._memory.write(flight, key)
                        self._queue.put(Written(flight))
                    case Probe(key):
                        self._queue.put(Probed(key, self._memory.probe(key)))
        except Exception as error:  # noqa: BLE001 - the thread's root: the session's own thread raises it
            self._queue.put(error)
