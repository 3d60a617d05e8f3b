"""What goes wrong at the start gives one line that names the thing and the remedy, in time, with an exit code."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.boundary_faults import until
from tests.support.fleet import ROOT, Fleet, Worker


def refused(worker: Worker) -> tuple[str, str]:
    """Wait for a worker to end with a named error; return its kind and message."""
    assert worker.end() == 1
    error = worker.wait_said("error")
    assert "\n" not in error["message"].split("; nothing was changed:")[0]
    return error["error"], error["message"]


def test_wrong_coordinator_address(tmp_path: Path) -> None:
    """Field report: gensyn-ai/rl-swarm#377 and ft-diloco's constructor that waited for a store nobody hosted."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    with Fleet(tmp_path) as fleet:
        kind, message = refused(fleet.worker("w0", agent={"coordinator": nobody, "attach_timeout_seconds": 2.0}))
    assert kind == "CoordinatorUnreachable"
    assert nobody in message
    assert "recovery coordinator" in message


def test_wrong_run_id(tmp_path: Path) -> None:
    """Field report: two runs on one coordinator with equal worker names merged (nicholicaron/ft-diloco)."""
    with Fleet(tmp_path) as fleet:
        kind, message = refused(fleet.worker("w0", agent={"run_id": "another-run"}))
    assert kind == "RunRefused"
    assert "another-run" in message
    assert "test-run" in message


def test_other_layout_is_refused_before_anything_moves(tmp_path: Path) -> None:
    """Field report: pytorch/pytorch#1489, state of another model is loaded without an error."""
    with Fleet(tmp_path) as fleet:
        first = fleet.worker("w0", seed=0)
        first.wait_said("joined")
        kind, message = refused(fleet.worker("w1", seed=1, hidden=65))
        assert kind in {"LayoutMismatch", "RunRefused"}
        assert "layout" in message
        assert first.process.poll() is None


def test_other_numerics_id_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        fleet.worker("w0", seed=0).wait_said("joined")
        other = fleet.worker("w1", seed=1, environment={"ATEN_CPU_CAPABILITY": "default"})
        kind, message = refused(other)
        assert kind == "RunRefused"
        assert "ATEN_CPU_CAPABILITY" in message


def test_two_alive_under_one_name(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        first = fleet.worker("w0", seed=0)
        first.wait_said("joined")
        kind, message = refused(fleet.worker("w0", seed=1))
        assert kind == "RunRefused"
        assert "w0" in message
        first.wait_boundary(1)


def test_no_donor_and_no_checkpoint(tmp_path: Path) -> None:
    with Fleet(tmp_path, "--expected-return", "1") as fleet:
        origin = fleet.worker("w0", seed=0)
        origin.wait_boundary(1)
        origin.process.kill()
        origin.end()
        kind, message = refused(fleet.worker("w1", seed=1))
        assert kind == "SourcesExhausted"
        assert "checkpoint" in message


def test_coordinator_without_history_never_takes_over_workers_that_have_one(tmp_path: Path) -> None:
    """Field report: nicholicaron/ft-diloco, a freshly initialised worker became the truth of a run with history."""
    with Fleet(tmp_path) as fleet:
        worker = fleet.worker("w0", seed=0)
        worker.wait_boundary(1)
        fleet.stop_coordinator()
        (tmp_path / "coordinator").rename(tmp_path / "lost")
        fleet.forget_history()
        fleet.start_coordinator()
        # The worker that holds the history says at once what it waits for, and who can end that.
        worker.wait(
            lambda m: m.get("event") == "WaitsForState" and "recovery adopt --worker w0" in m["reason"],
            "said that it waits for `recovery adopt`",
        )
        until(lambda: any("recovery adopt" in line for line in worker.stderr), "a line in the log says so, too")
        fresh = fleet.worker("w1", seed=1, agent={"recover_timeout_seconds": 8.0})
        kind, message = refused(fresh)
        assert kind in {"NoDonorLeft", "SourcesExhausted", "RunRefused"}
        with fleet.operator() as operator:
            listed = operator.list()
        assert listed.sealed.lineage == 0
        assert "adopt" in message + listed.paused + " ".join(w.waiting_for for w in listed.workers)


def test_coordinator_gone_at_a_boundary_is_waited_for(tmp_path: Path) -> None:
    """Field report: ray-project/ray#60820, the control plane's end was the run's end."""
    with Fleet(tmp_path) as fleet:
        workers = [fleet.worker(f"w{i}", seed=i) for i in range(2)]
        for worker in workers:
            worker.wait_boundary(1)
        fleet.stop_coordinator()
        reached = [worker.wait_boundary(1)["version"] for worker in workers]
        fleet.start_coordinator()
        for worker, version in zip(workers, reached, strict=True):
            worker.wait_boundary(int(version.split(".k")[1]) + 3)
        common = workers[0].boundaries().keys() & workers[1].boundaries().keys()
        newest = max(common, key=lambda v: int(v.split(".k")[1]))
        assert workers[0].boundaries()[newest]["outer_params"] == workers[1].boundaries()[newest]["outer_params"]


@pytest.mark.parametrize(
    ("options", "needles"),
    [
        (["status", "--coordinator", "127.0.0.1:9", "--timeout", "2"], ["127.0.0.1:9"]),
        (["status", "--coordinator", "nonsense"], ["nonsense", "host:port"]),
        (["coordinator", "--run-id", "bad/name", "--state-dir", "STATE", "--new-run"], ["bad/name"]),
        (["coordinator", "--run-id", "nothing-here", "--state-dir", "STATE", "--listen", "127.0.0.1:0"], ["--new-run"]),
    ],
)
def test_commands_name_what_is_wrong(tmp_path: Path, options: list[str], needles: list[str]) -> None:
    options = [str(tmp_path / "state") if option == "STATE" else option for option in options]
    done = subprocess.run(
        [sys.executable, "-m", "recovery.cli.main", *options], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode != 0
    assert all(needle in done.stderr for needle in needles), done.stderr
    assert "Traceback" not in done.stderr


def test_port_in_use(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "recovery.cli.main", "coordinator", "--run-id", "second", "--new-run"),
                *("--listen", fleet.address, "--state-dir", str(tmp_path / "second")),
            ],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=60,
        )
    assert done.returncode != 0
    assert fleet.address in done.stderr
    assert "Traceback" not in done.stderr
