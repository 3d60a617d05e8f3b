"""A path that swallows everything: the system gives it up in time, and it is known which one it was."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from recovery.transport.sockets import SocketSet, endpoint
from tests.support import deaf_sockets

WAIT_SECONDS = 30.0


@contextmanager
def connected(listener: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of one connection: whoever dials, and whoever was dialled."""
    with socket.create_connection(listener.getsockname()) as near, listener.accept()[0] as far:
        near.settimeout(WAIT_SECONDS)
        yield near, far


def test_a_cut_connection_is_named_and_given_up_and_others_are_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = endpoint(listener.getsockname())
        with connected(listener) as (near, far), connected(listener) as (healthy, other):
            sockets = SocketSet(("127.0.0.1", 1), [peer])
            assert len(sockets) == 2
            sockets.give_up_after(2.0)
            this = (endpoint(near.getsockname()), peer)
            for each in (near, healthy):
                each.sendall(b"before")
            assert far.recv(6) == other.recv(6) == b"before"
            assert sockets.unanswered() == []
            deaf_sockets.cut([near, far])
            near.sendall(b"lost")
            healthy.sendall(b"heard")
            assert other.recv(5) == b"heard"
            with pytest.raises(TimeoutError, match="timed out"):
                near.recv(1)  # ends by the system's word, long before this end's own patience
            assert near.gettimeout() == WAIT_SECONDS
            assert deaf_sockets.dropped([far]) > 0
            assert sockets.unanswered() == [this]
            deaf_sockets.mend([near, far])
            healthy.sendall(b"still")
            assert other.recv(5) == b"still"
            sockets.close()
            assert sockets.unanswered() == []


def test_a_mended_path_is_not_accused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, connected(listener) as (near, far):
        sockets = SocketSet(("127.0.0.1", 1), [endpoint(listener.getsockname())])
        deaf_sockets.cut([far])
        near.sendall(b"late")
        poll = threading.Event()
        for _ in range(int(WAIT_SECONDS / 0.05)):
            if sockets.unanswered():
                break
            poll.wait(0.05)
        assert sockets.unanswered()
        deaf_sockets.mend([far])
        far.settimeout(WAIT_SECONDS)
        assert far.recv(4) == b"late"
        near.settimeout(WAIT_SECONDS)
        far.sendall(b"answer")
        assert near.recv(6) == b"answer"
        assert sockets.unanswered() == []
        sockets.close()
