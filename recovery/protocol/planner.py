"""Which range of which chunk is asked of which donor, on which lane. Pure: no clock, no state, no IO.

Work is handed out piece by piece: whoever has room takes the next piece of the chunk that it has begun, then a chunk
that nobody has begun, and at the end what others have begun and not asked for. So rates need not be known, and a lane
or a donor that slows down holds back no more than what is in flight on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protos.recovery.v1 import peer_pb2
from recovery.errors import BadConfiguration
from recovery.transport.link import MAX_LANES
from recovery.types import KIB, MIB

_PIECE_STEP_BYTES = 64 * KIB
_UNKNOWN_RATE_PIECE_BYTES = 512 * KIB
_NEAR_SECONDS = 0.005
_BBR_LANES = 16
"""At 80 ms and 1 % loss 16 sockets carry 0.83 of the link, 8 carry 0.78; more only add handshakes that can be lost."""
_WIDE_WINDOWS = 2
"""A near donor's window of so many least ones is filled half at a time."""
_LEAST_LANE_SHARE = 0.25
"""A lane is taken to carry at least this part of the lanes' mean."""
_MAX_PASSED_OVER = 64
"""Needs that one plan may pass over because nobody with room may be asked: bounds a plan's cost for any state."""


class ChunkKey(NamedTuple):
    """A chunk of one of the two manifests: role, index of the part, index of the chunk in the part."""

    role: peer_pb2.ManifestRole.ValueType
    part: int
    chunk: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerConfig:
    """How much is asked for at once.

    Attributes:
        min_piece_bytes: Smallest message, unless less is left of a chunk; a multiple of 64 KiB.
        max_piece_bytes: Largest message.
        piece_seconds: A piece is sized to take this long on its lane.
        min_window_bytes: Bytes in flight from a donor that is near, or whose rate is unknown.
        far_window_bytes: Least bytes in flight from a donor that is far away.
        window_seconds: But no more than a donor brings in this time: what is in flight when a rate falls comes late.
        window_round_trips: Bytes in flight are this many times rate x round trip, if that is more. Two for what a
            sender keeps on the way and in the path's queue, one for asking, the rest for lanes faster than the mean.
        near_window_seconds: Bytes in flight from a donor that is near (threads decide there, not the path) are what it
            brings in this time, if that is more and is received where it stays. gloo locks a connection while a message
            moves: a receive that is posted meanwhile waits at the joiner and has the donor's thread spin. So many are
            posted ahead.
        near_window_share: But at most this share of what the donor lends.
        max_near_window_bytes: And at most this: it takes no memory, and as it arrives in order little has moved in vain
            when the donor is lost.
        max_window_bytes: Most bytes in flight from one donor; bounds the joiner's memory.
        overtake_seconds: What is on its way is asked a second time only if it is expected later than this.
        again_share: Of what a donor lends, at most this share is asked a second time of itself, on other lanes.
        min_again_bytes: But so much may be, of a state however small.
    """

    min_piece_bytes: int = 64 * KIB
    max_piece_bytes: int = 4 * MIB
    piece_seconds: float = 0.05
    min_window_bytes: int = 8 * MIB
    far_window_bytes: int = 2 * MIB
    window_seconds: float = 0.5
    window_round_trips: float = 5.0
    near_window_seconds: float = 0.1
    near_window_share: float = 0.25
    max_near_window_bytes: int = 256 * MIB
    max_window_bytes: int = 64 * MIB
    overtake_seconds: float = 0.2
    again_share: float = 0.05
    min_again_bytes: int = MIB

    def __post_init__(self) -> None:
        if not 0 < self.min_piece_bytes <= self.max_piece_bytes or self.min_piece_bytes % _PIECE_STEP_BYTES:
            raise BadConfiguration(f"pieces of {self.min_piece_bytes} to {self.max_piece_bytes} bytes are not possible")
        if (
            not 0 < self.min_window_bytes <= self.max_window_bytes
            or min(self.window_round_trips, self.window_seconds) <= 0
        ):
            raise BadConfiguration(
                f"a window of {self.min_window_bytes} to {self.max_window_bytes} bytes is not possible"
            )
        if self.piece_seconds <= 0:
            raise BadConfiguration(f"pieces of {self.piece_seconds} s are not possible")


