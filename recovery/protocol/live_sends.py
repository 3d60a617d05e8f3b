"""Which of a donor's sends read live memory at this moment."""

from __future__ import annotations

import threading

from recovery.protocol.ports import JOURNAL, OUTER, PRIVATE, SCALARS, Role


class LiveSends:
    """Pulls whose bytes are being read from live memory right now; the guard's callback asks which."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pulls: dict[Role, set[int]] = {role: set() for role in (OUTER, PRIVATE, JOURNAL, SCALARS)}

    def begin(self, role: Role, pull_id: int) -> None:
        with self._lock:
            self._pulls[role].add(pull_id)

    def end(self, role: Role, pull_id: int) -> None:
        with self._lock:
            self._pulls[role].discard(pull_id)

    def take(self, role: Role) -> tuple[int, ...]:
        with self._lock:
            taken = tuple(sorted(self._pulls[role]))
            self._pulls[role].clear()
            return taken
