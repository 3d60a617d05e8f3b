"""The shell round the run's machine: one task feeds it inputs and carries out, in order, what it decides.

Whatever goes wrong in here (a decision that raises, a disk that refuses) ends the coordinator: it starts again from its
durable history, which is always a state that somebody may have been told of.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from google.protobuf.message import Message

from protos.recovery.v1 import coordinator_pb2, operations_pb2
from recovery.clock import Clock
from recovery.control.inputs import (
    Answer,
    Attached,
    Detached,
    Drop,
    Effect,
    Emit,
    EndScope,
    Input,
    Operated,
    OperationRequest,
    Persist,
    Received,
    Tell,
    Tick,
)
from recovery.control.record import Change
from recovery.control.wire import timestamp
from recovery.errors import BadConfiguration, DonorBusy, RecoveryError
from recovery.events import Event, EventSink, to_json
from recovery.types import WorkerRef

logger = logging.getLogger(__name__)

MAX_PENDING_INPUTS = 10_000
"""Streams are not read any further while so many inputs wait."""

MAX_OUTGOING_MESSAGES = 1024
"""A worker that leaves so many messages unread loses its stream."""

MAX_WATCHERS = 32
MAX_UNREAD_EVENTS = 1000
KEPT_ANSWERS = 1024

_Asked = tuple[OperationRequest, asyncio.Future[Message | RecoveryError]]

# A machine that asks to be woken in the past is woken soon, not in a loop that starves the streams.
_MIN_SLEEP_SECONDS = 0.005


class Machine(Protocol):
    """The pure run machine, as the shell uses it."""

    def handle(self, event: Input, now: float, /) -> list[Effect]:
        """Return what has to be done, in order. ``now`` is monotonic seconds."""

    def next_wakeup(self) -> float | None:
        """Return when a ``Tick`` is wanted; None: never."""


class WorkerStream:
    """The coordinator's end of one worker's stream."""

    def __init__(self, worker: WorkerRef) -> None:
        self.worker = worker
        self.over = asyncio.Event()
        """Set once nothing more is written: everything told has been, or the stream is broken."""
        self.broken = False
        self._messages: deque[coordinator_pb2.CoordinatorMessage] = deque()
        self._changed = asyncio.Event()
        self._end: str | None = None

    @property
    def end_reason(self) -> str | None:
        """Why the stream ends; None: it goes on."""
        return self._end

    def tell(self, message: coordinator_pb2.CoordinatorMessage) -> None:
        """Queue a message; a worker that reads nothing loses its stream."""
        if self._end is not None:
            return
        if len(self._messages) >= MAX_OUTGOING_MESSAGES:
            self.break_off(f"it left {MAX_OUTGOING_MESSAGES} messages unread")
            return
        self._messages.append(message)
        self._changed.set()

    def end(self, reason: str) -> None:
        """End after the messages told so far; the first reason counts."""
        if self._end is None:
            self._end = reason
        self._changed.set()

    def break_off(self, reason: str) -> None:
        """End at once, whatever is still unwritten: the other side does not take it."""
        self.end(reason)
        self.broken = True
        self.over.set()

    async def outgoing(self) -> AsyncIterator[coordinator_pb2.CoordinatorMessage]:
        """Yield messages until the stream ends."""
        while True:
            while self._messages:
                yield self._messages.popleft()
            if self._end is not None:
                return
            self._changed.clear()
            await self._changed.wait()


class RunOwner:
    """Owns the machine. Everything runs on one event loop, apart from the writes to the history.

    Args:
        machine: Decides.
        store: Stores one change durably; called in a thread of its own, one call at a time, in order.
        end_scope: Forgets a rendezvous scope.
        clock: Time.
        events: Where the machine's events go, besides the watchers.
    """

    def __init__(
        self,
        machine: Machine,
        store: Callable[[Change], None],
        end_scope: Callable[[str], None],
        clock: Clock,
        events: EventSink,
    ) -> None:
        self._machine = machine
        self._store = store
        self._end_scope = end_scope
        self._clock = clock
        self._events = events
        self._inputs: deque[Input] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._streams: dict[WorkerRef, WorkerStream] = {}
        self._answers: OrderedDict[str, tuple[OperationRequest, asyncio.Future[Message | RecoveryError]]] = (
            OrderedDict()
        )
        self._watchers: set[asyncio.Queue[operations_pb2.WatchResponse | None]] = set()

    async def run(self) -> None:
        """Feed the machine until cancelled.

        Raises:
            Exception: whatever the machine or the history raised; nothing was told of the decision that failed.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="coordinator-history") as history:
            while True:
                await self._wait_for_input()
                wakeup = self._machine.next_wakeup()
                if wakeup is not None and wakeup <= self._clock.monotonic():
                    await self._decide(Tick(), history)
                if self._inputs:
                    event = self._inputs.popleft()
                    self._room.set()
                    await self._decide(event, history)

    async def attach(self, stream: WorkerStream, hello: coordinator_pb2.Hello) -> None:
        """Make ``stream`` the worker's. A former stream of the same process ends without a word."""
        former = self._streams.get(stream.worker)
        self._streams[stream.worker] = stream
        if former is not None:
            former.end("replaced by a newer stream of the same process")
        await self._put(Attached(stream.worker, hello))

    async def receive(self, stream: WorkerStream, message: coordinator_pb2.WorkerMessage) -> None:
        """Hand in a message; of a stream that was replaced or dropped it is not heard any more."""
        if self._streams.get(stream.worker) is stream:
            await self._put(Received(stream.worker, message))

    def detach(self, stream: WorkerStream, reason: str) -> None:
        """The stream is over; told to the machine if it was the worker's present one. Never waits."""
        if self._streams.get(stream.worker) is stream:
            del self._streams[stream.worker]
            # Past the cap: an end is never lost, and there are no more of them than streams.
            self._inputs.append(Detached(stream.worker, reason))
            self._arrived.set()

    def end_streams(self, reason: str) -> None:
        """End every worker's stream after what it was told; for the coordinator's own end."""
        for stream in self._streams.values():
            stream.end(reason)

    async def operate(self, request_id: str, request: OperationRequest) -> Message | RecoveryError:
        """Return the answer to an operator's request; the same id again gets the same answer, without a second act."""
        known = self._answers.get(request_id)
        if known is not None:
            asked, answer = known
            if type(asked) is not type(request) or asked != request:
                return BadConfiguration(f"request id {request_id} was used for another request: take a new one")
            self._answers.move_to_end(request_id)
        else:
            answer = asyncio.get_running_loop().create_future()
            self._answers[request_id] = (request, answer)
            self._forget_old_answers()
            await self._put(Operated(request_id, request))
        # Shielded: an operator who gives up, or asks again, does not end the request for the others.
        return await asyncio.shield(answer)

    async def watch(self) -> AsyncIterator[operations_pb2.WatchResponse]:
        """Yield events from now on.

        Raises:
            DonorBusy: too many watch already, or this one does not read.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise DonorBusy(f"{MAX_WATCHERS} watch this run already: end one of them")
        queue: asyncio.Queue[operations_pb2.WatchResponse | None] = asyncio.Queue(MAX_UNREAD_EVENTS)
        self._watchers.add(queue)
        try:
            while (response := await queue.get()) is not None:
                yield response
            raise DonorBusy(f"{MAX_UNREAD_EVENTS} events were left unread: watch again")
        finally:
            self._watchers.discard(queue)

    async def _put(self, event: Input) -> None:
        while len(self._inputs) >= MAX_PENDING_INPUTS:
            self._room.clear()
            await self._room.wait()
        self._inputs.append(event)
        self._arrived.set()

    async def _wait_for_input(self) -> None:
        if self._inputs:
            return
        self._arrived.clear()
        wakeup = self._machine.next_wakeup()
        pause = None if wakeup is None else max(wakeup - self._clock.monotonic(), _MIN_SLEEP_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._arrived.wait()

    async def _decide(self, event: Input, history: ThreadPoolExecutor) -> None:
        for effect in self._machine.handle(event, self._clock.monotonic()):
            match effect:
                case Persist(record=record):
                    await asyncio.get_running_loop().run_in_executor(history, self._store, record)
                case Tell(worker=worker, message=message):
                    stream = self._streams.get(worker)
                    if stream is not None:
                        stream.tell(message)
                case Drop(worker=worker, reason=reason):
                    stream = self._streams.pop(worker, None)
                    if stream is not None:
                        stream.end(reason)
                case Answer(request_id=request_id, answer=answer):
                    self._answer(request_id, answer)
                case Emit(event=happened):
                    self._emit(happened)
                case EndScope(scope=scope):
                    self._end_scope(scope)

    def _forget_old_answers(self) -> None:
        surplus = len(self._answers) - KEPT_ANSWERS
        if surplus > 0:
            # One that is still waited for stays, however many came after it: nobody else could give its answer.
            given = (request_id for request_id, (_, answer) in self._answers.items() if answer.done())
            for request_id in list(itertools.islice(given, surplus)):
                del self._answers[request_id]

    def _answer(self, request_id: str, answer: Message | RecoveryError) -> None:
        request, waiting = self._answers.get(request_id, (None, None))
        if isinstance(request, operations_pb2.ListRequest):
            # It acts on nothing, so that it may be asked anew: kept, its answers would crowd out those of orders.
            del self._answers[request_id]
        if waiting is None:
            logger.warning("an answer to request %s, which nobody waits for", request_id)
        elif not waiting.done():
            waiting.set_result(answer)

    def _emit(self, event: Event) -> None:
        self._events(event)
        if not self._watchers:
            return
        response = operations_pb2.WatchResponse(
            at=timestamp(self._clock.wall()), event=type(event).__name__, fields_json=to_json(event)
        )
        for queue in tuple(self._watchers):
            if queue.full():
                # Make room for the word that ends it: a watcher that does not read must not hold memory.
                queue.get_nowait()
                self._watchers.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(response)


def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task whose name shows in asyncio's debugging output."""
    return asyncio.get_running_loop().create_task(work, name=name)
