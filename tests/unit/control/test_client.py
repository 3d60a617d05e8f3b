"""A worker's stream: attaches, says why not, reattaches, never blocks its owner, ends cleanly."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from protos.recovery.v1 import coordinator_pb2
from recovery.control.client import ClientConfig, CoordinatorClient
from recovery.control.inputs import Attached, Detached, Drop, Effect, Input, Received, Tell
from recovery.control.wire import to_proto
from recovery.errors import (
    BadConfiguration,
    CoordinatorUnreachable,
    DonorBusy,
    MisuseError,
    RecoveryError,
    RunRefused,
)
from recovery.types import Address
from tests.support.coordinators import PLAIN, RecordingClient, coordinator
from tests.support.scripted_machine import ScriptedMachine, hello, tell, welcoming


def vote(epoch: int) -> coordinator_pb2.WorkerMessage:
    return coordinator_pb2.WorkerMessage(vote=coordinator_pb2.Vote(epoch=epoch))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def client_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("coordinator-")]


def refusing(failure: RecoveryError, *, evict: bool = False) -> ScriptedMachine:
    def script(event: Input) -> list[Effect]:
        if not isinstance(event, Attached):
            return []
        message = coordinator_pb2.CoordinatorMessage()
        (message.evicted if evict else message.rejected).failure.CopyFrom(to_proto(failure))
        return [*(welcoming(event) if evict else []), Tell(event.worker, message), Drop(event.worker, str(failure))]

    return ScriptedMachine(script)


# Attaching


def test_attached_means_welcomed(tmp_path: Path) -> None:
    with coordinator(tmp_path) as server, RecordingClient(server.address) as worker:
        worker.client.wait_attached(30)
        assert worker.client.attached
        worker.wait_message("welcome")


def test_an_address_may_be_text(tmp_path: Path) -> None:
    with coordinator(tmp_path) as server:
        client = CoordinatorClient(str(server.address), PLAIN, hello, lambda message: None, lambda reason: None)
        client.start()
        client.wait_attached(30)
        client.close()


def test_nobody_at_the_address_is_named_within_the_deadline() -> None:
    port = free_port()
    with RecordingClient(Address("127.0.0.1", port)) as worker:
        with pytest.raises(
            CoordinatorUnreachable,
            match=rf"127\.0\.0\.1:{port} within 0\.5 s: connection refused.*recovery coordinator",
        ):
            worker.client.wait_attached(0.5)
        assert worker.detachments == []


def test_a_server_that_is_no_coordinator_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = Address(*listener.getsockname())
        with RecordingClient(address) as worker, pytest.raises(CoordinatorUnreachable, match=str(address.port)):
            worker.client.wait_attached(0.3)


def test_a_coordinator_that_comes_later_is_found(tmp_path: Path) -> None:
    address = Address("127.0.0.1", free_port())
    with RecordingClient(address) as worker:
        with pytest.raises(CoordinatorUnreachable):
            worker.client.wait_attached(0.2)
        with coordinator(tmp_path, listen=address):
            worker.client.wait_attached(30)


def test_another_run_is_refused_for_good(tmp_path: Path) -> None:
    with coordinator(tmp_path) as server, RecordingClient(server.address, run_id="other") as worker:
        for _ in range(2):
            with pytest.raises(RunRefused, match="serves run 'run', not 'other'"):
                worker.client.wait_attached(30)
        with pytest.raises(RunRefused):
            worker.client.send(vote(1))
        assert isinstance(worker.client.refusal, RunRefused)
        assert "not 'other'" in worker.wait_detached()


@pytest.mark.parametrize("evict", [False, True], ids=["rejected", "evicted"])
def test_a_refusal_of_the_run_is_told_and_final(tmp_path: Path, evict: bool) -> None:
    machine = refusing(RunRefused("numerics id x is not y"), evict=evict)
    with coordinator(tmp_path, machine) as server, RecordingClient(server.address) as worker:
        assert worker.wait_detached() == "numerics id x is not y"
        with pytest.raises(RunRefused, match="numerics id x is not y"):
            worker.client.wait_attached(30)
        assert worker.kinds() == (["welcome", "evicted"] if evict else ["rejected"])
    assert sum(isinstance(event, Attached) for event in machine.inputs) == 1


def test_a_refusal_that_may_pass_is_tried_again(tmp_path: Path) -> None:
    machine = refusing(DonorBusy("come back"))
    with coordinator(tmp_path, machine) as server, RecordingClient(server.address) as worker:
        worker.wait_message("rejected", count=3)
        with pytest.raises(CoordinatorUnreachable, match="come back"):
            worker.client.wait_attached(0)


# Losing and finding it again


def test_a_restarted_coordinator_gets_a_new_hello(tmp_path: Path) -> None:
    held = [1, 2]

    def say_hello() -> coordinator_pb2.Hello:
        message = hello()
        message.held.outer_step = held.pop(0) if len(held) > 1 else held[0]
        return message

    first, second = ScriptedMachine(), ScriptedMachine()
    with coordinator(tmp_path, first) as server:
        address = server.address
        worker = RecordingClient(address, say_hello=say_hello)
        worker.client.start()
        worker.client.wait_attached(30)
    worker.wait_detached()
    with pytest.raises(CoordinatorUnreachable):
        worker.client.wait_attached(0)
    assert not worker.client.send(vote(1))
    with coordinator(tmp_path, second, listen=address):
        worker.client.wait_attached(30)
        assert worker.client.send(vote(2))
        second.wait_for(lambda event: isinstance(event, Received) and event.message == vote(2))
        worker.client.close()
    assert worker.kinds() == ["welcome", "welcome"]
    assert [event.hello.held.outer_step for event in first.inputs if isinstance(event, Attached)] == [1]
    assert [event.hello.held.outer_step for event in second.inputs if isinstance(event, Attached)] == [2]
    assert not any(isinstance(event, Received) and event.message == vote(1) for event in second.inputs)


def test_a_dropped_worker_comes_back_by_itself(tmp_path: Path) -> None:
    def script(event: Input) -> list[Effect]:
        if isinstance(event, Received) and event.message == vote(1):
            return [Drop(event.worker, "for a test")]
        return welcoming(event)

    machine = ScriptedMachine(script)
    with coordinator(tmp_path, machine) as server, RecordingClient(server.address) as worker:
        worker.client.wait_attached(30)
        worker.client.send(vote(1))
        assert worker.wait_detached() == "the coordinator ended the stream"
        worker.wait_message("welcome", count=2)
        machine.attached("w0", nth=2)


# Messages


def test_messages_arrive_in_order_both_ways(tmp_path: Path) -> None:
    def script(event: Input) -> list[Effect]:
        if isinstance(event, Received) and event.message.HasField("vote"):
            return [tell(event.worker, float(event.message.vote.epoch))]
        return welcoming(event)

    with coordinator(tmp_path, ScriptedMachine(script)) as server, RecordingClient(server.address) as worker:
        worker.client.wait_attached(30)
        for epoch in range(200):
            assert worker.client.send(vote(epoch))
        worker.wait_message("phase_ending", count=200)
        got = [message.phase_ending.deadline.seconds for message in worker.messages if message.HasField("phase_ending")]
        assert got == list(range(200))


def test_a_callback_may_send_and_close(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    sent = threading.Event()

    def on_message(message: coordinator_pb2.CoordinatorMessage) -> None:
        assert client.send(vote(9))
        client.close("from the callback")
        sent.set()

    with coordinator(tmp_path, machine) as server:
        client = CoordinatorClient(server.address, PLAIN, hello, on_message, lambda reason: None)
        client.start()
        assert sent.wait(30)
        assert machine.detached("w0").reason == "goodbye: from the callback"
        client.close()
        assert any(isinstance(event, Received) and event.message == vote(9) for event in machine.inputs)


def test_an_error_of_a_callback_is_raised_at_the_owners_next_call(tmp_path: Path) -> None:
    def on_message(message: coordinator_pb2.CoordinatorMessage) -> None:
        raise ArithmeticError("a defect of the owner")

    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server:
        client = CoordinatorClient(server.address, PLAIN, hello, on_message, lambda reason: None)
        client.start()
        machine.detached("w0")
        with pytest.raises(ArithmeticError, match="a defect of the owner"):
            client.wait_attached(30)
        with pytest.raises(ArithmeticError):
            client.send(vote(1))
        client.close()


def test_an_error_of_the_hello_is_raised_too(tmp_path: Path) -> None:
    def say_hello() -> coordinator_pb2.Hello:
        raise ArithmeticError("no hello today")

    with (
        coordinator(tmp_path) as server,
        RecordingClient(server.address, say_hello=say_hello) as worker,
        pytest.raises(ArithmeticError, match="no hello today"),
    ):
        worker.client.wait_attached(30)


def test_a_full_outbox_ends_the_attachment_and_never_blocks(tmp_path: Path) -> None:
    """The coordinator's owner is held, so its streams are not read: the sender must not feel it."""
    release = threading.Event()

    def script(event: Input) -> list[Effect]:
        if isinstance(event, Received) and event.message.HasField("vote"):
            assert release.wait(30)
        return welcoming(event)

    machine = ScriptedMachine(script)
    big = coordinator_pb2.WorkerMessage(applied=coordinator_pb2.Applied(data_position=bytes(500_000)))
    with (
        coordinator(tmp_path, machine) as server,
        RecordingClient(server.address, config=ClientConfig(outbox_messages=8)) as worker,
    ):
        worker.client.wait_attached(30)
        assert worker.client.send(vote(1))
        machine.wait_for(lambda event: isinstance(event, Received) and event.message.HasField("vote"))
        while worker.client.send(big):
            pass
        worker.wait_detached()
        release.set()
        worker.wait_message("welcome", count=2)


