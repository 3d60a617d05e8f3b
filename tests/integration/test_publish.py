"""Loops with an all-reduce of their own: what they publish becomes the history, or they take the others' state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.boundary_faults import INNER_STEPS, REPLICATED, STEP_SECONDS, step_of
from tests.support.fleet import Fleet, Worker

pytestmark = pytest.mark.timeout(300)
"""Several processes start in each test: a busy machine needs its time."""


def publishers(fleet: Fleet, folder: Path, size: int, outer_steps: int = 4, **damage: int) -> list[Worker]:
    plan: dict[str, Any] = {
        "module": "tests.support.publisher_process",
        "agent": {"inner_steps_per_phase": INNER_STEPS},
        "step_seconds": STEP_SECONDS,
        "outer_steps": outer_steps,
        "size": size,
        "meeting": str(folder / "meeting"),
    }
    names = [f"w{rank}" for rank in range(size)]
    return [
        fleet.worker(name, seed=rank, rank=rank, **({"damage": damage[name]} if name in damage else {}), **plan)
        for rank, name in enumerate(names)
    ]


def assert_same_at(workers: list[Worker], version: str) -> None:
    held = [worker.wait(lambda m: m["say"] == "boundary" and m["version"] == version, version) for worker in workers]
    for other in held[1:]:
        assert [part for part in REPLICATED if held[0]["parts"][part] != other["parts"][part]] == []


def test_published_versions_are_sealed(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        workers = publishers(fleet, tmp_path, 2)
        for step in range(1, 5):
            assert_same_at(workers, f"L1.k{step}")
        for worker in workers:
            assert worker.end() == 0
        with fleet.operator() as operator:
            listed = operator.list()
        assert (listed.sealed.lineage, listed.sealed.outer_step) == (1, 4)


def test_who_publishes_another_state_takes_the_majoritys(tmp_path: Path) -> None:
    """Field report: learning-at-home/hivemind#415, out-of-sync peers were believed."""
    with Fleet(tmp_path) as fleet:
        workers = publishers(fleet, tmp_path, 3, w1=2)
        for step in range(1, 5):
            assert_same_at(workers, f"L1.k{step}")
        restored = [m["version"] for m in workers[1].heard if m.get("event") == "StateRestored"]
        assert "L1.k2" in restored
        others = [m["version"] for w in (workers[0], workers[2]) for m in w.heard if m.get("event") == "StateRestored"]
        assert "L1.k2" not in others


def test_a_joiner_catches_up_by_the_averages_that_publishers_keep(tmp_path: Path) -> None:
    """The run moves on while the joiner holds only its base: nobody waits, and it replays what it missed."""
    with Fleet(tmp_path) as fleet:
        workers = publishers(fleet, tmp_path, 2, outer_steps=100)
        workers[0].wait_boundary(1)
        agent: dict[str, Any] = {"inner_steps_per_phase": INNER_STEPS}
        joiner = fleet.worker("w9", seed=9, agent=agent, step_seconds=STEP_SECONDS, halt={"event": "BaseRestored"})
        base = step_of(joiner.wait_said("halted")["version"])
        workers[0].wait_boundary(base + 1)
        joiner.command(do="go_on")
        assert step_of(joiner.wait_event("CommitReplayed")["version"]) == base + 1
        joined = joiner.wait_said("joined")
        assert step_of(joined["version"]) > base
        for worker in workers:
            held = worker.wait(
                lambda m: m["say"] == "boundary" and m["version"] == joined["version"], "the same version"
            )
            assert [part for part in REPLICATED if held["parts"][part] != joined["parts"][part]] == []
        assert [m for m in joiner.heard if m.get("event") == "CatchUpRebased"] == []
