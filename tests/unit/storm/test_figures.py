"""Figures of a storm, computed from timelines that are written by hand, so that what they mean is fixed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.storm import figures, report
from benchmarks.storm.timeline import Commit, Counted, Fault, Footprint, Roster, Timeline

MIB = 2**20


def fault(number: int, **fields: Any) -> Fault:
    told = {"kind": "kill", "victim": "w0", "due_at": 10.0, "struck_at": 10.0, "lasts": 0.0, "felt": True, **fields}
    return Fault(number=number, **told)


def commit(at: float, step: int, worker: str = "w0", held_out: float = 2.0) -> Commit:
    return Commit(at=at, worker=worker, version=f"L1.k{step}", loss=2.0, held_out=held_out)


def prints(rss: list[float], *, threads: int = 20, more_threads: int = 0) -> list[Footprint]:
    """Return footprints a second apart, the last third with more threads."""
    return [
        Footprint(
            at=float(i),
            rss_bytes=round(mib * MIB),
            threads=threads + (more_threads if i > 2 * len(rss) // 3 else 0),
            descriptors=20,
            cpu_seconds=i * 0.1,
        )
        for i, mib in enumerate(rss)
    ]


def record(**storm: Any) -> dict[str, Any]:
    """Return a record in which every asked figure is met, but for what is given."""
    steps = [{"at": 2.1 * i, "version": f"L1.k{i}", "held_out": 2.0} for i in range(1, 98)]
    whole: dict[str, Any] = {
        "seconds": 210.0,
        "steps": steps,
        "faults": [{"felt": True, "back_at": 12.0, "healed_at": 10.0, "struck_at": 9.0, "kind": "kill"}],
        "participation": 0.95,
        "footprints": {},
        "unexplained": [],
        **storm,
    }
    quiet = {"steps": [{"held_out": 2.0}] * 100, "seconds": 210.0}
    return {
        "storm": whole,
        "quiet": quiet,
        "faults_per_hour": 120.0,
        "seeds": {"1": [3.0] + [2.0] * 5, "2": [3.0] + [2.0] * 5, "3": [3.0] + [2.0] * 5},
    }


def held(told: dict[str, Any]) -> dict[str, bool]:
    return {bound.what.partition(" (")[0]: bound.holds for bound in figures.storm_bounds(told)}


def test_a_step_counts_once_and_only_within_the_storm() -> None:
    timeline = Timeline(began_at=10.0, ended_at=20.0)
    timeline.commits = [commit(9.0, 1), commit(12.1, 2, "w1"), commit(12.0, 2), commit(14.0, 3), commit(21.0, 4)]
    assert [(at, version) for at, version, _ in timeline.steps_within()] == [(12.0, "L1.k2"), (14.0, "L1.k3")]


def test_participation_is_of_the_live_and_ready_ones_at_committed_boundaries() -> None:
    timeline = Timeline(began_at=0.0, ended_at=100.0)
    timeline.epochs = [(1.0, 1, "committed", ""), (2.0, 2, "aborted", ""), (3.0, 3, "committed", "")]
    timeline.rosters = [
        Roster(at=0.9, epoch=1, members=("a", "b", "c"), missing=("d",), waited=1.0),
        Roster(at=1.9, epoch=2, members=("a",), missing=("b", "c", "d"), waited=1.0),
        Roster(at=2.9, epoch=3, members=("a", "b"), missing=(), waited=0.0),
    ]
    assert figures.participation(timeline) == pytest.approx((0.75 + 1.0) / 2)


def test_times_are_from_the_strike_and_from_the_faults_end() -> None:
    faults = [
        fault(0, detected_at=13.0, resumed_at=11.5, healed_at=20.0, back_at=22.0),
        fault(1, healed_at=10.0, back_at=15.0),
        fault(2, felt=False),
    ]
    found = figures.times(faults)
    assert (found["faults"], found["felt"], found["back"]) == (3, 2, 2)
    assert found["detect"] == {"number": 1, "median": 3.0, "p90": 3.0, "worst": 3.0}
    assert found["resume"]["median"] == 1.5
    assert found["back_after_end"] == {"number": 2, "median": 3.5, "p90": 5.0, "worst": 5.0}
    assert found["back_after_strike"]["worst"] == 12.0


def test_memory_that_stands_still_after_the_start_does_not_grow() -> None:
    found = figures.growth(prints([min(300.0, 200.0 + i * 5) for i in range(600)]))
    assert found is not None
    assert found["grown_mib"] == 0
    assert not figures.grows(found)


@pytest.mark.parametrize("leak", [prints([300 + i * 0.05 for i in range(600)]), prints([300.0] * 600, more_threads=30)])
def test_a_leak_of_memory_or_threads_is_seen(leak: list[Footprint]) -> None:
    found = figures.growth(leak)
    assert found is not None
    assert figures.grows(found)


def test_a_process_that_lived_briefly_is_not_judged() -> None:
    assert figures.growth(prints([300.0] * 60)) is None


def test_a_storm_that_meets_every_figure_holds() -> None:
    assert all(held(record()).values())


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        ({"steps": record()["storm"]["steps"][:94]}, "committed steps of the run without faults"),
        ({"participation": 0.89}, "participants of alive and ready"),
        ({"faults": [{"felt": False, "back_at": 1.0}]}, "faults that reached their victim"),
        ({"faults": [{"felt": True, "back_at": None}]}, "faults recovered"),
        ({"steps": [{"held_out": 2.03}] * 97}, "final loss"),
        ({"unexplained": ["w1 ended by itself"]}, "ends that nobody caused, pauses, new lineages"),
        (
            {"footprints": {"w0#1": figures.growth(prints([300 + i * 0.05 for i in range(600)]))}},
            "processes whose memory, threads or descriptors grow",
        ),
    ],
)
def test_each_figure_that_is_missed_is_told(broken: dict[str, Any], what: str) -> None:
    assert [name for name, holds in held(record(**broken)).items() if not holds] == [what]


def test_the_report_names_each_kind_and_every_figure() -> None:
    timeline = Timeline(began_at=0.0, ended_at=100.0)
    timeline.commits = [commit(2.0 * step, step) for step in range(1, 50)]
    timeline.faults = [fault(0, healed_at=10.1, back_at=16.0), fault(1, kind="partition", healed_at=20.0)]
    timeline.counted = [Counted(at=1.0, alive=4, ready=4, participating=4, running=4)]
    timeline.epochs = [(5.0, 3, "aborted", "w2 reports a failure")]
    run = report.of_run(timeline)
    told = {
        **record(),
        "storm": run,
        "quiet": run,
        "machine": {"date": "today", "cores": 2, "cpu": "some", "torch": "2"},
        "others": "Nothing else ran.",
        "load": 0.3,
        "seed": 1,
        "network": "loopback",
    }
    text = report.markdown(told)
    for part in ("| kill | 1 | 1 | 1 |", "| partition | 1 | 1 | 0 |", "Nothing else ran.", "w2 reports a failure"):
        assert part in text
    for bound in figures.storm_bounds(told):
        assert f"| {bound.what} | {bound.found} |" in text
