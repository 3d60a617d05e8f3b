"""Whole transfers over the simulated network: each fault is a line of a script, which proves that it struck."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recovery.errors import NoDonorLeft, RecoveryError
from recovery.events import ChunkRefetched, DonorFailed
from recovery.protocol import donor_io
from recovery.protocol.joiner_config import JoinerConfig
from recovery.protocol.ledger import ChunkLedger
from recovery.protocol.planner import PlannerConfig
from recovery.protocol.ports import OUTER as OUTER_ROLE
from recovery.types import KIB, MIB
from tests.support.memory_donor import Destinations, MemorySnapshots
from tests.support.memory_simulation import SimulatedDonor, Simulation

SMALL = JoinerConfig(
    lanes=3,
    planner=PlannerConfig(
        max_piece_bytes=2 * MIB, piece_seconds=0.25, min_window_bytes=1 * MIB, max_window_bytes=4 * MIB
    ),
)


def noise(num_bytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def outer() -> dict[str, object]:
    """Five chunks of large tensors, one packed chunk of small ones."""
    return {
        "outer_params": {
            "large": noise(9 * MIB + 5, 1),
            "a": noise(300, 2),
            "b": noise(70 * KIB, 3).reshape(7, -1).t(),
        },
        "outer_optimizer": {"momentum": noise(5 * MIB, 4)},
    }


def private() -> dict[str, object]:
    return {"inner_optimizer": {"exp_avg": noise(5 * MIB, 5)}}


OUTER, PRIVATE = outer(), private()


def donors(count: int) -> list[MemorySnapshots]:
    return [MemorySnapshots(f"d{index}", OUTER, PRIVATE) for index in range(count)]


def assert_whole(simulation: Simulation, *, with_private: bool = True) -> None:
    for name, value in {**OUTER, **(PRIVATE if with_private else {})}.items():
        assert simulation.destinations.holds(name, value), f"{name} differs"


def flipped(data: torch.Tensor) -> torch.Tensor:
    wrong = data.clone()
    wrong[wrong.numel() // 2] ^= 0x10
    return wrong


def invert(tensor: torch.Tensor) -> None:
    """What the outer step does to the memory: nothing in it stays as it was."""
    tensor.bitwise_xor_(0xFF)


class Once:
    """Damages the first message for which ``when`` is true."""

    def __init__(
        self,
        how: Callable[[torch.Tensor], torch.Tensor | None],
        when: Callable[[SimulatedDonor, donor_io.Send], bool] = lambda donor, send: True,
    ) -> None:
        self._how = how
        self._when = when
        self.struck: list[donor_io.Send] = []

    def __call__(self, donor: SimulatedDonor, send: donor_io.Send, data: torch.Tensor) -> torch.Tensor | None:
        if self.struck or not self._when(donor, send):
            return data
        self.struck.append(send)
        return self._how(data)


@pytest.mark.parametrize("num_donors", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_without_faults_everything_arrives_once(num_donors: int, seed: int) -> None:
    simulation = Simulation(donors(num_donors), config=SMALL, choose=random.Random(seed).randrange)
    assert simulation.run() == "done"
    assert_whole(simulation)
    assert simulation.joiner.payload_bytes == simulation.joiner.total_bytes
    acknowledged = {pair for donor in simulation.donors.values() for pair in donor.leases[OUTER_ROLE].acknowledged}
    assert acknowledged, "donors are told what their guards need not save"


@pytest.mark.parametrize("num_donors", [1, 2])
@pytest.mark.parametrize("how", ["flip", "truncate", "zero"])
def test_damage_is_found_and_fetched_again(num_donors: int, how: str) -> None:
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "flip": flipped,
        "truncate": lambda data: data[: data.numel() // 2],
        "zero": torch.zeros_like,
    }
    fault = Once(changes[how])
    simulation = Simulation(donors(num_donors), config=SMALL, fault=fault)
    assert simulation.run() == "done"
    assert fault.struck
    assert_whole(simulation)
    refetched = [event for event in simulation.events if isinstance(event, ChunkRefetched)]
    assert [event.blame for event in refetched] == ["link"]
    assert simulation.joiner.failures == {}


def test_a_damaged_packed_chunk_never_reaches_the_destination() -> None:
    fault = Once(flipped, lambda donor, send: send.part == 0 and send.num_bytes < 256 * KIB)
    simulation = Simulation(donors(1), config=SMALL, fault=fault)
    assert simulation.run() == "done"
    assert fault.struck
    assert_whole(simulation)


def test_a_second_damaged_chunk_ends_the_donor() -> None:
    """As reported in NVIDIA/Megatron-LM#5281."""
    struck = []

    def fault(donor: SimulatedDonor, send: donor_io.Send, data: torch.Tensor) -> torch.Tensor:
        if donor.name == "d0":
            struck.append(send)
            return flipped(data)
        return data

    simulation = Simulation(donors(2), config=SMALL, fault=fault)
    assert simulation.run() == "done"
    assert len(struck) >= 2
    assert_whole(simulation)
    assert isinstance(simulation.joiner.failures["d0"], RecoveryError)
    assert "damaged" in str(simulation.joiner.failures["d0"])


