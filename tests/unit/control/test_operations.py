"""Operators' requests over real sockets: each acts once and has one answer; watching."""

from __future__ import annotations

import threading
from pathlib import Path

import grpc
import pytest

from protos.recovery.v1 import coordinator_pb2, operations_pb2
from recovery.control import owner as owner_module
from recovery.control.inputs import (
    Answer,
    Attached,
    Effect,
    Emit,
    Input,
    Operated,
    Received,
)
from recovery.control.operator_client import OperatorClient
from recovery.control.rpc_errors import status_code
from recovery.errors import BadConfiguration, DonorBusy, NoDonorLeft
from recovery.events import WorkerStalled
from tests.support.coordinators import PLAIN, RecordingClient, coordinator
from tests.support.scripted_machine import ScriptedMachine, welcoming


def answering() -> ScriptedMachine:
    """Answer every Verify with the number of the request, counted from 1."""
    counted: list[str] = []

    def script(event: Input) -> list[Effect]:
        if not isinstance(event, Operated) or not isinstance(event.request, operations_pb2.VerifyRequest):
            return welcoming(event)
        counted.append(event.request_id)
        if event.request.worker_id == "gone":
            return [Answer(event.request_id, NoDonorLeft("worker gone is not attached"))]
        return [Answer(event.request_id, operations_pb2.VerifyResponse(different=[str(len(counted))]))]

    return ScriptedMachine(script)


def stalled(event: Input) -> list[Effect]:
    if isinstance(event, Received):
        return [Emit(WorkerStalled(worker_id="w0", stalled_seconds=5.0))]
    return welcoming(event)


def test_the_same_request_id_acts_once(tmp_path: Path) -> None:
    with coordinator(tmp_path, answering()) as server, OperatorClient(server.address, PLAIN) as operator:
        first = operator.verify("w0", timeout_seconds=30, request_id="r1")
        again = operator.verify("w0", timeout_seconds=30, request_id="r1")
        other = operator.verify("w0", timeout_seconds=30)
        assert [list(answer.different) for answer in (first, again, other)] == [["1"], ["1"], ["2"]]
        with pytest.raises(BadConfiguration, match="r1 was used for another request"):
            operator.verify("w1", timeout_seconds=30, request_id="r1")
        with pytest.raises(BadConfiguration, match="200 characters"):
            operator.verify("w1", request_id="r" * 201)


def test_a_failed_operation_raises_the_machines_error(tmp_path: Path) -> None:
    with (
        coordinator(tmp_path, answering()) as server,
        OperatorClient(server.address, PLAIN) as operator,
        pytest.raises(NoDonorLeft, match="worker gone is not attached"),
    ):
        operator.verify("gone")


def test_an_operator_who_gives_up_gets_the_answer_when_he_asks_again(tmp_path: Path) -> None:
    asked: list[str] = []

    def script(event: Input) -> list[Effect]:
        if isinstance(event, Operated) and isinstance(event.request, operations_pb2.VerifyRequest):
            asked.append(event.request_id)
            return []
        if isinstance(event, Attached):
            return [*welcoming(event), Answer("r1", operations_pb2.VerifyResponse(different=["late"]))]
        return []

    with coordinator(tmp_path, ScriptedMachine(script)) as server, OperatorClient(server.address, PLAIN) as operator:
        request = operations_pb2.VerifyRequest(request_id="r1", worker_id="w0")
        with pytest.raises(grpc.RpcError) as caught:
            operator._stub().Verify(request, timeout=0.3)
        assert status_code(caught.value) is grpc.StatusCode.DEADLINE_EXCEEDED
        with RecordingClient(server.address) as worker:
            worker.client.wait_attached(30)
            assert operator._stub().Verify(request, timeout=30).different == ["late"]
    assert asked == ["r1"]


def test_a_poll_of_status_does_not_take_an_orders_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dashboard asks for the status while an operator waits for an order: the order's answer still arrives."""
    monkeypatch.setattr(owner_module, "KEPT_ANSWERS", 4)

    def script(event: Input) -> list[Effect]:
        if isinstance(event, Attached):
            return [*welcoming(event), Answer("r1", operations_pb2.VerifyResponse(different=["late"]))]
        return welcoming(event)

    machine = ScriptedMachine(script)
    with coordinator(tmp_path, machine) as server, OperatorClient(server.address, PLAIN) as operator:
        answers: list[operations_pb2.VerifyResponse] = []
        asks = threading.Thread(
            target=lambda: answers.append(operator.verify("w0", timeout_seconds=60, request_id="r1")), daemon=True
        )
        asks.start()
        machine.wait_for(lambda event: isinstance(event, Operated) and event.request_id == "r1")
        for number in range(8):
            operator.list()
            # Nor do other orders that wait as well.
            with pytest.raises(grpc.RpcError):
                operator._stub().Verify(operations_pb2.VerifyRequest(request_id=f"p{number}"), timeout=0.05)
        with RecordingClient(server.address) as worker:
            worker.client.wait_attached(30)
            asks.join(30)
    assert [list(answer.different) for answer in answers] == [["late"]]


def test_an_answer_that_nobody_asked_for_is_harmless(tmp_path: Path) -> None:
    def script(event: Input) -> list[Effect]:
        return [Answer("unknown", operations_pb2.SaveResponse()), *welcoming(event)]

    with coordinator(tmp_path, ScriptedMachine(script)) as server, RecordingClient(server.address) as worker:
        worker.client.wait_attached(30)


def test_watch_shows_events_from_now_on(tmp_path: Path) -> None:
    with (
        coordinator(tmp_path, ScriptedMachine(stalled)) as server,
        OperatorClient(server.address, PLAIN) as operator,
        RecordingClient(server.address) as worker,
    ):
        worker.client.wait_attached(30)
        seen: list[operations_pb2.WatchResponse] = []
        first = threading.Event()

        def watch() -> None:
            for response in operator.watch():
                seen.append(response)
                first.set()
                return

        watcher = threading.Thread(target=watch)
        watcher.start()
        # Sent until one arrives: a watch begins at some moment after its request.
        while not first.wait(0.05):
            worker.client.send(coordinator_pb2.WorkerMessage(vote=coordinator_pb2.Vote(epoch=1)))
        watcher.join()
    assert seen[0].event == "WorkerStalled"
    assert '"stalled_seconds": 5.0' in seen[0].fields_json


def test_too_many_watchers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "MAX_WATCHERS", 0)
    with (
        coordinator(tmp_path) as server,
        OperatorClient(server.address, PLAIN) as operator,
        pytest.raises(DonorBusy, match="watch this run already"),
    ):
        next(iter(operator.watch()))
