"""Workers that join a live run: whole state bit-equal at the cut, bit-equal next step, and one kill a role."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, Worker

REPLICATED = ("outer_params", "outer_optimizer", "run_progress")
PRIVATE = ("inner_optimizer", "scheduler", "local_progress", "buffers")

LARGE = {"hidden": 20_000, "step_seconds": 0.1}
"""About 7.5 MB of state in steps of a tenth of a second."""
CAPPED = {"donor_bytes_per_second": 4_000_000, "inner_steps_per_phase": 50}
"""A transfer takes about 2 s, so that a victim can be hit in the middle of it; a phase takes 5."""


def assert_same(left: dict[str, str], right: dict[str, str], parts: tuple[str, ...]) -> None:
    assert [name for name in parts if left[name] != right[name]] == []


def half_way(fleet: Fleet, name: str, seed: int) -> Worker:
    """Start a joiner and return when it stands still in the middle of its transfer."""
    joiner = fleet.worker(name, seed=seed, halt={"event": "TransferProgress", "after": 1}, agent=CAPPED, **LARGE)
    halted = joiner.wait_said("halted")
    assert 0 < halted["verified_bytes"] < halted["total_bytes"]
    return joiner


def serving(donors: list[Worker]) -> Worker:
    """Return the donor that has a lease out."""
    for donor in donors:
        taken = [m for m in donor.heard if m.get("event") == "LeaseTaken"]
        ended = [m for m in donor.heard if m.get("event") == "LeaseEnded"]
        if len(taken) > len(ended):
            return donor
    raise AssertionError("no donor serves anybody")


def later(worker: Worker) -> int:
    """Return an outer step that the worker has not reached."""
    return max((int(v.split(".k")[1]) for v in worker.boundaries()), default=0) + 2


def test_joiner_is_bit_equal_at_the_cut_and_after_the_next_step(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        donor = fleet.worker("w0", seed=0, report_steps=True, step_seconds=0.1)
        donor.wait_boundary(2)  # momentum on both optimizers, a learning rate above its start
        joiner = fleet.worker("w1", seed=99, step_seconds=0.1)
        joined = joiner.wait_said("joined")
        at_cut = donor.wait(
            lambda m: (
                m["say"] == "step" and (m["version"], m["inner_step"]) == (joined["version"], joined["inner_step"])
            ),
            f"a step at {joined['version']}+{joined['inner_step']}",
        )
        assert_same(joined["parts"], at_cut["parts"], REPLICATED + PRIVATE)
        assert joined["next_rates"] == at_cut["next_rates"]
        assert len(joined["next_rates"]) == 21
        reached = joiner.wait_boundary(int(joined["version"].split(".k")[1]) + 2)
        donor.wait_boundary(int(reached["version"].split(".k")[1]))
        common = sorted(joiner.boundaries().keys() & donor.boundaries().keys())
        assert len(common) >= 2
        for version in common:
            assert_same(joiner.boundaries()[version], donor.boundaries()[version], REPLICATED)
        # What is never copied: each worker draws its own data.
        assert joiner.boundaries()[common[0]]["position"] != donor.boundaries()[common[0]]["position"]


def test_killed_joiner_leaves_the_others_training_and_comes_back(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        # One slot each: what the dead joiner held has to be free again before it can come back.
        others = [fleet.worker(f"w{i}", seed=i, agent={**CAPPED, "donor_slots": 1}, **LARGE) for i in range(2)]
        for other in others:
            other.wait_boundary(1)
        joiner = half_way(fleet, "w2", 2)
        donor = serving(others)
        since = len(donor.heard)
        joiner.signal(signal.SIGKILL)
        joiner.end()
        donor.wait_event("LeaseEnded", since=since)
        for other in others:
            other.wait_boundary(later(other))
        again = fleet.worker("w2", seed=2, agent=CAPPED, **LARGE)
        again.wait_said("joined")
        again.wait_boundary(later(others[0]))


def test_killed_donor_is_replaced_by_another(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        others = [fleet.worker(f"w{i}", seed=i, agent=CAPPED, **LARGE) for i in range(3)]
        for other in others:
            other.wait_boundary(1)
        joiner = half_way(fleet, "w3", 3)
        donor = serving(others)
        donor.signal(signal.SIGKILL)
        donor.end()
        joiner.command(do="go_on")
        joiner.wait_said("joined")
        survivors = [other for other in others if other is not donor]
        for survivor in survivors:
            survivor.wait_boundary(later(survivor))
        version = joiner.wait_boundary(later(survivors[0]))["version"]
        survivors[0].wait_boundary(int(version.split(".k")[1]))
        assert_same(joiner.boundaries()[version], survivors[0].boundaries()[version], REPLICATED)


def test_killed_bystander_disturbs_nobody(tmp_path: Path) -> None:
    """As reported in PrimeIntellect-ai/prime-diloco#118."""
    with Fleet(tmp_path) as fleet:
        others = [fleet.worker(f"w{i}", seed=i, agent=CAPPED, **LARGE) for i in range(3)]
        for other in others:
            other.wait_boundary(1)
        bystander, donors = others[2], others[:2]
        with fleet.operator() as operator:
            operator.drain(bystander.name)  # it serves nobody, and takes part in every boundary
        joiner = half_way(fleet, "w3", 3)
        bystander.signal(signal.SIGKILL)
        bystander.end()
        assert not [m for m in bystander.heard if m.get("event") == "LeaseTaken"], "it served the joiner"
        joiner.command(do="go_on")
        joiner.wait_said("joined")
        assert not [m for m in joiner.heard if m.get("event") == "DonorFailed"]
        for donor in donors:
            donor.wait_boundary(later(donor))
        with fleet.operator() as operator:
            (status,) = (w for w in operator.list().workers if w.worker.worker_id == bystander.name)
        assert not status.alive


