"""The joiner's memory side: where a flight's bytes go, their hashing, and the copy into the destination."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from recovery.errors import MisuseError
from recovery.protocol.ledger import ChunkLedger, ChunkName
from recovery.protocol.planner import ChunkKey
from recovery.protocol.ports import Destination, Role
from recovery.protocol.spool import ChunkSpool
from recovery.state.digest import chunk_digest
from recovery.state.manifest import Manifest
from recovery.types import DigestAlgorithm, PartName

_KEPT_BUFFERS = 8


@dataclass(frozen=True, slots=True)
class _Place:
    destination: Destination
    name: ChunkName
    algorithm: DigestAlgorithm


class ChunkMemory:
    """Destinations of the manifests' chunks and the bounce buffers of flights. Thread-safe for different flights.

    Args:
        ledger: Learns every chunk that is verified in its destination.
        spool: Learns it too, on disk; None: none is kept.
    """

    def __init__(self, ledger: ChunkLedger, spool: ChunkSpool | None) -> None:
        self._ledger = ledger
        self._spool = spool
        self._lock = threading.Lock()
        self._places: dict[ChunkKey, _Place] = {}
        self._bounces: dict[int, torch.Tensor] = {}
        self._free: list[torch.Tensor] = []
        self._digests: dict[int, bytes] = {}

    def prepare(
        self, role: Role, manifest: Manifest, destinations: Mapping[PartName, Destination], *, delta: bool
    ) -> tuple[frozenset[ChunkKey], frozenset[ChunkKey]]:
        """Take a manifest's destinations; return which chunks can be received into directly, and which may be there.

        Raises:
            MisuseError: a part has no destination, or one of another size.
        """
        viewable: set[ChunkKey] = set()
        candidates: set[ChunkKey] = set()
        for part_index, part in enumerate(manifest.parts):
            destination = destinations.get(part.name)
            if destination is None or destination.num_bytes != part.num_bytes:
                have = "none" if destination is None else f"{destination.num_bytes} bytes"
                raise MisuseError(f"part {part.name!r} of {part.num_bytes} bytes has a destination of {have}")
            for chunk_index, chunk in enumerate(part.chunks):
                key = ChunkKey(role, part_index, chunk_index)
                name = ChunkName(part.name, chunk.offset, chunk.num_bytes, chunk.digest)
                self._places[key] = _Place(destination, name, manifest.digest_algorithm)
                if destination.view(chunk.offset, chunk.num_bytes) is not None:
                    viewable.add(key)
                if delta or name in self._ledger or (self._spool is not None and name in self._spool):
                    candidates.add(key)
        return frozenset(viewable), frozenset(candidates)

    def open_flight(self, flight: int, key: ChunkKey, *, direct: bool) -> torch.Tensor:
        """Return the whole chunk's memory for a flight: the destination itself, or a bounce buffer of its own.

        The same each time that it is asked for.
        """
        place = self._places[key]
        name = place.name
        if direct:
            view = place.destination.view(name.offset, name.num_bytes)
            if view is None:
                raise MisuseError(f"{name.part} at {name.offset} cannot be received into directly any more")
            return view
        with self._lock:
            if (known := self._bounces.get(flight)) is not None:
                return known[: name.num_bytes]
            fitting = next((index for index, each in enumerate(self._free) if each.numel() >= name.num_bytes), None)
            buffer = self._free.pop(fitting) if fitting is not None else None
        if buffer is None:
            buffer = torch.empty(name.num_bytes, dtype=torch.uint8)
        with self._lock:
            self._bounces[flight] = buffer
        return buffer[: name.num_bytes]

    def fork(self, flight: int, twin: int, key: ChunkKey, *, direct: bool) -> None:
        """Begin a flight's bounce buffer with what another flight of the chunk has brought."""
        into = self.open_flight(twin, key, direct=False)
        into.copy_(self.open_flight(flight, key, direct=direct))

    def close_flight(self, flight: int) -> None:
        """The flight's receives have ended and nobody needs its buffer."""
        with self._lock:
            self._digests.pop(flight, None)
            buffer = self._bounces.pop(flight, None)
            if buffer is not None and len(self._free) < _KEPT_BUFFERS:
                self._free.append(buffer)

    def hash(self, flight: int, key: ChunkKey) -> None:
        """Hash what the flight brought, on the thread that saw the last of it arrive: a cache still has it.

        All receives of the flight have ended. Until it is checked nobody else writes where they went.
        """
        place = self._places[key]
        data = self._brought(flight, place)
        if data is not None:
            digest = chunk_digest(place.algorithm, data)
            with self._lock:
                self._digests[flight] = digest

    def check_hashed(self, flight: int, key: ChunkKey) -> tuple[bool, bool] | None:
        """Return what ``check`` would if it takes no hashing, copying or writing to disk any more, else None."""
        place = self._places[key]
        with self._lock:
            if self._spool is not None or flight in self._bounces or flight not in self._digests:
                return None
            good = self._digests[flight] == place.name.digest
        if good:
            self._ledger.add(place.name)
        return good, good

    def check(self, flight: int, key: ChunkKey, *, write: bool) -> tuple[bool, bool]:
        """Hash what the flight brought; return whether it is good, and whether the destination holds it now."""
        place = self._places[key]
        with self._lock:
            bounce = self._bounces.get(flight)
            digest = self._digests.get(flight)
        data = self._brought(flight, place)
        if data is None or (digest or chunk_digest(place.algorithm, data)) != place.name.digest:
            return False, False
        if bounce is not None and not write:
            return True, False
        if bounce is not None:
            place.destination.write(place.name.offset, data)
        self._record(place, data)
        return True, True

    def write(self, flight: int, key: ChunkKey) -> None:
        """Copy a flight's checked bytes to the destination."""
        place = self._places[key]
        with self._lock:
            data = self._bounces[flight][: place.name.num_bytes]
        place.destination.write(place.name.offset, data)
        self._record(place, data)

    def probe(self, key: ChunkKey) -> bool:
        """Return whether the destination holds the chunk, after taking it from the spool if it is there."""
        place = self._places[key]
        name = place.name
        data = place.destination.read(name.offset, name.num_bytes)
        if chunk_digest(place.algorithm, data) == name.digest:
            self._record(place, data)
            return True
        self._ledger.discard(name)
        spooled = self._spool.load(name) if self._spool is not None else None
        if spooled is None or chunk_digest(place.algorithm, spooled) != name.digest:
            return False
        place.destination.write(name.offset, spooled)
        self._ledger.add(name)
        return True

    def _brought(self, flight: int, place: _Place) -> torch.Tensor | None:
        with self._lock:
            bounce = self._bounces.get(flight)
        if bounce is not None:
            return bounce[: place.name.num_bytes]
        return place.destination.view(place.name.offset, place.name.num_bytes)

    def _record(self, place: _Place, data: torch.Tensor) -> None:
        self._ledger.add(place.name)
        if self._spool is not None:
            self._spool.store(place.name, data)
