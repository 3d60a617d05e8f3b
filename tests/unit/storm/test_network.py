"""A storm's network tells whether a fault of a link was felt: without traffic, or without the fault, it was not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from benchmarks.storm.network import SLOW_ROUND_TRIP_SECONDS, Loopback, Namespaces, Network, stage
from recovery.types import Address
from tests.support.wan import why_not_permitted


@pytest.fixture
def echo() -> Iterator[Address]:
    """Answer every connection with what it says."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with closing(connection):
            while data := connection.recv(4096):
                connection.sendall(data)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # the test is over
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield Address("127.0.0.1", listener.getsockname()[1])
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.fixture
def network() -> Iterator[Network]:
    with stage(["w0"], loopback=True) as found:
        assert isinstance(found, Loopback)
        yield found


def dialled(network: Network, echo: Address) -> socket.socket:
    near = network.coordinator_seen_from("w0", echo)
    return socket.create_connection((near.host, near.port), 10)


def test_a_cut_is_felt_when_something_vanished(network: Network, echo: Address) -> None:
    with dialled(network, echo) as connection:
        connection.sendall(b"before")
        assert connection.recv(16) == b"before"
        network.cut("w0")
        connection.sendall(b"lost")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(16)
        assert network.mend("w0")
    with dialled(network, echo) as connection:
        connection.sendall(b"after")
        assert connection.recv(16) == b"after"


def test_a_cut_without_traffic_is_not_called_felt(network: Network, echo: Address) -> None:
    with dialled(network, echo):
        network.cut("w0")
        assert not network.mend("w0")


def test_a_slow_link_delivers_late_and_tells_so(network: Network, echo: Address) -> None:
    with dialled(network, echo) as connection:
        network.slow("w0")
        began = time.monotonic()
        connection.sendall(b"late")
        assert connection.recv(16) == b"late"
        assert time.monotonic() - began >= SLOW_ROUND_TRIP_SECONDS
        assert network.speed_up("w0")


def test_a_slow_link_without_traffic_is_not_called_felt(network: Network, echo: Address) -> None:
    with dialled(network, echo):
        network.slow("w0")
        assert not network.speed_up("w0")


@pytest.mark.wan
@pytest.mark.skipif(bool(why_not_permitted()), reason=why_not_permitted() or "permitted")
def test_faults_in_namespaces_are_felt_by_packets() -> None:
    with stage(["w0", "w1"]) as network:
        assert isinstance(network, Namespaces)
        host = network.data_host("w0")

        def knock() -> None:
            try:
                socket.create_connection((host, 9), 0.3).close()
            except OSError:
                return  # refused, or nothing came back

        network.cut("w0")
        assert not network.mend("w0")
        network.cut("w0")
        knock()
        assert network.mend("w0")
        network.slow("w0")
        knock()
        assert network.speed_up("w0")
