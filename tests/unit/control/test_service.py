"""The shell round the machine: inputs in order, effects in order, nothing told before it is durable."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.recovery.v1 import coordinator_pb2, coordinator_pb2_grpc
from recovery.clock import SystemClock
from recovery.control import owner as owner_module
from recovery.control.channel import open_channel
from recovery.control.history import History
from recovery.control.inputs import (
    Attached,
    Detached,
    Drop,
    Effect,
    Input,
    Persist,
    Received,
    Tell,
    Tick,
)
from recovery.control.policy import RunPolicy
from recovery.control.record import DrainSet
from recovery.control.rpc_errors import status_code, told_failure
from recovery.control.server import CoordinatorConfig, CoordinatorServer
from recovery.control.wire import to_proto
from recovery.errors import CoordinatorUnreachable, NoDonorLeft, RunRefused
from recovery.events import Recorder
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


def test_worker_ref_is_what_the_machine_sees(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server, RecordingClient(server.address, worker_id="w7", incarnation="i9"):
        assert machine.attached("w7") == WorkerRef("w7", "i9")  # type: ignore[arg-type]
