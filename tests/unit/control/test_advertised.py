"""A worker on another machine that advertises loopback is corrected, or refused by name; one on this machine is not."""

from __future__ import annotations

import pytest

from protos.recovery.v1 import coordinator_pb2
from recovery.control.advertised import own_hosts, peer_host, without_loopback
from recovery.errors import BadConfiguration
from tests.support.scripted_machine import hello

OWN = frozenset({"127.0.0.1", "10.0.0.1", "fe80::1"})


def advertising(*hosts: str, data_hosts: tuple[str, ...] = ()) -> coordinator_pb2.Hello:
    said = hello()
    for host in hosts:
        said.peer_addresses.add(host=host, port=4711)
    said.data_hosts.extend(data_hosts)
    return said


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.2:4711", "10.0.0.2"),
        ("ipv6:%5B::1%5D:4711", "::1"),
        ("ipv6:[2001:db8::7]:4711", "2001:db8::7"),
        ("ipv6:%5B::ffff:10.0.0.2%5D:4711", "10.0.0.2"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", "fe80::1"),
        ("unix:/run/socket", ""),
        ("", ""),
        ("unknown", ""),
    ],
)
def test_a_peers_name_is_read(peer: str, host: str) -> None:
    assert peer_host(peer) == host


@pytest.mark.parametrize("peer", ["ipv4:127.0.0.1:1", "ipv6:%5B::1%5D:1", "ipv4:10.0.0.1:1", "unix:/run/socket"])
def test_a_worker_of_this_machine_may_advertise_loopback(peer: str) -> None:
    said = advertising("127.0.0.1", data_hosts=("127.0.0.1",))
    assert without_loopback(said, peer, OWN) == said


def test_a_remote_worker_keeps_what_others_can_reach() -> None:
    said = advertising("127.0.0.1", "10.0.0.2", "::1", data_hosts=("localhost", "10.0.0.2"))
    usable = without_loopback(said, "ipv4:10.0.0.2:1", OWN)
    assert usable == advertising("10.0.0.2", data_hosts=("10.0.0.2",))
    assert len(said.peer_addresses) == 3


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (advertising("127.0.0.1"), "127.0.0.1 for its peer service"),
        (advertising("10.0.0.2", data_hosts=("::1",)), "::1 for its data"),
    ],
)
def test_a_remote_worker_with_loopback_alone_is_refused_by_name(said: coordinator_pb2.Hello, what: str) -> None:
    """aws-do-eks#50 and others: the wrong interface is found out in minutes of silence; here at the hello.

    Reported in sgl-project/sglang#3226.
    """
    with pytest.raises(BadConfiguration, match=rf"w0 comes from 10\.0\.0\.2 but advertises {what}.*data_host"):
        without_loopback(said, "ipv4:10.0.0.2:1", OWN)


def test_a_remote_worker_without_a_service_is_its_own_affair() -> None:
    assert without_loopback(hello(), "ipv4:10.0.0.2:1", OWN) == hello()


def test_this_machines_addresses_include_loopback() -> None:
    assert "127.0.0.1" in own_hosts()
