"""What the joiner knows of each chunk of one manifest: needed, on its way, being checked, held, or in place.

A *flight* is one try to get a whole chunk from one donor. At most one flight of a chunk receives into the destination
itself; any other has a bounce buffer, and what it brought is copied only when no receive is posted into the
destination any more, however late that receive's bytes may come.

::

    NEEDED -> FLYING -> CHECKING -> in place
                 |          |-> HELD (good, in a bounce buffer, while another flight may still write the destination)
                 |          |-> COMPLAINED -> NEEDED (the donor says whose fault it was)
                 |          '-> NEEDED (declared void by the donor)
                 '-> NEEDED (donor lost)
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from recovery.protocol.joiner_io import Check, Forget, JoinerAction, PostedPull, Write
from recovery.protocol.ledger import ChunkName
from recovery.protocol.planner import ChunkKey, Need
from recovery.protocol.ports import Role
from recovery.state.manifest import Manifest


class FlightState(enum.Enum):
    FLYING = "flying"
    CHECKING = "checking"
    COMPLAINED = "complained"
    HELD = "held"
    WRITING = "writing"


@dataclass(slots=True)
class ChunkFlight:
    """One try to get a chunk from one donor."""

    number: int
    key: ChunkKey
    donor: str
    direct: bool
    asked_at: float
    pulls: tuple[PostedPull, ...]
    outstanding: dict[int, PostedPull]
    state: FlightState = FlightState.FLYING
    void: bool = False


@dataclass(slots=True)
class ChunkEntry:
    """One chunk. ``bad``: donors that sent it damaged."""

    name: ChunkName
    viewable: bool = False
    done: bool = False
    bad: set[str] = field(default_factory=set)
    flights: dict[int, ChunkFlight] = field(default_factory=dict)


class ChunkTable:
    """All chunks of one manifest. Methods that return actions expect them to be carried out in order."""

    def __init__(self, role: Role, manifest: Manifest) -> None:
        self.role = role
        self.manifest = manifest
        self.entries: dict[ChunkKey, ChunkEntry] = {}
        for part_index, part in enumerate(manifest.parts):
            for chunk_index, chunk in enumerate(part.chunks):
                name = ChunkName(part.name, chunk.offset, chunk.num_bytes, chunk.digest)
                self.entries[ChunkKey(role, part_index, chunk_index)] = ChunkEntry(name)
        self.total_bytes = sum(entry.name.num_bytes for entry in self.entries.values())
        self.done_bytes = 0
        self.reused_bytes = 0
        self.needed_bytes = 0
        self.prepared = False
        self.in_place = False
        """Whether every chunk can be received where it stays."""
        self._num_done = 0
        self._num_probing = 0
        self._needed: dict[ChunkKey, None] = {}
        self._flights: dict[int, ChunkFlight] = {}
        self._by_pull: dict[tuple[str, int], ChunkFlight] = {}

    @property
    def complete(self) -> bool:
        """Whether every chunk is verified and in place."""
        return self.prepared and self._num_done == len(self.entries)

    @property
    def quiet(self) -> bool:
        """Whether nothing is on its way, being checked or being probed."""
        return not self._flights and not self._num_probing

    def prepare(self, viewable: frozenset[ChunkKey], candidates: frozenset[ChunkKey]) -> list[ChunkKey]:
        """The destinations exist; return the chunks to probe. The others are needed from now on."""
        self.prepared = True
        self.in_place = len(viewable) == len(self.entries)
        probes = []
        for key, entry in self.entries.items():
            entry.viewable = key in viewable
            if key in candidates:
                self._num_probing += 1
                probes.append(key)
            else:
                self._need(key)
        return probes

    def probed(self, key: ChunkKey, present: bool) -> None:
        entry = self.entries[key]
        self._num_probing -= 1
        if present:
            self._finish(entry)
            self.reused_bytes += entry.name.num_bytes
        else:
            self._need(key)

    def needs(self, only: frozenset[str] | None) -> Iterator[Need]:
        """Yield what nobody is being asked for, first come first."""
        for key in self._needed:
            entry = self.entries[key]
            yield Need(key=key, num_bytes=entry.name.num_bytes, avoid=frozenset(entry.bad), only=only)

    @property
    def any_needed(self) -> bool:
        return bool(self._needed)

    def take_off(
        self, number: int, key: ChunkKey, donor: str, pulls: tuple[PostedPull, ...], now: float
    ) -> ChunkFlight:
        """A donor is asked for the chunk. The result's ``direct`` says where its bytes are to go."""
        entry = self.entries[key]
        # While another flight writes, reads or may still write the destination, this one keeps away from it.
        direct = entry.viewable and not entry.flights
        flight = ChunkFlight(number, key, donor, direct, now, pulls, {pull.pull_id: pull for pull in pulls})
        entry.flights[number] = flight
        self._flights[number] = flight
        for pull in pulls:
            self._by_pull[donor, pull.pull_id] = flight
        if key in self._needed:
            del self._needed[key]
            self.needed_bytes -= entry.name.num_bytes
        return flight

    def landed(self, donor: str, pull_id: int) -> tuple[PostedPull, list[JoinerAction]] | None:
        """A receive ended; return the pull and what to do, or None if no such receive was open here."""
        flight = self._by_pull.get((donor, pull_id))
        if flight is None or pull_id not in flight.outstanding:
            return None
        pull = flight.outstanding.pop(pull_id)
        if flight.outstanding:
            return pull, []
        entry = self.entries[flight.key]
        if entry.done:
            return pull, self._forget(flight)
        actions: list[JoinerAction] = []
        held = next((other for other in entry.flights.values() if other.state is FlightState.HELD), None)
        if held is not None:
            # Whatever this late one brought, the held bytes are good, and the destination is free now.
            actions += self._forget(flight)
            return pull, actions + self._release_held(entry)
        flight.state = FlightState.CHECKING
        alone = all(other is flight or not other.direct for other in entry.flights.values())
        return pull, [Check(flight.number, flight.key, write=alone)]

    def declare_void(self, donor: str, pull_id: int) -> None:
        """The donor says that these bytes may be torn: a failed check of their flight counts for nothing."""
        flight = self._by_pull.get((donor, pull_id))
        if flight is not None:
            flight.void = True

    def checked(self, number: int, good: bool, written: bool) -> tuple[ChunkFlight | None, list[JoinerAction]]:
        """A check ended. Returns the flight if its bytes were bad and the donor has to be asked why."""
        flight = self._flights[number]
        entry = self.entries[flight.key]
        if good and written:
            if not entry.done:
                self._finish(entry)
            return None, self._forget(flight)
        if good:
            if entry.done:
                return None, self._forget(flight)
            flight.state = FlightState.HELD
            return None, self._release_held(entry)
        if flight.void or entry.done:
            actions = self._forget(flight)
            self._need_again(flight.key)
            return None, actions + self._release_held(entry)
        flight.state = FlightState.COMPLAINED
        return flight, []

    def written(self, number: int) -> list[JoinerAction]:
        """A held flight's bytes are in the destination."""
        flight = self._flights[number]
        entry = self.entries[flight.key]
        if not entry.done:
            self._finish(entry)
        return self._forget(flight)

    def give_up(self, flight: ChunkFlight) -> list[JoinerAction]:
        """A flight brought nothing of use: its chunk is needed again unless another flight has it."""
        entry = self.entries[flight.key]
        actions = self._forget(flight)
        self._need_again(flight.key)
        return actions + self._release_held(entry)

    def has_flight(self, number: int) -> bool:
        return number in self._flights

    def flight_key(self, number: int) -> ChunkKey:
        return self._flights[number].key

    def flights_of(self, donor: str, *states: FlightState) -> list[ChunkFlight]:
        return [flight for flight in self._flights.values() if flight.donor == donor and flight.state in states]

    def flight_over(self, donor: str, key: ChunkKey, state: FlightState) -> ChunkFlight | None:
        """Return the donor's flight of this chunk in this state, if there is one."""
        entry = self.entries.get(key)
        if entry is None:
            return None
        return next((f for f in entry.flights.values() if f.donor == donor and f.state is state), None)

    def flying(self) -> list[ChunkFlight]:
        """Return flights that are on their way with chunks that are not in place yet."""
        return [
            flight
            for flight in self._flights.values()
            if flight.state is FlightState.FLYING and not self.entries[flight.key].done
        ]

    def blockers(self) -> set[str]:
        """Return donors that nothing is awaited of but the end of receives into chunks that others have brought."""
        awaited: set[str] = set()
        blocking: set[str] = set()
        for flight in self.flying():
            others = self.entries[flight.key].flights.values()
            held = any(other.state is FlightState.HELD for other in others)
            (blocking if held else awaited).add(flight.donor)
        return blocking - awaited

    def _release_held(self, entry: ChunkEntry) -> list[JoinerAction]:
        """Copy a held flight's bytes if no other flight of the chunk may touch the destination."""
        if entry.done or any(f.direct or f.state is FlightState.WRITING for f in entry.flights.values()):
            return []
        for flight in entry.flights.values():
            if flight.state is FlightState.HELD:
                flight.state = FlightState.WRITING
                return [Write(flight.number, flight.key)]
        return []

    def _finish(self, entry: ChunkEntry) -> None:
        entry.done = True
        self._num_done += 1
        self.done_bytes += entry.name.num_bytes

    def _need(self, key: ChunkKey) -> None:
        self._needed[key] = None
        self.needed_bytes += self.entries[key].name.num_bytes

    def _need_again(self, key: ChunkKey) -> None:
        entry = self.entries[key]
        if not entry.done and key not in self._needed and not entry.flights:
            self._need(key)

    def _forget(self, flight: ChunkFlight) -> list[JoinerAction]:
        del self._flights[flight.number]
        del self.entries[flight.key].flights[flight.number]
        for pull in flight.pulls:
            del self._by_pull[flight.donor, pull.pull_id]
        return [Forget(flight.number)]
