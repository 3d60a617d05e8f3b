"""The outer parts of one version: lent as views while they stand still, saved by the guard before they are overwritten.

A chunk is *live* (only in the memory that training uses), *being copied* by the copy-ahead thread, or *saved* in the
version's arena. The version is *open* until the guard closes it. Whoever reads live memory looks at ``open`` again
after reading: still open means that nothing was overwritten in between, because the guard closes the version on the
training thread before that thread goes on to write. That check takes the place of a lock, so that the guard never
waits for a reader, a copy or a digest.
"""

from __future__ import annotations

import bisect
import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from recovery.clock import Clock
from recovery.errors import DonorBusy, DonorMemoryChanged, DonorRefused, MisuseError, RecoveryError
from recovery.snapshot.frozen import copy_range, freeze
from recovery.snapshot.lease import LeaseBook, LeaseRecord, Reading
from recovery.snapshot.vault import Arena, Vault
from recovery.state.chunks import chunk_ranges
from recovery.state.compare import damaged_tensors
from recovery.state.digest import chunk_digest
from recovery.state.live_part import LivePart
from recovery.state.manifest import Manifest, encode
from recovery.types import Version


class Place(enum.IntEnum):
    """Where a chunk's bytes are."""

    LIVE = 0
    BEING_COPIED = 1
    SAVED = 2


@dataclass(frozen=True, slots=True)
class ClosingReport:
    """What the guard did. ``callbacks`` are to be called by the training thread at once."""

    copied_bytes: int
    num_leases: int
    callbacks: tuple[Callable[[], int | None], ...]


