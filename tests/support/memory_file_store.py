"""A ``KeyValue`` in a folder, for tests whose two ends are processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from recovery.errors import PeerUnreachable

_POLL_SECONDS = 0.005


class FileStore:
    """One file a key. ``add`` and ``compare_set`` are not atomic: gloo's rendezvous does not use them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, scope: str, key: str) -> Path:
        return self._folder / f"{scope}/{key}".replace("/", "__")

    def set(self, scope: str, key: str, value: bytes) -> None:
        path = self._path(scope, key)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_bytes(value)
        temporary.rename(path)

    def get(self, scope: str, keys: list[str], timeout_seconds: float) -> list[bytes]:
        self.wait(scope, keys, timeout_seconds)
        return [self._path(scope, key).read_bytes() for key in keys]

    def wait(self, scope: str, keys: list[str], timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not self.exists(scope, keys):
            if time.monotonic() > deadline:
                raise PeerUnreachable(f"{scope}: no {keys} within {timeout_seconds} s")
            time.sleep(_POLL_SECONDS)

    def exists(self, scope: str, keys: list[str]) -> bool:
        return all(self._path(scope, key).exists() for key in keys)

    def add(self, scope: str, key: str, amount: int) -> int:
        total = amount + (int(self._path(scope, key).read_bytes()) if self.exists(scope, [key]) else 0)
        self.set(scope, key, str(total).encode())
        return total

    def compare_set(self, scope: str, key: str, expected: bytes, desired: bytes) -> bytes:
        current = self._path(scope, key).read_bytes() if self.exists(scope, [key]) else b""
        if current == expected:
            self.set(scope, key, desired)
            return desired
        return current

    def delete(self, scope: str, key: str) -> bool:
        existed = self.exists(scope, [key])
        self._path(scope, key).unlink(missing_ok=True)
        return existed
