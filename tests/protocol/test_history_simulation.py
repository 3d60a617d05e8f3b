"""One history, in simulated schedules of crashes, freezes, cuts and a network that loses, repeats and reorders.

A failing seed is replayed, line by line, by ``python -m tests.protocol.simulate --seed N``.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.protocol.simulate import BUGS, Result, simulate

SCHEDULES_A_BATCH = 2000
BATCHES = 10
"""20,000 schedules: about a minute of one core."""
STORM_BATCHES = 100


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """Processes for the whole file: starting them takes as long as hundreds of schedules."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as processes:
        yield processes


def test_the_same_seed_is_the_same_schedule() -> None:
    first, again = simulate(7, keep_log=True), simulate(7, keep_log=True)
    assert first == again
    assert first.num_commits > 0


@pytest.mark.parametrize(
    "batch",
    [*range(BATCHES), *(pytest.param(b, marks=pytest.mark.storm) for b in range(BATCHES, BATCHES + STORM_BATCHES))],
)
def test_every_invariant_holds_in_every_schedule(pool: ProcessPoolExecutor, batch: int) -> None:
    seeds = range(batch * SCHEDULES_A_BATCH, (batch + 1) * SCHEDULES_A_BATCH)
    results = list(pool.map(simulate, seeds, chunksize=50))
    failed = [result for result in results if result.violation]
    assert not failed, "\n".join(
        f"seed {result.seed}: {result.violation} (replay: python -m tests.protocol.simulate --seed {result.seed})"
        for result in failed[:10]
    )
    _prove_that_faults_struck(results)


def _prove_that_faults_struck(results: list[Result]) -> None:
    struck: Counter[str] = Counter()
    for result in results:
        struck.update(result.struck)
    kinds = {"kill", "crash", "crash-between-effects", "freeze", "cut", "corrupt-average", "corrupt-state", "slow"}
    assert kinds | {"lose-state-dir"} <= struck.keys(), f"faults that reached nobody: {kinds - struck.keys()}"
    assert sum(result.num_resumes for result in results) > 0, "nobody ever resumed from a checkpoint"
    assert sum(result.num_ties for result in results) > 0, "no run was ever paused"
    assert sum(result.num_commits for result in results) > 2 * len(results)


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_found(bug: str) -> None:
    found = next((seed for seed in range(400) if simulate(seed, bug).violation), None)
    assert found is not None, f"{bug} went unnoticed in 400 schedules"
    assert not simulate(found).violation, "the schedule breaks without the bug, too"
