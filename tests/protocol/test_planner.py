"""The planner's tables: windows, pieces, proportions, the end of a transfer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.errors import BadConfiguration
from recovery.protocol.planner import (
    ChunkKey,
    DonorView,
    Flight,
    Need,
    PlannerConfig,
    choose_lanes,
    overtake,
    piece_bytes,
    plan,
    window_bytes,
)
from recovery.protocol.ports import OUTER
from recovery.types import KIB, MIB

CONFIG = PlannerConfig()
CHUNK = 4 * MIB


def key(number: int) -> ChunkKey:
    return ChunkKey(OUTER, 0, number)


def needs(count: int, num_bytes: int = CHUNK) -> list[Need]:
    return [Need(key=key(number), num_bytes=num_bytes) for number in range(count)]


def donor(name: str, rate: float = 0.0, lanes: tuple[int, ...] = (0, 0), round_trip: float = 0.0) -> DonorView:
    return DonorView(name=name, rate=rate, round_trip_seconds=round_trip, lane_bytes=lanes)


def test_nobody_to_ask_means_nothing_is_asked() -> None:
    assert plan(needs(3), 3 * CHUNK, [], CONFIG) == []


@pytest.mark.parametrize(
    ("rate", "lanes", "expected"),
    [
        (0.0, 1, 512 * KIB),  # unknown
        (0.0, 64, 64 * KIB),  # unknown, many lanes: a window of small pieces
        (1e3, 1, 64 * KIB),  # slow: the smallest
        (25e6, 8, 768 * KIB - 64 * KIB),  # a quarter of a second of one lane's share, in steps of 64 KiB
        (25e6, 64, 64 * KIB),
        (3e9, 2, 4 * MIB),  # fast: the largest
    ],
)
def test_a_piece_takes_a_quarter_of_a_second_of_its_lane(rate: float, lanes: int, expected: int) -> None:
    assert piece_bytes(rate, lanes, CONFIG) == expected


@pytest.mark.parametrize(
    ("rate", "round_trip", "lanes", "expected"),
    [
        (0.0, 0.0, 1, 8 * MIB),
        (100e6, 0.0001, 1, 8 * MIB),  # near
        (24e6, 0.08, 8, 12 * MIB),  # far: lanes run dry while a chunk is asked for
        (1e6, 0.08, 8, 4_000_000),  # slow: what it brings in four seconds
        (1e5, 0.08, 8, 1 * MIB),  # slower: two pieces for each lane
        (25e6, 0.5, 64, 25_000_000),  # two round trips' worth of bytes
        (3e9, 0.0001, 2, 16 * MIB),  # two pieces for each lane
        (1e10, 1.0, 2, 64 * MIB),  # the cap
    ],
)
def test_windows(rate: float, round_trip: float, lanes: int, expected: int) -> None:
    assert window_bytes(donor("d", rate, (0,) * lanes, round_trip), CONFIG) == expected


def test_pieces_cover_a_chunk_in_order_and_spread_over_the_lanes() -> None:
    (order,) = plan(needs(1), CHUNK, [donor("d", lanes=(10 * KIB, 0))], CONFIG)
    assert [piece.offset for piece in order.pieces] == [512 * KIB * index for index in range(8)]
    assert sum(piece.num_bytes for piece in order.pieces) == CHUNK
    assert [piece.lane for piece in order.pieces] == [1, 0, 1, 0, 1, 0, 1, 0]


def test_a_full_window_gets_nothing() -> None:
    assert plan(needs(3), 3 * CHUNK, [donor("d", lanes=(3 * MIB, 2 * MIB))], CONFIG) == []


def test_one_chunk_is_always_allowed_however_small_the_window() -> None:
    small = PlannerConfig(min_window_bytes=1 * MIB, max_window_bytes=1 * MIB)
    assert len(plan(needs(3), 3 * CHUNK, [donor("d", rate=1e4)], small)) == 1


def test_chunks_go_where_they_are_soonest() -> None:
    donors = [donor("slow", 10e6), donor("fast", 90e6)]
    wide = PlannerConfig(min_window_bytes=2000 * MIB, max_window_bytes=2000 * MIB, window_seconds=1000.0)
    orders = plan(needs(100), 100 * CHUNK, donors, wide)
    share = [order.donor for order in orders]
    assert share[0] == "fast"
    assert share.count("fast") == 9 * share.count("slow")


def test_at_the_end_a_slow_donor_is_not_waited_for() -> None:
    donors = [donor("slow", 1e6), donor("fast", 100e6, lanes=(8 * MIB, 8 * MIB))]
    assert plan(needs(1), CHUNK, donors, CONFIG) == []
    # With much left to do it is asked, for no more than a chunk: it needs four seconds for one.
    assert [order.donor for order in plan(needs(500), 500 * CHUNK, donors, CONFIG)] == ["slow"]


def test_a_donor_that_damaged_a_chunk_is_asked_only_if_nobody_else_can() -> None:
    wanted = Need(key=key(0), num_bytes=CHUNK, avoid=frozenset({"d0"}))
    assert plan([wanted], CHUNK, [donor("d0", 1e9), donor("d1", 1e6)], CONFIG)[0].donor == "d1"
    assert plan([wanted], CHUNK, [donor("d0", 1e9)], CONFIG)[0].donor == "d0"


def test_a_chunk_is_asked_only_of_those_that_have_it() -> None:
    wanted = Need(key=key(0), num_bytes=CHUNK, only=frozenset({"d1"}))
    assert plan([wanted], CHUNK, [donor("d0", 1e9), donor("d1", 1e6)], CONFIG)[0].donor == "d1"
    assert plan([wanted], CHUNK, [donor("d0", 1e9)], CONFIG) == []


def test_a_plan_costs_the_same_for_any_state() -> None:
    seen = 0

    def endless() -> object:
        nonlocal seen
        for need in needs(100_000, 1):
            seen += 1
            yield Need(key=need.key, num_bytes=1, only=frozenset({"away"}))

    assert plan(endless(), 100_000, [donor("d0", 1e6)], CONFIG) == []  # type: ignore[arg-type]
    assert seen <= 100


def test_overtaking_needs_a_donor_that_is_clearly_faster() -> None:
    slow = Flight(key=key(0), num_bytes=CHUNK, donor="slow", remaining_seconds=30.0)
    soon = Flight(key=key(1), num_bytes=CHUNK, donor="slow", remaining_seconds=0.3)
    fast = donor("fast", 40e6)
    assert [order.key for order in overtake([soon, slow], [fast], CONFIG)] == [key(0)]
    assert overtake([slow], [donor("no better", 0.2e6)], CONFIG) == []
    assert overtake([slow], [donor("slow", 40e6)], CONFIG) == [], "a donor does not overtake itself"
    assert overtake([slow], [donor("unknown")], CONFIG) == []


def test_each_idle_donor_overtakes_one_chunk() -> None:
    flights = [Flight(key=key(n), num_bytes=CHUNK, donor="slow", remaining_seconds=10.0 + n) for n in range(5)]
    orders = overtake(flights, [donor("a", 1e8), donor("b", 2e8)], CONFIG)
    assert [(order.key, order.donor) for order in orders] == [(key(4), "b"), (key(3), "a")]


@pytest.mark.parametrize(
    ("round_trip", "bbr", "lanes"), [(None, True, 1), (0.0001, False, 1), (0.08, True, 16), (0.08, False, 64)]
)
def test_lanes_suit_the_path(round_trip: float | None, bbr: bool, lanes: int) -> None:
    assert choose_lanes(round_trip, bbr=bbr) == lanes


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_piece_bytes": 1000},
        {"min_piece_bytes": 8 * MIB},
        {"min_window_bytes": 0},
        {"min_window_bytes": 128 * MIB},
        {"piece_seconds": 0.0},
        {"window_round_trips": -1.0},
    ],
)
def test_impossible_sizes_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadConfiguration):
        PlannerConfig(**wrong)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(
    counts=st.lists(st.integers(1, CHUNK), max_size=40),
    donors=st.lists(
        st.builds(
            lambda index, rate, lanes, round_trip: (index, rate, tuple(lanes), round_trip),
            st.integers(0, 3),
            st.floats(0, 1e10),
            st.lists(st.integers(0, 8 * MIB), min_size=1, max_size=64),
            st.floats(0, 2),
        ),
        max_size=4,
        unique_by=lambda each: each[0],
    ),
)
def test_whatever_the_numbers_plans_are_sound(
    counts: list[int], donors: list[tuple[int, float, tuple[int, ...], float]]
) -> None:
    views = [donor(f"d{index}", rate, lanes, trip) for index, rate, lanes, trip in donors]
    wanted = [Need(key=key(number), num_bytes=count) for number, count in enumerate(counts)]
    orders = plan(wanted, sum(counts), views, CONFIG)
    assert len({order.key for order in orders}) == len(orders)
    added = {view.name: 0 for view in views}
    for order in orders:
        view = next(view for view in views if view.name == order.donor)
        size = counts[order.key.chunk]
        assert sum(piece.num_bytes for piece in order.pieces) == size
        position = 0
        for piece in order.pieces:
            assert piece.offset == position
            assert 0 < piece.num_bytes <= CONFIG.max_piece_bytes
            assert piece.lane < len(view.lane_bytes)
            position += piece.num_bytes
        before = view.in_flight_bytes + added[view.name]
        assert before == 0 or before + size <= window_bytes(view, CONFIG)
        added[view.name] += size
    # Something always moves: a donor with nothing in flight is never left idle if it is the only one.
    if wanted and len(views) == 1 and views[0].in_flight_bytes == 0:
        assert orders
