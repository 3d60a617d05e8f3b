"""A direct stream inside this process: letters through queues, serialised as on the wire."""

from __future__ import annotations

import queue
import threading
from typing import Generic, TypeVar

from google.protobuf.message import Message

from protos.recovery.v1.peer_pb2 import DonorLetter, JoinerLetter
from recovery.errors import DonorLost

Sent = TypeVar("Sent", bound=Message)
Got = TypeVar("Got", bound=Message)


class _Pipe:
    """Both directions, and why they ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reason: str | None = None
        self.queues: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue(), queue.SimpleQueue()]

    def end(self, reason: str) -> None:
        with self.lock:
            if self.reason is None:
                self.reason = reason
                for each in self.queues:
                    each.put(None)


class MemoryConversation(Generic[Sent, Got]):
    """One end. Letters that were sent before the end are received before its error is raised."""

    def __init__(self, pipe: _Pipe, mine: int, got: type[Got]) -> None:
        self.round_trip_seconds: float | None = None
        self._pipe = pipe
        self._out = pipe.queues[1 - mine]
        self._in = pipe.queues[mine]
        self._got = got
        self.sent: list[Sent] = []

    def send(self, letter: Sent, /) -> None:
        with self._pipe.lock:
            if self._pipe.reason is not None:
                raise DonorLost(f"the conversation has ended: {self._pipe.reason}")
            self.sent.append(letter)
            self._out.put(letter.SerializeToString())

    def receive(self, timeout_seconds: float, /) -> Got | None:
        try:
            data = self._in.get(timeout=timeout_seconds)
        except queue.Empty:
            return None
        if data is None:
            self._in.put(None)
            raise DonorLost(f"the conversation has ended: {self._pipe.reason}")
        letter = self._got()
        letter.ParseFromString(data)
        return letter

    def close(self, reason: str, /) -> None:
        self._pipe.end(reason)


def conversation_pair() -> tuple[
    MemoryConversation[JoinerLetter, DonorLetter], MemoryConversation[DonorLetter, JoinerLetter]
]:
    """Return the joiner's and the donor's end of a new stream."""
    pipe = _Pipe()
    return MemoryConversation(pipe, 0, DonorLetter), MemoryConversation(pipe, 1, JoinerLetter)
