"""Where a storm's processes stand: each in a network namespace of its own, or, without root, on loopback.

In namespaces a partition and a slow link meet everything that a worker sends: letters, payload, averages. On loopback
they meet only its stream to the coordinator; the report says which it was.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from recovery.types import Address
from tests.support.slow_proxy import SlowProxy
from tests.support.wan import Wan, emulated, why_not_permitted

HUB = "hub"
SLOW_ROUND_TRIP_SECONDS = 0.04
SLOW_BITS_PER_SECOND = 10_000_000


class Network(Protocol):
    """Hosts, and faults of their links; each fault leaves a proof that it was felt."""

    described: str
    """What a partition and a slow link meet, in words for the report."""

    def prefix(self, host: str) -> Sequence[str]:
        """Return what to put before a command that runs in ``host``."""

    def listen_host(self) -> str:
        """Return the address that the coordinator binds."""

    def data_host(self, worker: str) -> str:
        """Return the address that a worker binds."""

    def coordinator_seen_from(self, worker: str, address: Address) -> Address:
        """Return where a worker reaches the coordinator; ``address`` is where that listens."""

    def cut(self, worker: str) -> None: ...

    def mend(self, worker: str) -> bool:
        """Undo ``cut``; return whether something was lost meanwhile."""

    def slow(self, worker: str) -> None: ...

    def speed_up(self, worker: str) -> bool:
        """Undo ``slow``; return whether it was felt meanwhile."""


class Namespaces:
    """A namespace a host, joined by the emulator of wide-area links."""

    described = "network namespaces: partitions and slow links meet all of a worker's packets"

    def __init__(self, wan: Wan) -> None:
        self._wan = wan
        self._before: dict[str, tuple[int, int]] = {}

    def prefix(self, host: str) -> Sequence[str]:
        return self._wan.prefix(host)

    def listen_host(self) -> str:
        return self._wan.address(HUB)

    def data_host(self, worker: str) -> str:
        return self._wan.address(worker)

    def coordinator_seen_from(self, worker: str, address: Address) -> Address:
        return address

    def cut(self, worker: str) -> None:
        self._before[worker] = self._counts(worker)
        self._wan.cut(worker)

    def mend(self, worker: str) -> bool:
        self._wan.heal(worker)
        return self._counts(worker)[0] > self._before[worker][0]

    def slow(self, worker: str) -> None:
        self._before[worker] = self._counts(worker)
        # The delay of what the worker sends is the whole round trip: the others send without one.
        delay = f"{SLOW_ROUND_TRIP_SECONDS * 1000:.0f}ms"
        self._wan.set(worker, rate=f"{SLOW_BITS_PER_SECOND // 1000}kbit", delay=delay)

    def speed_up(self, worker: str) -> bool:
        passed = self._counts(worker)[1] > self._before[worker][1]
        slow = self._round_trip(worker) >= SLOW_ROUND_TRIP_SECONDS / 2
        self._wan.set(worker, rate="0", delay="0ms")
        return passed and slow

    def _counts(self, worker: str) -> tuple[int, int]:
        stats = self._wan.stats().hosts[worker]
        return stats.up.drop_cut + stats.down.drop_cut, stats.up.packets

    def _round_trip(self, worker: str) -> float:
        """Return how long a refusal of a connection takes to come back."""
        began = time.monotonic()
        with contextlib.suppress(OSError), socket.create_connection((self._wan.address(worker), 9), 10):
            pass
        return time.monotonic() - began


class Loopback:
    """One machine's loopback, with a proxy between each worker and the coordinator."""

    described = "loopback: partitions and slow links meet only a worker's stream to the coordinator"

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._proxies: dict[str, SlowProxy] = {}
        self._before: dict[str, int] = {}

    def prefix(self, host: str) -> Sequence[str]:
        return ()

    def listen_host(self) -> str:
        return "127.0.0.1"

    def data_host(self, worker: str) -> str:
        return "127.0.0.1"

    def coordinator_seen_from(self, worker: str, address: Address) -> Address:
        if worker not in self._proxies:
            proxy = SlowProxy(address)
            self._stack.enter_context(proxy)
            self._proxies[worker] = proxy
        return self._proxies[worker].address

    def cut(self, worker: str) -> None:
        self._before[worker] = self._proxies[worker].swallowed
        self._proxies[worker].cut()

    def mend(self, worker: str) -> bool:
        self._proxies[worker].mend()
        return self._proxies[worker].swallowed > self._before[worker]

    def slow(self, worker: str) -> None:
        self._before[worker] = self._proxies[worker].delayed
        self._proxies[worker].slow(SLOW_BITS_PER_SECOND / 8, SLOW_ROUND_TRIP_SECONDS / 2)

    def speed_up(self, worker: str) -> bool:
        self._proxies[worker].slow(0.0, 0.0)
        return self._proxies[worker].delayed > self._before[worker]


def _subnet() -> str:
    """Return a subnet that no other storm of this machine uses now."""
    return f"10.{96 + time.monotonic_ns() % 32}.{time.monotonic_ns() // 1000 % 256}.0/24"


@contextlib.contextmanager
def stage(workers: Sequence[str], *, loopback: bool = False) -> Iterator[Network]:
    """Set the network up for the duration of a ``with`` block."""
    if loopback or why_not_permitted():
        with ExitStack() as stack:
            yield Loopback(stack)
        return
    hosts: AbstractContextManager[Wan] = emulated([HUB, *workers], own="watcher", subnet=_subnet())
    with hosts as wan:
        yield Namespaces(wan)
