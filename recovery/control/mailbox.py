"""A bounded queue between two threads that can end: what was put in before the end is still taken out, then the end."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

from recovery.errors import RecoveryError

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Letters in order, at most ``capacity`` at once. Every method may be called from any thread."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._letters: deque[T] = deque()
        self._end: RecoveryError | None = None
        self._changed = threading.Condition()

    def offer(self, letter: T) -> bool:
        """Put a letter in without waiting; False: full, or ended."""
        with self._changed:
            if self._end is not None or len(self._letters) >= self._capacity:
                return False
            self._letters.append(letter)
            self._changed.notify_all()
            return True

    def put(self, letter: T) -> bool:
        """Put a letter in, waiting for room until the mailbox ends; False: ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or len(self._letters) < self._capacity)
            if self._end is not None:
                return False
            self._letters.append(letter)
            self._changed.notify_all()
            return True

    def take(self, timeout_seconds: float | None) -> T | None:
        """Return the oldest letter, or None if none came in time; ``timeout_seconds=None`` waits for ever.

        Raises:
            RecoveryError: the error given to ``end``, once all letters were taken.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._changed:
            while not self._letters:
                if self._end is not None:
                    # A fresh object each time: several threads may raise it, each with its own traceback.
                    raise type(self._end)(str(self._end)) from self._end
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return None
                self._changed.wait(remaining)
            letter = self._letters.popleft()
            self._changed.notify_all()
            return letter

    def end(self, why: RecoveryError, *, discard: bool = False) -> None:
        """Accept no more letters; only the first end counts. ``discard`` throws away what was not taken yet."""
        with self._changed:
            if self._end is None:
                self._end = why
            if discard:
                self._letters.clear()
            self._changed.notify_all()

    @property
    def ended(self) -> RecoveryError | None:
        """Why the mailbox ended; None: it goes on."""
        with self._changed:
            return self._end
