"""The coordinator's metrics, as a scraper sees them over loopback."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from recovery.control.metrics import RunMetrics
from recovery.control.policy import RunPolicy
from recovery.control.server import CoordinatorConfig, CoordinatorServer
from recovery.errors import BadConfiguration
from recovery.events import EpochEnded, Recorder, VersionSealed
from recovery.types import Version
from tests.support.coordinators import LOOPBACK, RUN, RecordingClient
from tests.support.scraping import free_port, scrape


def config(folder: Path, port: int) -> CoordinatorConfig:
    return CoordinatorConfig(
        policy=RunPolicy(run_id=RUN), listen=LOOPBACK, state_dir=folder, new_run=True, metrics_port=port
    )


def test_the_runs_numbers_are_read_and_its_events_counted(tmp_path: Path) -> None:
    port, events = free_port(), Recorder()
    server = CoordinatorServer(config(tmp_path / "state", port), events=events)
    with server:
        before = scrape(port)
        assert before["recovery_run_info,run_id=run"] == 1
        assert before["recovery_run_workers_alive"] == 0
        assert before["recovery_run_worker_changes_total,change=attached"] == 0
        with RecordingClient(server.address) as client:
            client.wait_message("become_origin")
            found = scrape(port)
            assert found["recovery_run_workers_alive"] == 1
            assert found["recovery_run_workers_ready"] == 0
            assert found["recovery_run_roster_size_workers"] == 0
            assert found["recovery_run_worker_changes_total,change=attached"] == 1
            assert found["recovery_run_paused"] == 0
    assert events.events  # the user's sink is told as well
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port)).close()


def test_epochs_and_seals_are_counted_by_kind() -> None:
    metrics = RunMetrics("r", lambda: None)
    for verdict in ("committed", "committed", "aborted"):
        metrics(EpochEnded(epoch=1, verdict=verdict, version=Version(1, 1), reason=""))
    metrics(VersionSealed(version=Version(1, 1), fingerprint="", reporters=()))
    value = metrics.registry.get_sample_value
    assert value("recovery_run_epochs_total", {"verdict": "committed"}) == 2
    assert value("recovery_run_epochs_total", {"verdict": "aborted"}) == 1
    assert value("recovery_run_versions_sealed_total") == 1


def test_a_taken_port_ends_the_start_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = CoordinatorServer(config(tmp_path / "state", port), events=Recorder())
        with pytest.raises(BadConfiguration, match=f"127.0.0.1:{port}: Address already in use") as refused:
            server.start()
        assert "\n" not in str(refused.value)
    with CoordinatorServer(config(tmp_path / "state", port), events=Recorder()):
        assert scrape(port)["recovery_run_workers_alive"] == 0