def test_beats_fill_the_silence(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    config = ClientConfig(beat_seconds=0.02)
    with coordinator(tmp_path, machine) as server, RecordingClient(server.address, config=config) as worker:
        machine.wait_for(lambda event: isinstance(event, Received) and event.message.beat.number == 3)
        assert set(worker.kinds()) <= {"welcome"}


def test_behind_a_proxy_a_silent_coordinator_is_left(tmp_path: Path) -> None:
    """Beats go up and no beat comes back: what a proxy that answers pings for a dead coordinator looks like."""
    config = ClientConfig(beat_seconds=0.05, silence_seconds=0.2)
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server:
        release = threading.Event()

        def script(event: Input) -> list[Effect]:
            if isinstance(event, Received):
                release.wait(30)
            return welcoming(event)

        machine.script = script
        with RecordingClient(server.address, config=config) as worker:
            worker.client.wait_attached(30)
            worker.wait_detached()
            release.set()


# Life


def test_close_says_goodbye_and_leaves_no_thread(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server:
        worker = RecordingClient(server.address)
        worker.client.start()
        worker.client.wait_attached(30)
        worker.client.close("finished")
        worker.client.close("again")
        assert machine.detached("w0").reason == "goodbye: finished"
        with pytest.raises(MisuseError):
            worker.client.send(vote(1))
        with pytest.raises(MisuseError):
            worker.client.wait_attached(1)
        with pytest.raises(MisuseError):
            worker.client.start()
        assert worker.detachments == []
    assert client_threads() == []
    assert sum(isinstance(event, Detached) for event in machine.inputs) == 1


def test_close_does_not_wait_for_a_coordinator_that_is_not_there() -> None:
    worker = RecordingClient(Address("127.0.0.1", free_port()))
    worker.client.start()
    worker.client.close()
    assert client_threads() == []


def test_misuse_is_named() -> None:
    client = RecordingClient(Address("127.0.0.1", 1)).client
    with pytest.raises(MisuseError, match="not started"):
        client.wait_attached(1)
    with pytest.raises(MisuseError, match="not started"):
        client.send(vote(1))
    with pytest.raises(MisuseError, match="not started"):
        client.key_value()
    client.close()


def test_configuration_errors_belong_to_the_caller() -> None:
    with pytest.raises(BadConfiguration, match="--insecure"):
        RecordingClient(Address("10.0.0.1", 1)).client.start()
    for bad in (
        {"beat_seconds": 0.0},
        {"outbox_messages": 0},
        {"first_backoff_seconds": 2.0},
        {"silence_seconds": 1.0},
    ):
        with pytest.raises(BadConfiguration):
            ClientConfig(**bad)


def test_an_exception_in_the_block_is_the_goodbyes_reason(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server:
        client = CoordinatorClient(server.address, PLAIN, hello, lambda message: None, lambda reason: None)
        with pytest.raises(ZeroDivisionError), client:
            client.wait_attached(30)
            raise ZeroDivisionError("the loss was zero")
        assert machine.detached("w0").reason == "goodbye: ZeroDivisionError: the loss was zero"
