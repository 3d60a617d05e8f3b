"""The process's own TCP sockets: found by their endpoints, duplicated, measured, shut down.

A library that opens sockets for us (gloo) gives no handle to them. What it opened is found among the process's file
descriptors: the listener is the one that was not there before, a connection is ours if its local end is our listener
or its far end is a peer's listener. Other threads may open and close sockets meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from recovery.errors import PeerUnreachable

Endpoint = tuple[str, int]
"""Numeric host (IPv4-mapped IPv6 written as IPv4, no zone) and port."""

_TCP_INFO = getattr(socket, "TCP_INFO", 11)
_TCP_CONGESTION = getattr(socket, "TCP_CONGESTION", 13)
_TCP_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", 18)
# Offsets into struct tcp_info of Linux, stable since 4.6:
# u8 tcpi_retransmits and tcpi_probes of what is unanswered now, u32 tcpi_rtt in microseconds,
# u64 tcpi_bytes_acked, u64 tcpi_bytes_received.
_RETRANSMITS_OFFSET = 2
_PROBES_OFFSET = 3
_RTT_OFFSET = 68
_BYTES_ACKED_OFFSET = 120
_BYTES_RECEIVED_OFFSET = 128
_TCP_INFO_BYTES = 136
_DRAINED_BYTES = 1 << 20
_LARGEST_SEND_BUFFER = Path("/proc/sys/net/core/wmem_max")
_LARGEST_RECEIVE_BUFFER = Path("/proc/sys/net/core/rmem_max")

_opening = threading.Lock()
"""Held while a listener is being opened and looked for, so that this module's own users do not confuse each other."""


def endpoint(address: object) -> Endpoint:
    """Return a socket address, as ``getsockname`` gives it, in comparable form."""
    if not isinstance(address, tuple) or len(address) < 2:
        raise PeerUnreachable(f"{address!r} is not an internet address")
    host = str(address[0]).split("%", 1)[0]
    return (host.removeprefix("::ffff:") if "." in host else host, int(address[1]))


def endpoint_text(end: Endpoint) -> str:
    """Return ``host:port``, with brackets around IPv6."""
    return f"[{end[0]}]:{end[1]}" if ":" in end[0] else f"{end[0]}:{end[1]}"


def open_duplicates(wanted: Callable[[socket.socket], bool]) -> list[socket.socket]:
    """Return duplicates of this process's internet stream sockets for which ``wanted`` is true; the caller closes them.

    Descriptors that vanish while this looks at them are skipped: whoever closed them did not want them found.
    """
    folder = Path("/proc/self/fd") if sys.platform == "linux" else Path("/dev/fd")
    found: list[socket.socket] = []
    for name in os.listdir(folder):  # noqa: PTH208 - a Path for each of thousands of descriptors would cost more
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed by another thread since it was listed
        keep = False
        try:
            keep = (
                duplicate.family in (socket.AF_INET, socket.AF_INET6)
                and duplicate.type == socket.SOCK_STREAM
                and wanted(duplicate)
            )
        except OSError:
            keep = False  # not connected (any more): no endpoint to compare
        finally:
            if not keep:
                duplicate.close()
        if keep:
            found.append(duplicate)
    return found


