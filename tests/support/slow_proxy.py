"""A cut proxy that can also be slow: bytes arrive, late and at a low rate."""

from __future__ import annotations

import contextlib
import socket
import time

from recovery.types import Address
from tests.support.cut_proxy import CutProxy

_BITE_BYTES = 4096


class SlowProxy(CutProxy):
    """Relays at once until ``slow``; ``delayed`` then counts the bytes held back, the proof that it was felt."""

    def __init__(self, target: Address) -> None:
        super().__init__(target)
        self._bytes_per_second = 0.0
        self._delay_seconds = 0.0
        self.delayed = 0

    def slow(self, bytes_per_second: float, delay_seconds: float) -> None:
        """Hold every byte back from now on, both ways; zero and zero: none any more."""
        self._bytes_per_second, self._delay_seconds = bytes_per_second, delay_seconds

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # one side hung up, or the test is over
            while data := source.recv(_BITE_BYTES):
                if self._cut.is_set():
                    with self._lock:
                        self.swallowed += len(data)
                    continue
                rate, delay = self._bytes_per_second, self._delay_seconds
                if rate:
                    time.sleep(delay + len(data) / rate)  # the link itself: later bytes queue behind these
                    with self._lock:
                        self.delayed += len(data)
                sink.sendall(data)
        if not self._cut.is_set():
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
