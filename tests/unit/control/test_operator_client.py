"""Each of the operator's requests reaches the machine whole, and each failure comes back as what it was."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.message import Message

from protos.recovery.v1 import operations_pb2 as pb
from recovery.control.inputs import Answer, Effect, Input, Operated
from recovery.control.operator_client import OperatorClient
from recovery.control.peer_service import PeerServer
from recovery.control.wire import duration, to_proto
from recovery.errors import BadConfiguration, CoordinatorUnreachable, RunRefused
from recovery.types import Address, Version
from tests.support.coordinators import PLAIN, RUN, coordinator
from tests.support.scripted_machine import ScriptedMachine

ANSWERS: dict[type, Message] = {
    pb.ListRequest: pb.ListResponse(run_id=RUN, alive=2),
    pb.ResyncRequest: pb.ResyncResponse(detail="from w2"),
    pb.VerifyRequest: pb.VerifyResponse(different=["outer_params/a"]),
    pb.SaveRequest: pb.SaveResponse(detail="/checkpoints"),
    pb.DrainRequest: pb.DrainResponse(),
    pb.CancelRequest: pb.CancelResponse(),
    pb.SetRateRequest: pb.SetRateResponse(),
    pb.RollbackRequest: pb.RollbackResponse(version=to_proto(Version(2, 5))),
    pb.AdoptRequest: pb.AdoptResponse(fingerprint=b"f"),
}


def answering(event: Input) -> list[Effect]:
    return [Answer(event.request_id, ANSWERS[type(event.request)])] if isinstance(event, Operated) else []


def call_list(operator: OperatorClient) -> object:
    return operator.list()


@pytest.mark.parametrize(
    ("call", "request_", "answer"),
    [
        (call_list, pb.ListRequest(run_id=RUN), ANSWERS[pb.ListRequest]),
        (
            lambda operator: operator.resync("w1", from_worker_id="w2", timeout_seconds=7, request_id="r"),
            pb.ResyncRequest(request_id="r", run_id=RUN, worker_id="w1", from_worker_id="w2", timeout=duration(7)),
            ANSWERS[pb.ResyncRequest],
        ),
        (
            lambda operator: operator.verify("w1", timeout_seconds=7, request_id="r"),
            pb.VerifyRequest(request_id="r", run_id=RUN, worker_id="w1", timeout=duration(7)),
            ANSWERS[pb.VerifyRequest],
        ),
        (
            lambda operator: operator.save("w1", timeout_seconds=7, request_id="r"),
            pb.SaveRequest(request_id="r", run_id=RUN, worker_id="w1", timeout=duration(7)),
            ANSWERS[pb.SaveRequest],
        ),
        (
            lambda operator: operator.drain("w1", drained=False, request_id="r"),
            pb.DrainRequest(request_id="r", run_id=RUN, worker_id="w1", drained=False),
            ANSWERS[pb.DrainRequest],
        ),
        (
            lambda operator: operator.cancel("t1", request_id="r"),
            pb.CancelRequest(request_id="r", run_id=RUN, transfer_id="t1"),
            ANSWERS[pb.CancelRequest],
        ),
        (
            lambda operator: operator.set_rate("w1", 5_000_000, request_id="r"),
            pb.SetRateRequest(request_id="r", run_id=RUN, worker_id="w1", bytes_per_second=5_000_000),
            None,
        ),
        (
            lambda operator: operator.rollback(Version(1, 5), worker_id="w1", request_id="r"),
            pb.RollbackRequest(request_id="r", run_id=RUN, version=to_proto(Version(1, 5)), worker_id="w1"),
            ANSWERS[pb.RollbackRequest],
        ),
        (
            lambda operator: operator.adopt("w1", request_id="r"),
            pb.AdoptRequest(request_id="r", run_id=RUN, worker_id="w1"),
            ANSWERS[pb.AdoptRequest],
        ),
    ],
    ids=["list", "resync", "verify", "save", "drain", "cancel", "rate", "rollback", "adopt"],
)
def test_a_request_arrives_whole_and_its_answer_comes_back(
    tmp_path: Path, call: Callable[[OperatorClient], object], request_: Message, answer: Message | None
) -> None:
    machine = ScriptedMachine(answering)
    with coordinator(tmp_path, machine) as server, OperatorClient(server.address, PLAIN, run_id=RUN) as operator:
        assert call(operator) == answer
    (event,) = machine.inputs
    assert isinstance(event, Operated)
    assert event.request == request_


def test_requests_without_an_id_are_new_ones(tmp_path: Path) -> None:
    machine = ScriptedMachine(answering)
    with coordinator(tmp_path, machine) as server, OperatorClient(server.address, PLAIN) as operator:
        operator.adopt()
        operator.adopt()
    assert len({event.request_id for event in machine.inputs if isinstance(event, Operated)}) == 2


def test_another_run_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    machine = ScriptedMachine(answering)
    with coordinator(tmp_path, machine) as server, OperatorClient(server.address, PLAIN, run_id="mine") as operator:
        for call in (operator.list, operator.save, lambda: next(operator.watch())):
            with pytest.raises(RunRefused, match="serves run 'run', not 'mine'"):
                call()
    assert machine.inputs == []


def test_nobody_at_the_address_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = Address(*free.getsockname())
    with OperatorClient(str(address), PLAIN) as operator:
        for call in (operator.list, operator.save, lambda: next(operator.watch())):
            with pytest.raises(CoordinatorUnreachable, match=rf"no coordinator at {address}: connection refused"):
                call()


def test_no_answer_in_time_is_named_with_the_deadline(tmp_path: Path) -> None:
    machine = ScriptedMachine(lambda event: [])
    with (
        coordinator(tmp_path, machine) as server,
        OperatorClient(server.address, PLAIN) as operator,
        pytest.raises(CoordinatorUnreachable, match=r"list: .* no answer within 0\.2 s; `recovery status`"),
    ):
        operator.list(timeout_seconds=0.2)


def test_another_kind_of_server_is_named() -> None:
    with (
        PeerServer("127.0.0.1", 0, lambda side: None, PLAIN) as peer,
        OperatorClient(peer.address, PLAIN) as operator,
        pytest.raises(RunRefused, match="not a coordinator"),
    ):
        operator.list()


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="host:port"):
        OperatorClient("nonsense", PLAIN)
