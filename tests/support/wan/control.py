"""Talks to an instance's daemon: commands over its socket, counters back."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.wan import namespaces
from tests.support.wan.errors import WanError
from tests.support.wan.registry import Place

PUNCTUAL_MICROSECONDS = 300.0
"""A figure that was measured over the emulator counts only if packets were late by less than this on average."""

_ANSWER_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Late:
    """How far behind their due time packets were handed over; above ``PUNCTUAL_MICROSECONDS``: the machine's doing."""

    packets: int
    mean_microseconds: float
    max_microseconds: float
    over_a_millisecond: int

    @property
    def counts(self) -> bool:
        """Whether a figure that was measured meanwhile is the link's and not the machine's."""
        return self.packets > 0 and self.mean_microseconds < PUNCTUAL_MICROSECONDS


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCount:
    """One direction of a host's line: offered = packets + the drops + queued."""

    offered_packets: int
    offered_bytes: int
    packets: int
    bytes: int
    drop_queue: int
    drop_loss: int
    drop_cut: int
    drop_memory: int
    queued_packets: int
    queued_bytes: int
    queue_peak_bytes: int

    @property
    def drops(self) -> int:
        return self.drop_queue + self.drop_loss + self.drop_cut + self.drop_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStats:
    up: LinkCount
    down: LinkCount
    cut: bool
    alive: bool
    unroutable: int
    device_errors: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Counters since the start or the last reset."""

    uptime_seconds: float
    cpu_seconds: float
    late: Late
    hosts: Mapping[str, HostStats]


def ask(place: Place, line: str) -> dict[str, Any]:
    """Send a command and return the daemon's answer.

    Raises:
        WanError: it refuses, with its reason, or does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        try:
            connection.connect(str(place.control))
            connection.sendall(line.encode() + b"\n")
            connection.shutdown(socket.SHUT_WR)
            data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except OSError as error:
            raise WanError(f"instance {place.instance}: the daemon does not answer ({error})") from error
    try:
        reply: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise WanError(f"instance {place.instance}: the daemon's answer broke off") from error
    if not reply.pop("ok"):
        raise WanError(reply["error"])
    return reply


def raw_stats(place: Place) -> dict[str, Any]:
    """Return the counters as the daemon writes them, with what the devices themselves had to drop."""
    found = ask(place, "stats")
    record = place.load()
    for name, host in (record.hosts if record is not None else {}).items():
        found["hosts"][name]["dev_tx_dropped"] = namespaces.device_drops(host.namespace, host.device)
    return found


def stats(place: Place) -> Stats:
    """Return the counters, typed."""
    found = ask(place, "stats")
    late = found["late"]
    return Stats(
        uptime_seconds=found["uptime_s"],
        cpu_seconds=found["cpu_s"],
        late=Late(
            packets=late["pkts"],
            mean_microseconds=late["mean_us"],
            max_microseconds=late["max_us"],
            over_a_millisecond=late["over_1ms"],
        ),
        hosts={
            name: HostStats(
                up=_count(host["up"]),
                down=_count(host["down"]),
                cut=host["cut"],
                alive=host["alive"],
                unroutable=host["unroutable"],
                device_errors=host["tun_errors"],
            )
            for name, host in found["hosts"].items()
        },
    )


def _count(found: dict[str, int]) -> LinkCount:
    return LinkCount(
        offered_packets=found["offered_pkts"],
        offered_bytes=found["offered_bytes"],
        packets=found["pkts"],
        bytes=found["bytes"],
        drop_queue=found["drop_queue"],
        drop_loss=found["drop_loss"],
        drop_cut=found["drop_cut"],
        drop_memory=found["drop_mem"],
        queued_packets=found["queued_pkts"],
        queued_bytes=found["queued_bytes"],
        queue_peak_bytes=found["queue_peak"],
    )
