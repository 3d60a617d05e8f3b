"""Process groups of our own over gloo, and the link built on one. The only user of torch's private group options.

Nothing in torch interrupts a blocked gloo wait; ``abort()`` and ``shutdown()`` do not. So each group keeps duplicates
of the sockets that gloo opened for it, and ``shut`` shuts those down: every wait on them raises in milliseconds.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import logging
import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from recovery.errors import BadConfiguration, DonorLost, MisuseError, PeerUnreachable
from recovery.transport.link import MAX_LANES, Transfer, check_message
from recovery.transport.rendezvous_store import ControlStore
from recovery.transport.sockets import Endpoint, SocketSet, endpoint, endpoint_text, find_new_listener
from recovery.transport.state_dict import post_receive, post_send
from recovery.types import KIB, MIB, KeyValue

logger = logging.getLogger(__name__)

DONOR_RANK = 0
JOINER_RANK = 1

_LOCAL_SEND_BYTES = 512 * KIB
_LOCAL_RECEIVE_BYTES = 2 * MIB
"""Socket buffers inside one machine. There is no round trip to bridge, and what waits in larger ones falls out of the
processor's cache before it is read: a quarter more processor time a byte at both ends."""
_LONGEST_WAIT_SECONDS = 7 * 24 * 3600.0
_BROKEN_WAIT_SECONDS = 0.01
_CANCEL_SECONDS = 0.05
"""A wait on a link that is known to be broken: what has not ended by now never will."""


class GroupHandle:
    """A gloo process group that can be ended from any thread. Made by ``open_group``.

    Attributes:
        rank: This process's rank.
        size: Number of ranks.
    """

    def __init__(
        self,
        groups: Sequence[ProcessGroupGloo],
        stores: Sequence[ControlStore],
        sockets: SocketSet,
        rank: int,
        size: int,
    ) -> None:
        self._groups = tuple(groups)
        self._stores = tuple(stores)  # C++ calls back into them: they must live as long as the groups
        self._lock = threading.Lock()
        self.sockets = sockets
        self.rank = rank
        self.size = size
        self._reason: str | None = None

    @property
    def group(self) -> ProcessGroupGloo:
        """The group.

        Raises:
            MisuseError: after ``close``.
        """
        return self.lane_group(0)

    def lane_group(self, lane: int) -> ProcessGroupGloo:
        """Return the group of one lane; a group that was asked for without lanes is lane 0.

        Raises:
            MisuseError: after ``close``.
        """
        groups = self._groups
        if not groups:
            raise MisuseError("the process group is closed")
        return groups[lane]

    @property
    def reason(self) -> str | None:
        """Why the group was shut; None: it was not."""
        return self._reason

    def shut(self, reason: str) -> None:
        """Break the group: waits in progress on this and every other rank raise. Any thread; the first reason stays."""
        with self._lock:
            self._reason = self._reason or reason
        self.sockets.shut()

    def close(self) -> None:
        """Shut, then give the sockets and threads back. Twice without harm.

        Tensors of operations that were still posted may be freed only after this returned and every ``Work`` ended.
        """
        self.shut("closed")
        self.sockets.close()
        with self._lock:
            self._groups = ()
            self._stores = ()


