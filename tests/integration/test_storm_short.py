"""A minute of storm over a real run: each kind of fault once, every one felt and recovered, one history.

The long one, with its figures, is ``make storm``; here nothing is asked of time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.storm import report
from benchmarks.storm.faults import Weather
from benchmarks.storm.figures import participation
from benchmarks.storm.fleet import COORDINATOR, Fleet
from benchmarks.storm.network import stage
from benchmarks.storm.plan import SECONDS, Kind, Strike
from benchmarks.storm.timeline import Timeline, outer_step

pytestmark = pytest.mark.timeout(300)

WORKERS = ("w0", "w1", "w2", "w3")
STORM_SECONDS = 36.0


def strikes() -> list[Strike]:
    """Return one strike of each kind, no two of them on one worker; the frozen and the cut one overlap."""
    order = (Kind.PARTITION, Kind.STOP, Kind.COORDINATOR, Kind.KILL, Kind.SLOW)
    return [
        Strike(
            number=number,
            at=2.0 + 5.0 * number,
            kind=kind,
            preference=(*WORKERS[number % 4 :], *WORKERS[: number % 4]),
            lasts=min(8.0, SECONDS[kind][1]),
        )
        for number, kind in enumerate(order)
    ]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Timeline]:
    folder = tmp_path_factory.mktemp("storm")
    with stage(WORKERS) as network, Fleet(folder, network, WORKERS, seed=1, phase_seconds=1.0) as fleet:
        fleet.begin()
        Weather(fleet, strikes(), patience_seconds=60.0).blow(STORM_SECONDS)
        fleet.finish()
        yield fleet.timeline


def test_every_fault_reached_its_victim(seen: Timeline) -> None:
    assert {fault.kind for fault in seen.faults} == {kind.value for kind in Kind}
    assert [(fault.kind, fault.victim, fault.proof) for fault in seen.faults if not fault.felt] == []


def test_every_victim_came_back(seen: Timeline) -> None:
    assert [(fault.kind, fault.victim) for fault in seen.faults if fault.back_at is None] == []


def test_those_who_vanished_were_missed_and_the_others_went_on(seen: Timeline) -> None:
    for fault in seen.faults:
        if fault.kind in (Kind.STOP.value, Kind.PARTITION.value):
            assert fault.healed_at is not None
            # It was known to be gone, and the run did not wait for it.
            assert fault.detected_at is not None, fault
            assert fault.detected_at < fault.healed_at, fault
            assert fault.resumed_at is not None, fault
            assert fault.resumed_at < fault.healed_at, fault
    assert participation(seen) > 0


def test_nobody_ended_who_was_not_struck_and_there_is_one_history(seen: Timeline) -> None:
    assert seen.unexplained == []
    steps = [outer_step(version) for _, version, _ in seen.steps()]
    assert {version.partition(".")[0] for _, version, _ in seen.steps()} == {"L1"}
    assert sorted(steps) == list(range(1, max(steps) + 1))
    losses: dict[str, set[float]] = {}
    for commit in seen.commits:
        losses.setdefault(commit.version, set()).add(commit.held_out)
    # The same weights on the same text: equal to the last bit on everybody who applied the step.
    assert [version for version, found in losses.items() if len(found) != 1] == []
    assert max(sum(commit.version == version for commit in seen.commits) for version in losses) == len(WORKERS)


def test_the_report_tells_it(seen: Timeline, tmp_path: Path) -> None:
    run = report.of_run(seen)
    assert run["times"]["all"]["back"] == len(seen.faults)
    assert {fault["victim"] for fault in run["faults"]} >= {COORDINATOR}
    assert run["steps"]
    assert run["counted"]
