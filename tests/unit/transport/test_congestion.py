"""A link's congestion control: the system's until the path is seen to lose at random, whatever its queue does."""

from __future__ import annotations

import pytest

from recovery.transport.congestion import PathWatch, loses_at_random
from recovery.transport.sockets import PathState


def state(sent: int, lost: int, round_trip: float = 0.08, least: float = 0.08) -> PathState:
    return PathState(
        segments_sent=sent, segments_lost=lost, round_trip_seconds=round_trip, least_round_trip_seconds=least
    )


@pytest.mark.parametrize(
    ("now", "lossy"),
    [
        (state(11_000, 110), True),
        (state(11_000, 105), True),
        (state(11_000, 103), False),  # too few to tell
        (state(111_000, 110), False),  # too small a part to matter
        (state(11_000, 200, round_trip=0.15), False),  # the queue overflows
        (state(1_000, 100), False),  # nothing was sent
    ],
)
def test_only_losses_with_an_empty_queue_count(now: PathState, lossy: bool) -> None:
    assert loses_at_random(state(1_000, 100), now) is lossy


class Scripted:
    """Sockets that tell what a test says."""

    def __init__(self, *states: PathState | None) -> None:
        self.states = list(states)
        self.chosen: list[str] = []

    def path_state(self) -> PathState | None:
        return self.states.pop(0)

    def choose_congestion_control(self, wanted: str) -> str:
        self.chosen.append(wanted)
        return wanted


def test_sockets_are_changed_once_and_stay_so() -> None:
    sockets = Scripted(state(0, 0), state(1_000, 50, round_trip=0.16), state(2_000, 60), state(3_000, 90))
    watch = PathWatch(sockets, "bbr")  # type: ignore[arg-type]
    watch.look()
    assert (sockets.chosen, watch.in_force) == ([], "")
    watch.look()
    assert (sockets.chosen, watch.in_force) == (["bbr"], "bbr")
    watch.look()
    assert sockets.chosen == ["bbr"]


def test_a_system_that_does_not_say_is_left_alone() -> None:
    sockets = Scripted(None, None, None)
    watch = PathWatch(sockets, "bbr")  # type: ignore[arg-type]
    watch.look()
    watch.look()
    assert sockets.chosen == []
