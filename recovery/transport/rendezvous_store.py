"""``ControlStore``: a ``torch.distributed.Store`` over the project's ``KeyValue`` port, one scope a process group."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from recovery.errors import PeerUnreachable
from recovery.types import KeyValue

_SLICE_SECONDS = 0.5
"""Longest single wait at the port: a cancelled rendezvous ends within this time."""


class ControlStore(dist.Store):  # type: ignore[name-defined,misc]
    """Lets the ranks of one group meet through ``store``, under ``scope``.

    Calls may come from several threads at once and none holds a lock while it waits: two groups that meet through one
    ``KeyValue`` cannot dead-lock each other. Keys are taken to be written once, as a rendezvous does: a value that a
    wait brought is handed out by the next ``get`` without asking again, since the store may be far away.

    Args:
        store: The port; outlives this object.
        scope: Names the group; never used for two groups.
        timeout_seconds: Longest wait for the other ranks' keys.
        cancelled: Once set, waits in progress and all later calls raise ``PeerUnreachable`` within half a second.
        prefix: Before each key, where several groups share a scope.
    """

    def __init__(
        self,
        store: KeyValue,
        scope: str,
        timeout_seconds: float,
        cancelled: threading.Event | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self._store = store
        self._scope = scope
        self._timeout_seconds = timeout_seconds
        self._cancelled = cancelled
        self._prefix = prefix
        self._fetched: dict[str, bytes] = {}

    # The methods below are torch's interface; C++ calls them from whatever thread builds a group.

    def set(self, key: str, value: str | bytes) -> None:
        self._check_cancelled()
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(self._scope, self._prefix + key, data)
        self._fetched[key] = data

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._fetched.pop(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when every key exists.

        Raises:
            PeerUnreachable: the timeout passed (the message names the keys), or the rendezvous was cancelled.
        """
        seconds = self._timeout_seconds if timeout is None else min(timeout.total_seconds(), self._timeout_seconds)
        deadline = time.monotonic() + seconds
        while missing := [key for key in keys if key not in self._fetched]:
            self._check_cancelled()
            remaining = deadline - time.monotonic()
            names = [self._prefix + key for key in missing]
            try:
                values = self._store.get(self._scope, names, max(0.001, min(remaining, _SLICE_SECONDS)))
            except PeerUnreachable as error:
                if deadline - time.monotonic() <= 0:
                    raise PeerUnreachable(
                        f"no peer at rendezvous {self._scope!r} within {seconds:.1f} s (missing: {', '.join(names)}): "
                        "it died, was cut off, or cannot reach the coordinator"
                    ) from error
            else:
                self._fetched.update(zip(missing, values, strict=True))

    def add(self, key: str, amount: int) -> int:
        self._check_cancelled()
        return self._store.add(self._scope, self._prefix + key, amount)

    def check(self, keys: list[str]) -> bool:
        self._check_cancelled()
        return self._store.exists(self._scope, [self._prefix + key for key in keys])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        self._check_cancelled()

        def as_bytes(value: str | bytes) -> bytes:
            return value.encode() if isinstance(value, str) else bytes(value)

        return self._store.compare_set(self._scope, self._prefix + key, as_bytes(expected), as_bytes(desired))

    def delete_key(self, key: str) -> bool:
        self._check_cancelled()
        self._fetched.pop(key, None)
        return self._store.delete(self._scope, self._prefix + key)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_seconds = timeout.total_seconds()

    def _check_cancelled(self) -> None:
        if self._cancelled is not None and self._cancelled.is_set():
            raise PeerUnreachable(f"rendezvous {self._scope!r} was cancelled")