def test_memory_written_round_the_guard_ends_the_donor() -> None:
    own = copy.deepcopy(OUTER)
    snapshots = [MemorySnapshots("d0", own, PRIVATE), MemorySnapshots("d1", OUTER, PRIVATE)]
    momentum: torch.Tensor = own["outer_optimizer"]["momentum"]  # type: ignore[index]
    momentum[3 * MIB] ^= 1
    simulation = Simulation(snapshots, config=SMALL)
    assert simulation.run() == "done"
    assert_whole(simulation)
    assert simulation.joiner.failures["d0"].kind == "DonorMemoryChanged"
    assert "outer_optimizer" in str(simulation.joiner.failures["d0"])


@pytest.mark.parametrize("percent", [10, 50, 90])
def test_a_donor_dies(percent: int) -> None:
    simulation = Simulation(donors(2), config=SMALL, choose=random.Random(percent).randrange)
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
    assert_whole(simulation)
    assert "killed" in str(simulation.joiner.failures[killed[0]])
    again = simulation.joiner.payload_bytes - simulation.joiner.total_bytes
    assert again <= 4 * MIB, "at most the window moves again"


@pytest.mark.parametrize("percent", [10, 50, 90])
def test_a_frozen_donor_is_left(percent: int) -> None:
    """As reported in NousResearch/nousnet#61."""
    simulation = Simulation(donors(2), config=SMALL, choose=random.Random(percent).randrange)
    frozen: list[str] = []

    def fault(donor: SimulatedDonor, send: donor_io.Send, data: torch.Tensor) -> torch.Tensor | None:
        moved = sum(each.sent_bytes for each in simulation.donors.values())
        if not frozen and moved >= simulation.joiner.total_bytes * percent // 100:
            frozen.append(donor.name)
            simulation.freeze(donor.name)
        return data

    simulation.fault = fault
    assert simulation.run() == "done"
    assert frozen
    assert_whole(simulation)


