"""The threads of one end of a conversation: named, owned, and joined when it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

RECEIVE_SECONDS = 0.5
"""Longest wait for a letter, after which a thread looks whether it should end."""

WAIT_SECONDS = 600.0
"""Longest wait for one message: the machine watches progress and shuts the link long before. It bounds the life of a
thread whose wait gloo does not end (see ``Link.shut``)."""

_LET_GO_SECONDS = 0.1
"""How long lanes' threads are waited for once their link is shut: then nothing is read or written for them any more."""


class Crew:
    """Starts threads until it is ended, then waits for them.

    Args:
        name: Begins every thread's name.
        last: Ends it.

    Attributes:
        ended: Set by ``end``; for what the threads call.
    """

    def __init__(self, name: str, last: str = "") -> None:
        self._name = name
        self._last = last
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._of_lanes: set[threading.Thread] = set()
        self.ended = threading.Event()

    def spawn(self, what: str, target: Callable[[], None], *, of_lane: bool = False) -> None:
        """Start a thread; no-op once ended. ``of_lane``: it may sit in a wait that nothing ends, and is left there."""
        with self._lock:
            if self.ended.is_set():
                return
            thread = threading.Thread(target=target, name=f"{self._name}-{what}{self._last}", daemon=True)
            self._threads.append(thread)
            if of_lane:
                self._of_lanes.add(thread)
            thread.start()

    def end(self) -> None:
        """Start no more threads. Twice without harm."""
        with self._lock:
            self.ended.set()

    def join(self, release: Callable[[], None]) -> None:
        """Return when all threads have ended, those of lanes after a short time at the latest.

        Args:
            release: Ends what they wait for. Called before each look: a thread may have opened more meanwhile.
        """
        while True:
            with self._lock:
                threads, self._threads = self._threads, []
            release()
            if not threads:
                return  # none was left, and none is started any more
            deadline = time.monotonic() + _LET_GO_SECONDS
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()) if thread in self._of_lanes else None)
