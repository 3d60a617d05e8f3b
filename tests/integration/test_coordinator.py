"""The coordinator as a process of its own: its command, its log, who may ask it, and who watches."""

from __future__ import annotations

import contextlib
import json
import signal
from datetime import datetime
from pathlib import Path

import pytest

from recovery.control.operator_client import OperatorClient
from recovery.types import Address
from tests.support.certificates import Authority
from tests.support.coordinator_processes import (
    CoordinatorProcess,
    command,
)
from tests.support.coordinators import PLAIN, RUN, RecordingClient
from tests.support.processes import ChildProcess


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_without_torch_and_ends_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with CoordinatorProcess(tmp_path) as process:
        assert process.announcement == f"coordinator of run {RUN} listens on {process.address}"
        with RecordingClient(process.address) as member:
            member.client.wait_attached(30)
            member.client.key_value().set("scope", "key", b"value")
            with OperatorClient(process.address, PLAIN, run_id=RUN) as operator:
                assert [status.worker.worker_id for status in operator.list().workers] == ["w0"]
            process.signal(number)
            ended = json.loads(process.line("ended").split(" ", 1)[1])
        assert process.wait() == 0
        assert ended == {"code": 0, "heavy": []}
        assert process.errors == ""


def test_json_events_are_one_object_a_line(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path, "--json") as process:
        assert json.loads(process.announcement) == {"listening": str(process.address), "run_id": RUN}
        with RecordingClient(process.address) as member:
            member.client.wait_attached(30)
            event = json.loads(process.line('{"event": "WorkerAttached"'))
        assert event["fields"]["worker_id"] == "w0"
        assert datetime.fromisoformat(event["at"]).tzinfo is not None


def test_each_line_of_the_log_begins_with_its_time(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path) as process, RecordingClient(process.address) as member:
        member.client.wait_attached(30)
        at, name, fields = process.line("2").split(" ", 2)
    assert datetime.fromisoformat(at).tzinfo is not None
    assert name == "WorkerAttached"
    assert json.loads(fields)["worker_id"] == "w0"


def test_operators_commands_do_not_load_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from recovery.cli.main import run; code = run(sys.argv[1:]);"
        "print('loaded', code, sorted(n for n in ('torch', 'numpy') if n in sys.modules))"
    )
    with (
        CoordinatorProcess(tmp_path) as process,
        ChildProcess(["-c", code, "status", "--coordinator", str(process.address)]) as status,
    ):
        assert status.line("run ") == f"run {RUN}: sealed nothing yet"
        assert status.line("loaded") == "loaded 0 []"


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    """As reported in pytorch/pytorch#191560."""
    with CoordinatorProcess(tmp_path) as first:
        state = str(tmp_path / "other")
        arguments = ["--run-id", RUN, "--new-run", "--state-dir", state, "--listen", str(first.address)]
        with command("coordinator", *arguments) as second:
            assert second.wait() == 1
            assert second.errors == (
                f"error: cannot listen on {first.address}: the port is in use by another process: "
                "stop it, or take another port (0: any free)\n"
            )


def test_a_folder_without_history_is_never_made_one_by_accident(tmp_path: Path) -> None:
    state = str(tmp_path / "none")
    with command("coordinator", "--run-id", RUN, "--state-dir", state, "--listen", "127.0.0.1:0") as process:
        assert process.wait() == 1
        assert process.errors.count("\n") == 1
        assert "--new-run" in process.errors


def test_a_token_guards_the_process(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("the-token-of-this-run\n")
    with CoordinatorProcess(tmp_path, "--token-file", str(token_file)) as process:
        status = ["status", "--coordinator", str(process.address)]
        with command(*status) as refused:
            assert refused.wait() == 1
            assert refused.errors.startswith("error: the token is missing or wrong")
            assert refused.errors.count("\n") == 1
        with command(*status, "--token-file", str(token_file)) as admitted:
            assert admitted.wait() == 0
        with ChildProcess(
            ["-m", "recovery.cli.main", *status], {"RECOVERY_TOKEN": "the-token-of-this-run"}
        ) as admitted:
            assert admitted.wait() == 0


def test_mutual_tls_by_the_command_lines_options(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    (certificate, key), (own_certificate, own_key) = authority.issue("coordinator"), authority.issue("operator")
    trust = ["--authority", str(authority.certificate_file)]
    with CoordinatorProcess(tmp_path, "--certificate", certificate, "--key", key, *trust) as process:
        status = ["status", "--coordinator", str(process.address), *trust]
        with command(*status, "--certificate", own_certificate, "--key", own_key) as admitted:
            assert admitted.wait() == 0
        with command(*status, "--timeout", "5") as refused:
            assert refused.wait() == 1
            assert refused.errors.count("\n") == 1


def test_watch_ends_on_ctrl_c_without_a_traceback(tmp_path: Path) -> None:
    with (
        CoordinatorProcess(tmp_path) as process,
        command("watch", "--coordinator", str(process.address), "--json") as watch,
    ):
        assert json.loads(_seen_by(watch, process.address))["fields"]["worker_id"]
        watch.signal(signal.SIGINT)
        assert watch.wait() == 130
        assert watch.errors == ""


def test_watch_goes_on_when_the_coordinator_comes_back(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path) as first:
        address = first.address
        watch = command("watch", "--coordinator", str(address), "--json")
        try:
            _seen_by(watch, address)
            first.kill()
            said = json.loads(watch.line('{"at"'))
            while said["event"] != "WatchInterrupted":
                said = json.loads(watch.line('{"at"'))
            assert "waiting for it" in said["fields"]["reason"]
            with CoordinatorProcess(tmp_path, listen=str(address), new_run=False):
                assert json.loads(watch.line('{"at"'))["event"] == "WatchResumed"
                _seen_by(watch, address)
                watch.signal(signal.SIGINT)
                assert watch.wait() == 130
            assert watch.errors == ""
        finally:
            watch.close()


def _seen_by(watch: ChildProcess, address: Address) -> str:
    """Return the first event of workers that come and go until the watch shows one: it begins when it likes."""
    for attempt in range(100):
        with RecordingClient(address, worker_id=f"w{attempt}") as member:
            member.client.wait_attached(30)
        with contextlib.suppress(AssertionError):
            return watch.line('{"at"', timeout_seconds=0.2)
    raise AssertionError(f"the watch shows nothing: {watch.errors}")
