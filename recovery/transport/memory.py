"""A link inside one process, with a hook through which tests damage, drop, repeat, delay and reorder messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from recovery.errors import DonorLost, MisuseError
from recovery.transport.link import Transfer, check_message


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What the donor's end was given to send. ``number`` counts the link's messages from 0."""

    number: int
    lane: int
    tag: int
    data: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """Bytes that reach the joiner's end for a message: at once, or after so many further messages of the link.

    A delivery whose receive has ended already is dropped, as a socket's would be.
    """

    data: torch.Tensor
    after_messages: int = 0


Faults = Callable[[Message], Sequence[Delivery]]
"""Decides what becomes of a message. An empty answer loses it; the sender is not told."""


def deliver(message: Message) -> Sequence[Delivery]:
    """Deliver each message once, unchanged: no fault."""
    return [Delivery(data=message.data)]


@dataclass(slots=True)
class _Posted:
    into: torch.Tensor | None
    ended: threading.Event = field(default_factory=threading.Event)
    error: str | None = None
    waited: bool = False


class MemoryWire:
    """What the two ends share. Tests read its counters and release what a fault delayed.

    Attributes:
        dropped: Number of deliveries that found no receive to go to, because it had ended.
    """

    def __init__(self, lanes: int, faults: Faults) -> None:
        self._lanes = lanes
        self._faults = faults
        self._lock = threading.RLock()
        self._num_messages = 0
        self._receives: dict[int, _Posted] = {}
        self._ended_tags: set[int] = set()
        self._arrived: dict[int, list[tuple[torch.Tensor, _Posted]]] = {}
        self._held: list[tuple[int, int, torch.Tensor, _Posted]] = []
        self._everything: list[_Posted] = []
        self._broken: str | None = None
        self.moved_bytes = 0
        self.dropped = 0

    def post_send(self, tag: int, lane: int, data: torch.Tensor) -> _Posted:
        with self._lock:
            self._check_broken()
            message = Message(number=self._num_messages, lane=lane, tag=tag, data=data)
            self._num_messages += 1
            sent = _Posted(data)
            self._everything.append(sent)
            deliveries = self._faults(message)
            if not deliveries:
                sent.ended.set()
            for delivery in deliveries:
                self._held.append((message.number + delivery.after_messages, tag, delivery.data, sent))
            self._deliver_until(message.number)
            return sent

    def post_receive(self, tag: int, into: torch.Tensor) -> _Posted:
        with self._lock:
            self._check_broken()
            if tag in self._receives or tag in self._ended_tags:
                raise MisuseError(f"tag {tag} is in use or was used")
            posted = _Posted(into)
            self._everything.append(posted)
            self._receives[tag] = posted
            for data, sent in self._arrived.pop(tag, []):
                self._arrive(tag, data, sent)
            return posted

    def release(self) -> int:
        """Deliver everything that a fault delayed, now, in the order of its due messages; return how much it was."""
        with self._lock:
            num_held = len(self._held)
            self._deliver_until(max((due for due, *_ in self._held), default=0))
            return num_held

    def shut(self, reason: str) -> None:
        with self._lock:
            if self._broken is None:
                self._broken = reason
            self._held.clear()
            self._arrived.clear()
            self._receives.clear()
            for posted in self._everything:
                if not posted.ended.is_set():
                    posted.error = f"the data link was shut: {self._broken}"
                    posted.ended.set()
            self._everything.clear()

    def wait(self, posted: _Posted, timeout_seconds: float) -> None:
        with self._lock:
            if posted.waited:
                raise MisuseError("a transfer is waited for exactly once")
            posted.waited = True
        if not posted.ended.wait(timeout_seconds):
            self.shut(f"nothing moved for {timeout_seconds:.1f} s")
        if posted.error is not None:
            raise DonorLost(posted.error)

    def _deliver_until(self, number: int) -> None:
        due = sorted((each for each in self._held if each[0] <= number), key=lambda each: each[0])
        self._held = [each for each in self._held if each[0] > number]
        for _, tag, data, sent in due:
            self._arrive(tag, data, sent)

    def _arrive(self, tag: int, data: torch.Tensor, sent: _Posted) -> None:
        if tag in self._ended_tags:
            self.dropped += 1
            sent.ended.set()
            return
        posted = self._receives.get(tag)
        if posted is None or posted.into is None:
            self._arrived.setdefault(tag, []).append((data, sent))
            return
        if data.numel() > posted.into.numel():
            # Over gloo this ends the joiner's process; here it ends the link.
            self.shut(f"a message of {data.numel()} bytes came for a receive of {posted.into.numel()}")
            return
        posted.into[: data.numel()].copy_(data)
        self.moved_bytes += data.numel()
        del self._receives[tag]
        self._ended_tags.add(tag)
        posted.into = None  # from here on the memory is the caller's again
        posted.ended.set()
        sent.ended.set()

    def _check_broken(self) -> None:
        if self._broken is not None:
            raise DonorLost(f"the link was shut: {self._broken}")


class MemoryTransfer:
    """One posted operation of a memory link."""

    def __init__(self, wire: MemoryWire, posted: _Posted) -> None:
        self._wire = wire
        self._posted = posted

    def wait(self, timeout_seconds: float) -> None:
        self._wire.wait(self._posted, timeout_seconds)


class MemoryLink:
    """One end of a link inside this process."""

    def __init__(self, wire: MemoryWire, lanes: int, *, donor: bool) -> None:
        self.wire = wire
        self._lanes = lanes
        self._donor = donor

    @property
    def lanes(self) -> int:
        return self._lanes

    def send(self, lane: int, tag: int, data: torch.Tensor) -> Transfer:
        if not self._donor:
            raise MisuseError("a joiner does not send payload")
        check_message(lane, self._lanes, tag, data)
        return MemoryTransfer(self.wire, self.wire.post_send(tag, lane, data))

    def receive(self, lane: int, tag: int, into: torch.Tensor) -> Transfer:
        if self._donor:
            raise MisuseError("a donor never receives payload")
        check_message(lane, self._lanes, tag, into)
        return MemoryTransfer(self.wire, self.wire.post_receive(tag, into))

    def shut(self, reason: str) -> None:
        self.wire.shut(reason)

    def close(self) -> None:
        self.wire.shut("closed")

    def endpoints(self) -> list[str]:
        return []

    def bytes_moved(self) -> int:
        return self.wire.moved_bytes

    def round_trip_seconds(self) -> float | None:
        return None


def memory_link_pair(lanes: int, faults: Faults = deliver) -> tuple[MemoryLink, MemoryLink]:
    """Return the donor's and the joiner's end of a new link; ``faults`` decides what becomes of each message."""
    wire = MemoryWire(lanes, faults)
    return MemoryLink(wire, lanes, donor=True), MemoryLink(wire, lanes, donor=False)
