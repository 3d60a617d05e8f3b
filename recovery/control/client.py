"""A worker's side of the control plane: one stream to the coordinator, held open for the process's life.

Two threads, both named and joined: ``coordinator-stream`` connects, says hello and reads; ``coordinator-dispatch``
calls the owner back, one message at a time, in the order of arrival. gRPC answers the keepalive pings that are this
worker's lease in threads of its own, without the GIL: a busy process is not a lost one.

gRPC and ``fork`` do not go together: start data loaders with the ``spawn`` context, or before the client.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from protos.recovery.v1 import coordinator_pb2, coordinator_pb2_grpc
from recovery.control.channel import PING_TIMEOUT_SECONDS, open_channel
from recovery.control.key_value import RendezvousKeyValue
from recovery.control.outbox import Outbox
from recovery.control.rpc_errors import cause, details_of, told_failure
from recovery.control.security import SecurityConfig
from recovery.control.wire import from_proto
from recovery.errors import (
    BadConfiguration,
    CoordinatorUnreachable,
    MisuseError,
    RecoveryError,
    Stop,
)
from recovery.types import Address, KeyValue

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientConfig:
    """Times of a worker's stream to its coordinator.

    Attributes:
        beat_seconds: A Beat is sent when nothing else was for so long; keeps proxies from closing the stream.
        silence_seconds: A stream on which nothing came for so long is given up. Zero: HTTP/2 keepalive alone decides,
            which is right unless a proxy answers the pings.
        ping_timeout_seconds: How long the coordinator may leave a keepalive ping unanswered.
        first_backoff_seconds: Pause before the first attempt to reconnect; doubled after each that fails.
        max_backoff_seconds: The longest pause. Random between half and the whole of it.
        linger_seconds: How long ``close`` waits for the Goodbye to arrive.
        outbox_messages: How many messages may wait to be sent; one more ends the attachment.
    """

    beat_seconds: float = 2.0
    silence_seconds: float = 0.0
    ping_timeout_seconds: float = PING_TIMEOUT_SECONDS
    first_backoff_seconds: float = 0.05
    max_backoff_seconds: float = 0.5
    linger_seconds: float = 2.0
    outbox_messages: int = 1024

    def __post_init__(self) -> None:
        if self.beat_seconds <= 0 or self.first_backoff_seconds <= 0 or self.outbox_messages < 1:
            raise BadConfiguration("beat_seconds, first_backoff_seconds and outbox_messages must be above zero")
        if self.max_backoff_seconds < self.first_backoff_seconds:
            raise BadConfiguration("max_backoff_seconds is below first_backoff_seconds")
        if 0 < self.silence_seconds <= self.beat_seconds:
            raise BadConfiguration("silence_seconds must be longer than beat_seconds, or zero")


class CoordinatorClient:
    """Keeps a worker attached to its run, across losses of the link and restarts of the coordinator.

    Args:
        address: The coordinator's.
        security: Equal to the coordinator's.
        hello: Called on the stream's thread before each attempt; says what the worker holds *now*.
        on_message: Called on the dispatch thread with every message, Welcome, Rejected and Evicted included; Beats
            excepted. It may call ``send``. If it raises, the client closes and the owner's next call raises that error.
        on_detached: Called on the dispatch thread after the last message of an attachment, with the reason; the
            client reconnects by itself unless ``refusal`` is set by then.
        config: Times.
    """

    def __init__(
        self,
        address: Address | str,
        security: SecurityConfig,
        hello: Callable[[], coordinator_pb2.Hello],
        on_message: Callable[[coordinator_pb2.CoordinatorMessage], None],
        on_detached: Callable[[str], None],
        *,
        config: ClientConfig | None = None,
    ) -> None:
        self.address = address if isinstance(address, Address) else Address.parse(address)
        self._security = security
        self._hello = hello
        self._on_message = on_message
        self._on_detached = on_detached
        self._config = config or ClientConfig()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._attached = False
        self._refusal: RecoveryError | None = None
        self._failed: BaseException | None = None
        self._last_cause = "no attempt was made yet"
        self._outbox: Outbox | None = None
        self._cancel: Callable[[], object] | None = None
        self._deliveries: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._key_value: RendezvousKeyValue | None = None

    def start(self) -> CoordinatorClient:
        """Begin to connect; returns at once.

        Raises:
            BadConfiguration: the address or the security does not allow a channel.
            MisuseError: started before.
        """
        if self._threads or self._closing.is_set():
            raise MisuseError("the coordinator's client was started before")
        # Opened here for its checks as well: a configuration error belongs to the caller, not to a thread.
        self._security.check_files()
        self._key_value = RendezvousKeyValue(self._open_channel(), str(self.address))
        self._threads = [
            threading.Thread(target=self._stream_root, name="coordinator-stream", daemon=True),
            threading.Thread(target=self._dispatch_root, name="coordinator-dispatch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __enter__(self) -> CoordinatorClient:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    @property
    def attached(self) -> bool:
        """True: the coordinator welcomed this worker on the present stream."""
        with self._changed:
            return self._attached

    @property
    def refusal(self) -> RecoveryError | None:
        """Why the coordinator does not want this worker, after which no attempt is made; None: it does, or is away."""
        with self._changed:
            return self._refusal

    def wait_attached(self, timeout_seconds: float) -> None:
        """Return once the coordinator has welcomed this worker.

        Raises:
            RunRefused: it refused instead, with its message; or another Stop that it named.
            CoordinatorUnreachable: nobody answered within ``timeout_seconds``; the message says why the last attempt
                failed. The client goes on trying.
            MisuseError: not started, or closed.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while True:
                self._raise_if_over()
                if self._attached:
                    return
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise CoordinatorUnreachable(
                        f"no coordinator at {self.address} within {timeout_seconds:g} s: {self._last_cause}; "
                        "is `recovery coordinator` running, and is this its address?"
                    )
                self._changed.wait(remaining)

    def send(self, message: coordinator_pb2.WorkerMessage) -> bool:
        """Queue a message for the present attachment; never blocks.

        Returns:
            False: there is none now, and the message is dropped: a message belongs to its attachment, and what was
            lost with it has to be said again after the next Welcome, if it still matters. True does not mean
            delivered.

        Raises:
            RecoveryError: the refusal that ended the client.
            MisuseError: not started, or closed.
        """
        with self._changed:
            self._raise_if_over()
            outbox, cancel = self._outbox, self._cancel
            if not self._attached or outbox is None:
                return False
        if outbox.put(message):
            return True
        # The coordinator takes nothing any more: a new attachment begins with a fresh picture.
        self._note(f"{self._config.outbox_messages} messages were waiting to be sent")
        if cancel is not None:
            cancel()
        return False

    def key_value(self) -> KeyValue:
        """Return the run's rendezvous; it survives detachments and ends with ``close``.

        Raises:
            MisuseError: not started.
        """
        if self._key_value is None:
            raise MisuseError("the coordinator's client is not started")
        return self._key_value

    def close(self, reason: str = "") -> None:
        """Say goodbye, end both threads and every wait; twice without harm. May be called from a callback."""
        self._closing.set()
        with self._changed:
            outbox, cancel = self._outbox, self._cancel
            attached = self._attached
            self._changed.notify_all()
        if outbox is not None:
            outbox.put(coordinator_pb2.WorkerMessage(goodbye=coordinator_pb2.Goodbye(reason=reason)))
            outbox.end()
        here = threading.current_thread()
        for thread in self._threads[:1]:
            if thread is not here:
                # Nobody hears a goodbye on a stream that was never welcomed.
                thread.join(self._config.linger_seconds if attached else 0.0)
        if cancel is not None:
            cancel()
        if self._key_value is not None:
            self._key_value.close()
        for thread in self._threads:
            if thread is not here:
                thread.join()

    def _raise_if_over(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._refusal is not None:
            raise type(self._refusal)(str(self._refusal)) from None
        if self._closing.is_set():
            raise MisuseError("the coordinator's client is closed")
        if not self._threads:
            raise MisuseError("the coordinator's client is not started")

    def _open_channel(self) -> grpc.Channel:
        return open_channel(
            self.address,
            self._security,
            what="the coordinator",
            ping_timeout_seconds=self._config.ping_timeout_seconds,
        )

    def _note(self, why: str) -> None:
        with self._changed:
            self._last_cause = why

    # The stream's thread

    def _stream_root(self) -> None:
        try:
            self._stay_attached()
        except Exception as error:  # thread's root: kept, and raised at the owner's next call
            logger.exception("the stream to the coordinator at %s failed", self.address)
            self._fail(error)
        finally:
            self._deliveries.put(None)

    def _stay_attached(self) -> None:
        backoff = self._config.first_backoff_seconds
        while not self._closing.is_set():
            welcomed = self._attach_once()
            if self._refusal is not None or self._failed is not None:
                return
            if welcomed:
                backoff = self._config.first_backoff_seconds
            # Random, so that a restarted coordinator is not met by all workers at once.
            self._closing.wait(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, self._config.max_backoff_seconds)

    def _attach_once(self) -> bool:
        """Make one attempt and stay as long as it lasts; True: it was welcomed."""
        channel = self._open_channel()
        try:
            outbox = Outbox(
                self._hello(),
                beat_seconds=self._config.beat_seconds,
                silence_seconds=self._config.silence_seconds,
                max_messages=self._config.outbox_messages,
            )
            call: Any = coordinator_pb2_grpc.CoordinatorStub(channel).Attach(outbox)
            with self._changed:
                self._outbox, self._cancel = outbox, call.cancel
            outbox.on_silence = call.cancel
            if self._closing.is_set():
                # close() came before there was a call that it could cancel.
                call.cancel()
            try:
                why = "the coordinator ended the stream"
                for message in call:
                    outbox.heard()
                    # What the coordinator gave as its reason says more than that the stream ended after it.
                    why = self._received(message) or why
            except grpc.RpcError as error:
                why = self._lost(error)
            finally:
                outbox.end()
                outbox.on_silence()
        finally:
            channel.close()
        with self._changed:
            welcomed, self._attached = self._attached, False
            self._outbox = self._cancel = None
            self._last_cause = why if self._refusal is None else str(self._refusal)
            # A detachment that the owner asked for is no news.
            tell = (welcomed or self._refusal is not None) and not self._closing.is_set()
            reason = self._last_cause
            self._changed.notify_all()
        if tell:
            self._deliveries.put(lambda: self._on_detached(reason))
        return welcomed

    def _received(self, message: coordinator_pb2.CoordinatorMessage) -> str:
        """File one message; return the reason it gives for ending the stream, or nothing."""
        kind = message.WhichOneof("kind")
        if kind is None or kind == "beat":
            return ""
        reason = ""
        with self._changed:
            if kind == "welcome":
                self._attached = True
            elif kind in ("rejected", "evicted"):
                failure = from_proto(getattr(message, kind).failure)
                self._refuse(failure)
                reason = str(failure)
            self._changed.notify_all()
        self._deliveries.put(lambda: self._on_message(message))
        return reason

    def _lost(self, error: grpc.RpcError) -> str:
        told = told_failure(error)
        with self._changed:
            if told is not None:
                self._refuse(told)
                return str(told)
            trouble = "" if self._attached else self._security.handshake_trouble(details_of(error))
        return trouble or cause(error)

    def _refuse(self, failure: RecoveryError) -> None:
        # Other classes than Stop say that another attempt may succeed.
        if isinstance(failure, Stop) and not isinstance(failure, CoordinatorUnreachable):
            self._refusal = failure
        self._last_cause = str(failure)

    # The dispatch thread

    def _dispatch_root(self) -> None:
        while (delivery := self._deliveries.get()) is not None:
            try:
                delivery()
            except Exception as error:  # thread's root: kept, and raised at the owner's next call
                logger.exception("a callback of the coordinator's client failed")
                self._fail(error)
                return

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failed is None:
                self._failed = error
            cancel = self._cancel
            self._changed.notify_all()
        if cancel is not None:
            cancel()
