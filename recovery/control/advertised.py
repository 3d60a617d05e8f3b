"""Addresses that a worker advertises, checked against where its stream comes from: loopback reaches nobody else."""

from __future__ import annotations

import ipaddress
import urllib.parse

import psutil

from protos.recovery.v1 import coordinator_pb2
from recovery.control.security import is_loopback
from recovery.errors import BadConfiguration


def peer_host(peer: str) -> str:
    """Return the address in gRPC's name of a peer, such as ``ipv4:10.0.0.2:4711`` or ``ipv6:%5B::1%5D:4711``.

    An IPv4 address mapped into IPv6 is returned as IPv4; what is no address (a Unix socket) as the empty string.
    """
    kind, _, rest = urllib.parse.unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if kind == "ipv6" and isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)


def own_hosts() -> frozenset[str]:
    """Return the addresses of this machine's interfaces."""
    return frozenset(
        found.address.partition("%")[0] for interface in psutil.net_if_addrs().values() for found in interface
    )


def without_loopback(hello: coordinator_pb2.Hello, peer: str, own: frozenset[str]) -> coordinator_pb2.Hello:
    """Return the hello as others may use it: a worker on another machine loses its loopback addresses.

    Args:
        hello: As the worker said it.
        peer: gRPC's name of the other end of its stream.
        own: Addresses of the coordinator's machine: who comes from there may advertise loopback.

    Raises:
        BadConfiguration: loopback is all that the worker advertises; names both addresses and the remedy.
    """
    host = peer_host(peer)
    if not host or is_loopback(host) or host in own:
        return hello
    addresses = [address for address in hello.peer_addresses if not is_loopback(address.host)]
    data_hosts = [data_host for data_host in hello.data_hosts if not is_loopback(data_host)]
    for what, given, left in (
        ("its peer service", [address.host for address in hello.peer_addresses], addresses),
        ("its data", list(hello.data_hosts), data_hosts),
    ):
        if given and not left:
            raise BadConfiguration(
                f"worker {hello.worker.worker_id[:200]} comes from {host} but advertises {given[0]} for {what}, which "
                "no other machine can reach: give it the address of the interface that the others see (data_host)"
            )
    usable = coordinator_pb2.Hello()
    usable.CopyFrom(hello)
    del usable.peer_addresses[:]
    del usable.data_hosts[:]
    usable.peer_addresses.extend(addresses)
    usable.data_hosts.extend(data_hosts)
    return usable
