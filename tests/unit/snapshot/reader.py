"""A joiner as far as a snapshot sees one: it reads at its own pace, verifies, acknowledges, freezes, returns."""

from __future__ import annotations

import enum
import random
import threading
from collections.abc import Callable

import blake3
import torch

from recovery.snapshot import Lease
from recovery.state.digest import chunk_digest


class Temper(enum.Enum):
    """How a reader behaves."""

    BRISK = "brisk"
    SLOW = "slow"
    """Pauses between pieces, and in the middle of each send."""
    FREEZES = "freezes"
    """Stops in the middle of a send until the donor's outer step is over, then goes on with the same send."""


class Reader:
    """Receives one lease's parts over an imagined wire that takes its time to send the bytes it was given.

    Attributes:
        bad_chunks: Chunks without the manifest's digest that the donor had not declared void.
        void_sends: Sends that were under way when the donor closed the version.
        read_after_close: Whether the lease outlived the outer step.
    """

    def __init__(self, lease: Lease, temper: Temper, rng: random.Random, give_up: threading.Event) -> None:
        self.lease = lease
        self.temper = temper
        self.bad_chunks = 0
        self.void_sends = 0
        self.read_after_close = False
        self._rng = rng
        self._give_up = give_up
        self._closed = threading.Event()
        self._sending_live = False
        self._has_frozen = False
        self._parts = [torch.zeros(part.num_bytes, dtype=torch.uint8) for part in lease.manifest.parts]
        self._verified: set[tuple[int, int]] = set()
        lease.on_closed(self._on_closed)

    def _on_closed(self) -> int:
        under_way = int(self._sending_live)
        self.void_sends += under_way
        self._closed.set()
        return under_way

    def take_up(self, lease: Lease) -> None:
        """Go on under a lease taken again, with what has been verified so far."""
        assert lease.manifest_bytes == self.lease.manifest_bytes
        self.lease = lease
        lease.on_closed(self._on_closed)

    def receive(self, *, until: float = 1.0) -> None:
        """Receive and verify this share of the chunks, in random order."""
        todo = [
            (p, c)
            for p, part in enumerate(self.lease.manifest.parts)
            for c in range(len(part.chunks))
            if (p, c) not in self._verified
        ]
        self._rng.shuffle(todo)
        for p, c in todo[: round(len(todo) * until)]:
            self._receive_chunk(p, c)

    def _receive_chunk(self, p: int, c: int) -> None:
        spec = self.lease.manifest.parts[p].chunks[c]
        position, end = spec.offset, spec.offset + spec.num_bytes
        while position < end:
            size = min(end - position, self._rng.choice([1 << 16, 1 << 20, 1 << 22]))
            self._send(p, position, size)
            position += size
        got = self._parts[p][spec.offset : end]
        if chunk_digest(self.lease.manifest.digest_algorithm, got) == spec.digest:
            self._verified.add((p, c))
            self.lease.acknowledge(p, c)
        else:
            self.bad_chunks += 1

    def _send(self, p: int, offset: int, size: int) -> None:
        while True:
            self._sending_live = True  # before reading: the version may close in between
            reading = self.lease.read(p, offset, size)
            self._sending_live = reading.live
            self.read_after_close |= self._closed.is_set()
            into = self._parts[p][offset : offset + size]
            half = size // 2
            into[:half].copy_(reading.data[:half])
            self._pause(reading.live)
            into[half:].copy_(reading.data[half:])
            self._sending_live = False
            if not (reading.live and self._closed.is_set()):
                return

    def _pause(self, live: bool) -> None:
        if self.temper is Temper.SLOW:
            self._give_up.wait(self._rng.random() * 0.003)
        if self.temper is Temper.FREEZES and live and not self._has_frozen:
            self._has_frozen = True
            self._closed.wait(2)
            self._give_up.wait(0.02)  # long enough for the outer step to overwrite what is being sent

    def found(self) -> dict[str, tuple[bytes, bytes]]:
        """Return what was received, in the form of ``trainee.reference``."""
        return {
            part.name: (part.tree.SerializeToString(deterministic=True), blake3.blake3(data.numpy().tobytes()).digest())
            for part, data in zip(self.lease.manifest.parts, self._parts, strict=True)
        }


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Return whether ``condition`` came true within ``seconds``."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if condition():
            return True
        pause.wait(0.005)
    return condition()
