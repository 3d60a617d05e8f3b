"""A coordinator's life: what it binds and holds, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery.control.inputs import (
    Detached,
)
from recovery.control.policy import RunPolicy
from recovery.control.server import CoordinatorConfig, CoordinatorServer
from recovery.errors import BadConfiguration, MisuseError
from tests.support.coordinators import LOOPBACK, PLAIN, RUN, RecordingClient, coordinator
from tests.support.scripted_machine import ScriptedMachine


def test_a_taken_port_is_named_and_the_state_folder_is_given_back(tmp_path: Path) -> None:
    with (
        coordinator(tmp_path / "one") as first,
        pytest.raises(BadConfiguration, match=rf"{first.port}: the port is in use"),
        coordinator(tmp_path / "two", listen=first.address),
    ):
        pass
    with coordinator(tmp_path / "two"):
        pass


def test_an_address_of_another_machine_is_named(tmp_path: Path) -> None:
    config = CoordinatorConfig(
        policy=RunPolicy(run_id=RUN),
        listen=type(LOOPBACK)("no-such-host.invalid", 0),
        state_dir=tmp_path,
        new_run=True,
        security=type(PLAIN)(insecure=True),
    )
    with pytest.raises(BadConfiguration, match="host name is not known"):
        CoordinatorServer(config).start()


def test_a_second_coordinator_on_the_same_state_is_refused(tmp_path: Path) -> None:
    with coordinator(tmp_path), pytest.raises(BadConfiguration, match="held by another coordinator"):
        CoordinatorServer(CoordinatorConfig(policy=RunPolicy(run_id=RUN), listen=LOOPBACK, state_dir=tmp_path)).start()


def test_life_is_start_and_stop_once(tmp_path: Path) -> None:
    config = CoordinatorConfig(policy=RunPolicy(run_id=RUN), listen=LOOPBACK, state_dir=tmp_path, new_run=True)
    server = CoordinatorServer(config, make_machine=lambda *_: ScriptedMachine())
    server.stop()
    with pytest.raises(MisuseError):
        _ = server.address
    server.start()
    with pytest.raises(MisuseError):
        server.start()
    server.stop()
    server.stop()


def test_a_coordinator_that_ends_loses_no_worker(tmp_path: Path) -> None:
    """Its streams end because it ends: the machine must not decide anything from that any more."""
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server:
        worker = RecordingClient(server.address)
        worker.client.start()
        worker.client.wait_attached(30)
    assert worker.wait_detached() == "the coordinator ended the stream"
    assert not any(isinstance(event, Detached) for event in machine.inputs)
    worker.client.close()


def test_the_port_file_holds_the_whole_address(tmp_path: Path) -> None:
    config = CoordinatorConfig(
        policy=RunPolicy(run_id=RUN),
        listen=LOOPBACK,
        state_dir=tmp_path / "state",
        new_run=True,
        port_file=tmp_path / "port",
    )
    with CoordinatorServer(config, make_machine=lambda *_: ScriptedMachine()) as server:
        assert (tmp_path / "port").read_text() == f"{server.address}\n"