def permits(congestion_control: str) -> bool:
    """Return whether this process may choose ``congestion_control`` for its sockets; opens one that goes nowhere."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        try:
            trial.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, congestion_control.encode())
            return (
                trial.getsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, 16).split(b"\0")[0] == congestion_control.encode()
            )
        except OSError:
            return False


def is_listener(candidate: socket.socket) -> bool:
    """Return whether the socket accepts connections."""
    return candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


def find_new_listener(open_it: Callable[[], object], attempts: int = 5) -> tuple[object, Endpoint]:
    """Call ``open_it``, which opens one listening socket, and return its result and where the listener is bound.

    If another thread of the process opens a listener at the same moment the two cannot be told apart; then the result
    is dropped and ``open_it`` called again.

    Raises:
        PeerUnreachable: the listener was not found in ``attempts`` tries.
    """

    def listeners() -> set[Endpoint]:
        duplicates = open_duplicates(is_listener)
        try:
            return {endpoint(duplicate.getsockname()) for duplicate in duplicates}
        finally:
            for duplicate in duplicates:
                duplicate.close()

    for _ in range(attempts):
        with _opening:
            before = listeners()
            opened = open_it()
            new = listeners() - before
        if len(new) == 1:
            return opened, new.pop()
        del opened
    raise PeerUnreachable("the data listener cannot be told from others that this process keeps opening; try again")


class SocketSet:
    """Duplicates of the connected sockets of one process group. All methods may be called from any thread.

    Args:
        listener: Where this process's group listens.
        peers: Where the other members' groups listen.
    """

    def __init__(self, listener: Endpoint, peers: Collection[Endpoint]) -> None:
        far = {peer for peer in peers if peer != listener}

        def ours(candidate: socket.socket) -> bool:
            if is_listener(candidate):
                return False
            return endpoint(candidate.getpeername()) in far or endpoint(candidate.getsockname()) == listener

        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._pairs: list[tuple[Endpoint, Endpoint]] = []
        for each in open_duplicates(ours):
            try:
                pair = (endpoint(each.getsockname()), endpoint(each.getpeername()))
            except OSError:  # broken already: the operations on it will say so
                each.close()
                continue
            if pair in self._pairs:  # a second descriptor of the same socket, for example one that another thread made
                each.close()
            else:
                self._sockets.append(each)
                self._pairs.append(pair)

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def pairs(self) -> list[tuple[Endpoint, Endpoint]]:
        """Local and remote end of each socket, as they were when found."""
        return list(self._pairs)

    def shut(self) -> None:
        """Shut every socket down in both directions: whoever is blocked on one is woken at once.

        After this nobody gets another byte from them: the system takes none any more, and what it had is thrown away.
        """
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):  # the far end was faster
                    each.shutdown(socket.SHUT_RDWR)
                with contextlib.suppress(OSError):
                    while each.recv(_DRAINED_BYTES, socket.MSG_DONTWAIT):
                        pass

    def close(self) -> None:
        """Close the duplicates (not the library's own descriptors). Twice without harm."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            each.close()

    def choose_congestion_control(self, wanted: str = "bbr") -> str:
        """Ask for ``wanted`` on every connected socket and return what is in force on all: ``wanted``, or what is not.

        Set on a socket before it is connected the choice is silently lost, hence here, and hence read back.
        """
        in_force = wanted
        with self._lock:
            for each in self._sockets:
                # Not permitted, or not in this kernel: what is read back below says so.
                with contextlib.suppress(OSError):
                    each.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, wanted.encode())
                try:
                    found = each.getsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, 16).split(b"\0")[0].decode()
                except OSError:
                    found = "unknown"
                in_force = in_force if found == wanted else found
        return in_force

    def give_up_after(self, seconds: float) -> None:
        """Let the system break a connection whose far end acknowledges nothing, or takes nothing, for so long.

        Where the system cannot (it is not Linux), connections break as its own settings say.
        """
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, max(1, int(seconds * 1000)))

    def unanswered(self) -> list[tuple[Endpoint, Endpoint]]:
        """Return the pairs of those connections on which something was sent again and again without an answer."""
        found = []
        with self._lock:
            for each, pair in zip(self._sockets, self._pairs, strict=False):
                with contextlib.suppress(OSError):
                    info = each.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
                    if len(info) > _PROBES_OFFSET and max(info[_RETRANSMITS_OFFSET], info[_PROBES_OFFSET]) > 1:
                        found.append(pair)
        return found

    def bound_buffers(self, *, send_bytes: int, receive_bytes: int) -> None:
        """Bound what waits in every connected socket; the system would let both sides grow to megabytes.

        Where the system permits less than is asked for, it would take that instead, and a receiver of little is slow:
        there nothing is changed.
        """
        bounds = []
        for option, limit, wanted in (
            (socket.SO_SNDBUF, _LARGEST_SEND_BUFFER, send_bytes),
            (socket.SO_RCVBUF, _LARGEST_RECEIVE_BUFFER, receive_bytes),
        ):
            with contextlib.suppress(OSError):  # not Linux: left to the system
                if int(limit.read_text(encoding="ascii")) >= wanted:
                    bounds.append((option, wanted))
        with self._lock:
            for each in self._sockets:
                for option, wanted in bounds:
                    with contextlib.suppress(OSError):  # broken already: the operations on it will say so
                        each.setsockopt(socket.SOL_SOCKET, option, wanted)

    def bytes_received(self) -> int:
        """Return payload and control bytes that arrived on all sockets; 0 where the system does not say."""
        return sum(struct.unpack_from("=Q", info, _BYTES_RECEIVED_OFFSET)[0] for info in self._infos())

    def bytes_acknowledged(self) -> int:
        """Return bytes that the far ends' systems acknowledged; 0 where the system does not say."""
        return sum(struct.unpack_from("=Q", info, _BYTES_ACKED_OFFSET)[0] for info in self._infos())

    def round_trip_seconds(self) -> float | None:
        """Return the median smoothed round trip of the sockets; None where the system does not say."""
        trips = sorted(struct.unpack_from("=I", info, _RTT_OFFSET)[0] for info in self._infos())
        return trips[len(trips) // 2] / 1e6 if trips else None

    def _infos(self) -> list[bytes]:
        if sys.platform != "linux":
            return []
        infos = []
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):  # shut meanwhile: no progress to report
                    info = each.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
                    if len(info) >= _TCP_INFO_BYTES:
                        infos.append(info)
        return infos
