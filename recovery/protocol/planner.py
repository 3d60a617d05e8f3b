"""Which chunk is asked of which donor, in which pieces, on which lane. Pure: no clock, no state, no IO."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
_MAX_PASSED_OVER = 64
"""Needs that one plan may pass over because their donors are busy: bounds a plan's cost for any size of state."""


class ChunkKey(NamedTuple):
    """A chunk of one of the two manifests: role, index of the part, index of the chunk in the part."""

    role: peer_pb2.ManifestRole.ValueType
    part: int
    chunk: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerConfig:
    """How much is asked for at once.

    Attributes:
        min_piece_bytes: Smallest message, unless a chunk is smaller; a multiple of 64 KiB.
        max_piece_bytes: Largest message.
        piece_seconds: A piece is sized to take this long on its lane.
        min_window_bytes: Least bytes in flight from one donor. Two chunks, so that the next is asked for while one
            arrives: a chunk is asked for whole.
        far_window_bytes: The same for a donor that is far away, where lanes run dry while a chunk is asked for; also
            what is lost with such a donor.
        window_seconds: But no more than a donor brings in this time, so that a slow one holds up little at the end.
            Long enough that a donor whose rate recovers is given work on all its lanes, by which that is seen.
        window_round_trips: Bytes in flight are this many times rate x round trip, if that is more.
        near_window_seconds: The same for a donor that is near (threads decide there, not the path) if what it sends is
            received where it stays. gloo locks a connection while a message moves: a receive that is posted meanwhile
            waits at the joiner and has the donor's thread spin. So many are posted ahead.
        near_window_share: But at most this share of what the donor lends.
        max_near_window_bytes: And at most this: it takes no memory, and as it arrives in order little has moved in vain
            when the donor is lost.
        max_window_bytes: Most bytes in flight from one donor; bounds the joiner's memory.
        overtake_seconds: At the end a chunk is asked a second time only if it is expected later than this.
    """

    min_piece_bytes: int = 64 * KIB
    max_piece_bytes: int = 4 * MIB
    piece_seconds: float = 0.25
    min_window_bytes: int = 8 * MIB
    far_window_bytes: int = 12 * MIB
    window_seconds: float = 4.0
    window_round_trips: float = 2.0
    near_window_seconds: float = 0.1
    near_window_share: float = 0.25
    max_near_window_bytes: int = 256 * MIB
    max_window_bytes: int = 64 * MIB
    overtake_seconds: float = 0.5

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
        lent_bytes: Bytes of all that it lends.
        in_place: Every chunk is received where it stays: more in flight costs no memory.
    """

    name: str
    rate: float
    round_trip_seconds: float
    lane_bytes: tuple[int, ...]
    lent_bytes: int = 0
    in_place: bool = False

    @property
    def near(self) -> bool:
        return self.round_trip_seconds < _NEAR_SECONDS

    @property
    def in_flight_bytes(self) -> int:
        return sum(self.lane_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """A chunk that is wanted.

    Attributes:
        avoid: Donors that sent it damaged, or are sending it already: asked only if nobody else can.
        only: Donors that have it; None: all.
    """

    key: ChunkKey
    num_bytes: int
    avoid: frozenset[str] = frozenset()
    only: frozenset[str] | None = None


class Piece(NamedTuple):
    """A range of a chunk and the lane it is asked on."""

    offset: int
    num_bytes: int
    lane: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkOrder:
    """Ask ``donor`` for the whole chunk, in these pieces, in this order."""

    key: ChunkKey
    donor: str
    pieces: tuple[Piece, ...]


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
    """Return how many bytes may be in flight from a donor.

    One whose rate is unknown may have the near window; a slow one holds at least what the planner gives to anyone who
    holds nothing: one chunk.
    """
    in_the_pipe = config.window_round_trips * donor.rate * donor.round_trip_seconds
    far = not donor.near and donor.rate > 0
    least: float = max(config.far_window_bytes, config.min_window_bytes) if far else config.min_window_bytes
    if donor.rate > 0:
        least = min(least, donor.rate * config.window_seconds)
    wanted = max(in_the_pipe, least)
    # Two pieces for each lane: while one travels the next is asked for.
    for_lanes = 2 * len(donor.lane_bytes) * piece_bytes(donor.rate, len(donor.lane_bytes), config)
    usual = int(min(max(wanted, for_lanes), config.max_window_bytes))
    if not donor.near or not donor.in_place:
        return usual
    ahead = min(donor.rate * config.near_window_seconds, donor.lent_bytes * config.near_window_share)
    return max(usual, int(min(ahead, config.max_near_window_bytes)))


def plan(
    needs: Iterable[Need], needed_bytes: int, donors: Sequence[DonorView], config: PlannerConfig
) -> list[ChunkOrder]:
    """Return what to ask for now, so that all donors finish together.

    Takes needs in their order until every donor's window is full. Each chunk goes to the donor that would have it
    soonest. Near the end a slow donor gets nothing that would come later than if the fastest did all the rest.

    Args:
        needs: Chunks that nobody is being asked for.
        needed_bytes: Their sum.
        donors: Donors that can be asked now.
        config: Sizes.
    """
    if not donors:
        return []
    known = [donor.rate for donor in donors if donor.rate > 0]
    assumed = sum(known) / len(known) if known else 1.0
    rates = {donor.name: donor.rate if donor.rate > 0 else assumed for donor in donors}
    lanes = {donor.name: list(donor.lane_bytes) for donor in donors}
    windows = {donor.name: window_bytes(donor, config) for donor in donors}
    for donor in donors:
        # A wide window near by is filled half at a time: receives are posted together, and letters are few.
        wide = donor.near and windows[donor.name] >= _WIDE_WINDOWS * config.min_window_bytes
        if wide and 2 * donor.in_flight_bytes > windows[donor.name]:
            windows[donor.name] = 0
    if all(donor.in_flight_bytes and donor.in_flight_bytes >= windows[donor.name] for donor in donors):
        return []
    sizes = {donor.name: piece_bytes(donor.rate, len(donor.lane_bytes), config) for donor in donors}
    delays = {donor.name: donor.round_trip_seconds for donor in donors}
    fastest = max(donors, key=lambda donor: rates[donor.name]).name
    orders = []
    passed_over = 0
    for need in needs:
        open_names = [
            name for name in lanes if not (used := sum(lanes[name])) or used + need.num_bytes <= windows[name]
        ]
        if not open_names:
            break
        able = [name for name in lanes if need.only is None or name in need.only]
        preferred = [name for name in able if name not in need.avoid] or able
        candidates = [name for name in preferred if name in open_names]

        def finish(name: str, num_bytes: int) -> float:
            return delays[name] + (sum(lanes[name]) + num_bytes) / rates[name]

        if candidates:
            chosen = min(candidates, key=lambda name: (finish(name, need.num_bytes), name))
            may_wait = fastest in preferred and chosen != fastest
            if not may_wait or finish(chosen, need.num_bytes) <= finish(fastest, max(needed_bytes, need.num_bytes)):
                pieces = _cut(need.num_bytes, sizes[chosen], lanes[chosen])
                orders.append(ChunkOrder(key=need.key, donor=chosen, pieces=pieces))
                needed_bytes -= need.num_bytes
                continue
        passed_over += 1
        if passed_over >= _MAX_PASSED_OVER:
            break
    return orders


def _cut(num_bytes: int, size: int, lane_bytes: list[int]) -> tuple[Piece, ...]:
    """Cut a chunk into pieces, each on the lane with the least in flight; ``lane_bytes`` is brought up to date."""
    pieces = []
    for offset in range(0, num_bytes, size):
        length = min(size, num_bytes - offset)
        lane = min(range(len(lane_bytes)), key=lambda index: (lane_bytes[index], index))
        lane_bytes[lane] += length
        pieces.append(Piece(offset, length, lane))
    return tuple(pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """A chunk that is being asked of one donor, and when it is to be expected at that donor's pace."""

    key: ChunkKey
    num_bytes: int
    donor: str
    remaining_seconds: float


def overtake(flights: Sequence[Flight], idle: Sequence[DonorView], config: PlannerConfig) -> list[ChunkOrder]:
    """Return chunks to ask a second time, of donors that have nothing else to do: the slowest first.

    A chunk is asked again only of a donor that would have it in less than half of the time that is still expected.
    """
    orders = []
    free = {donor.name: donor for donor in idle if donor.rate > 0}
    for flight in sorted(flights, key=lambda flight: -flight.remaining_seconds):
        able = [donor for donor in free.values() if donor.name != flight.donor]
        if not able:
            continue
        best = max(able, key=lambda donor: (donor.rate, donor.name))
        quick = best.round_trip_seconds + flight.num_bytes / best.rate
        if max(2 * quick, config.overtake_seconds) < flight.remaining_seconds:
            del free[best.name]
            size = piece_bytes(best.rate, len(best.lane_bytes), config)
            pieces = _cut(flight.num_bytes, size, list(best.lane_bytes))
            orders.append(ChunkOrder(key=flight.key, donor=best.name, pieces=pieces))
    return orders