def open_group(
    store: KeyValue,
    scope: str,
    *,
    rank: int,
    size: int,
    host: str,
    timeout_seconds: float,
    operation_timeout_seconds: float | None = None,
    lanes: int = 1,
    cancelled: threading.Event | None = None,
) -> GroupHandle:
    """Build a gloo group of ``size`` ranks that meet through ``store`` and return a handle that can end it.

    Blocks until every rank is there. ``torch.distributed``'s default group is neither needed nor touched.

    Args:
        store: Where the ranks meet.
        scope: Names the group in the store; never used twice.
        rank: This process's rank.
        size: Number of ranks, at least 1.
        host: Address or name of the interface that is bound and advertised to the other ranks.
        timeout_seconds: Longest wait for the other ranks, and to connect to them.
        operation_timeout_seconds: Default timeout of the group's operations; ``timeout_seconds`` if None.
        lanes: Number of equal groups, each with a socket of its own to each peer, on one listener.
        cancelled: Ends the wait for the others, and for their connections, when set.

    Raises:
        PeerUnreachable: a rank did not come in time, cannot be connected to, or the wait was cancelled.
        BadConfiguration: ``host`` is not an address of this machine, or a size is out of range.
    """
    if not 0 <= rank < size or not 1 <= lanes <= MAX_LANES:
        raise BadConfiguration(f"rank {rank} of {size} with {lanes} sockets to each peer is not possible")
    device, listener = find_new_listener(lambda: _create_device(host))
    meeting = ControlStore(store, scope, timeout_seconds, cancelled)
    meeting.set(f"listener/{rank}", json.dumps(listener).encode())
    keys = [f"listener/{other}" for other in range(size)]
    meeting.wait(keys)
    peers = [_listener(scope, key, meeting.get(key)) for key in keys]
    stores = [ControlStore(store, scope, timeout_seconds, cancelled, prefix=f"lane/{lane}/") for lane in range(lanes)]
    groups: dict[int, ProcessGroupGloo] = {}
    errors: list[Exception] = []
    abandoned = threading.Event()

    def connect(lane: int) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._timeout = timedelta(seconds=operation_timeout_seconds or timeout_seconds)
        options._threads = 2 if size > 2 else 1
        try:
            groups[lane] = ProcessGroupGloo(stores[lane], rank, size, options)
        except (RuntimeError, PeerUnreachable) as error:
            errors.append(error)
        if abandoned.is_set():
            groups.clear()

    # Connecting takes several round trips to the store and to the peer, one after the other: all lanes at once. All on
    # threads of their own: nothing interrupts gloo's connecting, which to an end that has gone takes five times its
    # timeout. Who cancels is let go at once; the threads end later, and what they still build goes with them.
    threads = [
        threading.Thread(target=connect, args=(lane,), name=f"recovery-lane-{lane}", daemon=True)
        for lane in range(lanes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(_CANCEL_SECONDS)
            if cancelled is not None and cancelled.is_set() and thread.is_alive():
                abandoned.set()
                groups.clear()
                raise PeerUnreachable(f"the ranks of {scope!r} met, and the wait for their connections was cancelled")
    if errors:
        error = errors[0]
        if isinstance(error, PeerUnreachable):
            raise error
        raise PeerUnreachable(
            f"the ranks of {scope!r} met but could not connect ({_first_line(error)}); both ends must accept "
            f"connections: this one listens at {endpoint_text(listener)}"
        ) from error
    sockets = SocketSet(listener, peers)
    logger.debug("group %s: rank %d of %d, %d sockets", scope, rank, size, len(sockets))
    return GroupHandle([groups[lane] for lane in range(lanes)], stores, sockets, rank, size)


class GlooLink:
    """One end of a link: a two-rank gloo group for each lane, on one listener. Made by ``open_gloo_link``."""

    def __init__(self, handle: GroupHandle, lanes: int) -> None:
        self._handle = handle
        self._lanes = lanes
        self._lock = threading.Lock()
        self._posted: dict[int, torch.Tensor] = {}
        """Whose memory gloo may touch: held here alone, and let go when the wait has ended or the link is closed."""
        self._number = 0
        self._broken: str | None = None

    @property
    def lanes(self) -> int:
        return self._lanes

    def send(self, lane: int, tag: int, data: torch.Tensor) -> Transfer:
        if self._handle.rank != DONOR_RANK:
            raise MisuseError("a joiner does not send payload")
        return self._post(lane, tag, data, lambda group, lent: post_send(_as_group(group), lent, JOINER_RANK, tag))

    def receive(self, lane: int, tag: int, into: torch.Tensor) -> Transfer:
        # A donor that posts a receive can be ended by a longer message from anyone who reaches its port.
        if self._handle.rank != JOINER_RANK:
            raise MisuseError("a donor never receives payload")
        return self._post(lane, tag, into, lambda group, lent: post_receive(_as_group(group), lent, DONOR_RANK, tag))

    def shut(self, reason: str) -> None:
        with self._lock:
            self._broken = self._broken or reason
        self._handle.shut(reason)

    @property
    def is_broken(self) -> bool:
        """Whether the link was shut or has failed."""
        return self._broken is not None

    def close(self) -> None:
        self.shut("closed")
        self._handle.close()
        with self._lock:
            self._posted.clear()

    def endpoints(self) -> list[str]:
        return sorted(f"{endpoint_text(local)}>{endpoint_text(remote)}" for local, remote in self._handle.sockets.pairs)

    def bytes_moved(self) -> int:
        sockets = self._handle.sockets
        return sockets.bytes_acknowledged() if self._handle.rank == DONOR_RANK else sockets.bytes_received()

    def round_trip_seconds(self) -> float | None:
        return self._handle.sockets.round_trip_seconds()

    def _post(
        self, lane: int, tag: int, data: torch.Tensor, start: Callable[[ProcessGroupGloo, torch.Tensor], dist.Work]
    ) -> GlooTransfer:
        check_message(lane, self._lanes, tag, data)
        with self._lock:
            if self._broken is not None:
                raise DonorLost(f"the link was shut: {self._broken}")
            # Registered before it is posted: from here on the bytes may be touched at any moment.
            self._number += 1
            transfer = GlooTransfer(self, self._number)
            self._posted[self._number] = data
        try:
            transfer.work = start(self._handle.lane_group(lane), _lent(data))
        except RuntimeError as error:
            raise self.broken(error) from error
        return transfer

    def broken(self, error: RuntimeError) -> DonorLost:
        """Shut the link after gloo reported ``error`` and return what to raise."""
        with self._lock:
            reason = self._broken
        if reason is None:
            self.shut(_first_line(error))
            return DonorLost(f"the data link broke: {_first_line(error)}")
        return DonorLost(f"the data link was shut: {reason}")

    def ended(self, number: int) -> None:
        """Give up the reference that kept a finished operation's memory alive."""
        with self._lock:
            self._posted.pop(number, None)


class GlooTransfer:
    """One posted gloo operation."""

    def __init__(self, link: GlooLink, number: int) -> None:
        self._link = link
        self._number = number
        self._waited = threading.Lock()
        self.work: dist.Work | None = None

    def wait(self, timeout_seconds: float) -> None:
        # A second wait on a finished gloo operation blocks until the group's timeout, so it is refused here.
        if self.work is None or not self._waited.acquire(blocking=False):
            raise MisuseError("a transfer is waited for exactly once")
        limit = _BROKEN_WAIT_SECONDS if self._link.is_broken else _LONGEST_WAIT_SECONDS
        try:
            self.work.wait(timedelta(seconds=min(timeout_seconds, limit)))
        except RuntimeError as error:
            # The link keeps the tensor until it is closed: the pair is closed, but its memory is not ours to judge.
            raise self._link.broken(error) from error
        self._link.ended(self._number)


def open_gloo_link(
    store: KeyValue,
    scope: str,
    *,
    rank: int,
    host: str,
    lanes: int,
    timeout_seconds: float,
    congestion_control: str | None = "bbr",
    cancelled: threading.Event | None = None,
) -> GlooLink:
    """Meet the other end at ``scope`` and return this end of the link. Blocks until both are there.

    The two ends compare their sockets through ``store``: a stranger who took a socket's place is found before any
    receive is posted.

    Args:
        store: Where the two meet.
        scope: Names the link; never used twice.
        rank: ``DONOR_RANK`` or ``JOINER_RANK``.
        host: Address of the interface to bind and advertise.
        lanes: Number of sockets, 1 to ``MAX_LANES``; the same at both ends.
        timeout_seconds: Longest wait for the other end.
        congestion_control: Asked for on sockets to other machines where the kernel permits; None: the system's.
        cancelled: Ends the wait for the other end when set.

    Raises:
        PeerUnreachable: the other end did not come, cannot be connected to, or the sockets do not match.
    """
    handle = open_group(
        store, scope, rank=rank, size=2, host=host, timeout_seconds=timeout_seconds, lanes=lanes, cancelled=cancelled
    )
    try:
        _compare_sockets(store, scope, handle, lanes, timeout_seconds, cancelled)
    except BaseException:
        handle.close()
        raise
    if _is_local(handle.sockets):
        handle.sockets.bound_buffers(send_bytes=_LOCAL_SEND_BYTES, receive_bytes=_LOCAL_RECEIVE_BYTES)
    elif congestion_control is not None:
        in_force = handle.sockets.choose_congestion_control(congestion_control)
        logger.info("link %s: %d sockets, congestion control %s", scope, lanes, in_force)
    return GlooLink(handle, lanes)


def _lent(data: torch.Tensor) -> torch.Tensor:
    """Return the same bytes without a share in their memory.

    gloo keeps what it was given for as long as its wait lasts, and a wait for a message that was cut in the middle
    lasts until its timeout, long after the link was closed and nothing touches the bytes any more.
    """
    return torch.frombuffer((ctypes.c_uint8 * data.numel()).from_address(data.data_ptr()), dtype=torch.uint8)


def _as_group(group: ProcessGroupGloo) -> dist.ProcessGroup:
    """A backend has the point-to-point calls of a process group; torch's stubs do not say so."""
    return group  # type: ignore[return-value]


def _create_device(host: str) -> ProcessGroupGloo.Device:
    try:
        try:
            # Connections must exist when the group does: their descriptors are looked for right after.
            return ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
        except TypeError:  # torch before 2.8 has no lazy connections
            return ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError as error:
        raise BadConfiguration(
            f"cannot listen at {host!r} ({_first_line(error)}): name an address of this machine that others can reach"
        ) from error


def _compare_sockets(
    store: KeyValue,
    scope: str,
    handle: GroupHandle,
    lanes: int,
    timeout_seconds: float,
    cancelled: threading.Event | None,
) -> None:
    mine = sorted(handle.sockets.pairs)
    store.set(scope, f"sockets/{handle.rank}", json.dumps(mine).encode())
    value = ControlStore(store, scope, timeout_seconds, cancelled).get(f"sockets/{1 - handle.rank}")
    try:
        far = sorted((endpoint(tuple(remote)), endpoint(tuple(local))) for local, remote in json.loads(value))
    except (ValueError, TypeError) as error:
        raise PeerUnreachable(f"the other end of {scope!r} named its sockets in another form") from error
    if len(mine) != lanes or mine != far:
        raise PeerUnreachable(
            f"the sockets of {scope!r} are not the other end's: {len(mine)} here, {len(far)} there, {lanes} agreed; "
            "somebody else connected to the data port, or an address is translated on the way"
        )


def _listener(scope: str, key: str, value: bytes) -> Endpoint:
    try:
        host, port = json.loads(value)
        return str(host), int(port)
    except (ValueError, TypeError) as error:
        raise PeerUnreachable(f"{key} of {scope!r} holds {value[:80]!r}, not an endpoint") from error


def _is_local(sockets: SocketSet) -> bool:
    return all(local[0] == remote[0] or ipaddress.ip_address(remote[0]).is_loopback for local, remote in sockets.pairs)


def _first_line(error: BaseException) -> str:
    """Return what gloo says, without the path of its source file and its advice."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    said = re.sub(r"^\[[^]]*\.(cc|h):\d+\]\s*", "", lines[0])
    return said.split(" This is typically caused by", 1)[0][:300]
