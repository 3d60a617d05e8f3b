"""Leases: who reads a snapshot, what each has verified, and when a silent one loses it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from recovery.clock import Clock
from recovery.errors import DonorRefused, MisuseError
from recovery.state.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes of a part: a 1-d uint8 CPU tensor, never to be written.

    ``live``: a view of memory that training will overwrite at its next outer step; from the call of the lease's
    ``on_closed`` on, what was read from it counts for nothing. Not live: stable for as long as it is referenced.
    """

    data: torch.Tensor
    live: bool


@dataclass(eq=False, slots=True)
class LeaseRecord:
    """One holder's claim on one snapshot. It survives the loss of the holder by a grace time."""

    holder: str
    until_boundary: bool
    acknowledged: list[bytearray]
    last_used_seconds: float
    generation: int = 0
    """Raised when the holder takes the lease up again; the older ``Lease`` is dead from then on."""
    grace_until_seconds: float | None = None
    ended: str = ""
    on_closed: list[Callable[[], int | None]] = field(default_factory=list)


class LeaseBook:
    """The leases of one snapshot. Every method may be called from any thread; none waits.

    Args:
        chunk_counts: Number of chunks of each part.
        deadline_seconds: A holder that uses its lease no sooner than this loses it.
        grace_seconds: How long a lost holder's lease stays.
        on_ended: Called after a lease ended, with the record and the reason, outside of the book's lock.
        on_empty: Called after the last lease ended.
    """

    def __init__(
        self,
        chunk_counts: Sequence[int],
        clock: Clock,
        *,
        deadline_seconds: float,
        grace_seconds: float,
        on_ended: Callable[[LeaseRecord, str], None],
        on_empty: Callable[[], None],
    ) -> None:
        self._chunk_counts = tuple(chunk_counts)
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._grace_seconds = grace_seconds
        self._on_ended = on_ended
        self._on_empty = on_empty
        self._lock = threading.Lock()
        self._records: dict[str, LeaseRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def records(self) -> list[LeaseRecord]:
        """Return the leases that count now, those in grace included."""
        with self._lock:
            return list(self._records.values())

    def holds(self, holder: str) -> bool:
        """Return whether ``holder`` has a lease, in use or in grace."""
        return holder in self._records

    def take(self, holder: str, *, until_boundary: bool) -> LeaseRecord:
        """Return the holder's record: a new one, or the one that it had, with all that it acknowledged."""
        now = self._clock.monotonic()
        with self._lock:
            record = self._records.get(holder)
            if record is None:
                acknowledged = [bytearray(count) for count in self._chunk_counts]
                record = LeaseRecord(holder, until_boundary, acknowledged, now)
                self._records[holder] = record
            record.generation += 1
            record.grace_until_seconds = None
            record.last_used_seconds = now
            return record

    def use(self, record: LeaseRecord, generation: int) -> None:
        """The holder gave a sign of life.

        Raises:
            DonorRefused: the lease ended, or the holder took it up again elsewhere.
        """
        if record.ended:
            raise DonorRefused(f"the lease of {record.holder} ended: {record.ended}")
        if record.generation != generation:
            raise DonorRefused(f"{record.holder} took its lease up again: this one is no longer in use")
        record.last_used_seconds = self._clock.monotonic()

    def acknowledge(self, record: LeaseRecord, part: int, chunk: int) -> None:
        """The holder has verified this chunk and will not ask for it again.

        Raises:
            MisuseError: there is no such chunk.
        """
        if not (0 <= part < len(record.acknowledged) and 0 <= chunk < len(record.acknowledged[part])):
            raise MisuseError(f"{record.holder} acknowledged chunk {chunk} of part {part}, which does not exist")
        record.acknowledged[part][chunk] = 1

    def release(self, record: LeaseRecord, generation: int, reason: str, *, grace: bool) -> None:
        """The lease ends, at once or (``grace``) unless its holder takes it up again in time. Safe twice."""
        if record.generation != generation or record.ended:
            return
        if grace and self._grace_seconds > 0:
            record.grace_until_seconds = self._clock.monotonic() + self._grace_seconds
            record.on_closed.clear()
            return
        self.end(record, reason)

    def end(self, record: LeaseRecord, reason: str) -> None:
        """The lease is over now, whoever holds it. Safe twice."""
        with self._lock:
            if record.ended:
                return
            record.ended = reason or "released"
            record.on_closed.clear()
            if self._records.get(record.holder) is record:
                del self._records[record.holder]
            empty = not self._records
        self._on_ended(record, record.ended)
        if empty:
            self._on_empty()

    def end_all(self, reason: str) -> None:
        """No lease is left."""
        for record in self.records():
            self.end(record, reason)

    def expire(self) -> None:
        """Leases whose holder was silent or lost for too long are over."""
        now = self._clock.monotonic()
        for record in self.records():
            if record.grace_until_seconds is not None:
                if now >= record.grace_until_seconds:
                    self.end(record, f"its holder was lost and did not come back in {self._grace_seconds:g} s")
            elif now - record.last_used_seconds >= self._deadline_seconds:
                self.end(record, f"its holder read and said nothing for {self._deadline_seconds:g} s")


class Leased(Protocol):
    """A snapshot that can be read under a lease."""

    @property
    def book(self) -> LeaseBook: ...

    def read(self, record: LeaseRecord, part: int, offset: int, num_bytes: int) -> Reading: ...

    def recheck(self, part: int, chunk: int) -> bool: ...


class Lease:
    """One holder's right to read one snapshot. Methods may be called from any thread, by one holder.

    Attributes:
        manifest: What the snapshot holds.
        manifest_bytes: Its canonical encoding.
        holder: Who reads.
        until_boundary: The snapshot can be read only until the donor's next outer step, which ends it.
    """

    def __init__(self, snapshot: Leased, record: LeaseRecord, manifest: Manifest, manifest_bytes: bytes) -> None:
        self._snapshot: Leased | None = snapshot
        self._book = snapshot.book
        self._record = record
        self._generation = record.generation
        self.manifest = manifest
        self.manifest_bytes = manifest_bytes
        self.holder = record.holder
        self.until_boundary = record.until_boundary

    @property
    def ended(self) -> str:
        """Why the lease is over; empty while it holds."""
        if self._record.ended:
            return self._record.ended
        return "taken up again elsewhere" if self._record.generation != self._generation else ""

    def read(self, part: int, offset: int, num_bytes: int) -> Reading:
        """Return ``num_bytes`` of a part from ``offset`` on. Never waits for training.

        Args:
            part: Index into ``manifest.parts``.
            offset: First byte.
            num_bytes: At least 1.

        Raises:
            MisuseError: the range is not inside the part.
            DonorBusy: lent until the boundary, and that is past: ask for the newer version.
            DonorRefused: the lease ended, or the holder acknowledged these bytes before the outer step.
        """
        return self._in_use().read(self._record, part, offset, num_bytes)

    def part_bytes(self, part: int) -> int:
        """Return the number of bytes of a part; ``read`` serves all of them."""
        return self.manifest.parts[part].num_bytes

    def acknowledge(self, part: int, chunk: int) -> None:
        """The holder verified the chunk: it need not be saved for it any more."""
        self._in_use().book.acknowledge(self._record, part, chunk)

    def recheck(self, part: int, chunk: int) -> bool:
        """Hash the chunk's memory again; return whether it has the manifest's digest.

        True: the link or the reader changed the bytes. False: memory was written round the guard.

        Raises:
            DonorRefused, DonorBusy: as ``read``.
        """
        return self._in_use().recheck(part, chunk)

    def renew(self) -> None:
        """The holder lives: its deadline starts again."""
        self._in_use()

    def release(self, reason: str, *, grace: bool = False) -> None:
        """The holder reads no more. Safe twice.

        Args:
            reason: Shown in the event.
            grace: The holder was lost and may come back: the snapshot stays for it for a grace time.
        """
        self._book.release(self._record, self._generation, reason, grace=grace)
        self._snapshot = None  # whoever still holds this object does not keep the memory

    def on_closed(self, callback: Callable[[], int | None]) -> None:
        """Have ``callback`` called when live readings become void, on the training thread: it must return at once.

        It may return how many pulls it voided, for the event. If the views are closed already, nobody calls it: what
        is read after that is never live.
        """
        self._record.on_closed.append(callback)

    def _in_use(self) -> Leased:
        """Return the snapshot, for a sign of life of the holder."""
        snapshot = self._snapshot
        self._book.use(self._record, self._generation)
        if snapshot is None:
            raise DonorRefused(f"{self.holder} released this lease")
        return snapshot
