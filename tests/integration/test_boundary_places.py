"""Each of the twelve named places of a boundary, hit: kill, SIGSTOP and cut of a worker, and of the coordinator.

The full product is in ``tests/chaos``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import boundary_faults, fleet
from tests.support.boundary_faults import PLACES, REPLICATED, Fault, Scene, commits
from tests.support.cut_proxy import CutProxy

pytestmark = pytest.mark.timeout(300)
"""Several processes start in each test: a busy machine needs its time."""


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


@pytest.mark.parametrize(
    "place", ["averaging", *(pytest.param(p, marks=pytest.mark.chaos) for p in PLACES if p != "averaging")]
)
def test_data_path_is_cut(tmp_path: Path, place: str) -> None:
    """Letters arrive, payload does not: nobody stands until the boundary's own timeout, which is a minute here.

    Field report: pytorch/torchft#35 (survivors wait for the timeout).
    """
    plan = {"module": "tests.support.deaf_worker"}
    with Scene(tmp_path, 3, progress_timeout_seconds=3.0, plan=plan) as scene:
        scene.average_together()
        scene.data_case("w1", place)
        reasons = scene.reasons_of_aborts()
        assert any("the averaging broke off" in reason for reason in reasons), reasons
        # The victim itself may be the first to report. It reaches nobody, and names nobody.
        assert any("blames w1" in reason or "w1 reports" in reason for reason in reasons), reasons
        assert not any("blames w0" in reason or "blames w2" in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("fault", "places"),
    [(Fault.KILL, PLACES[1::3]), (Fault.STOP, PLACES[2::3]), (Fault.CUT, PLACES[0::3])],
    ids=lambda value: value.value if isinstance(value, Fault) else "-".join(value),
)
def test_coordinator_is_hit(tmp_path: Path, fault: Fault, places: tuple[str, ...]) -> None:
    """Field report: ray-project/ray#60820, the control plane's end was the run's end."""
    with Scene(tmp_path, 2) as scene:
        for number, place in enumerate(places):
            scene.coordinator_case(f"w{number % 2}", place, fault)


# A fault that does not reach its victim, and a history that is not one, must not pass.


def test_harness_notices_a_fault_that_was_not_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Scene(tmp_path, 1) as scene:
        worker = scene.workers["w0"]
        monkeypatch.setattr(boundary_faults, "WAIT_SECONDS", 0.5)
        with monkeypatch.context() as patch:
            patch.setattr(worker, "signal", lambda number: None)
            for fault, never in ((Fault.KILL, "ended"), (Fault.STOP, "stopped")):
                with pytest.raises(AssertionError, match=f"never: process .* {never}"):
                    scene.hit("w0", "voted", fault)
                worker.command(do="go_on")
        with monkeypatch.context() as patch:
            patch.setattr(CutProxy, "cut", lambda self: None)
            with pytest.raises(AssertionError, match="never: w0 felt that it is cut off"):
                scene.hit("w0", "voted", Fault.CUT)
        # A victim that was somewhere else is none either.
        monkeypatch.setattr(fleet, "WAIT_SECONDS", 0.5)
        with pytest.raises(AssertionError, match="never: said 'halted'"):
            scene.hit("w0", "nowhere", Fault.KILL)


def test_harness_notices_two_histories(tmp_path: Path) -> None:
    with Scene(tmp_path, 1) as scene:
        worker = scene.workers["w0"]
        scene.assert_one_history()
        impostor = {**commits(worker)[0], "say": "boundary", "parts": dict.fromkeys(REPLICATED, "other")}
        worker.heard.append(impostor)
        with pytest.raises(AssertionError, match=r"'outer_params'.* of L1\.k1 differ"):
            scene.assert_one_history()