@pytest.mark.parametrize("late_arrives", [True, False], ids=["before the check", "never"])
def test_a_late_duplicate_with_wrong_bytes_changes_nothing(late_arrives: bool) -> None:
    """A chunk is asked of a second donor because the first keeps a piece back; then the first's bytes come, wrong.

    Where they never come, the receive is broken off, and what it left in the memory is wrong all the same.
    """
    simulation = Simulation(
        donors(2), config=SMALL, choose=random.Random(1).randrange, rates={"d0": 50e6, "d1": 50e6}, want_private=False
    )
    kept_back: list[donor_io.Send] = []
    overtaken: list[donor_io.Send] = []
    landed: list[donor_io.Send] = []

    def fault(donor: SimulatedDonor, send: donor_io.Send, data: torch.Tensor) -> torch.Tensor | None:
        if donor.name == "d0" and not kept_back and send.part == 0 and send.num_bytes > MIB:
            kept_back.append(send)
            return None
        if kept_back and donor.name == "d1" and (send.part, send.offset) == (0, kept_back[0].offset):
            overtaken.append(send)
            if late_arrives:
                simulation.at_step[simulation.num_steps + 1] = late
        return data

    def late() -> None:
        landed.append(kept_back[0])
        simulation.land("d0", kept_back[0].tag, torch.full((kept_back[0].num_bytes,), 0xBA, dtype=torch.uint8))

    simulation.fault = fault
    assert simulation.run() == "done"
    assert kept_back
    assert overtaken
    assert bool(landed) == late_arrives
    assert_whole(simulation, with_private=False)


def test_the_guard_voids_bytes_in_flight_and_nobody_is_blamed() -> None:
    own = copy.deepcopy(OUTER)
    large: torch.Tensor = own["outer_params"]["large"]  # type: ignore[index]
    simulation = Simulation([MemorySnapshots("d0", own, PRIVATE)], config=SMALL)
    stepped: list[int] = []

    def fault(donor: SimulatedDonor, send: donor_io.Send, data: torch.Tensor) -> torch.Tensor | None:
        if not stepped and send.role == 1:
            simulation.outer_step("d0", lambda: invert(large))
            stepped.extend(donor.inbox[-1].void_pull_ids)  # type: ignore[union-attr]
        return data

    simulation.fault = fault
    assert simulation.run() == "done"
    assert stepped, "live bytes were in flight when the guard closed"
    assert_whole(simulation)
    assert simulation.joiner.failures == {}
    blames = {event.blame for event in simulation.events if isinstance(event, ChunkRefetched)}
    assert blames <= {"void"}
    assert simulation.joiner.payload_bytes > simulation.joiner.total_bytes


def test_all_donors_gone_then_a_new_one_moves_only_the_rest() -> None:
    destinations, ledger = Destinations(), ChunkLedger()
    first = Simulation(donors(2), config=SMALL, destinations=destinations, ledger=ledger, want_private=False)

    def fault(donor: SimulatedDonor, send: donor_io.Send, data: torch.Tensor) -> torch.Tensor | None:
        if first.joiner.verified_bytes >= first.joiner.total_bytes * 7 // 10:
            first.kill("d0")
            first.kill("d1")
            return None
        return data

    first.fault = fault
    result = first.run()
    assert isinstance(result, NoDonorLeft)
    assert "d0: DonorLost" in str(result) and "d1: DonorLost" in str(result)
    kept = ledger.num_bytes
    assert kept >= first.joiner.total_bytes * 7 // 10
    second = Simulation(donors(1), config=SMALL, destinations=destinations, ledger=ledger, want_private=False)
    assert second.run() == "done"
    assert_whole(second, with_private=False)
    assert second.joiner.reused_bytes == kept
    assert second.joiner.payload_bytes == second.joiner.total_bytes - kept


def test_the_private_donor_dies_and_another_cut_takes_its_place() -> None:
    other_private = {"inner_optimizer": {"exp_avg": noise(5 * MIB, 99)}}
    snapshots = [MemorySnapshots("d0", OUTER, PRIVATE), MemorySnapshots("d1", OUTER, other_private)]
    simulation = Simulation(snapshots, config=SMALL)
    struck: list[donor_io.Send] = []

    def fault(donor: SimulatedDonor, send: donor_io.Send, data: torch.Tensor) -> torch.Tensor | None:
        if donor.name == "d0" and send.role == 2 and send.offset > 0:
            struck.append(send)
            simulation.kill("d0")
            return None
        return data

    simulation.fault = fault
    assert simulation.run() == "done"
    assert struck
    assert simulation.destinations.holds("inner_optimizer", other_private["inner_optimizer"]), "one cut, not a mixture"
    assert_whole(simulation, with_private=False)


