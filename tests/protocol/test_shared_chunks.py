"""Chunks whose pieces come from several donors, or twice: what is kept, who is blamed, what is left behind."""

from __future__ import annotations

import random

import pytest
import torch

from recovery.events import ChunkRefetched
from recovery.protocol import donor_io
from recovery.protocol.joiner_config import JoinerConfig
from recovery.protocol.planner import PlannerConfig
from recovery.types import KIB, MIB
from tests.protocol.test_transfer_faults import assert_whole, donors, flipped
from tests.support.memory_simulation import SimulatedDonor, Simulation

PIECES = JoinerConfig(
    lanes=3,
    planner=PlannerConfig(max_piece_bytes=256 * KIB, min_window_bytes=1 * MIB, max_window_bytes=4 * MIB),
)


@pytest.mark.parametrize("percent", [10, 50, 90])
def test_what_a_lost_donor_has_brought_of_a_chunk_is_kept(percent: int) -> None:
    simulation = Simulation(donors(2), config=PIECES, choose=random.Random(percent).randrange, want_private=False)
    killed: list[str] = []

    def fault(donor: SimulatedDonor, send: donor_io.Send, data: torch.Tensor) -> torch.Tensor | None:
        moved = sum(each.sent_bytes for each in simulation.donors.values())
        if not killed and moved >= simulation.joiner.total_bytes * percent // 100:
            killed.append(donor.name)
            simulation.kill(donor.name)
            return None
        return data

    simulation.fault = fault
    assert simulation.run() == "done"
    assert killed
    assert_whole(simulation, with_private=False)
    # What has arrived is not asked for again, though its chunk was not whole.
    assert simulation.joiner.payload_bytes <= simulation.joiner.total_bytes + 256 * KIB


def test_nobody_is_blamed_for_damage_that_several_may_have_done() -> None:
    """A damaged piece comes from a donor that dies; another brings the rest of the chunk. The next try is its own."""
    simulation = Simulation(donors(2), config=PIECES, choose=random.Random(3).randrange, want_private=False)
    chunks: list[tuple[int, int]] = []
    alone: list[str] = []

    def fault(donor: SimulatedDonor, send: donor_io.Send, data: torch.Tensor) -> torch.Tensor | None:
        chunk = (send.part, send.offset // (4 * MIB))
        if donor.name == "d0" and send.role == 1 and send.num_bytes == 256 * KIB:
            if not chunks:
                chunks.append(chunk)
                return flipped(data)
            if chunk == chunks[0]:
                simulation.kill("d0")
                return None
        if chunks and chunk == chunks[0]:
            alone.append(donor.name)
        return data

    simulation.fault = fault
    assert simulation.run() == "done"
    assert_whole(simulation, with_private=False)
    assert not simulation.donors["d0"].alive, "it died with the chunk begun"
    assert set(alone) == {"d1"}
    assert len(alone) > 16, "the rest of the chunk, and then the whole of it"
    assert set(simulation.joiner.failures) == {"d0"}
    assert not [event for event in simulation.events if isinstance(event, ChunkRefetched)], "nobody was complained of"


def test_a_lane_that_stands_still_at_the_end_is_left_behind() -> None:
    """Its one donor is asked for the piece again, on another lane."""
    simulation = Simulation(donors(1), config=PIECES, want_private=False, rates={"d0": 5e6}, round_trip_seconds=0.05)
    kept_back: list[donor_io.Send] = []
    again: list[donor_io.Send] = []

    def fault(donor: SimulatedDonor, send: donor_io.Send, data: torch.Tensor) -> torch.Tensor | None:
        if not kept_back and send.part == 1 and send.offset >= 4 * MIB:
            kept_back.append(send)
            return None
        if kept_back and (send.part, send.offset) == (1, kept_back[0].offset):
            again.append(send)
        return data

    simulation.fault = fault
    assert simulation.run() == "done"
    assert_whole(simulation, with_private=False)
    assert simulation.joiner.failures == {}, "the donor was not given up"
    assert again
    assert again[0].lane != kept_back[0].lane
