"""The shell round the machine: inputs in order, effects in order, nothing told before it is durable."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.recovery.v1 import coordinator_pb2, coordinator_pb2_grpc, operations_pb2
from recovery.clock import SystemClock
from recovery.control import owner as owner_module
from recovery.control.channel import open_channel
from recovery.control.history import History
from recovery.control.inputs import (
    Answer,
    Attached,
    Detached,
    Drop,
    Effect,
    Emit,
    Input,
    Operated,
    Persist,
    Received,
    Tell,
    Tick,
)
from recovery.control.operator_client import OperatorClient
from recovery.control.policy import RunPolicy
from recovery.control.record import DrainSet
from recovery.control.rpc_errors import status_code, told_failure
from recovery.control.server import CoordinatorConfig, CoordinatorServer
from recovery.control.wire import to_proto
from recovery.errors import BadConfiguration, CoordinatorUnreachable, DonorBusy, MisuseError, NoDonorLeft, RunRefused
from recovery.events import Recorder, WorkerStalled
from recovery.types import WorkerRef
from tests.support.coordinators import LOOPBACK, PLAIN, RUN, RecordingClient, coordinator
from tests.support.scripted_machine import ScriptedMachine, hello, tell, welcoming

CHANGE = DrainSet("w7", True)


def raw_attach(server: CoordinatorServer, *messages: coordinator_pb2.WorkerMessage) -> tuple[grpc.Channel, Any]:
    """Open a stream that says exactly ``messages`` and then nothing more."""
    channel = open_channel(server.address, PLAIN, what="the coordinator")
    return channel, coordinator_pb2_grpc.CoordinatorStub(channel).Attach(iter(messages), timeout=30)


def hello_message(**arguments: str) -> coordinator_pb2.WorkerMessage:
    return coordinator_pb2.WorkerMessage(hello=hello(**arguments))


def goodbye(reason: str = "") -> coordinator_pb2.WorkerMessage:
    return coordinator_pb2.WorkerMessage(goodbye=coordinator_pb2.Goodbye(reason=reason))


# Streams


@pytest.mark.parametrize(
    ("first", "code", "says"),
    [
        (hello_message(run_id="other"), grpc.StatusCode.FAILED_PRECONDITION, "serves run 'run', not 'other'"),
        (goodbye(), grpc.StatusCode.INVALID_ARGUMENT, "has to be a hello"),
        (hello_message(worker_id="../w"), grpc.StatusCode.INVALID_ARGUMENT, "worker id"),
        (hello_message(incarnation=""), grpc.StatusCode.INVALID_ARGUMENT, "incarnation"),
        (None, grpc.StatusCode.INVALID_ARGUMENT, "before its hello"),
    ],
)
def test_a_wrong_beginning_is_refused_by_name(
    tmp_path: Path, first: coordinator_pb2.WorkerMessage | None, code: grpc.StatusCode, says: str
) -> None:
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server:
        channel, call = raw_attach(server, *([] if first is None else [first]))
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        channel.close()
        assert status_code(caught.value) is code
        assert says in str(told_failure(caught.value))
    assert machine.inputs == []


def test_a_stream_becomes_attached_received_detached_in_order(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server:
        vote = coordinator_pb2.WorkerMessage(vote=coordinator_pb2.Vote(epoch=3))
        channel, call = raw_attach(server, hello_message(), vote, goodbye("finished"))
        kinds = [message.WhichOneof("kind") for message in call]
        channel.close()
        worker = machine.attached("w0")
        assert machine.detached("w0").reason == "goodbye: finished"
    assert kinds == ["welcome"]
    assert machine.inputs == [
        Attached(worker, hello()),
        Received(worker, vote),
        Received(worker, goodbye("finished")),
        Detached(worker, "goodbye: finished"),
    ]


def test_an_end_without_goodbye_is_a_loss(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server:
        channel, call = raw_attach(server, hello_message())
        assert next(call).HasField("welcome")
        call.cancel()
        assert "lost" in machine.detached("w0").reason or "without a goodbye" in machine.detached("w0").reason
        channel.close()


def test_a_second_hello_ends_the_stream(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server:
        channel, call = raw_attach(server, hello_message(), hello_message())
        assert len(list(call)) == 1
        assert "hello twice" in machine.detached("w0").reason
        channel.close()


def test_the_same_process_on_a_new_stream_replaces_the_old_one_silently(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server:
        held = threading.Event()

        def first_stream() -> Iterator[coordinator_pb2.WorkerMessage]:
            yield hello_message()
            held.wait(30)

        channel = open_channel(server.address, PLAIN, what="the coordinator")
        first: Any = coordinator_pb2_grpc.CoordinatorStub(channel).Attach(first_stream())
        assert next(first).HasField("welcome")
        other_channel, second = raw_attach(server, hello_message(), goodbye("second"))
        assert [message.WhichOneof("kind") for message in second] == ["welcome"]
        assert list(first) == []
        machine.detached("w0")
        held.set()
        channel.close()
        other_channel.close()
    ends = [event for event in machine.inputs if isinstance(event, Detached)]
    assert [end.reason for end in ends] == ["goodbye: second"]


def test_a_dropped_worker_hears_what_was_told_before(tmp_path: Path) -> None:
    def script(event: Input) -> list[Effect]:
        if not isinstance(event, Attached):
            return []
        rejected = coordinator_pb2.Rejected(failure=to_proto(RunRefused("taken by process 7")))
        message = coordinator_pb2.CoordinatorMessage(rejected=rejected)
        return [Tell(event.worker, message), Drop(event.worker, "taken"), tell(event.worker)]

    machine = ScriptedMachine(script)
    with coordinator(tmp_path, machine) as server:
        channel, call = raw_attach(server, hello_message())
        assert [message.WhichOneof("kind") for message in call] == ["rejected"]
        channel.close()
    assert not [event for event in machine.inputs if isinstance(event, Detached)]


def test_beats_are_answered_and_handed_in(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server:
        beat = coordinator_pb2.WorkerMessage(beat=coordinator_pb2.Beat(number=7))
        channel, call = raw_attach(server, hello_message(), beat, goodbye())
        messages = list(call)
        channel.close()
    assert [message.beat.number for message in messages if message.HasField("beat")] == [7]
    assert any(isinstance(event, Received) and event.message == beat for event in machine.inputs)


def test_behind_a_proxy_silence_is_a_loss(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine, silence_seconds=0.2) as server:
        silent = threading.Event()

        def says_hello_only() -> Iterator[coordinator_pb2.WorkerMessage]:
            yield hello_message()
            silent.wait(30)

        channel = open_channel(server.address, PLAIN, what="the coordinator")
        call: Any = coordinator_pb2_grpc.CoordinatorStub(channel).Attach(says_hello_only())
        assert next(call).HasField("welcome")
        assert machine.detached("w0").reason == "nothing came from it for 0.2 s"
        with pytest.raises((grpc.RpcError, StopIteration)):
            next(call)
        silent.set()
        channel.close()


def test_a_worker_that_reads_nothing_loses_its_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "MAX_OUTGOING_MESSAGES", 4)

    def script(event: Input) -> list[Effect]:
        if not isinstance(event, Received):
            return welcoming(event)
        # Larger together than what gRPC and the sockets buffer for a reader that does not read.
        big = coordinator_pb2.CoordinatorMessage(
            rejected=coordinator_pb2.Rejected(failure=to_proto(NoDonorLeft("x" * 4000)))
        )
        big.rejected.failure.message = "x" * 1_000_000
        return [Tell(event.worker, big)] * 64

    machine = ScriptedMachine(script)
    with coordinator(tmp_path, machine) as server:
        keep_open = threading.Event()

        def messages() -> Iterator[coordinator_pb2.WorkerMessage]:
            yield hello_message()
            yield goodbye_later
            keep_open.wait(30)

        goodbye_later = coordinator_pb2.WorkerMessage(vote=coordinator_pb2.Vote(epoch=1))
        channel = open_channel(server.address, PLAIN, what="the coordinator")
        call: Any = coordinator_pb2_grpc.CoordinatorStub(channel).Attach(messages())
        assert next(call).HasField("welcome")
        assert machine.detached("w0").reason == "it left 4 messages unread"
        with pytest.raises(grpc.RpcError):
            list(call)
        keep_open.set()
        channel.close()


# Effects


class SlowHistory(History):
    """Stores on command, and remembers what it stored."""

    may_store = threading.Event()
    storing = threading.Event()

    def apply(self, record: Any) -> None:
        self.storing.set()
        assert self.may_store.wait(30)
        super().apply(record)


def test_nothing_is_told_before_it_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SlowHistory.may_store, SlowHistory.storing = threading.Event(), threading.Event()
    monkeypatch.setattr("recovery.control.server.History", SlowHistory)

    def script(event: Input) -> list[Effect]:
        if isinstance(event, Attached):
            return [Persist(CHANGE), *welcoming(event), tell(event.worker)]
        return []

    with coordinator(tmp_path, ScriptedMachine(script)) as server, RecordingClient(server.address) as worker:
        assert SlowHistory.storing.wait(30)
        with pytest.raises(CoordinatorUnreachable):
            worker.client.wait_attached(0.3)
        assert worker.kinds() == []
        SlowHistory.may_store.set()
        worker.wait_message("phase_ending")
        assert worker.kinds() == ["welcome", "phase_ending"]
    with History(tmp_path) as history:
        assert history.load(RUN).drained == {"w7"}


def test_a_disk_that_refuses_ends_the_coordinator_and_nobody_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenHistory(History):
        def apply(self, record: Any) -> None:
            raise OSError("no space left")

    monkeypatch.setattr("recovery.control.server.History", BrokenHistory)
    machine = ScriptedMachine(lambda event: [Persist(CHANGE), *welcoming(event)] if isinstance(event, Attached) else [])
    config = CoordinatorConfig(policy=RunPolicy(run_id=RUN), listen=LOOPBACK, state_dir=tmp_path, new_run=True)
    server = CoordinatorServer(config, events=Recorder(), make_machine=lambda *_: machine).start()
    with RecordingClient(server.address) as worker:
        machine.attached("w0")
        with pytest.raises(OSError, match="no space left"):
            server.stop()
        assert worker.kinds() == []


def test_a_decision_that_raises_ends_the_coordinator(tmp_path: Path) -> None:
    def script(event: Input) -> list[Effect]:
        raise ArithmeticError("a defect")

    with pytest.raises(ArithmeticError), coordinator(tmp_path, machine := ScriptedMachine(script)) as server:
        channel, _ = raw_attach(server, hello_message())
        machine.attached("w0")
        channel.close()


def test_wakeups_bring_ticks_even_when_they_are_late(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    machine.wakeup = SystemClock().monotonic() + 0.05
    with coordinator(tmp_path, machine):
        machine.wait_for(lambda event: isinstance(event, Tick))


def test_an_overdue_wakeup_does_not_keep_inputs_waiting(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    machine.wakeup = 0.0
    with coordinator(tmp_path, machine) as server, RecordingClient(server.address) as worker:
        worker.client.wait_attached(30)


# Operations


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


def stalled(event: Input) -> list[Effect]:
    if isinstance(event, Received):
        return [Emit(WorkerStalled(worker_id="w0", stalled_seconds=5.0))]
    return welcoming(event)


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


# Life


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


def test_worker_ref_is_what_the_machine_sees(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server, RecordingClient(server.address, worker_id="w7", incarnation="i9"):
        assert machine.attached("w7") == WorkerRef("w7", "i9")  # type: ignore[arg-type]
