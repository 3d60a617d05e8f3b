"""One joiner's conversation with one donor, seen from either end: letters in, letters out, and an end with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from google.protobuf.message import Message

from recovery.control.channel import MAX_MESSAGE_BYTES
from recovery.control.mailbox import Mailbox
from recovery.errors import DonorLost, MisuseError, RecoveryError

Sent = TypeVar("Sent", bound=Message)
Got = TypeVar("Got", bound=Message)

MAX_WAITING_LETTERS = 4096
"""Letters that wait in each direction. The reader of the stream stops when so many came unread, and gRPC's flow control
holds the sender; a sender that finds so many unsent gives the conversation up."""


class StreamConversation(Generic[Sent, Got]):
    """Letters over a gRPC stream. All methods may be called from any thread.

    Made by ``dial`` (joiner) and ``PeerServer`` (donor). It ends once: by ``close``, by the other side, or by the loss
    of the link, which keepalive finds within about 3 s even when the other process is frozen.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._inbox: Mailbox[Got] = Mailbox(MAX_WAITING_LETTERS)
        self._outbox: Mailbox[Sent] = Mailbox(MAX_WAITING_LETTERS)
        self._on_close: Callable[[], None] = lambda: None
        self.close_reason = ""
        self.round_trip_seconds: float | None = None
        """Of an empty call on the stream's connection; None: not measured, as at the donor's end."""

    def send(self, letter: Sent) -> None:
        """Queue a letter; does not wait for it to arrive.

        Raises:
            DonorLost: the conversation has ended, with the reason; or the other side reads nothing any more.
            MisuseError: the letter is longer than a message may be; nothing was sent.
        """
        if letter.ByteSize() > MAX_MESSAGE_BYTES:
            raise MisuseError(f"a letter to {self.peer} has {letter.ByteSize()} bytes, more than {MAX_MESSAGE_BYTES}")
        if self._outbox.offer(letter):
            return
        ended = self._inbox.ended or self._outbox.ended
        if ended is None:
            ended = DonorLost(f"{self.peer} does not read: {MAX_WAITING_LETTERS} letters are unsent")
            self.end(ended)
        raise type(ended)(str(ended)) from ended

    def receive(self, timeout_seconds: float | None) -> Got | None:
        """Return the next letter, or None if none came within ``timeout_seconds`` (None: no limit).

        Raises:
            DonorLost: the conversation has ended and every letter that came before was returned; the message says
                why. Another class of ``RecoveryError`` if the other side's server named one (``DonorBusy``,
                ``RunRefused``).
        """
        return self._inbox.take(timeout_seconds)

    @property
    def ended(self) -> RecoveryError | None:
        """Why the conversation ended; None: it goes on, as far as this side knows."""
        return self._inbox.ended

    def close(self, reason: str) -> None:
        """End the conversation after the letters already sent; twice without harm. Waits at most a second."""
        if self._inbox.ended is None:
            self.close_reason = reason
        self._inbox.end(DonorLost(f"this side closed the conversation with {self.peer}: {reason}"))
        self._outbox.end(DonorLost(f"this side closed the conversation with {self.peer}: {reason}"))
        self._on_close()

    # For the stream's adapter

    def end(self, why: RecoveryError) -> None:
        """The stream is over: what was not sent cannot be."""
        self._inbox.end(why)
        self._outbox.end(why, discard=True)

    def deliver(self, letter: Got) -> bool:
        """Hand in a letter that arrived, waiting for room; False: nobody wants it any more."""
        return self._inbox.put(letter)

    def outgoing(self) -> Iterator[Sent]:
        """Yield letters to send until the conversation ends."""
        while True:
            try:
                letter = self._outbox.take(None)
            except RecoveryError:
                return
            if letter is not None:
                yield letter

    def on_close(self, act: Callable[[], None]) -> None:
        """Have ``close`` call ``act`` last."""
        self._on_close = act
