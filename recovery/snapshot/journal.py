"""The journal: the averaged pseudo-gradients of the last commits, kept only while somebody is catching up.

A joiner whose transfer takes longer than a phase replays them upon its copy of an older version. An entry is named by
the version that it leads to. Its tensors are the averager's own result buffers, taken over without a copy; a training
loop that writes into what it was given is found out, and is copied for from then on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recovery.clock import Clock
from recovery.errors import DonorBusy, DonorMemoryChanged, DonorRefused, MisuseError, RecoveryError
from recovery.snapshot.lease import Lease, LeaseBook, LeaseRecord, Reading
from recovery.snapshot.service import ServiceThread
from recovery.snapshot.stall import StallAccount, StallCause
from recovery.snapshot.vault import Vault
from recovery.state.digest import chunk_digest
from recovery.state.live_part import LivePart, live_part
from recovery.state.manifest import Manifest, encode
from recovery.types import PartClass, PartName, Version

logger = logging.getLogger(__name__)

JOURNAL_PART = PartName("journal")
"""The one part of an entry's manifest: a dict of ``tokens``, ``like`` (shape and dtype of each average), ``gradients``
(the averages; empty if they travelled rounded) and ``encoded`` (then: what travelled, of which they are the values)."""

KEPT_ENTRIES = 2
"""Entries kept beside those that are being read: an outer base is only about twice the bytes of one. Of entries rounded
to a quarter of the bytes four times as many are kept."""

MakeBook = Callable[[Sequence[int], Callable[[], None]], LeaseBook]
Describe = Callable[[Version, LivePart], Manifest]


@dataclass(slots=True)
class _Pending:
    """What the boundary averaged and the training loop has not applied yet."""

    gradients: list[Tensor]
    encoded: list[Tensor]
    like: list[tuple[torch.Size, torch.dtype]]
    counters: list[int]
    """How often each tensor had been written when it was handed to the loop."""
    num_bytes: int
    rounded: int
    """How many such entries have the bytes of one that is not rounded."""

    @property
    def written(self) -> bool:
        return self.counters != _counters(self.gradients)


@dataclass(slots=True)
class _Entry:
    version: Version
    pending: _Pending
    tokens: int
    ready: threading.Event = field(default_factory=threading.Event)
    snapshot: _EntrySnapshot | None = None
    failure: RecoveryError | None = None

    @property
    def leased(self) -> bool:
        return self.snapshot is not None and len(self.snapshot.book) > 0


class _EntrySnapshot:
    """One entry as a lease reads it: memory that nobody writes any more."""

    def __init__(self, part: LivePart, manifest: Manifest, make_book: MakeBook) -> None:
        self._part = part
        self.manifest = manifest
        self.manifest_bytes = encode(manifest)
        self.book = make_book([len(spec.chunks) for spec in manifest.parts], lambda: None)

    def read(self, record: LeaseRecord, part: int, offset: int, num_bytes: int) -> Reading:
        """See ``Lease.read``."""
        if part != 0 or offset < 0 or num_bytes < 1 or offset + num_bytes > self._part.bytes.num_bytes:
            raise MisuseError(f"bytes {offset} to {offset + num_bytes} of part {part} are not inside the entry")
        return Reading(self._part.bytes.read(offset, num_bytes), live=False)

    def recheck(self, part: int, chunk: int) -> bool:
        """See ``Lease.recheck``."""
        chunks = self.manifest.parts[0].chunks
        if part != 0 or not 0 <= chunk < len(chunks):
            raise MisuseError(f"there is no chunk {chunk} of part {part}")
        spec = chunks[chunk]
        data = self._part.bytes.read(spec.offset, spec.num_bytes)
        return chunk_digest(self.manifest.digest_algorithm, data) == spec.digest


class Journal:
    """Entries by version. ``begin`` and ``record`` belong to the training thread, the rest to any.

    Args:
        vault: Whose budget the entries count against; memory itself is the averager's.
        digester: The thread that describes entries.
        stall: Where copies on the training thread are counted.
        describe: Makes an entry's manifest.
        make_book: Makes an entry's leases.
        grace_seconds: How long after the last conversation entries are kept on.
    """

    def __init__(
        self,
        vault: Vault,
        digester: ServiceThread,
        stall: StallAccount,
        clock: Clock,
        *,
        describe: Describe,
        make_book: Callable[[Version], MakeBook],
        grace_seconds: float,
    ) -> None:
        self._vault = vault
        self._digester = digester
        self._stall = stall
        self._clock = clock
        self._describe = describe
        self._make_book = make_book
        self._grace_seconds = grace_seconds
        self._lock = threading.Lock()
        self._readers = 0
        self._until = float("-inf")
        self._published_at: float | None = None
        self._period_seconds = 0.0
        self._pending: _Pending | None = None
        self._copies = False
        self._entries: dict[Version, _Entry] = {}
        self._closed = False
        self._last_refusal = ""

    # Who is interested

    def enter(self) -> None:
        """A joiner's conversation began: from here on commits are kept."""
        with self._lock:
            self._readers += 1

    def leave(self) -> None:
        """A conversation that ``enter`` counted is over. Entries stay for a grace time, or one outer period."""
        with self._lock:
            self._readers -= 1
            self._until = self._clock.monotonic() + max(self._grace_seconds, self._period_seconds)

    @property
    def wanted(self) -> bool:
        """Whether somebody is catching up now, or was a short time ago."""
        return self._readers > 0 or self._clock.monotonic() < self._until

    @property
    def versions(self) -> list[Version]:
        """The versions that entries lead to, oldest first."""
        with self._lock:
            return sorted(self._entries)

    # Training thread

    def begin(self, averaged: Sequence[Tensor], encoded: Sequence[Tensor] = ()) -> bool:
        """The boundary is committed; the loop is about to apply ``averaged``.

        Args:
            averaged: What the loop gets.
            encoded: What travelled, if it was rounded to fewer bytes: kept instead. The loop never sees it.

        Returns:
            Whether the tensors themselves are kept: nobody but the loop may write into them from now on.
        """
        self._forget_pending()
        if self._closed or not self.wanted:
            return False
        whole = sum(tensor.nbytes for tensor in averaged)
        num_bytes = sum(tensor.nbytes for tensor in encoded) if encoded else whole
        self._last_refusal = ""
        if not self._vault.charge(num_bytes):
            self._last_refusal = (
                f"{num_bytes} bytes of a journal entry do not fit beside {self._vault.used_bytes} in use into the "
                f"snapshot budget of {self._vault.budget_bytes} bytes"
            )
            return False
        copies = self._copies or any(tensor.is_inference() for tensor in averaged)
        kept = [] if encoded else self._copied(averaged) if copies else list(averaged)
        like = [(tensor.shape, tensor.dtype) for tensor in averaged]
        self._pending = _Pending(
            kept, list(encoded), like, _counters(kept), num_bytes, max(1, whole // max(num_bytes, 1))
        )
        return bool(kept) and not copies

    def record(self, version: Version, tokens: int) -> None:
        """The loop has applied what ``begin`` was told: that led to ``version``. Entries too old are forgotten."""
        now = self._clock.monotonic()
        if self._published_at is not None:
            self._period_seconds = now - self._published_at
        self._published_at = now
        pending, self._pending = self._pending, None
        if pending is not None and pending.written:
            self._copies = True
            self._last_refusal = f"the training loop wrote into the averages that led to {version}"
            logger.info("%s: the next ones are copied for the journal", self._last_refusal)
            self._vault.refund(pending.num_bytes)
            pending = None
        if pending is not None:
            entry = _Entry(version, pending, tokens)
            with self._lock:
                self._entries[version] = entry
            self._digester.submit(lambda: self._digest(entry))
        self.sweep()

    # Any thread

    def lease(self, version: Version, holder: str, timeout_seconds: float) -> Lease:
        """Return a lease on the entry that leads to ``version``.

        Raises:
            DonorRefused: it is not kept; says which are, and why if the last one was not.
            DonorBusy: its digests are not ready in time.
            DonorMemoryChanged: the training loop wrote into it.
        """
        with self._lock:
            entry = self._entries.get(version)
        if entry is None:
            kept = ", ".join(map(str, self.versions)) or "none"
            raise DonorRefused(
                f"no journal entry leads to {version} here; there are: {kept}"
                + (f" ({self._last_refusal})" if self._last_refusal else "")
            )
        if not entry.ready.wait(timeout_seconds):
            raise DonorBusy(f"the journal entry of {version} was not hashed within {timeout_seconds:g} s")
        snapshot = entry.snapshot
        if snapshot is None or entry.pending.written:
            self._drop(entry)
            raise entry.failure or DonorMemoryChanged(
                f"the training loop wrote into the averages that led to {version}"
            )
        record = snapshot.book.take(holder, until_boundary=False)
        return Lease(snapshot, record, snapshot.manifest, snapshot.manifest_bytes)

    def sweep(self) -> None:
        """Leases past their deadline end; entries that nobody can want any more are forgotten."""
        with self._lock:
            entries = sorted(self._entries.values(), key=lambda entry: entry.version)
        for entry in entries:
            if entry.snapshot is not None:
                entry.snapshot.book.expire()
        count = KEPT_ENTRIES * min((entry.pending.rounded for entry in entries), default=1)
        kept = entries[-count:] if self.wanted and not self._closed else []
        for entry in entries:
            if entry not in kept and not entry.leased:
                self._drop(entry)

    def close(self, reason: str) -> None:
        """Every lease has ended, nothing is kept. Training thread. Safe twice."""
        self._closed = True
        self._forget_pending()
        with self._lock:
            entries = list(self._entries.values())
        for entry in entries:
            if entry.snapshot is not None:
                entry.snapshot.book.end_all(reason)
            self._drop(entry)

    @property
    def num_leases(self) -> int:
        """Leases that count now."""
        with self._lock:
            entries = list(self._entries.values())
        return sum(len(entry.snapshot.book) for entry in entries if entry.snapshot is not None)

    def _copied(self, averaged: Sequence[Tensor]) -> list[Tensor]:
        with self._stall.measure(StallCause.JOURNAL_COPY) as span:
            span.num_bytes = sum(tensor.nbytes for tensor in averaged)
            return [tensor.detach().clone() for tensor in averaged]

    def _digest(self, entry: _Entry) -> None:
        """The entry can be leased, or says why not. On the digester's thread."""
        try:
            pending = entry.pending
            value = {
                "tokens": entry.tokens,
                "like": pending.like,
                "gradients": pending.gradients,
                "encoded": pending.encoded,
            }
            part = live_part(JOURNAL_PART, PartClass.REPLICATED, value)
            manifest = self._describe(entry.version, part)
            entry.snapshot = _EntrySnapshot(part, manifest, self._make_book(entry.version))
        except RecoveryError as error:
            entry.failure = error
        finally:
            entry.ready.set()

    def _drop(self, entry: _Entry) -> None:
        with self._lock:
            if self._entries.get(entry.version) is not entry:
                return
            del self._entries[entry.version]
        self._vault.refund(entry.pending.num_bytes)

    def _forget_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._vault.refund(pending.num_bytes)


def _counters(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]
