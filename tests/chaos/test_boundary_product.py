"""Kill, SIGSTOP and cut, of every worker of a run of two and of three, and of the coordinator, at every named place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.boundary_faults import PLACES, Fault, Scene

pytestmark = pytest.mark.chaos


def named(value: object) -> str:
    return value.value if isinstance(value, Fault) else str(value)


FAULTS = [Fault.KILL, Fault.STOP, Fault.CUT]
"""The averaging's connections are cut, place by place, in the tests of the places."""


@pytest.mark.parametrize("fault", FAULTS, ids=named)
@pytest.mark.parametrize(("size", "victim"), [(2, "w0"), (2, "w1"), (3, "w0"), (3, "w1"), (3, "w2")])
def test_worker_is_hit(tmp_path: Path, size: int, victim: str, fault: Fault) -> None:
    with Scene(tmp_path, size) as scene:
        for place in PLACES:
            scene.worker_case(victim, place, fault)


@pytest.mark.parametrize("fault", FAULTS, ids=named)
@pytest.mark.parametrize(("size", "halted"), [(1, "w0"), (2, "w0"), (2, "w1"), (3, "w1")])
def test_coordinator_is_hit(tmp_path: Path, size: int, halted: str, fault: Fault) -> None:
    with Scene(tmp_path, size) as scene:
        for place in PLACES:
            scene.coordinator_case(halted, place, fault)


@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_worker_and_coordinator_are_hit_together(tmp_path: Path, fault: Fault) -> None:
    """The coordinator falls while a worker lies at the place: nobody is left to free those who wait for it."""
    with Scene(tmp_path, 3) as scene:
        for number, place in enumerate(PLACES):
            scene.joint_case(f"w{number % 3}", place, fault)
