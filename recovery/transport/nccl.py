"""A link between two CUDA devices over NCCL. Written to the contract and guarded; see the README for what was tested.

NCCL matches messages by order alone and blocks for ever on a length that differs. So each message is announced by a
header of its own (tag and length), which the joiner's lane thread reads before it posts the payload's receive: a
length that was not agreed on ends the link, not a process. Unlike gloo, NCCL's ``abort`` does end what is blocked.

Payload is CPU memory at both ends (the snapshots' and the state's); it passes through page-locked buffers and one
device buffer a message.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from recovery.errors import BadConfiguration, DonorLost, MisuseError, PeerUnreachable
from recovery.transport.link import MAX_LANES, Transfer, check_message
from recovery.transport.process_group import DONOR_RANK, JOINER_RANK
from recovery.transport.rendezvous_store import ControlStore
from recovery.transport.state_dict import post_receive, post_send
from recovery.types import KeyValue

_HEADER_WORDS = 2
_POLL_SECONDS = 0.0005
_LET_GO_SECONDS = 5.0


def nccl_unavailable(num_devices: int = 1) -> str:
    """Return why NCCL cannot be used with so many devices of this machine; empty: it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not dist.is_nccl_available():
        return "this torch was built without NCCL"
    if torch.cuda.device_count() < num_devices:
        return f"{torch.cuda.device_count()} CUDA devices; NCCL wants one a rank, here {num_devices}"
    return ""


@dataclass(slots=True)
class _Posted:
    """A send or receive that was posted; ``ended`` is set once, with or without an error."""

    tag: int
    memory: torch.Tensor
    ended: threading.Event = field(default_factory=threading.Event)
    waited: threading.Lock = field(default_factory=threading.Lock)
    error: str = ""


