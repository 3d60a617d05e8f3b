"""A TCP proxy on loopback that can cut a path: bytes vanish, connections stay open, as when a link goes dead."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

from recovery.types import Address


class CutProxy:
    """Relays to ``target`` until ``cut``; ``swallowed`` then counts what vanished, the proof that the cut was felt."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self._cut = threading.Event()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.swallowed = 0

    def cut(self) -> None:
        """Swallow every byte from now on, both ways, of old and new connections."""
        self._cut.set()

    def mend(self) -> None:
        """Relay new connections again; those that were cut have lost bytes and never recover."""
        self._end_connections()
        self._cut.clear()

    def __enter__(self) -> CutProxy:
        self._spawn(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._end_connections()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _spawn(self, run: object, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, name="cut-proxy", daemon=True)  # type: ignore[arg-type]
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed: the test is over
                return
            try:
                far = socket.create_connection((self._target.host, self._target.port), 10)
            except OSError:  # nobody listens there now: the caller sees the same
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._sockets += [near, far]
            self._spawn(self._relay, near, far)
            self._spawn(self._relay, far, near)

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # one side hung up, or the test is over
            while data := source.recv(65536):
                if self._cut.is_set():
                    with self._lock:
                        self.swallowed += len(data)
                else:
                    sink.sendall(data)
        if not self._cut.is_set():
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _end_connections(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for end in sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