class OuterSnapshot:
    """The replicated parts at one version.

    Args:
        version: What the parts are.
        parts: Live references, read on the training thread.
        digest: The digest pass over parts, live or frozen.
        book: Makes the version's leases, given the chunk counts of its parts and what to do when none is left.
    """

    def __init__(
        self,
        version: Version,
        parts: Sequence[LivePart],
        digest: Callable[[Sequence[LivePart]], Manifest],
        vault: Vault,
        clock: Clock,
        make_book: Callable[[Sequence[int], Callable[[], None]], LeaseBook],
    ) -> None:
        self.version = version
        self._parts = tuple(parts)
        self._digest = digest
        self._vault = vault
        self._clock = clock
        self.published_at_seconds = clock.monotonic()
        self._chunks = [chunk_ranges([spec.num_bytes for spec in part.specs]) for part in parts]
        self._starts: list[int] = []
        self.num_bytes = 0
        for part in parts:
            self._starts.append(self.num_bytes)
            self.num_bytes += part.bytes.num_bytes
        # One chunk more than the parts: the guard must not wait for a copy that the copy-ahead thread has begun.
        self.arena_bytes = self.num_bytes + max((size for chunks in self._chunks for _, size in chunks), default=0)
        self.leased_since_seconds = self.published_at_seconds
        self._lock = threading.Lock()
        self._places = [bytearray(len(chunks)) for chunks in self._chunks]
        self._arena: Arena | None = None
        self._spare: tuple[int, int] | None = None
        self._open = True
        self._closing = False
        self._gone = ""
        self._manifest: Manifest | None = None
        self._manifest_bytes = b""
        self._failure: RecoveryError | None = None
        self._digested = threading.Event()
        self.book = make_book([len(chunks) for chunks in self._chunks], self._emptied)

    @property
    def is_open(self) -> bool:
        """Whether the parts still stand in the memory that training uses."""
        return self._open

    @property
    def is_saving(self) -> bool:
        """Whether the guard would save chunks: somebody reads, and memory is reserved."""
        return self._open and self._arena is not None and len(self.book) > 0

    # The digest pass

    def run_digest(self) -> None:
        """The manifest is known, or why there is none. Runs on the digest thread, once."""
        try:
            manifest = self._digest(self._parts)
            if not self._open:
                # Training may have written while the pass read: what it found counts for nothing.
                manifest = self._digest_of_copies()
            self._manifest_bytes = encode(manifest)
            self._manifest = manifest
        except RecoveryError as error:
            self._failure = error
        except Exception as error:
            self._failure = DonorRefused(f"the digest pass over {self.version} failed: {error!r}")
            raise  # a bug: the thread's owner gets it as well
        finally:
            self._digested.set()

    def _digest_of_copies(self) -> Manifest:
        with self._lock:
            whole = self._arena is not None and all(place == Place.SAVED for places in self._places for place in places)
            arena = self._arena
        if not whole or arena is None:
            raise DonorBusy(f"{self.version} was overwritten before its digests were ready: ask for the newer version")
        frozen = [freeze(part, self._saved_part(arena, p)) for p, part in enumerate(self._parts)]
        return self._digest(frozen)

    def manifest(self, timeout_seconds: float) -> tuple[Manifest, bytes]:
        """Return the manifest and its encoding, waiting for the digest pass.

        Raises:
            DonorBusy: not ready in time, or overwritten before the pass was through and nobody had it saved.
            RecoveryError: what the digest pass raised.
        """
        if not self._digested.wait(timeout_seconds):
            raise DonorBusy(f"the digests of {self.version} are not ready after {timeout_seconds:g} s")
        if self._failure is not None:
            raise self._failure
        assert self._manifest is not None
        return self._manifest, self._manifest_bytes

    # Leases

    def reserve(self) -> bool:
        """Memory for the worst case is reserved and touched, once for all leases; False if the vault has none.

        May take long: not for the training thread.
        """
        with self._lock:
            if self._arena is None and self._open and not self._closing:
                self._arena = self._vault.reserve(self.arena_bytes)
                self.leased_since_seconds = self._clock.monotonic()
            arena = self._arena
        if arena is None:
            return False
        arena.touch()
        return True

    def take(self, holder: str) -> LeaseRecord:
        """Return a new lease, or the holder's own that it left.

        Raises:
            DonorBusy: the version is closed, and ``holder`` had no lease on it.
        """
        with self._lock:
            # Who comes while the guard copies comes too late: what is to be copied has been settled.
            if self._gone or (self._closing and not self.book.holds(holder)):
                raise DonorBusy(self._gone or f"{self.version} is over: ask for the newer version")
            return self.book.take(holder, until_boundary=False)

    def read(self, record: LeaseRecord, part: int, offset: int, num_bytes: int) -> Reading:
        """See ``Lease.read``."""
        self._check_range(part, offset, num_bytes)
        wanted = self._covering(part, offset, num_bytes)
        saved = self._saved(part, wanted, offset, num_bytes)
        if saved is None and self._open:
            view = self._parts[part].bytes.view(offset, num_bytes)
            if view is not None:
                return Reading(view, live=True)
            copy = self._parts[part].bytes.read(offset, num_bytes)
            if self._open:  # after copying: nobody has written in between
                return Reading(copy, live=False)
        if saved is None:
            saved = self._saved(part, wanted, offset, num_bytes)  # the guard may have saved it meanwhile
        if saved is not None:
            return Reading(saved, live=False)
        raise self._not_held(record, part, wanted)

    def recheck(self, part: int, chunk: int) -> bool:
        """See ``Lease.recheck``."""
        manifest, _ = self.manifest(0)
        if not (0 <= part < len(self._chunks) and 0 <= chunk < len(self._chunks[part])):
            raise MisuseError(f"there is no chunk {chunk} of part {part}")
        offset, num_bytes = self._chunks[part][chunk]
        expected = manifest.parts[part].chunks[chunk].digest
        wanted = range(chunk, chunk + 1)
        saved = self._saved(part, wanted, offset, num_bytes)
        if saved is None:
            live = self._parts[part].bytes.read(offset, num_bytes)
            same = chunk_digest(manifest.digest_algorithm, live) == expected
            if self._open:
                return same
            saved = self._saved(part, wanted, offset, num_bytes)
        if saved is None:
            raise DonorBusy(self._gone or f"{self.version} is over: chunk {chunk} of part {part} was not saved")
        return chunk_digest(manifest.digest_algorithm, saved) == expected

    def damaged(self) -> list[str]:
        """Return the tensors, as part/path, whose memory no longer has the manifest's digest.

        Raises:
            DonorBusy: the version was closed meanwhile, or its digests are not ready.
        """
        manifest, _ = self.manifest(0)
        found = []
        for part, spec in zip(self._parts, manifest.parts, strict=True):
            found += [f"{part.name}/{path}" for path in damaged_tensors(part, spec, manifest.digest_algorithm)]
        if not self._open:
            raise DonorBusy(f"{self.version} was overwritten while its memory was hashed: ask again")
        return found

    # The guard

    def close(self) -> ClosingReport:
        """What somebody still needs is saved, and the live views are closed. Training thread; waits for nobody."""
        with self._lock:
            if not self._open:
                return ClosingReport(0, 0, ())
            self._closing = True
            arena = self._arena
            todo = self._needed() if arena is not None else []
            for p, c in todo:
                if self._places[p][c] == Place.BEING_COPIED:
                    # The copy-ahead thread will write its slot after the outer step has begun: that slot is lost to
                    # it, and the bytes go to the spare one.
                    self._spare = (p, c)
        copied = 0
        for p, offset, num_bytes, slot in self._runs(arena, todo) if arena is not None else ():
            copy_range(self._parts[p], offset, slot)
            copied += num_bytes
        with self._lock:
            for p, c in todo:
                self._places[p][c] = Place.SAVED
            self._open = False
            records = self.book.records()
        callbacks = tuple(callback for record in records for callback in record.on_closed)
        return ClosingReport(copied, len(records), callbacks)

    def void(self, reason: str) -> tuple[Callable[[], int | None], ...]:
        """The memory was written without the guard: nothing that is not saved can be served. Training thread."""
        with self._lock:
            self._open = False
            self._closing = True
            self._gone = reason
            records = self.book.records()
        callbacks = tuple(callback for record in records for callback in record.on_closed)
        self.book.end_all(reason)
        return callbacks

    def _runs(self, arena: Arena, todo: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """Yield (part, offset, bytes, place in the arena), neighbouring chunks of one tensor taken together."""
        position = 0
        while position < len(todo):
            p, c = todo[position]
            offset, num_bytes = self._chunks[p][c]
            position += 1
            while position < len(todo) and self._spare not in (todo[position - 1], todo[position]):
                (next_p, next_c), size = todo[position], self._chunks[todo[position][0]][todo[position][1]][1]
                if (next_p, next_c) != (p, c + 1) or self._parts[p].bytes.view(offset, num_bytes + size) is None:
                    break
                c, num_bytes, position = next_c, num_bytes + size, position + 1
            if self._spare == (p, c):
                yield p, offset, num_bytes, self._slot(arena, p, c)
            else:
                start = self._starts[p] + offset
                yield p, offset, num_bytes, arena.data[start : start + num_bytes]

    def _needed(self) -> list[tuple[int, int]]:
        """Chunks that are not saved and that some holder has not verified. While digests are not ready: all."""
        records = [record for record in self.book.records() if not record.until_boundary]
        if not records:
            return []
        everything = not self._digested.is_set()
        return [
            (p, c)
            for p, places in enumerate(self._places)
            for c, place in enumerate(places)
            if place != Place.SAVED and (everything or not all(record.acknowledged[p][c] for record in records))
        ]

    # Copying ahead

    def unsaved(self) -> list[tuple[int, int]]:
        """Return the chunks that the guard would have to copy now."""
        with self._lock:
            return self._needed() if self._open and self._arena is not None else []

    def bytes_of(self, chunks: Sequence[tuple[int, int]]) -> int:
        return sum(self._chunks[p][c][1] for p, c in chunks)

    def acknowledged_bytes(self) -> int:
        """Return the bytes that every holder has verified."""
        records = self.book.records()
        return sum(
            self._chunks[p][c][1]
            for p in range(len(self._chunks))
            for c in range(len(self._chunks[p]))
            if records and all(record.acknowledged[p][c] for record in records)
        )

    def save_ahead(self, part: int, chunk: int) -> int:
        """Copy one chunk into the arena; return its bytes, 0 if there was nothing to do. One thread only."""
        with self._lock:
            arena = self._arena
            if not self._open or self._closing or arena is None or self._places[part][chunk] != Place.LIVE:
                return 0
            self._places[part][chunk] = Place.BEING_COPIED
        offset, num_bytes = self._chunks[part][chunk]
        start = self._starts[part] + offset
        copy_range(self._parts[part], offset, arena.data[start : start + num_bytes])
        with self._lock:
            if self._closing or self._arena is not arena:
                return 0  # the guard has taken the chunk over, or nobody reads any more
            self._places[part][chunk] = Place.SAVED
        return num_bytes

    # Inside

    def _emptied(self) -> None:
        with self._lock:
            if len(self.book):
                return
            # Its memory goes back as soon as the last reading is dropped.
            self._arena = None
            self._spare = None
            for places in self._places:
                places[:] = bytes(len(places))

    def _check_range(self, part: int, offset: int, num_bytes: int) -> None:
        if not 0 <= part < len(self._parts):
            raise MisuseError(f"part {part} does not exist: the snapshot has {len(self._parts)}")
        whole = self._parts[part].bytes.num_bytes
        if offset < 0 or num_bytes < 1 or offset + num_bytes > whole:
            raise MisuseError(f"bytes {offset} to {offset + num_bytes} are not inside part {part} of {whole} bytes")

    def _covering(self, part: int, offset: int, num_bytes: int) -> range:
        chunks = self._chunks[part]
        first = bisect.bisect_right(chunks, offset, key=lambda chunk: chunk[0]) - 1
        last = bisect.bisect_left(chunks, offset + num_bytes, key=lambda chunk: chunk[0]) - 1
        return range(first, last + 1)

    def _saved(self, part: int, wanted: range, offset: int, num_bytes: int) -> torch.Tensor | None:
        """Return the saved bytes if all chunks of ``wanted`` are saved, else None."""
        with self._lock:
            arena, spare = self._arena, self._spare
            if arena is None or any(self._places[part][c] != Place.SAVED for c in wanted):
                return None
        if spare is None or spare[0] != part or spare[1] not in wanted:
            start = self._starts[part] + offset
            return arena.data[start : start + num_bytes]
        pieces = []
        for c in wanted:
            start, size = self._chunks[part][c]
            low, high = max(offset, start), min(offset + num_bytes, start + size)
            pieces.append(self._slot(arena, part, c)[low - start : high - start])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _slot(self, arena: Arena, part: int, chunk: int) -> torch.Tensor:
        offset, num_bytes = self._chunks[part][chunk]
        start = self.num_bytes if self._spare == (part, chunk) else self._starts[part] + offset
        return arena.data[start : start + num_bytes]

    def _saved_part(self, arena: Arena, part: int) -> torch.Tensor:
        start = self._starts[part]
        data = arena.data[start : start + self._parts[part].bytes.num_bytes]
        if self._spare is not None and self._spare[0] == part:
            data = data.clone()
            offset, num_bytes = self._chunks[part][self._spare[1]]
            data[offset : offset + num_bytes] = self._slot(arena, part, self._spare[1])
        return data

    def _not_held(self, record: LeaseRecord, part: int, wanted: range) -> RecoveryError:
        if self._gone:
            return DonorMemoryChanged(self._gone)
        if record.until_boundary or self._arena is None:
            return DonorBusy(f"{self.version} was lent until the boundary, which is past: ask for the newer version")
        return DonorRefused(
            f"{record.holder} acknowledged chunks {wanted.start} to {wanted.stop - 1} of part {part} before the outer "
            f"step: {self.version} no longer has them"
        )
