"""What the joiner knows of each chunk of one manifest: needed, on its way, being checked, held, or in place.

A *flight* is one try to assemble a whole chunk in one piece of memory. Its ranges may come from several donors, but no
range has more than one receive posted into it. At most one flight of a chunk receives into the destination itself; any
other has a bounce buffer, and what it brought is copied only when no receive is posted into the destination any more,
however late that receive's bytes may come.

::

    NEEDED -> FLYING -> CHECKING -> in place
                 |          |-> HELD (good, in a bounce buffer, while another flight may still write the destination)
                 |          |-> COMPLAINED -> NEEDED (the donor says whose fault it was)
                 |          '-> NEEDED (declared void by a donor; or from several donors: then from one alone)
                 '-> FLYING (a donor is lost: its ranges are asked of others)
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from recovery.protocol.joiner_io import Check, Forget, Fork, JoinerAction, PostedPull, Write
from recovery.protocol.ledger import ChunkName
from recovery.protocol.planner import ChunkKey, Need, Span
from recovery.protocol.ports import Role
from recovery.state.manifest import Manifest

_NEARLY_ALL = 0.9


class FlightState(enum.Enum):
    FLYING = "flying"
    CHECKING = "checking"
    COMPLAINED = "complained"
    HELD = "held"
    WRITING = "writing"


@dataclass(slots=True)
class ChunkFlight:
    """One try to get a chunk.

    Attributes:
        begun_by: The donor that is asked for the rest; empty: whoever has room.
        alone: No other donor may be asked for a part.
        unasked: Ranges that nobody is being asked for.
        pulls: What was asked and not lost, by donor and pull id: all of it at the end.
        outstanding: What of it has not come.
        again: Its ranges are on their way elsewhere, and late.
        avoid: Donors that are late with them.
        void: A donor said that bytes of it may be torn.
    """

    number: int
    key: ChunkKey
    begun_by: str
    direct: bool
    alone: bool
    unasked: list[Span]
    pulls: dict[tuple[str, int], PostedPull] = field(default_factory=dict)
    outstanding: dict[tuple[str, int], PostedPull] = field(default_factory=dict)
    state: FlightState = FlightState.FLYING
    again: bool = False
    avoid: frozenset[str] = frozenset()
    void: bool = False

    @property
    def contributors(self) -> frozenset[str]:
        """Donors whose bytes it holds or awaits."""
        return frozenset(donor for donor, _ in self.pulls)

    @property
    def owed_by(self) -> frozenset[str]:
        return frozenset(donor for donor, _ in self.outstanding)

    @property
    def unasked_bytes(self) -> int:
        return sum(span.num_bytes for span in self.unasked)

    @property
    def missing_bytes(self) -> int:
        return sum(pull.num_bytes for pull in self.outstanding.values())


@dataclass(slots=True)
class ChunkEntry:
    """One chunk. ``bad``: donors that sent it damaged. ``alone``: it was damaged, and nobody knows by whom."""

    name: ChunkName
    viewable: bool = False
    done: bool = False
    alone: bool = False
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
        self.prepared = False
        self.in_place = False
        """Whether nearly all bytes can be received where they stay; a chunk of several small tensors cannot."""
        self._num_done = 0
        self._num_probing = 0
        self._needed: dict[ChunkKey, None] = {}
        self._needed_bytes = 0
        self._flights: dict[int, ChunkFlight] = {}
        self._begun: dict[int, ChunkFlight] = {}
        """Flights with ranges that nobody is asked for."""
        self._by_pull: dict[tuple[str, int], ChunkFlight] = {}

    @property
    def complete(self) -> bool:
        """Whether every chunk is verified and in place."""
        return self.prepared and self._num_done == len(self.entries)

    @property
    def quiet(self) -> bool:
        """Whether nothing is on its way, being checked or being probed; chunks may have been begun."""
        return not self._num_probing and all(
            flight.state is FlightState.FLYING and not flight.outstanding for flight in self._flights.values()
        )

    def abandon(self) -> list[JoinerAction]:
        """Give up what was begun; nothing may be on its way."""
        actions: list[JoinerAction] = []
        for flight in list(self._flights.values()):
            actions += self._forget(flight)
        return actions

    def prepare(self, viewable: frozenset[ChunkKey], candidates: frozenset[ChunkKey]) -> list[ChunkKey]:
        """The destinations exist; return the chunks to probe. The others are needed from now on."""
        self.prepared = True
        in_place = sum(self.entries[key].name.num_bytes for key in viewable)
        self.in_place = in_place >= _NEARLY_ALL * self.total_bytes
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

    # What is to be asked for

    @property
    def wanted_bytes(self) -> int:
        """Bytes that nobody is being asked for."""
        begun = sum(span.num_bytes for flight in self._begun.values() for span in flight.unasked)
        return self._needed_bytes + begun

    @property
    def any_wanted(self) -> bool:
        return bool(self._needed or self._begun)

    def begun(self) -> list[Need]:
        """Return what is left to ask for of chunks that were begun."""
        needs = []
        for flight in self._begun.values():
            entry = self.entries[flight.key]
            need = Need(
                key=flight.key,
                spans=tuple(flight.unasked),
                flight=flight.number,
                begun_by=flight.begun_by,
                alone=flight.alone,
                again=flight.again,
                avoid=flight.avoid | entry.bad,
            )
            needs.append(need)
        return needs

    def fresh(self) -> Iterator[Need]:
        """Yield chunks of which nobody is being asked for anything, first come first."""
        for key in self._needed:
            entry = self.entries[key]
            yield Need(key=key, spans=(Span(0, entry.name.num_bytes),), alone=entry.alone, avoid=frozenset(entry.bad))

    def take_off(self, number: int, key: ChunkKey, donor: str, *, bounce: bool) -> ChunkFlight:
        """A donor begins the chunk. ``bounce``: not in the destination, so that nothing waits for what comes late."""
        entry = self.entries[key]
        # While another flight writes, reads or may still write the destination, this one keeps away from it.
        direct = entry.viewable and not entry.flights and not bounce
        flight = ChunkFlight(number, key, donor, direct, entry.alone, [Span(0, entry.name.num_bytes)])
        self._add(flight)
        if key in self._needed:
            del self._needed[key]
            self._needed_bytes -= entry.name.num_bytes
        return flight

    def fork(self, flight: ChunkFlight, number: int, *, avoid: frozenset[str]) -> list[JoinerAction]:
        """Begin another flight with what has come of this one: what has not is to be asked for a second time."""
        came = {pull: each for pull, each in flight.pulls.items() if pull not in flight.outstanding}
        missing = [Span(pull.offset, pull.num_bytes) for pull in flight.outstanding.values()]
        twin = ChunkFlight(number, flight.key, "", False, flight.alone, missing, again=True, avoid=avoid)
        twin.pulls, twin.void = came, flight.void
        self._add(twin)
        return [Fork(flight.number, number, flight.key, flight.direct)]

    def ask(self, flight: ChunkFlight, donor: str, pull: PostedPull) -> None:
        """A donor is asked for a range that nobody is asked for."""
        end = pull.offset + pull.num_bytes
        index = next(i for i, span in enumerate(flight.unasked) if span.offset <= pull.offset < sum(span))
        span = flight.unasked.pop(index)
        if end < sum(span):
            flight.unasked.insert(index, Span(end, sum(span) - end))
        if span.offset < pull.offset:
            flight.unasked.insert(index, Span(span.offset, pull.offset - span.offset))
        if not flight.unasked:
            del self._begun[flight.number]
        flight.begun_by = flight.begun_by or donor
        flight.pulls[donor, pull.pull_id] = flight.outstanding[donor, pull.pull_id] = pull
        self._by_pull[donor, pull.pull_id] = flight

    # What has become of it

    def landed(self, donor: str, pull_id: int) -> tuple[PostedPull, list[JoinerAction]] | None:
        """A receive ended; return the pull and what to do, or None if no such receive was open here."""
        flight = self._by_pull.pop((donor, pull_id), None)
        if flight is None:
            return None
        pull = flight.outstanding.pop((donor, pull_id))
        if flight.outstanding:
            return pull, []
        entry = self.entries[flight.key]
        if entry.done or any(other.state is FlightState.HELD for other in entry.flights.values()):
            # Whatever this late one brought, there are good bytes, and the destination is free now.
            return pull, self._settle(entry)
        if flight.unasked:
            return pull, []
        flight.state = FlightState.CHECKING
        alone = all(other is flight or not other.direct for other in entry.flights.values())
        return pull, [Check(flight.number, flight.key, write=alone)]

    def declare_void(self, donor: str, pull_id: int) -> None:
        """The donor says that these bytes may be torn: a failed check of their flight counts for nothing."""
        for flight in self._flights.values():
            if (donor, pull_id) in flight.pulls:
                flight.void = True

    def checked(self, number: int, good: bool, written: bool) -> tuple[ChunkFlight | None, list[JoinerAction]]:
        """A check ended. Returns the flight if its bytes were bad and its one donor has to be asked why."""
        flight = self._flights[number]
        entry = self.entries[flight.key]
        if good and written:
            if not entry.done:
                self._finish(entry)
            return None, self._forget(flight) + self._settle(entry)
        if good:
            if entry.done:
                return None, self._forget(flight)
            flight.state = FlightState.HELD
            return None, self._settle(entry)
        mixed = len(flight.contributors) > 1
        if flight.void or entry.done or mixed:
            # Damaged by one of several: the next try shows by whom.
            entry.alone = entry.alone or (mixed and not flight.void)
            return None, self.give_up(flight)
        flight.state = FlightState.COMPLAINED
        return flight, []

    def written(self, number: int) -> list[JoinerAction]:
        """A held flight's bytes are in the destination."""
        flight = self._flights[number]
        entry = self.entries[flight.key]
        if not entry.done:
            self._finish(entry)
        return self._forget(flight) + self._settle(entry)

    def give_up(self, flight: ChunkFlight) -> list[JoinerAction]:
        """A flight that awaits nothing was of no use: its chunk is needed again unless another flight has it."""
        entry = self.entries[flight.key]
        actions = self._forget(flight)
        if not entry.done and flight.key not in self._needed and not entry.flights:
            self._need(flight.key)
        return actions + self._settle(entry)

    def lost(self, donor: str) -> list[JoinerAction]:
        """A donor is gone and nothing of it can come any more: what it owed is wanted of others."""
        actions: list[JoinerAction] = []
        for flight in list(self._flights.values()):
            owed = [pull_id for name, pull_id in flight.outstanding if name == donor]
            if flight.begun_by == donor:
                flight.begun_by = ""
            for pull_id in owed:
                pull = flight.outstanding.pop((donor, pull_id))
                del flight.pulls[donor, pull_id]
                del self._by_pull[donor, pull_id]
                flight.unasked.append(Span(pull.offset, pull.num_bytes))
                self._begun[flight.number] = flight
            over = flight.number in self._flights and flight.state is FlightState.FLYING and not flight.outstanding
            # With nothing of its own left to lose it starts anew, as does what only the lost one could go on with.
            if over and (not flight.pulls or (flight.alone and not flight.begun_by)):
                actions += self.give_up(flight)
            actions += self._settle(self.entries[flight.key])
        return actions

    def has_flight(self, number: int) -> bool:
        return number in self._flights

    def flight(self, number: int) -> ChunkFlight:
        return self._flights[number]

    def complaints_to(self, donor: str) -> list[ChunkFlight]:
        """Return flights whose damage a donor was asked about."""
        return [
            flight
            for flight in self._flights.values()
            if flight.state is FlightState.COMPLAINED and donor in flight.contributors
        ]

    def complaint(self, donor: str, key: ChunkKey) -> ChunkFlight | None:
        """Return the flight of this chunk whose damage a donor was asked about, if there is one."""
        return next((flight for flight in self.complaints_to(donor) if flight.key == key), None)

    def flying(self) -> list[ChunkFlight]:
        """Return flights that await bytes, of chunks that are not in place yet."""
        return [flight for flight in self._flights.values() if flight.outstanding and not self.entries[flight.key].done]

    def blockers(self) -> set[str]:
        """Return donors that nothing is awaited of but the end of receives into chunks that others have brought."""
        awaited: set[str] = set()
        blocking: set[str] = set()
        for flight in self.flying():
            others = self.entries[flight.key].flights.values()
            held = any(other.state is FlightState.HELD for other in others)
            (blocking if held else awaited).update(flight.owed_by)
        return blocking - awaited

    def _settle(self, entry: ChunkEntry) -> list[JoinerAction]:
        """Where good bytes are, end what awaits nothing any more; copy a held flight's if the destination is free."""
        held = any(flight.state is FlightState.HELD for flight in entry.flights.values())
        if not entry.done and not held:
            return []
        actions: list[JoinerAction] = []
        for flight in list(entry.flights.values()):
            if flight.unasked:
                flight.unasked.clear()
                del self._begun[flight.number]
            useless = flight.state is FlightState.FLYING or (entry.done and flight.state is FlightState.HELD)
            if useless and not flight.outstanding:
                actions += self._forget(flight)
        if entry.done or any(f.direct or f.state is FlightState.WRITING for f in entry.flights.values()):
            return actions
        for flight in entry.flights.values():
            if flight.state is FlightState.HELD:
                flight.state = FlightState.WRITING
                return [*actions, Write(flight.number, flight.key)]
        return actions

    def _finish(self, entry: ChunkEntry) -> None:
        entry.done = True
        self._num_done += 1
        self.done_bytes += entry.name.num_bytes

    def _need(self, key: ChunkKey) -> None:
        self._needed[key] = None
        self._needed_bytes += self.entries[key].name.num_bytes

    def _add(self, flight: ChunkFlight) -> None:
        self.entries[flight.key].flights[flight.number] = flight
        self._flights[flight.number] = self._begun[flight.number] = flight

    def _forget(self, flight: ChunkFlight) -> list[JoinerAction]:
        del self._flights[flight.number]
        del self.entries[flight.key].flights[flight.number]
        self._begun.pop(flight.number, None)
        for pull in flight.outstanding:
            del self._by_pull[pull]
        return [Forget(flight.number)]