class NcclLink:
    """One end of a link: an NCCL group and a thread for each lane. Made by ``open_nccl_link``."""

    def __init__(self, groups: list[dist.ProcessGroup], stores: list[ControlStore], rank: int, device: int) -> None:
        self._groups = groups
        self._stores = stores  # NCCL calls back into them: they live as long as the groups
        self._rank = rank
        self._device = torch.device("cuda", device)
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._moved = 0
        self._sends: list[queue.SimpleQueue[_Posted | None]] = [queue.SimpleQueue() for _ in groups]
        self._receives: list[dict[int, _Posted]] = [{} for _ in groups]
        self._wanted = threading.Condition(self._lock)
        run = self._send_lane if rank == DONOR_RANK else self._receive_lane
        self._threads = [
            threading.Thread(target=run, args=(lane,), name=f"recovery-nccl-lane-{lane}", daemon=True)
            for lane in range(len(groups))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def lanes(self) -> int:
        return len(self._receives)

    def send(self, lane: int, tag: int, data: torch.Tensor) -> Transfer:
        if self._rank != DONOR_RANK:
            raise MisuseError("a joiner does not send payload")
        check_message(lane, self.lanes, tag, data)
        posted = _Posted(tag, data)
        with self._lock:
            self._check_broken()
            self._sends[lane].put(posted)
        return _NcclTransfer(self, posted)

    def receive(self, lane: int, tag: int, into: torch.Tensor) -> Transfer:
        if self._rank != JOINER_RANK:
            raise MisuseError("a donor never receives payload")
        check_message(lane, self.lanes, tag, into)
        posted = _Posted(tag, into)
        with self._lock:
            self._check_broken()
            if tag in self._receives[lane]:
                raise MisuseError(f"tag {tag} is in use")
            self._receives[lane][tag] = posted
            self._wanted.notify_all()
        return _NcclTransfer(self, posted)

    def shut(self, reason: str) -> None:
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            waiting = [posted for lane in self._receives for posted in lane.values()]
            self._wanted.notify_all()
        for sends in self._sends:
            sends.put(None)
        for group in self._groups:
            group.abort()
        for posted in waiting:
            self._end(posted, reason)

    def close(self) -> None:
        self.shut("closed")
        for thread in self._threads:
            thread.join(_LET_GO_SECONDS)
        self._groups.clear()
        self._stores.clear()

    def endpoints(self) -> list[str]:
        return []

    def bytes_moved(self) -> int:
        return self._moved

    def round_trip_seconds(self) -> float | None:
        return None

    @property
    def reason(self) -> str | None:
        """Why the link was shut; None: it was not."""
        return self._reason

    def _check_broken(self) -> None:
        if self._reason is not None:
            raise DonorLost(f"the link was shut: {self._reason}")

    def _end(self, posted: _Posted, error: str = "") -> None:
        if not posted.ended.is_set():
            posted.error = error
            posted.ended.set()

    # Lane threads

    def _send_lane(self, lane: int) -> None:
        posted: _Posted | None = None
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(_new_stream(self._device)):
                while (posted := self._sends[lane].get()) is not None:
                    header = torch.tensor([posted.tag, posted.memory.numel()], dtype=torch.int64, device=self._device)
                    payload = posted.memory.pin_memory().to(self._device, non_blocking=True)
                    self._finish(post_send(self._groups[lane], header.view(torch.uint8), JOINER_RANK, 0))
                    self._finish(post_send(self._groups[lane], payload, JOINER_RANK, 0))
                    self._moved += posted.memory.numel()
                    self._end(posted)
        except Exception as error:  # noqa: BLE001 - thread's root: the link is broken, its waits say why
            self._break(posted, error)
        while not self._sends[lane].empty():  # what was posted and not begun
            if (left := self._sends[lane].get()) is not None:
                self._end(left, self._reason or "closed")

    def _receive_lane(self, lane: int) -> None:
        posted: _Posted | None = None
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(_new_stream(self._device)):
                header = torch.zeros(_HEADER_WORDS, dtype=torch.int64, device=self._device)
                while self._reason is None:
                    self._finish(post_receive(self._groups[lane], header.view(torch.uint8), DONOR_RANK, 0))
                    tag, num_bytes = header.tolist()
                    posted = self._posted_for(lane, tag)
                    if posted is None:
                        return
                    if not 0 < num_bytes <= posted.memory.numel():
                        raise DonorLost(f"a message of {num_bytes} bytes came for a receive of {posted.memory.numel()}")
                    payload = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                    self._finish(post_receive(self._groups[lane], payload, DONOR_RANK, 0))
                    with self._lock:
                        self._check_broken()  # the memory is no longer the link's
                        posted.memory[:num_bytes].copy_(payload)
                    self._moved += num_bytes
                    self._end(posted)
                    posted = None
        except Exception as error:  # noqa: BLE001 - thread's root, as above
            self._break(posted, error)

    def _posted_for(self, lane: int, tag: int) -> _Posted | None:
        """Wait for the receive of an announced message; None: the link was shut."""
        with self._lock:
            while tag not in self._receives[lane]:
                if self._reason is not None:
                    return None
                self._wanted.wait()
            return self._receives[lane].pop(tag)

    def _finish(self, work: dist.Work) -> None:
        """Wait on the CPU, which ``work.wait`` does not do, for as long as the link is whole."""
        while not work.is_completed():
            if self._reason is not None:
                raise DonorLost(f"the link was shut: {self._reason}")
            time.sleep(_POLL_SECONDS)
        if (error := work.exception()) is not None:
            raise DonorLost(f"NCCL failed: {error}")

    def _break(self, posted: _Posted | None, error: Exception) -> None:
        self.shut(str(error))
        if posted is not None:
            self._end(posted, self._reason or str(error))


class _NcclTransfer:
    def __init__(self, link: NcclLink, posted: _Posted) -> None:
        self._link = link
        self._posted = posted

    def wait(self, timeout_seconds: float) -> None:
        if not self._posted.waited.acquire(blocking=False):
            raise MisuseError("a transfer is waited for exactly once")
        if not self._posted.ended.wait(timeout_seconds):
            self._link.shut(f"nothing moved for {timeout_seconds:.1f} s")
            self._posted.ended.wait(_LET_GO_SECONDS)
        if self._posted.error or not self._posted.ended.is_set():
            raise DonorLost(f"the data link was shut: {self._link.reason or self._posted.error}")


def open_nccl_link(
    store: KeyValue,
    scope: str,
    *,
    rank: int,
    device: int,
    lanes: int,
    timeout_seconds: float,
    cancelled: threading.Event | None = None,
) -> NcclLink:
    """Meet the other end at ``scope`` and return this end of the link. Blocks until both are there.

    Args:
        store: Where the two meet.
        scope: Names the link; never used twice.
        rank: ``DONOR_RANK`` or ``JOINER_RANK``.
        device: CUDA device of this end; the two ends' devices differ, NCCL wants one for each rank.
        lanes: Number of groups, 1 to ``MAX_LANES``; the same at both ends.
        timeout_seconds: Longest wait for the other end.
        cancelled: Ends the wait for the other end when set.

    Raises:
        BadConfiguration: there is no such device here, or torch has no NCCL.
        PeerUnreachable: the other end did not come, or cannot be connected to.
    """
    if reason := nccl_unavailable(device + 1):
        raise BadConfiguration(f"payload cannot go over NCCL: {reason}")
    if not 1 <= lanes <= MAX_LANES:
        raise BadConfiguration(f"{lanes} lanes are not possible: 1 to {MAX_LANES}")
    meeting = ControlStore(store, scope, timeout_seconds, cancelled)
    meeting.set(f"here/{rank}", b"1")
    meeting.wait([f"here/{1 - rank}"])
    groups: list[dist.ProcessGroup] = []
    stores: list[ControlStore] = []
    try:
        with torch.cuda.device(device):
            for lane in range(lanes):
                stores.append(ControlStore(store, scope, timeout_seconds, cancelled, prefix=f"lane/{lane}/"))
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(days=7)  # waits are bounded by the link's users, by progress
                # A backend has the point-to-point calls of a process group; torch's stubs do not say so.
                groups.append(cast(dist.ProcessGroup, dist.ProcessGroupNCCL(stores[-1], rank, 2, options)))
    except RuntimeError as error:
        for group in groups:
            group.abort()
        raise PeerUnreachable(f"the ends of {scope!r} met but NCCL could not connect them: {error}") from error
    return NcclLink(groups, stores, rank, device)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