@dataclass(frozen=True, kw_only=True, slots=True)
class DonorView:
    """What the planner knows of a donor.

    Attributes:
        name: The donor.
        rate: Bytes per second; 0: unknown.
        round_trip_seconds: From asking to the first byte.
        lane_bytes: Bytes asked for and not arrived, for each lane.
        lane_rates: Bytes per second of each lane; 0: unknown. Empty: of none is known.
        lent_bytes: Bytes of all that it lends.
        in_place: Nearly everything is received where it stays: more in flight costs next to no memory.
        again_bytes: What it was asked for although it owed it already.
    """

    name: str
    rate: float
    round_trip_seconds: float
    lane_bytes: tuple[int, ...]
    lane_rates: tuple[float, ...] = ()
    lent_bytes: int = 0
    in_place: bool = False
    again_bytes: int = 0

    @property
    def in_flight_bytes(self) -> int:
        return sum(self.lane_bytes)

    @property
    def near(self) -> bool:
        return self.round_trip_seconds < _NEAR_SECONDS


class Span(NamedTuple):
    """A range of a chunk; ``offset`` counts from the chunk's start."""

    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What is wanted of a chunk and asked of nobody.

    Attributes:
        key: The chunk.
        spans: The ranges that are wanted.
        flight: The flight that has begun it; 0: nobody has begun it.
        begun_by: The donor that began it; empty: nobody, or one that is lost.
        alone: Only ``begun_by`` may go on with it.
        again: It is on its way already, and late: not to be put behind it on the same lane.
        avoid: Donors that sent it damaged: asked only if nobody else can.
        only: Donors that have it; None: all.
    """

    key: ChunkKey
    spans: tuple[Span, ...]
    flight: int = 0
    begun_by: str = ""
    alone: bool = False
    again: bool = False
    avoid: frozenset[str] = frozenset()
    only: frozenset[str] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(span.num_bytes for span in self.spans)


class Asking(NamedTuple):
    """Ask ``donor`` for a range of a chunk on a lane. ``flight`` 0: all for one new flight."""

    key: ChunkKey
    flight: int
    donor: str
    span: Span
    lane: int


def choose_lanes(round_trip_seconds: float | None, *, bbr: bool) -> int:
    """Return how many sockets suit a path.

    Near (under 5 ms, or unknown) one is enough: gloo serves all sockets of a group from one thread, and each further
    one costs both ends processor time. Far away a socket that backs off at each loss carries little, so many share
    the path; one that models the path's rate needs company only for its ramp.
    """
    if round_trip_seconds is None or round_trip_seconds < _NEAR_SECONDS:
        return 1
    return _BBR_LANES if bbr else MAX_LANES


def piece_bytes(rate: float, num_lanes: int, config: PlannerConfig) -> int:
    """Return the size of pieces on a donor's lanes: ``piece_seconds`` of one lane's share of the rate."""
    if rate > 0:
        wanted = rate / num_lanes * config.piece_seconds
    else:
        wanted = min(_UNKNOWN_RATE_PIECE_BYTES, config.min_window_bytes / (2 * num_lanes))
    stepped = int(min(wanted, config.max_piece_bytes)) // _PIECE_STEP_BYTES * _PIECE_STEP_BYTES
    return max(config.min_piece_bytes, min(stepped, config.max_piece_bytes))


def window_bytes(donor: DonorView, config: PlannerConfig) -> int:
    """Return how many bytes may be in flight from a donor."""
    if donor.rate <= 0:
        return config.min_window_bytes
    lanes = len(donor.lane_bytes)
    in_the_pipe = config.window_round_trips * donor.rate * donor.round_trip_seconds
    least = min(config.min_window_bytes if donor.near else config.far_window_bytes, donor.rate * config.window_seconds)
    # Two pieces for each lane: while one travels the next is asked for. A lane without work looks slow, and stays so.
    for_lanes = 2 * lanes * piece_bytes(donor.rate, lanes, config)
    usual = int(min(max(in_the_pipe, least, for_lanes), config.max_window_bytes))
    if not donor.near or not donor.in_place:
        return usual
    ahead = min(donor.rate * config.near_window_seconds, donor.lent_bytes * config.near_window_share)
    return max(usual, int(min(ahead, config.max_near_window_bytes)))


def most_again_bytes(lent_bytes: int, config: PlannerConfig) -> int:
    """Return how much may be asked of a donor although it owes it already: lanes that stand still are no reason to move
    a state twice, and on a slow machine all lanes seem to."""
    return max(config.min_again_bytes, int(lent_bytes * config.again_share))


class _Desk:
    """A donor while a plan is made."""

    def __init__(self, view: DonorView, assumed_rate: float, config: PlannerConfig) -> None:
        self.name = view.name
        self.rate = view.rate if view.rate > 0 else assumed_rate
        self.delay = view.round_trip_seconds
        self.window = window_bytes(view, config)
        self.piece = piece_bytes(view.rate, len(view.lane_bytes), config)
        self.lanes = list(view.lane_bytes)
        # A lane that stood still is given little, but something: it shows whether it moves again.
        mean = self.rate / len(self.lanes)
        known = view.lane_rates or (0.0,) * len(self.lanes)
        self.lane_rates = [max(rate, mean * _LEAST_LANE_SHARE) if rate > 0 else mean for rate in known]
        self.in_flight = sum(self.lanes)
        # A wide window near by is filled half at a time: receives are posted together, and letters are few.
        wide = view.near and self.window >= _WIDE_WINDOWS * config.min_window_bytes
        self.waits = wide and 2 * self.in_flight > self.window

    @property
    def has_room(self) -> bool:
        return not self.in_flight or self.in_flight + self.piece <= self.window

    def finish(self, num_bytes: int) -> float:
        return self.delay + (self.in_flight + num_bytes) / self.rate

    def take(self, num_bytes: int, *, idle_lane: bool) -> int:
        """Note that so much is asked; return the lane: the one that would bring it first."""
        idle = [lane for lane, waiting in enumerate(self.lanes) if not waiting] if idle_lane else []
        lanes = idle or range(len(self.lanes))
        lane = min(lanes, key=lambda lane: (self.lanes[lane] + num_bytes) / self.lane_rates[lane])
        self.lanes[lane] += num_bytes
        self.in_flight += num_bytes
        return lane


class _Rest:
    """A need while a plan is made: what is still asked of nobody."""

    def __init__(self, need: Need) -> None:
        self.need = need
        self.begun_by = need.begun_by
        self.spans = list(need.spans)

    def left(self) -> int:
        return sum(span.num_bytes for span in self.spans)

    def cut(self, num_bytes: int) -> Span:
        first = self.spans[0]
        if first.num_bytes <= num_bytes:
            return self.spans.pop(0)
        self.spans[0] = Span(first.offset + num_bytes, first.num_bytes - num_bytes)
        return Span(first.offset, num_bytes)


def plan(
    begun: Iterable[Need], fresh: Iterable[Need], wanted_bytes: int, donors: Sequence[DonorView], config: PlannerConfig
) -> list[Asking]:
    """Return what to ask for now, so that all donors are busy and finish together.

    Pieces go to the donor that is the first to run dry, until every window is full or nothing is left. Near the end a
    slow donor gets nothing that would come later than if the others did all the rest.

    Args:
        begun: Chunks of which a part was asked for.
        fresh: Chunks of which nothing was asked for, first come first.
        wanted_bytes: The sum of both.
        donors: Donors that can be asked now.
        config: Sizes.
    """
    known = [donor.rate for donor in donors if donor.rate > 0]
    assumed = sum(known) / len(known) if known else 1.0
    by_name = {donor.name: _Desk(donor, assumed, config) for donor in donors}
    desks = [desk for desk in by_name.values() if desk.has_room and not desk.waits]
    if not desks:
        return []
    shelf = _Shelf(begun, fresh, set(by_name))
    askings: list[Asking] = []
    while desks:
        desk = min(desks, key=lambda each: (each.finish(each.piece), each.name))
        rest = shelf.choose(desk, by_name)
        if rest is None or _others_are_sooner(desk, rest, wanted_bytes, by_name, shelf):
            desks.remove(desk)
            continue
        span = rest.cut(desk.piece)
        wanted_bytes -= span.num_bytes
        if rest.begun_by not in by_name:
            rest.begun_by = desk.name
        askings.append(
            Asking(
                rest.need.key, rest.need.flight, desk.name, span, desk.take(span.num_bytes, idle_lane=rest.need.again)
            )
        )
        if not desk.has_room:
            desks.remove(desk)
    return askings


def _others_are_sooner(desk: _Desk, rest: _Rest, wanted_bytes: int, desks: dict[str, _Desk], shelf: _Shelf) -> bool:
    """Return whether the others would have everything that is wanted before this donor had one more piece of it."""
    others = [each for each in desks.values() if each is not desk and shelf.may(each.name, rest)]
    if not any(each.rate > desk.rate for each in others):
        return False
    size = min(desk.piece, rest.spans[0].num_bytes)
    due = sum(each.in_flight for each in others) + max(wanted_bytes, size)
    return desk.finish(size) > min(each.delay for each in others) + due / sum(each.rate for each in others)


class _Shelf:
    """What is still asked of nobody while a plan is made."""

    def __init__(self, begun: Iterable[Need], fresh: Iterable[Need], names: set[str]) -> None:
        self._begun = [_Rest(need) for need in begun]
        self._fresh: Iterator[Need] = iter(fresh)
        self._passed_over: list[_Rest] = []
        self._names = names

    def may(self, name: str, rest: _Rest) -> bool:
        """Return whether a donor may be asked for it: one that damaged it only if nobody else can."""
        need = rest.need
        if need.only is not None and name not in need.only:
            return False
        if need.alone and rest.begun_by not in ("", name):
            return False
        able = self._names if need.only is None else self._names & need.only
        return name not in need.avoid or not able - need.avoid

    def choose(self, desk: _Desk, desks: dict[str, _Desk]) -> _Rest | None:
        """Return what a donor is to be asked for next; None: nothing is left for it."""
        self._begun = [rest for rest in self._begun if rest.spans]
        begun = [rest for rest in self._begun if self.may(desk.name, rest)]
        for owner in (desk.name, ""):
            for rest in begun:
                if rest.begun_by == owner or (not owner and rest.begun_by not in desks):
                    return rest
        found = self._take_fresh(desk.name)
        if found is not None:
            self._begun.append(found)
            return found

        # The end: what another has begun, if that one is to be waited for longer.
        def awaited(rest: _Rest) -> float:
            return desks[rest.begun_by].finish(rest.left())

        late = max(begun, key=awaited, default=None)
        return late if late is not None and desk.finish(desk.piece) < awaited(late) else None

    def _take_fresh(self, name: str) -> _Rest | None:
        for index, rest in enumerate(self._passed_over):
            if self.may(name, rest):
                return self._passed_over.pop(index)
        while len(self._passed_over) < _MAX_PASSED_OVER:
            need = next(self._fresh, None)
            if need is None:
                return None
            rest = _Rest(need)
            if self.may(name, rest):
                return rest
            self._passed_over.append(rest)
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """A chunk of which everything is asked for and not everything has come.

    Attributes:
        number: The flight.
        missing_bytes: What has not come.
        donors: Who owes it.
        own_lanes_help: Whether the same donors may be asked again, on other lanes: their receives can be left behind.
        remaining_seconds: When the first of it is to be expected at the donors' pace.
    """

    number: int
    missing_bytes: int
    donors: frozenset[str]
    own_lanes_help: bool
    remaining_seconds: float


def overtake(flights: Sequence[Flight], donors: Sequence[DonorView], config: PlannerConfig) -> list[int]:
    """Return the flights to begin a second time when nothing else is left to ask for: the latest first, one a donor.

    Something is asked again only if a donor would have it in less than half of the time that is still expected.
    """

    def may_again(donor: DonorView, flight: Flight) -> bool:
        again_bytes = donor.again_bytes + flight.missing_bytes
        return flight.own_lanes_help and again_bytes <= most_again_bytes(donor.lent_bytes, config)

    found = []
    free = {donor.name: donor for donor in donors if donor.rate > 0 and 0 in donor.lane_bytes}
    for flight in sorted(flights, key=lambda flight: -flight.remaining_seconds):

        def quick(donor: DonorView, missing_bytes: int = flight.missing_bytes) -> float:
            return donor.round_trip_seconds + (donor.in_flight_bytes + missing_bytes) / donor.rate

        able = [donor for donor in free.values() if donor.name not in flight.donors or may_again(donor, flight)]
        if not able:
            continue
        best = min(able, key=lambda donor: (quick(donor), donor.name))
        if max(2 * quick(best), config.overtake_seconds) < flight.remaining_seconds:
            del free[best.name]
            found.append(flight.number)
    return found
