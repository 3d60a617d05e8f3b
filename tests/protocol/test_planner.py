"""The planner's tables: windows, pieces, proportions, the end of a transfer."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.errors import BadConfiguration
from recovery.protocol.planner import (
    Asking,
    ChunkKey,
    DonorView,
    Flight,
    Need,
    PlannerConfig,
    Span,
    choose_lanes,
    most_again_bytes,
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


def need(number: int, num_bytes: int = CHUNK, **options: object) -> Need:
    return Need(key=key(number), spans=(Span(0, num_bytes),), **options)  # type: ignore[arg-type]


def needs(count: int, num_bytes: int = CHUNK) -> list[Need]:
    return [need(number, num_bytes) for number in range(count)]


def donor(name: str, rate: float = 0.0, lanes: tuple[int, ...] = (0, 0), round_trip: float = 0.0) -> DonorView:
    return DonorView(name=name, rate=rate, round_trip_seconds=round_trip, lane_bytes=lanes)


def asked(askings: list[Asking], name: str) -> int:
    return sum(asking.span.num_bytes for asking in askings if asking.donor == name)


def test_nobody_to_ask_means_nothing_is_asked() -> None:
    assert plan([], needs(3), 3 * CHUNK, [], CONFIG) == []


@pytest.mark.parametrize(
    ("rate", "lanes", "expected"),
    [
        (0.0, 1, 512 * KIB),  # unknown
        (0.0, 64, 64 * KIB),  # unknown, many lanes: a window of small pieces
        (1e3, 1, 64 * KIB),  # slow: the smallest
        (100e6, 8, 576 * KIB),  # a twentieth of a second of one lane's share, in steps of 64 KiB
        (25e6, 16, 64 * KIB),
        (3e9, 2, 4 * MIB),  # fast: the largest
    ],
)
def test_a_piece_takes_a_twentieth_of_a_second_of_its_lane(rate: float, lanes: int, expected: int) -> None:
    assert piece_bytes(rate, lanes, CONFIG) == expected


@pytest.mark.parametrize(
    ("rate", "round_trip", "lanes", "expected"),
    [
        (0.0, 0.0, 1, 8 * MIB),  # unknown
        (100e6, 0.0001, 1, 8 * MIB),  # near
        (5e6, 0.0001, 1, 2_500_000),  # near and slow: half a second of it
        (25e6, 0.08, 16, 10_000_000),  # five round trips' worth of bytes
        (1e6, 0.08, 16, 2 * MIB),  # slow: two pieces for each lane
        (3e9, 0.0001, 2, 16 * MIB),  # two pieces for each lane
        (1e10, 1.0, 2, 64 * MIB),  # the cap
    ],
)
def test_windows(rate: float, round_trip: float, lanes: int, expected: int) -> None:
    assert window_bytes(donor("d", rate, (0,) * lanes, round_trip), CONFIG) == expected


def test_a_chunk_is_cut_in_order_and_spread_over_the_lanes() -> None:
    askings = plan([], needs(1), CHUNK, [donor("d", lanes=(10 * KIB, 0))], CONFIG)
    assert [asking.span for asking in askings] == [Span(512 * KIB * index, 512 * KIB) for index in range(8)]
    assert [asking.lane for asking in askings] == [1, 0, 1, 0, 1, 0, 1, 0]


def test_a_lane_is_given_what_it_carries() -> None:
    view = DonorView(name="d", rate=40e6, round_trip_seconds=0.08, lane_bytes=(0, 0, 0), lane_rates=(30e6, 10e6, 0.1))
    askings = plan([], needs(100), 100 * CHUNK, [view], CONFIG)
    lanes = [sum(asking.span.num_bytes for asking in askings if asking.lane == lane) for lane in range(3)]
    assert lanes[0] == pytest.approx(3 * lanes[1], rel=0.25)
    assert 0 < lanes[2] < lanes[1] / 2, "one that stands still is tried all the same"


def test_a_full_window_gets_nothing() -> None:
    assert plan([], needs(3), 3 * CHUNK, [donor("d", lanes=(5 * MIB, 3 * MIB))], CONFIG) == []


def test_a_piece_is_always_allowed_however_small_the_window() -> None:
    small = PlannerConfig(min_window_bytes=1 * KIB, max_window_bytes=1 * KIB)
    assert len(plan([], needs(3), 3 * CHUNK, [donor("d", rate=1e4)], small)) == 1


def test_windows_are_filled_by_rate() -> None:
    donors = [donor("slow", 10e6, round_trip=0.1), donor("fast", 90e6, round_trip=0.1)]
    askings = plan([], needs(100), 100 * CHUNK, donors, CONFIG)
    assert asked(askings, "fast") == pytest.approx(9 * asked(askings, "slow"), rel=0.1)


def test_each_donor_goes_on_with_its_own_chunk() -> None:
    begun = [need(0, flight=7, begun_by="a"), need(1, flight=8, begun_by="b")]
    askings = plan(begun, needs(9), 11 * CHUNK, [donor("a", 10e6), donor("b", 10e6)], CONFIG)
    first = {asking.donor: asking for asking in reversed(askings)}
    assert (first["a"].flight, first["b"].flight) == (7, 8)
    assert {asking.donor for asking in askings if asking.flight == 7} == {"a"}


def test_what_a_lost_donor_had_begun_comes_before_new_chunks() -> None:
    left = Need(key=key(5), spans=(Span(64, 100), Span(1000, 50)), flight=3, begun_by="gone")
    askings = plan([left], needs(2), 2 * CHUNK + 150, [donor("a", 10e6)], CONFIG)
    assert [asking[:4] for asking in askings[:2]] == [(key(5), 3, "a", Span(64, 100)), (key(5), 3, "a", Span(1000, 50))]


def test_at_the_end_an_idle_donor_takes_what_a_slow_one_has_begun() -> None:
    slow, fast = donor("slow", 1e6, lanes=(64 * KIB, 0)), donor("fast", 50e6)
    begun = [need(0, flight=1, begun_by="slow")]
    askings = plan(begun, (), CHUNK, [slow, fast], CONFIG)
    assert {asking.donor for asking in askings} == {"fast"}
    assert asked(askings, "fast") == CHUNK
    alone = [need(0, flight=1, begun_by="slow", alone=True)]
    assert {asking.donor for asking in plan(alone, (), CHUNK, [slow, fast], CONFIG)} == {"slow"}


def test_at_the_end_a_slow_donor_is_not_waited_for() -> None:
    donors = [donor("slow", 0.5e6), donor("fast", 100e6, lanes=(4 * MIB, 4 * MIB))]
    assert plan([], needs(1, 256 * KIB), 256 * KIB, donors, CONFIG) == []
    # With much left to do it is asked, for half a second's worth.
    askings = plan([], needs(500), 500 * CHUNK, donors, CONFIG)
    assert 0 < asked(askings, "slow") <= 256 * KIB


def test_a_donor_that_damaged_a_chunk_is_asked_only_if_nobody_else_can() -> None:
    wanted = need(0, avoid=frozenset({"d0"}))
    askings = plan([], [wanted], CHUNK, [donor("d0", 1e9), donor("d1", 1e8)], CONFIG)
    assert {asking.donor for asking in askings} == {"d1"}
    assert plan([], [wanted], CHUNK, [donor("d0", 1e9)], CONFIG)[0].donor == "d0"


def test_a_chunk_is_asked_only_of_those_that_have_it() -> None:
    wanted = need(0, only=frozenset({"d1"}))
    askings = plan([], [wanted], CHUNK, [donor("d0", 1e9), donor("d1", 1e8)], CONFIG)
    assert {asking.donor for asking in askings} == {"d1"}
    assert plan([], [wanted], CHUNK, [donor("d0", 1e9)], CONFIG) == []


def test_a_plan_costs_the_same_for_any_state() -> None:
    seen = 0

    def endless() -> object:
        nonlocal seen
        for number in range(100_000):
            seen += 1
            yield need(number, 1, only=frozenset({"away"}))

    assert plan([], endless(), 100_000, [donor("d0", 1e6)], CONFIG) == []  # type: ignore[arg-type]
    assert seen <= 100


def flight(number: int, remaining: float, *, direct: bool = True, missing: int = CHUNK) -> Flight:
    return Flight(
        number=number,
        missing_bytes=missing,
        donors=frozenset({"slow"}),
        own_lanes_help=not direct,
        remaining_seconds=remaining,
    )


def test_overtaking_needs_a_donor_that_is_clearly_faster() -> None:
    slow, soon = flight(1, 30.0), flight(2, 0.15)
    assert overtake([soon, slow], [donor("fast", 40e6)], CONFIG) == [1]
    assert overtake([slow], [donor("no better", 0.2e6)], CONFIG) == []
    assert overtake([slow], [donor("unknown")], CONFIG) == []
    assert overtake([slow], [donor("busy", 40e6, lanes=(1, 1))], CONFIG) == []


def test_a_donor_overtakes_itself_only_where_its_late_bytes_can_be_left_behind() -> None:
    own = donor("slow", 40e6, lanes=(64 * KIB, 0))
    assert overtake([flight(1, 3.0)], [own], CONFIG) == []
    assert overtake([flight(1, 3.0, direct=False, missing=64 * KIB)], [own], CONFIG) == [1]


def test_what_a_donor_overtakes_of_its_own_is_bounded_however_late_all_of_it_seems() -> None:
    late = flight(1, 1000.0, direct=False, missing=64 * KIB)
    lent = 40 * MIB
    limit = most_again_bytes(lent, CONFIG)
    assert limit == 2 * MIB
    own = dataclasses.replace(donor("slow", 40e6, lanes=(64 * KIB, 0)), lent_bytes=lent)
    for again_bytes, found in ((limit - 64 * KIB, [1]), (limit - 64 * KIB + 1, [])):
        assert overtake([late], [dataclasses.replace(own, again_bytes=again_bytes)], CONFIG) == found
    other = dataclasses.replace(own, name="other", again_bytes=limit)
    assert overtake([late], [other], CONFIG) == [1], "another donor does not owe it"


def test_each_donor_overtakes_one_flight() -> None:
    flights = [flight(n, 10.0 + n) for n in range(5)]
    assert overtake(flights, [donor("a", 1e8), donor("b", 2e8)], CONFIG) == [4, 3]


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
    begun = [need(number, count, flight=number + 1, begun_by="d0") for number, count in enumerate(counts[:5])]
    fresh = [need(number, count) for number, count in enumerate(counts)][5:]
    askings = plan(begun, fresh, sum(counts), views, CONFIG)
    reached = dict.fromkeys(range(len(counts)), 0)
    added = {view.name: 0 for view in views}
    for asking in askings:
        view = next(view for view in views if view.name == asking.donor)
        chunk, size = asking.key.chunk, asking.span.num_bytes
        assert asking.flight == (chunk + 1 if chunk < 5 else 0)
        assert asking.span.offset == reached[chunk], "in order, nothing twice"
        reached[chunk] += size
        assert reached[chunk] <= counts[chunk]
        assert 0 < size <= CONFIG.max_piece_bytes
        assert asking.lane < len(view.lane_bytes)
        before = view.in_flight_bytes + added[view.name]
        assert before == 0 or before + size <= window_bytes(view, CONFIG)
        added[view.name] += size
    # Something always moves: a donor with nothing in flight is never left idle if it is the only one.
    if counts and len(views) == 1 and views[0].in_flight_bytes == 0:
        assert askings
