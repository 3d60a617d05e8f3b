"""The command line in this process: every command's text, JSON, exit code and one-line errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos.recovery.v1 import operations_pb2 as pb
from recovery.cli import connection
from recovery.cli.main import run
from recovery.control.inputs import Answer, Effect, Input, Operated
from recovery.control.operator_client import OperatorClient
from recovery.control.server import CoordinatorServer
from recovery.control.wire import duration, timestamp, to_proto
from recovery.errors import NoDonorLeft
from recovery.types import NO_VERSION, Incarnation, Version, WorkerId, WorkerRef
from tests.support.coordinators import RUN, coordinator
from tests.support.scripted_machine import ScriptedMachine

SEALED = bytes(range(32))


def worker(worker_id: str, **fields: Any) -> pb.WorkerStatus:
    ref = to_proto(WorkerRef(WorkerId(worker_id), Incarnation("i")))
    return pb.WorkerStatus(worker=ref, **fields)


LIST = pb.ListResponse(
    run_id=RUN,
    sealed=to_proto(Version(2, 40)),
    sealed_fingerprint=SEALED,
    alive=3,
    ready=1,
    participating=2,
    epoch=57,
    committed_epochs=50,
    aborted_epochs=3,
    paused="w1 and w2 disagree: `recovery resync` one of them",
    workers=[
        worker(
            "w0",
            alive=True,
            ready=True,
            version=to_proto(Version(2, 40)),
            fingerprint=SEALED,
            donor_slots=2,
            free_slots=1,
            inner_step=3,
            inner_steps_per_phase=8,
        ),
        worker("w1", alive=True, version=to_proto(Version(2, 40)), fingerprint=bytes(32), drained=True),
        worker(
            "w2",
            alive=True,
            poisoned=True,
            stalled=True,
            waiting_for="a slot at w0 [1 of 2]",
            waited=duration(12.4),
        ),
        worker("w3"),
    ],
    lineages=[
        pb.LineageStatus(lineage=1, cause="origin", started=timestamp(0)),
        pb.LineageStatus(lineage=2, cause="resume", parent=to_proto(Version(1, 38)), lost_steps=2),
    ],
)

ANSWERS: dict[type, Any] = {
    pb.ListRequest: LIST,
    pb.ResyncRequest: pb.ResyncResponse(version=to_proto(Version(2, 40)), fingerprint=SEALED, detail="1 MB from w0"),
    pb.SaveRequest: pb.SaveResponse(version=to_proto(Version(2, 40)), detail="/checkpoints/step_2_40"),
    pb.DrainRequest: pb.DrainResponse(obeyed=True),
    pb.CancelRequest: pb.CancelResponse(detail="w1 obeys"),
    pb.SetRateRequest: pb.SetRateResponse(),
    pb.RollbackRequest: pb.RollbackResponse(version=to_proto(Version(3, 5))),
    pb.AdoptRequest: pb.AdoptResponse(version=to_proto(Version(1, 7)), fingerprint=SEALED),
}


def script(event: Input) -> list[Effect]:
    if not isinstance(event, Operated):
        return []
    if isinstance(event.request, pb.VerifyRequest):
        return [Answer(event.request_id, verdict(event.request.worker_id))]
    return [Answer(event.request_id, ANSWERS[type(event.request)])]


def verdict(worker_id: str) -> pb.VerifyResponse | NoDonorLeft:
    if worker_id == "w9":
        return NoDonorLeft("worker w9 is not attached")
    answer = pb.VerifyResponse(version=to_proto(Version(2, 40)), fingerprint=SEALED, expected_fingerprint=SEALED)
    if worker_id == "w1":
        answer.fingerprint = bytes(32)
        answer.different.extend(["outer_params/a", "outer_optimizer/a/momentum_buffer"])
    return answer


@pytest.fixture
def machine() -> ScriptedMachine:
    return ScriptedMachine(script)


@pytest.fixture
def server(tmp_path: Path, machine: ScriptedMachine, monkeypatch: pytest.MonkeyPatch) -> Iterator[CoordinatorServer]:
    with coordinator(tmp_path, machine) as found:
        monkeypatch.setenv("RECOVERY_COORDINATOR", str(found.address))
        yield found


def operated(machine: ScriptedMachine) -> Any:
    (event,) = [event for event in machine.inputs if isinstance(event, Operated)]
    return event.request


def test_status_shows_what_an_operator_asks(server: CoordinatorServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0] == "run run: sealed L2.k40, fingerprint 000102030405"
    assert lines[1] == ("workers: 3 alive, 1 ready, 2 participating in epoch 57; 50 epochs committed, 3 aborted")
    assert lines[2] == "PAUSED: w1 and w2 disagree: `recovery resync` one of them"
    rows = {line.split()[0]: line for line in lines[4:8]}
    assert rows["w0"].split() == ["w0", "yes", "yes", "L2.k40", "000102030405", "1/2", "3/8", "-", "-"]
    assert rows["w1"].split() == [
        *("w1", "yes", "no", "L2.k40", "000000000000", "0/0", "-", "diverged,", "drained", "-")
    ]
    assert "poisoned, stalled" in rows["w2"]
    assert "a slot at w0 [1 of 2] (12 s)" in rows["w2"]
    assert rows["w3"].split()[:3] == ["w3", "no", "no"]
    assert "L2       resume  L1.k38  2" in text


def test_status_as_json_keeps_numbers_and_names(server: CoordinatorServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sealed"] == {"lineage": 2, "outer_step": 40}
    assert found["sealed_fingerprint"] == SEALED.hex()
    assert (found["alive"], found["ready"], found["participating"]) == (3, 1, 2)
    assert found["workers"][2]["waited"] == 12.4
    assert found["workers"][2]["worker"]["worker_id"] == "w2"
    assert found["workers"][3]["version"] is None
    assert found["lineages"][0]["started"] == "1970-01-01T00:00:00+00:00"


def test_an_empty_run_has_a_status_too(
    server: CoordinatorServer, machine: ScriptedMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = pb.ListResponse(run_id=RUN, sealed=to_proto(NO_VERSION))
    machine.script = lambda event: [Answer(event.request_id, empty)] if isinstance(event, Operated) else []
    assert run(["status"]) == 0
    text = capsys.readouterr().out
    assert "sealed nothing yet" in text
    assert "no worker is attached" in text


def test_verify_says_equal_by_exit_code(server: CoordinatorServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "w0"]) == 0
    assert "w0 equals the sealed state of L2.k40" in capsys.readouterr().out
    assert run(["verify", "w0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True


def test_verify_names_each_tensor_that_differs(server: CoordinatorServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "w1"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert "2 tensors differ" in lines[0]
    assert lines[1:3] == ["  outer_params/a", "  outer_optimizer/a/momentum_buffer"]
    assert lines[3] == "to heal it: recovery resync w1"
    assert run(["verify", "w1", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is False
    assert found["different"] == ["outer_params/a", "outer_optimizer/a/momentum_buffer"]


def test_what_could_not_be_verified_is_an_error(server: CoordinatorServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "w9"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: worker w9 is not attached\n"


@pytest.mark.parametrize(
    ("arguments", "request_", "says"),
    [
        (
            ["resync", "w1", "--from", "w0", "--timeout", "7", "--request-id", "r"],
            pb.ResyncRequest(request_id="r", worker_id="w1", from_worker_id="w0", timeout=duration(7)),
            "w1 holds L2.k40, fingerprint 000102030405: 1 MB from w0",
        ),
        (
            ["save", "--worker", "w0", "--request-id", "r"],
            pb.SaveRequest(request_id="r", worker_id="w0", timeout=duration(600)),
            "saved L2.k40: /checkpoints/step_2_40",
        ),
        (
            ["drain", "w1", "--request-id", "r"],
            pb.DrainRequest(request_id="r", worker_id="w1", drained=True),
            "w1 is not chosen as donor any more",
        ),
        (
            ["drain", "w1", "--undo", "--request-id", "r"],
            pb.DrainRequest(request_id="r", worker_id="w1"),
            "w1 may be chosen as donor again",
        ),
        (
            ["cancel", "t7", "--request-id", "r"],
            pb.CancelRequest(request_id="r", transfer_id="t7"),
            "transfer t7 is cancelled: w1 obeys",
        ),
        (
            ["rate", "w0", "1.5M", "--request-id", "r"],
            pb.SetRateRequest(request_id="r", worker_id="w0", bytes_per_second=1_500_000),
            "w0 sends at most 1,500,000 bytes per second",
        ),
        (
            ["rate", "w0", "0", "--request-id", "r"],
            pb.SetRateRequest(request_id="r", worker_id="w0"),
            "w0 has no cap",
        ),
        (
            ["rollback", "L1.k5", "--worker", "w0", "--request-id", "r"],
            pb.RollbackRequest(request_id="r", version=to_proto(Version(1, 5)), worker_id="w0"),
            "the run goes on from L1.k5 as L3.k5",
        ),
        (
            ["adopt", "--worker", "w0", "--request-id", "r"],
            pb.AdoptRequest(request_id="r", worker_id="w0"),
            "the run goes on from L1.k7, fingerprint 000102030405",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_each_command_asks_and_says_what_was_done(
    server: CoordinatorServer,
    machine: ScriptedMachine,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    request_: Any,
    says: str,
) -> None:
    assert run(arguments) == 0
    assert capsys.readouterr().out == says + "\n"
    assert operated(machine) == request_
    assert run([*arguments, "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


def test_watch_prints_events_until_it_is_interrupted(
    server: CoordinatorServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pb.WatchResponse(
        at=timestamp(0.25),
        event="WorkerStalled",
        fields_json='{"worker_id": "w2", "empty": "", "seconds": 0.013509815998986596}',
    )

    def watch(self: OperatorClient, *, connect_seconds: float) -> Iterator[pb.WatchResponse]:
        yield first
        raise KeyboardInterrupt

    monkeypatch.setattr(OperatorClient, "watch", watch)
    assert run(["watch"]) == 130
    assert capsys.readouterr().out == "00:00:00.250Z  WorkerStalled  worker_id=w2  seconds=0.014\n"
    assert run(["watch", "--json"]) == 130
    assert json.loads(capsys.readouterr().out) == {
        "at": "1970-01-01T00:00:00.250000+00:00",
        "event": "WorkerStalled",
        "fields": {"worker_id": "w2", "empty": "", "seconds": 0.013509815998986596},
    }


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["status", "--coordinator", "127.0.0.1:9", "--timeout", "5"], 1, "no coordinator at 127.0.0.1:9"),
        (["status", "--coordinator", "nonsense"], 1, "'nonsense' is not of the form host:port"),
        (["status", "--coordinator", "10.0.0.1:1"], 1, "--insecure"),
        (["rollback", "five"], 1, "version 'five' is not of the form L1.k40"),
        (["rate", "w0", "fast"], 1, "rate 'fast' is not a number of bytes per second"),
        (["status", "--token-file", "/nonexistent"], 1, "/nonexistent cannot be read"),
        (["status", "--run-id", "other"], 1, "serves run 'run', not 'other'"),
    ],
)
def test_errors_are_one_line(
    server: CoordinatorServer, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    assert run(arguments) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert says in captured.err


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["status", "--nonsense"], ["verify"], ["status", "--timeout", "0"]]
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert run(arguments) == 2


def test_without_an_address_the_coordinators_own_default_is_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert connection.DEFAULT_ADDRESS == "127.0.0.1:7440"
    monkeypatch.delenv("RECOVERY_COORDINATOR", raising=False)
    monkeypatch.setattr(connection, "DEFAULT_ADDRESS", "127.0.0.1:9")
    assert run(["status"]) == 1
    said = capsys.readouterr().err
    assert "no coordinator at 127.0.0.1:9" in said
    assert "--coordinator, RECOVERY_COORDINATOR" in said


def test_what_happens_with_no_holder_left_is_a_choice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "state"
    assert run(["coordinator", "--run-id", "r", "--state-dir", str(folder), "--on-all-gone", "banana"]) == 2
    said = capsys.readouterr().err
    assert "resume" in said
    assert "refuse" in said
    assert not folder.exists()


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in [
        "coordinator",
        "status",
        "verify",
        "resync",
        "save",
        "drain",
        "cancel",
        "rate",
        "rollback",
        "adopt",
        "watch",
    ]:
        assert run([command, "--help"]) == 0
        assert "--json" in capsys.readouterr().out
