"""An S3 server of this process on loopback, a relay in front of it that cuts it off, and damage to its objects."""

from __future__ import annotations

import contextlib
import socket
import threading

import boto3  # type: ignore[import-untyped]
from moto.server import ThreadedMotoServer

from ckpt.objects import FsspecStorage

WAIT = 60.0


class S3:
    """A moto server on a loopback port that stays the same when it is cut off and comes back."""

    def __init__(self) -> None:
        self.server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self.server.start()
        host, self.port = self.server.get_host_and_port()
        self.endpoint = f"http://{host}:{self.port}"
        self.client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket="bucket")

    @property
    def options(self) -> dict[str, object]:
        return {
            "key": "test",
            "secret": "test",
            "client_kwargs": {"endpoint_url": self.endpoint, "region_name": "us-east-1"},
            "config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 2, "read_timeout": 10},
        }

    def stop(self) -> None:
        self.client.close()
        self.server.stop()


class Relay:
    """A TCP relay to a port that refuses connections on command."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.refused = 0
        self._left: int | None = None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut_after(self, requests: int) -> None:
        """Pass on so many requests more, then drop every connection."""
        with self._lock:
            self._left, self.refused = requests, 0

    def heal(self) -> None:
        with self._lock:
            self._left = None

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._open):
            self._end(one)
        for thread in self._threads:
            thread.join(WAIT)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._to))
            self._open |= {client, server}
            for a, b, counts in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._pump, args=(a, b, counts), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source_: socket.socket, target: socket.socket, counts: bool) -> None:
        try:
            while data := source_.recv(65536):
                if counts and not self._passes(data):
                    break
                target.sendall(data)
        except OSError:
            pass
        self._end(source_)
        self._end(target)

    def _passes(self, data: bytes) -> bool:
        with self._lock:
            if self._left is None:
                return True
            if data[:4] in (b"GET ", b"PUT ", b"HEAD", b"POST", b"DELE"):
                if not self._left:
                    self.refused += 1
                    return False
                self._left -= 1
            return True

    @staticmethod
    def _end(one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


def flip(storage: FsspecStorage, path: str) -> None:
    full = storage._full(path)
    content = bytearray(storage._fs.cat_file(full))
    content[-1] ^= 1
    storage._fs.pipe_file(full, bytes(content))
