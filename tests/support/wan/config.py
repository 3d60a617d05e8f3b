"""What an instance is to look like."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.support.wan.errors import WanError
from tests.support.wan.namespaces import HOST

INSTANCE = re.compile(r"[0-9][a-z0-9]{1,9}")

SHAPING = (
    *("rate", "up", "down", "delay", "rtt", "jitter", "loss", "lossdown", "ge", "gedown"),
    *("queue", "upqueue", "downqueue"),
)
"""Keys of a host. ``rate`` sets both directions, ``rtt`` twice the delay; see the README."""

Settings = Mapping[str, str]
"""Keys of ``SHAPING`` with values as the daemon reads them: ``100mbit``, ``40ms``, ``0.1%``, ``512k``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WanConfig:
    """Hosts, and the links between them.

    Attributes:
        hosts: 2 to 32 hosts, each with settings of its own; they get the network's addresses in this order.
        every: Settings of every host, before its own.
        paths: Settings of a direction ``a:b`` or pair ``a-b``, in place of the sending host's.
        own: Name of a host (of ``hosts``, or one more) that is the machine's own namespace; None: none.
        mtu: Of the devices, in bytes.
        seed: Of random losses and jitter: the same packets in the same order meet the same fate.
        segmentation_offload: Hand over TCP data in pieces of up to 64 KiB, as to a network card.
        quantum: Shortest time between rounds of the daemon.
        memory: Most memory for packets.
        realtime: Real-time scheduling of the daemon.
        congestion_control: TCP's, in the hosts; None: the machine's.
        tcp_buffer_bytes: Largest TCP send and receive buffer in the hosts; 0: the machine's.
        sysctls: Set in the hosts.
        subnet: Addresses of the hosts.
        instance: The id: a digit, then 1 to 9 of a-z 0-9; empty: drawn.
        ttl_seconds: The instance goes down by itself after this; 0: never.
    """

    hosts: Mapping[str, Settings]
    every: Settings = field(default_factory=dict)
    paths: Mapping[str, Settings] = field(default_factory=dict)
    own: str | None = None
    mtu: int = 1500
    seed: int = 1
    segmentation_offload: bool = True
    quantum: str = "100us"
    memory: str = "1g"
    realtime: bool = True
    congestion_control: str | None = None
    tcp_buffer_bytes: int = 0
    sysctls: Settings = field(default_factory=dict)
    subnet: str = "10.77.0.0/24"
    instance: str = ""
    ttl_seconds: float = 0.0

    def __post_init__(self) -> None:
        names = self.names
        for name in names:
            if not HOST.fullmatch(name) or name == "all":
                raise WanError(f"bad host name {name!r}: a letter, then at most 11 of a-z 0-9")
        try:
            network = self.network
        except ValueError as error:
            raise WanError(f"bad subnet: {error}") from error
        if not 2 <= len(names) <= 32 or network.num_addresses - 2 < len(names):
            raise WanError("give 2 to 32 hosts, and a subnet that holds them")
        for settings in (self.every, *self.hosts.values(), *self.paths.values()):
            for key, value in settings.items():
                if key not in SHAPING or not re.fullmatch(r"\S+", value):
                    raise WanError(f"bad setting {key}={value}: the keys are {', '.join(SHAPING)}")
        if self.congestion_control and not re.fullmatch(r"[a-z0-9_]+", self.congestion_control):
            raise WanError(f"bad congestion control {self.congestion_control!r}")
        if not 576 <= self.mtu <= 65535:
            raise WanError("the MTU must lie in 576 to 65535")
        if self.instance and not INSTANCE.fullmatch(self.instance):
            raise WanError(f"bad id {self.instance!r}: a digit, then 1 to 9 of a-z 0-9")

    @property
    def names(self) -> list[str]:
        """The hosts, in the order of their addresses."""
        extra = [self.own] if self.own and self.own not in self.hosts else []
        return [*self.hosts, *extra]

    @property
    def network(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(self.subnet)

    def commands(self) -> list[str]:
        """Return the daemon's commands that make the links so."""
        settings = {"all": self.every, **self.hosts, **self.paths}
        return [
            f"set {target} " + " ".join(f"{key} {value}" for key, value in each.items())
            for target, each in settings.items()
            if each
        ]

    def all_sysctls(self) -> list[tuple[str, str]]:
        """Return the hosts' settings with those that ``tcp_buffer_bytes`` means."""
        largest = self.tcp_buffer_bytes
        buffers = (
            [("net.ipv4.tcp_rmem", f"4096 131072 {largest}"), ("net.ipv4.tcp_wmem", f"4096 16384 {largest}")]
            if largest
            else []
        )
        return [*buffers, *self.sysctls.items()]