def test_only_donor_killed_ends_the_joiner_with_a_named_error(tmp_path: Path) -> None:
    with Fleet(tmp_path, "--expected-return", "2") as fleet:
        donor = fleet.worker("w0", seed=0, agent=CAPPED, **LARGE)
        donor.wait_boundary(1)
        joiner = fleet.worker(
            "w1",
            seed=1,
            halt={"event": "TransferProgress", "after": 1},
            agent=CAPPED,
            **LARGE,
        )
        joiner.wait_said("halted")
        donor.signal(signal.SIGKILL)
        donor.end()
        joiner.command(do="go_on")
        assert joiner.end() == 1
        error = joiner.wait_said("error")
        assert error["error"] == "SourcesExhausted"


@pytest.mark.parametrize("names", [["0.weight"], ["1.bias", "3.weight"]])
def test_flipped_bits_are_named_and_healed(tmp_path: Path, names: list[str]) -> None:
    with Fleet(tmp_path) as fleet:
        # Phases so long that no boundary comes between the flip and its discovery.
        agent = {"inner_steps_per_phase": 400}
        workers = [fleet.worker(f"w{i}", seed=i, agent=agent) for i in range(2)]
        for worker in workers:
            worker.wait_said("joined")
        victim = workers[1]
        with fleet.operator() as operator:
            assert list(operator.verify("w1").different) == []
            victim.command(do="flip", names=names)
            victim.wait_said("flipped")
            assert sorted(operator.verify("w1").different) == sorted(f"outer_params/{n}" for n in names)
            assert list(operator.verify("w0").different) == []
            operator.resync("w1")
            assert list(operator.verify("w1").different) == []
        version = victim.wait_boundary(1)["version"]
        workers[0].wait_boundary(1)
        assert_same(victim.boundaries()[version], workers[0].boundaries()[version], REPLICATED)


def test_flipped_bits_never_reach_the_average(tmp_path: Path) -> None:
    """Nobody asks: the worker finds the damage itself before it averages, and heals."""
    with Fleet(tmp_path) as fleet:
        workers = [fleet.worker(f"w{i}", seed=i, step_seconds=0.1) for i in range(2)]
        for worker in workers:
            worker.wait_boundary(1)
        since = len(workers[1].heard)
        workers[1].command(do="flip", names=["0.weight"])
        flipped = workers[1].wait_said("flipped")
        restored = workers[1].wait_event("StateRestored", since=since)
        assert restored["source"] == "peers"
        assert workers[1].heard.index(flipped) < workers[1].heard.index(restored)
        version = workers[1].wait_boundary(later(workers[1]))["version"]
        workers[0].wait_boundary(int(version.split(".k")[1]))
        assert_same(workers[1].boundaries()[version], workers[0].boundaries()[version], REPLICATED)
