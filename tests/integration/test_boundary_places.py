"""Each of the twelve named places of a boundary, hit: kill, SIGSTOP and cut of a worker, and of the coordinator.

The full product is in ``tests/chaos``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.boundary_faults import PLACES, Fault, Scene


@pytest.mark.parametrize(
    ("fault", "places"),
    [(Fault.KILL, PLACES[0::3]), (Fault.STOP, PLACES[1::3]), (Fault.CUT, PLACES[2::3])],
    ids=lambda value: value.value if isinstance(value, Fault) else "-".join(value),
)
def test_worker_is_hit(tmp_path: Path, fault: Fault, places: tuple[str, ...]) -> None:
    """Field reports: torchft#35 (survivors wait for the timeout), titan#834 (joiners hang at their first commit)."""
    with Scene(tmp_path, 3) as scene:
        for number, place in enumerate(places):
            scene.worker_case(f"w{number % 3}", place, fault)


def test_coordinator_is_killed(tmp_path: Path) -> None:
    """Field report: ray-project/ray#60820, the control plane's end was the run's end."""
    with Scene(tmp_path, 2) as scene:
        for number, place in enumerate(PLACES):
            scene.coordinator_case(f"w{number % 2}", place, Fault.KILL)
