"""How the two ends of a link find each other: keys and values that travel as letters of their conversation.

The ends are connected already, so that nobody in between has to be asked: a key that one end sets is at the other end
after half a round trip, and setting does not wait. A coordinator that is away does not keep a transfer from opening.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from protos.recovery.v1.peer_pb2 import Meeting
from recovery.errors import DonorRefused, MisuseError, PeerUnreachable
from recovery.transport.link import MAX_LANES
from recovery.types import KIB, MIB

_MAX_VALUE_BYTES = 64 * KIB
_MAX_NAME_BYTES = 256
_MAX_KEYS = 16 * MAX_LANES
_MAX_TOTAL_BYTES = MIB


class MeetingPoint:
    """One end's view of the keys of both, as a ``KeyValue``. Thread-safe.

    Scopes are not told apart: a conversation has one link.

    Args:
        say: Sends a letter to the other end; does not wait.
    """

    def __init__(self, say: Callable[[Meeting], None]) -> None:
        self._say = say
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._end = ""

    def heard(self, letter: Meeting) -> None:
        """The other end has set a key.

        Raises:
            DonorRefused: more, or more bytes, than any link has to tell.
        """
        if len(letter.value) > _MAX_VALUE_BYTES or len(letter.key.encode()) > _MAX_NAME_BYTES:
            raise DonorRefused(f"the other end set a key of {len(letter.key)} letters to {len(letter.value)} bytes")
        self._store(letter.key, letter.value)

    def end(self, reason: str) -> None:
        """Nothing more will be heard: every wait raises. Twice without harm; the first reason stays."""
        with self._changed:
            self._end = self._end or reason
            self._changed.notify_all()

    def set(self, scope: str, key: str, value: bytes) -> None:
        del scope
        self._store(key, value)
        self._say(Meeting(key=key, value=value))

    def get(self, scope: str, keys: list[str], timeout_seconds: float) -> list[bytes]:
        self.wait(scope, keys, timeout_seconds)
        with self._changed:
            return [self._values[key] for key in keys]

    def wait(self, scope: str, keys: list[str], timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while missing := [key for key in keys if key not in self._values]:
                if self._end:
                    raise PeerUnreachable(f"the other end of {scope!r} left: {self._end}")
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise PeerUnreachable(f"the other end of {scope!r} has not set {', '.join(missing)}")
                self._changed.wait(remaining)

    def exists(self, scope: str, keys: list[str]) -> bool:
        del scope
        with self._changed:
            return all(key in self._values for key in keys)

    # What would need somebody who decides between the two.

    def add(self, scope: str, key: str, amount: int) -> int:
        raise MisuseError(f"two ends cannot count together at {scope!r} ({key}, {amount})")

    def compare_set(self, scope: str, key: str, expected: bytes, desired: bytes) -> bytes:
        raise MisuseError(f"two ends cannot compare and set at {scope!r} ({key}: {expected!r} to {desired!r})")

    def delete(self, scope: str, key: str) -> bool:
        raise MisuseError(f"what the other end of {scope!r} was told cannot be taken back ({key})")

    def _store(self, key: str, value: bytes) -> None:
        with self._changed:
            self._num_bytes += len(value) - len(self._values.get(key, b""))
            if (key not in self._values and len(self._values) >= _MAX_KEYS) or self._num_bytes > _MAX_TOTAL_BYTES:
                raise DonorRefused(f"more than {_MAX_KEYS} keys or {_MAX_TOTAL_BYTES} bytes for one link")
            self._values[key] = bytes(value)
            self._changed.notify_all()
