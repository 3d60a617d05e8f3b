"""What a worker has to say on one stream to the coordinator: queued messages, and a beat when there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from protos.recovery.v1 import coordinator_pb2
from recovery.control.mailbox import Mailbox
from recovery.errors import RecoveryError, RunRefused


class Outbox(Iterator[coordinator_pb2.WorkerMessage]):
    """The messages of one attachment, the hello first; gRPC takes them in a thread of its own.

    Args:
        hello: What is said first.
        beat_seconds: A Beat is sent when nothing else was for so long.
        silence_seconds: ``on_silence`` is called when ``heard`` was not for so long; zero: never.
        max_messages: How many may wait to be sent.
    """

    def __init__(
        self, hello: coordinator_pb2.Hello, *, beat_seconds: float, silence_seconds: float, max_messages: int
    ) -> None:
        self._beat_seconds = beat_seconds
        self._silence_seconds = silence_seconds
        self._messages: Mailbox[coordinator_pb2.WorkerMessage] = Mailbox(max_messages)
        self._messages.put(coordinator_pb2.WorkerMessage(hello=hello))
        self._beats = 0
        self._heard = time.monotonic()
        self.on_silence: Callable[[], object] = lambda: None

    def put(self, message: coordinator_pb2.WorkerMessage) -> bool:
        """Queue a message; False: too many wait, or this is over."""
        return self._messages.offer(message)

    def end(self) -> None:
        """Take no more; what waits is still sent."""
        self._messages.end(RunRefused("the attachment is over"))

    def heard(self) -> None:
        """Note that something came."""
        self._heard = time.monotonic()

    def __next__(self) -> coordinator_pb2.WorkerMessage:
        try:
            message = self._messages.take(self._beat_seconds)
        except RecoveryError:
            raise StopIteration from None
        if message is not None:
            return message
        if 0 < self._silence_seconds < time.monotonic() - self._heard:
            self.on_silence()
        self._beats += 1
        return coordinator_pb2.WorkerMessage(beat=coordinator_pb2.Beat(number=self._beats))