def test_a_donor_with_other_content_is_dropped() -> None:
    other = copy.deepcopy(OUTER)
    momentum: torch.Tensor = other["outer_optimizer"]["momentum"]  # type: ignore[index]
    momentum[0] ^= 1
    snapshots = [MemorySnapshots("d0", OUTER, PRIVATE), MemorySnapshots("d1", other, PRIVATE)]
    simulation = Simulation(snapshots, config=SMALL, choose=random.Random(3).randrange)
    assert simulation.run() == "done"
    assert_whole(simulation)
    assert simulation.joiner.failures["d1"].kind == "ManifestRejected"
    assert any(isinstance(event, DonorFailed) and event.donor == "d1" for event in simulation.events)


@pytest.mark.parametrize("seed", range(6))
def test_a_lie_under_the_right_fingerprint_does_not_win(seed: int) -> None:
    """Whichever of the two manifests comes first, the bytes show which is true."""
    snapshots = donors(2)
    part = snapshots[1].outer_manifest.parts[0]
    chunk = dataclasses.replace(part.chunks[0], digest=b"\1" * 16)
    lie = dataclasses.replace(part, chunks=(chunk, *part.chunks[1:]))
    snapshots[1].outer_manifest = dataclasses.replace(
        snapshots[1].outer_manifest, parts=(lie, *snapshots[1].outer_manifest.parts[1:])
    )
    simulation = Simulation(snapshots, config=SMALL, choose=random.Random(seed).randrange)
    assert simulation.run() == "done"
    assert_whole(simulation)
    assert "d0" not in simulation.joiner.failures


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_whatever_happens_memory_is_whole_or_the_ledger_is_true(data: st.DataObject) -> None:
    """Random schedules with flips, cuts, losses, kills, freezes and outer steps.

    Reported in MoonshotAI/checkpoint-engine#40.
    """
    rng = random.Random(data.draw(st.integers(0, 2**32), label="schedule"))
    num_donors = data.draw(st.integers(1, 3), label="donors")
    own = [copy.deepcopy(OUTER) for _ in range(num_donors)]
    snapshots = [MemorySnapshots(f"d{index}", own[index], PRIVATE) for index in range(num_donors)]
    simulation = Simulation(snapshots, config=SMALL, choose=rng.randrange)
    damage = data.draw(st.sampled_from([0.0, 0.02, 0.2]), label="damage")

    def fault(donor: SimulatedDonor, send: donor_io.Send, message: torch.Tensor) -> torch.Tensor | None:
        if rng.random() >= damage:
            return message
        kind = rng.randrange(4)
        if kind == 0:
            return flipped(message)
        if kind == 1:
            return message[: rng.randrange(message.numel() + 1)]
        if kind == 2:
            return torch.full_like(message, 7)
        return None

    simulation.fault = fault
    for step in data.draw(st.lists(st.integers(5, 400), max_size=3, unique=True), label="steps"):
        index = data.draw(st.integers(0, num_donors - 1), label="victim")
        name = f"d{index}"
        what = data.draw(st.sampled_from(["kill", "freeze", "outer step"]), label="what")
        if what == "kill":
            simulation.at_step[step] = lambda name=name: simulation.kill(name)  # type: ignore[misc]
        elif what == "freeze":
            simulation.at_step[step] = lambda name=name: simulation.freeze(name)  # type: ignore[misc]
        else:
            large: torch.Tensor = own[index]["outer_params"]["large"]  # type: ignore[index]

            def change(name: str = name, large: torch.Tensor = large) -> None:
                simulation.outer_step(name, lambda: invert(large))

            simulation.at_step[step] = change
    result = simulation.run()
    if result == "done":
        assert_whole(simulation)
    else:
        assert isinstance(result, NoDonorLeft), result
        for table in simulation.joiner._pulls.tables.values():
            for key, entry in table.entries.items():
                if entry.done:
                    assert simulation.memory.probe(key), "what counts as verified is still in place"
