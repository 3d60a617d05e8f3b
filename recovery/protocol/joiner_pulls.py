"""What the joiner has asked of whom, and what became of it: flights over all manifests of an attempt, without IO."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from protos.recovery.v1 import peer_pb2
from protos.recovery.v1.peer_pb2 import JoinerLetter
from recovery.errors import ChunkDamaged, DonorMemoryChanged, RecoveryError
from recovery.protocol.chunk_table import ChunkFlight, ChunkTable
from recovery.protocol.joiner_donors import Donor, Phase
from recovery.protocol.joiner_events import chunk_refetched
from recovery.protocol.joiner_io import JoinerAction, Post, PostedPull, Probe, Say
from recovery.protocol.letters import chunk_message
from recovery.protocol.planner import (
    Asking,
    ChunkKey,
    DonorView,
    Flight,
    PlannerConfig,
    overtake,
    plan,
    window_bytes,
)
from recovery.protocol.ports import Attempt, Role
from recovery.transport.link import lane_tag

_DAMAGED_CHUNKS_ALLOWED = 1


class Pulls:
    """The chunk tables of an attempt, and the flights in them. Methods return actions to be carried out in order.

    Args:
        attempt: What the ticket orders.
        donors: By name; shared with the machine.
        config: Sizes of pieces and windows.
        copied: Whether what arrives is copied in any case, so that bytes in flight take memory.

    Attributes:
        tables: By role, those of the manifests that are being carried out.
        payload_bytes: Bytes that arrived over links, whatever became of them.
        unacknowledged: Chunks that are in place and that no donor was told of.
    """

    def __init__(self, attempt: Attempt, donors: dict[str, Donor], config: PlannerConfig, *, copied: bool) -> None:
        self._attempt = attempt
        self._donors = donors
        self._config = config
        self._copied = copied
        self._next_flight = 1
        self.tables: dict[Role, ChunkTable] = {}
        self.payload_bytes = 0
        self.unacknowledged: list[ChunkKey] = []

    @property
    def quiet(self) -> bool:
        """Whether nothing is on its way, being checked or being probed."""
        return all(table.quiet for table in self.tables.values())

    def has_complaint(self, donor: str) -> bool:
        """Return whether the donor owes an answer to a complaint."""
        return any(table.complaints_to(donor) for table in self.tables.values())

    # Destinations

    def prepared(
        self, role: Role, viewable: frozenset[ChunkKey], candidates: frozenset[ChunkKey]
    ) -> list[JoinerAction]:
        """The destinations exist."""
        return [Probe(key) for key in self.tables[role].prepare(viewable, candidates)]

    def probed(self, key: ChunkKey, *, present: bool) -> None:
        """A candidate was hashed."""
        table = self.tables[key.role]
        table.probed(key, present)
        self._note_done(table, key)

    # Asking

    def ask(self, table: ChunkTable, donors: Sequence[Donor], now: float) -> list[JoinerAction]:
        """Ask for what the donors have room for; when nothing is left, a second time for what comes late."""
        if not table.prepared:
            return []
        views = [self._view(donor, table, now) for donor in donors]
        if table.any_wanted:
            askings = plan(table.begun(), table.fresh(), table.wanted_bytes, views, self._config)
            return self._carry_out(table, askings, views, now)
        actions: list[JoinerAction] = []
        if not any(0 in view.lane_bytes for view in views):
            return actions  # nobody has a lane with nothing to do
        expected = [self._expected(table, flight, now) for flight in table.flying()]
        flights = [flight for flight in expected if flight is not None]
        for number in overtake(flights, views, self._config):
            late = table.flight(number)
            actions += table.fork(late, self._take_number(), avoid=late.owed_by)
        if actions:
            askings = plan(table.begun(), (), table.wanted_bytes, views, self._config)
            actions += self._carry_out(table, askings, views, now)
        return actions

    def _view(self, donor: Donor, table: ChunkTable, now: float) -> DonorView:
        return donor.view(now, lent_bytes=table.total_bytes, in_place=table.in_place and not self._copied)

    def _expected(self, table: ChunkTable, flight: ChunkFlight, now: float) -> Flight | None:
        if len(table.entries[flight.key].flights) > 1 or flight.alone:
            return None  # asked twice already, or not to be asked of two
        due = (self._donors[name].due_seconds(pull.lane, now) for (name, _), pull in flight.outstanding.items())
        return Flight(
            number=flight.number,
            missing_bytes=flight.missing_bytes,
            donors=flight.owed_by,
            own_lanes_help=not flight.direct,
            # The latest are begun anew together with all that is missing: so not while some of it is about to come.
            remaining_seconds=min(due, default=0.0),
        )

    def _carry_out(
        self, table: ChunkTable, askings: list[Asking], views: list[DonorView], now: float
    ) -> list[JoinerAction]:
        posts: list[Post] = []
        batches: dict[str, peer_pb2.PullBatch] = {}
        begun: dict[ChunkKey, ChunkFlight] = {}
        # What several donors, or several lanes far away, bring at the end comes into memory that nothing has to wait
        # for: whatever is late then is left behind.
        shared = len(views) > 1 or any(not view.near for view in views)
        end_bytes = sum(window_bytes(view, self._config) for view in views) if shared else 0
        for asking in askings:
            donor = self._donors[asking.donor]
            flight = table.flight(asking.flight) if asking.flight else begun.get(asking.key)
            if flight is None:
                bounce = table.wanted_bytes <= end_bytes
                flight = table.take_off(self._take_number(), asking.key, asking.donor, bounce=bounce)
                begun[asking.key] = flight
            pull_id = donor.ask(asking.lane, asking.span.num_bytes, now)
            if flight.again and asking.donor in flight.avoid:
                donor.again_bytes += asking.span.num_bytes
            tag = lane_tag(asking.lane, len(donor.lane_bytes), pull_id)
            pull = PostedPull(pull_id, asking.span.offset, asking.span.num_bytes, asking.lane, tag)
            table.ask(flight, asking.donor, pull)
            batches.setdefault(asking.donor, peer_pb2.PullBatch()).pulls.add(
                pull_id=pull_id,
                role=table.role,
                part=asking.key.part,
                offset=table.entries[asking.key].name.offset + asking.span.offset,
                num_bytes=asking.span.num_bytes,
                lane=asking.lane,
            )
            last = posts[-1] if posts else None
            if last is not None and (last.donor, last.flight) == (asking.donor, flight.number):
                posts[-1] = dataclasses.replace(last, pulls=(*last.pulls, pull))
            else:
                posts.append(Post(asking.donor, flight.number, asking.key, flight.direct, (pull,)))
        return [*posts, *(Say(name, JoinerLetter(pull=batch)) for name, batch in batches.items())]

    def _take_number(self) -> int:
        number, self._next_flight = self._next_flight, self._next_flight + 1
        return number

    # What became of it

    def arrived(self, donor: Donor, pull_id: int, now: float) -> list[JoinerAction]:
        """A receive has ended."""
        for table in self.tables.values():
            landed = table.landed(donor.name, pull_id)
            if landed is not None:
                pull, actions = landed
                donor.arrived(pull.lane, pull.num_bytes, now)
                self.payload_bytes += pull.num_bytes
                return actions
        return []

    def checked(self, number: int, *, good: bool, written: bool) -> list[JoinerAction]:
        """A flight was hashed. The donor of a damaged one is asked whose fault it was."""
        table = self._table_of_flight(number)
        key = table.flight(number).key
        complaint, actions = table.checked(number, good, written)
        self._note_done(table, key)
        if complaint is None:
            return actions
        (name,) = complaint.contributors
        if not self._donors[name].alive:
            return actions + table.give_up(complaint)
        letter = peer_pb2.Complaint(chunk=chunk_message(key), pull_ids=[pull_id for _, pull_id in complaint.pulls])
        return [*actions, Say(name, JoinerLetter(complaint=letter))]

    def written(self, number: int) -> list[JoinerAction]:
        """A held flight's bytes are in the destination."""
        table = self._table_of_flight(number)
        key = table.flight(number).key
        actions = table.written(number)
        self._note_done(table, key)
        return actions

    def declared_void(self, donor: str, pull_ids: Sequence[int]) -> None:
        """The donor's guard closed its memory while these were sent: they may be torn, through nobody's fault."""
        for pull_id in pull_ids:
            for table in self.tables.values():
                table.declare_void(donor, pull_id)

    def answered(
        self, donor: Donor, answer: peer_pb2.ComplaintAnswer
    ) -> tuple[list[JoinerAction], RecoveryError | None]:
        """The donor has looked into a complaint. Returns also the error that ends it, if one does."""
        key = ChunkKey(answer.chunk.role, answer.chunk.part, answer.chunk.chunk)
        table = self.tables.get(answer.chunk.role)
        flight = table.complaint(donor.name, key) if table is not None else None
        if table is None or flight is None:
            return [], None
        entry = table.entries[key]
        actions: list[JoinerAction] = [
            chunk_refetched(self._attempt, donor.name, entry.name.part, key.chunk, answer.blame)
        ]
        if answer.blame == peer_pb2.BLAME_VOID:
            return actions + table.give_up(flight), None
        entry.bad.add(donor.name)
        actions += table.give_up(flight)
        where = f"{entry.name.part} bytes {entry.name.offset} to {entry.name.offset + entry.name.num_bytes}"
        if answer.blame == peer_pb2.BLAME_MEMORY:
            return actions, DonorMemoryChanged(
                f"{donor.name}: {where} in its memory differ from its manifest: written round the guard"
            )
        donor.num_damaged += 1
        if donor.num_damaged > _DAMAGED_CHUNKS_ALLOWED:
            return actions, ChunkDamaged(
                f"{donor.name}: {donor.num_damaged} chunks arrived damaged, the last was {where}"
            )
        return actions, None

    def no_answers_of(self, donor: str) -> list[JoinerAction]:
        """A donor will answer no complaint any more. Those receives have ended: nothing has to be waited for."""
        actions: list[JoinerAction] = []
        for table in self.tables.values():
            for flight in table.complaints_to(donor):
                actions += table.give_up(flight)
        return actions

    def lost(self, donor: str) -> list[JoinerAction]:
        """A donor is gone and nothing of it can come any more."""
        return [action for table in self.tables.values() for action in table.lost(donor)]

    # Telling the donors

    def acknowledge(self, private_donor: str | None) -> list[JoinerAction]:
        """Tell the donors what is in place: their guards need not save it for us."""
        keys, self.unacknowledged = self.unacknowledged, []
        actions: list[JoinerAction] = []
        for name, donor in self._donors.items():
            if donor.phase is not Phase.READY:
                continue
            known = [chunk_message(key) for key in keys if key.role == self._attempt.first or name == private_donor]
            if known:
                actions.append(Say(name, JoinerLetter(acknowledge=peer_pb2.Acknowledge(chunks=known))))
        return actions

    def _note_done(self, table: ChunkTable, key: ChunkKey) -> None:
        if table.entries[key].done:
            self.unacknowledged.append(key)

    def _table_of_flight(self, number: int) -> ChunkTable:
        return next(table for table in self.tables.values() if table.has_flight(number))
