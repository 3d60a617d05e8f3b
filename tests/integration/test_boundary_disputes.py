"""Workers that disagree about an average, and one that comes and goes: one history, and nobody decides alone."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from recovery.types import NO_VERSION
from tests.support.boundary_faults import (
    INNER_STEPS,
    REPLICATED,
    STEP_SECONDS,
    Scene,
    newest,
    step_of,
    until,
    wait_commit,
)
from tests.support.fleet import Fleet, Worker

pytestmark = pytest.mark.timeout(300)
"""Several processes start in each test: a busy machine needs its time."""

PACE: dict[str, Any] = {"agent": {"inner_steps_per_phase": INNER_STEPS}, "step_seconds": STEP_SECONDS}


def averaged_at(worker: Worker, version: str) -> list[int]:
    """Return the epochs in which the worker computed an average of a version's pseudo-gradients."""
    return [m["epoch"] for m in list(worker.heard) if m.get("stage") == "averaged" and m["version"] == version]


def common(workers: list[Worker], lineage: int, least_step: int) -> set[str]:
    """Return the versions of a lineage, from a step on, that all workers reached by commits of their own."""
    versions = set.intersection(*(set(worker.boundaries()) for worker in workers))
    return {each for each in versions if each.startswith(f"L{lineage}.") and step_of(each) >= least_step}


def test_two_that_disagree_average_once_more_then_wait_for_an_operator(tmp_path: Path) -> None:
    """Field report: nicholicaron/ft-diloco, one of two became the truth without anybody's word."""
    with Fleet(tmp_path) as fleet:
        # Only in rosters of two: if a busy machine makes one late, the other has nobody to disagree with.
        skewed = {"skew": 2, "skew_size": 2}
        workers = [fleet.worker("w0", seed=0, **PACE), fleet.worker("w1", seed=1, **skewed, **PACE)]
        for worker in workers:
            worker.wait_said("joined")
        with fleet.operator() as operator:
            until(lambda: bool(operator.list().paused), "the run is paused")
            paused = operator.list()
            assert "recovery rollback --worker" in paused.paused
            assert "w0" in paused.paused
            assert "w1" in paused.paused
            step = paused.sealed.outer_step
            assert paused.sealed.lineage == 1
            assert step >= 2
            # Both stand at the boundary, alive, with the state of before; each averaged twice, on two groups.
            together = set.intersection(*(set(averaged_at(worker, f"L1.k{step}")) for worker in workers))
            assert len(together) >= 2
            for worker in workers:
                assert worker.process.poll() is None
                assert newest(worker) <= step
            until(
                lambda: all("operator" in each.waiting_for for each in operator.list().workers),
                "both workers say that they wait for an operator",
            )
            operator.rollback(NO_VERSION, worker_id="w0")
        until(lambda: bool(common(workers, 2, step + 1)), "both committed the same step of the new lineage")
        for version in common(workers, 2, step + 1):
            left, right = (worker.boundaries()[version] for worker in workers)
            assert [part for part in REPLICATED if left[part] != right[part]] == []


def test_one_of_three_that_disagrees_recovers_and_the_others_go_on(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        # Only among three: if a busy machine makes one late, the two others have no majority to disagree with.
        skewed = {"skew": 2, "skew_size": 3}
        workers = [fleet.worker(f"w{i}", seed=i, **(skewed if i == 1 else {}), **PACE) for i in range(3)]
        excluded = workers[1].wait(
            lambda m: m.get("event") == "StateRestored" and step_of(m["version"]) >= 3, "recovered from the majority"
        )
        assert excluded["source"] == "peers"
        reached = max(newest(worker) for worker in workers)
        for worker in (workers[0], workers[2]):
            wait_commit(worker, reached + 1)
        with fleet.operator() as operator:
            assert not operator.list().paused
        versions = set.intersection(*(set(worker.boundaries()) for worker in workers))
        assert versions
        for version in versions:
            held = [worker.boundaries()[version] for worker in workers]
            assert [part for part in REPLICATED if len({each[part] for each in held}) > 1] == []


@pytest.mark.parametrize("min_participants", [1, 2])
def test_one_that_flaps_does_not_keep_two_from_committing(tmp_path: Path, min_participants: int) -> None:
    """Field reports: torchft#63 (a dead member is kept for ever), titan#834 (everybody heals at every step)."""
    with Scene(tmp_path, 3, coordinator_options=("--min-participants", str(min_participants))) as scene:
        for life in range(4):
            worker = scene.workers["w2"]
            if life == 1:  # dies as soon as it is known, before it holds a state
                worker.wait(lambda m: m["say"] == "event", "any event")
            elif life == 2:  # dies in the middle of an average
                worker.wait_said("joined")
                scene.stand_at("w2", "averaging")
            else:
                wait_commit(worker, 1)
            reached = max(newest(each) for each in scene.others("w2"))
            worker.signal(signal.SIGKILL)
            assert worker.end() == -signal.SIGKILL
            scene.start("w2")
            for other in scene.others("w2"):
                wait_commit(other, reached + 2)
        scene.all_go_on()
