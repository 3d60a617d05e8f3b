"""A ``KeyValue`` in this process's memory."""

from __future__ import annotations

import threading

from recovery.errors import PeerUnreachable


class MemoryStore:
    """Keeps every scope's keys; all methods may be called from several threads at once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[tuple[str, str], bytes] = {}

    def set(self, scope: str, key: str, value: bytes) -> None:
        with self._changed:
            self._values[scope, key] = value
            self._changed.notify_all()

    def get(self, scope: str, keys: list[str], timeout_seconds: float) -> list[bytes]:
        with self._changed:
            self._wait(scope, keys, timeout_seconds)
            return [self._values[scope, key] for key in keys]

    def wait(self, scope: str, keys: list[str], timeout_seconds: float) -> None:
        with self._changed:
            self._wait(scope, keys, timeout_seconds)

    def exists(self, scope: str, keys: list[str]) -> bool:
        with self._changed:
            return all((scope, key) in self._values for key in keys)

    def add(self, scope: str, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get((scope, key), b"0")) + amount
            self._values[scope, key] = str(total).encode()
            self._changed.notify_all()
            return total

    def compare_set(self, scope: str, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._changed:
            if self._values.get((scope, key), b"") == expected:
                self._values[scope, key] = desired
                self._changed.notify_all()
            return self._values.get((scope, key), b"")

    def delete(self, scope: str, key: str) -> bool:
        with self._changed:
            return self._values.pop((scope, key), None) is not None

    def _wait(self, scope: str, keys: list[str], timeout_seconds: float) -> None:
        if not self._changed.wait_for(lambda: all((scope, key) in self._values for key in keys), timeout_seconds):
            missing = [key for key in keys if (scope, key) not in self._values]
            raise PeerUnreachable(f"{scope}: no {', '.join(missing)} within {timeout_seconds} s")
