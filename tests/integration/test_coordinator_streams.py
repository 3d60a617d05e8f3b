"""What becomes of streams when the coordinator or a worker is killed, frozen, busy or cut off, and of strangers."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
from pathlib import Path

import psutil
import pytest

from recovery.control.inputs import Attached, Detached, Received
from recovery.control.operator_client import OperatorClient
from recovery.errors import CoordinatorUnreachable
from recovery.types import MIB
from tests.support.coordinator_processes import (
    FOUND_SECONDS,
    CoordinatorProcess,
    worker,
)
from tests.support.coordinators import PLAIN, RecordingClient, coordinator
from tests.support.cut_proxy import CutProxy
from tests.support.processes import ChildProcess
from tests.support.scripted_machine import ScriptedMachine


def test_a_killed_coordinator_comes_back_with_its_history_and_its_workers(tmp_path: Path) -> None:
    """ray-project/ray#60820: when the one process that knows everybody dies, nobody may be lost for good."""
    with CoordinatorProcess(tmp_path) as first:
        address = first.address
        member = RecordingClient(address)
        member.client.start()
        member.client.wait_attached(30)
        with OperatorClient(address, PLAIN) as operator:
            operator.drain("w0")
        first.kill()
        member.wait_detached()
        with pytest.raises(CoordinatorUnreachable):
            member.client.wait_attached(0.1)
    with CoordinatorProcess(tmp_path, listen=str(address), new_run=False) as second:
        member.client.wait_attached(30)
        member.wait_message("welcome", count=2)
        with OperatorClient(address, PLAIN) as operator:
            (status,) = operator.list().workers
            assert status.alive
            assert status.drained
        member.client.close("finished")
        second.signal(signal.SIGTERM)
        assert second.wait() == 0


def test_a_frozen_coordinator_is_noticed_and_found_again_when_it_thaws(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path) as process, RecordingClient(process.address) as member:
        member.client.wait_attached(30)
        process.freeze()
        assert "stopped answering" in member.wait_detached()
        process.thaw()
        member.wait_message("welcome", count=2)


def test_a_killed_worker_is_lost_at_once(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server, worker(server.address) as process:
        process.line("told welcome")
        process.kill()
        assert (
            "lost" in machine.detached("w0", FOUND_SECONDS).reason
            or "without a goodbye" in machine.detached("w0").reason
        )


def test_a_frozen_worker_is_lost_in_lease_time_and_may_come_back(tmp_path: Path) -> None:
    """torchft#35: the survivors must not wait for a process group's timeout to learn what the keepalive knows."""
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server, worker(server.address) as process:
        process.line("told welcome")
        process.freeze()
        machine.detached("w0", FOUND_SECONDS)
        process.thaw()
        process.line("detached")
        process.line("told welcome")
        process.tell("vote 5")
        machine.wait_for(lambda event: isinstance(event, Received) and event.message.vote.epoch == 5)


def test_a_worker_that_holds_the_interpreters_lock_keeps_its_lease(tmp_path: Path) -> None:
    """FlagOpen/FlagScale#1267: a process marked dead while it was only busy writing a checkpoint."""
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server, worker(server.address) as process:
        process.line("told welcome")
        process.tell("hold 9")
        process.line("holding")
        # More than twice what a frozen process gets; the child proves that its other threads really stood still.
        assert float(process.line("held").split()[1]) > 8.5
        process.tell("vote 7")
        machine.wait_for(lambda event: isinstance(event, Received) and event.message.vote.epoch == 7)
        assert not any(isinstance(event, Detached) for event in machine.inputs)
        assert sum(isinstance(event, Attached) for event in machine.inputs) == 1


def test_a_cut_path_is_noticed_by_both_ends_and_mended(tmp_path: Path) -> None:
    """The connections stay open and bytes vanish: nothing but an unanswered ping tells."""
    machine = ScriptedMachine()
    with (
        coordinator(tmp_path, machine) as server,
        CutProxy(server.address) as proxy,
        RecordingClient(proxy.address) as member,
    ):
        member.client.wait_attached(30)
        proxy.cut()
        machine.detached("w0", FOUND_SECONDS)
        assert "stopped answering" in member.wait_detached()
        assert proxy.swallowed > 0
        proxy.mend()
        member.wait_message("welcome", count=2)
        assert machine.attached("w0", nth=2).incarnation == "i1"


def test_a_restarted_worker_is_told_from_its_former_process(tmp_path: Path) -> None:
    """torchft#63: a dead member kept for ever; here the next process of the same name does not wait for anything."""
    with CoordinatorProcess(tmp_path) as process:
        with worker(process.address, incarnation="i1") as first:
            first.line("told welcome")
            first.kill()
        with worker(process.address, incarnation="i2") as second:
            second.line("told welcome")
            with OperatorClient(process.address, PLAIN) as operator:
                (status,) = operator.list().workers
                assert (status.worker.incarnation, status.alive) == ("i2", True)


BUSY_FORKS = """
import multiprocessing, sys
from recovery.control.client import CoordinatorClient
from recovery.control.peer_probe import probe
from recovery.control.peer_service import PeerServer
from recovery.control.security import SecurityConfig
from tests.support.scripted_machine import hello

context = multiprocessing.get_context("fork")
client = CoordinatorClient(
    sys.argv[1], SecurityConfig(), hello,
    lambda message: None, lambda reason: print("detached", reason, flush=True),
)
with client, PeerServer("127.0.0.1", 0, lambda side: None, SecurityConfig()) as server:
    client.wait_attached(30)
    for number in range(50):
        children = [context.Process(target=sum, args=((1, 2),)) for _ in range(2)]
        for child in children:
            child.start()
        probe(server.address, SecurityConfig())
        for child in children:
            child.join(20)
            assert child.exitcode == 0, (number, child.exitcode)
    client.key_value().set("scope", "key", b"value")
    print("forked", client.attached, flush=True)
"""


def test_children_forked_beside_live_streams_end_and_harm_nothing(tmp_path: Path) -> None:
    """grpc/grpc#32992, dlrover#405: data loader workers forked from a process that uses gRPC crash or never end."""
    machine = ScriptedMachine()
    with coordinator(tmp_path, machine) as server, ChildProcess(["-c", BUSY_FORKS, str(server.address)]) as process:
        assert process.line("forked", 100) == "forked True"
        assert process.wait() == 0
    assert sum(isinstance(event, Attached) for event in machine.inputs) == 1


def test_strangers_bytes_neither_end_a_server_nor_fill_its_memory(tmp_path: Path) -> None:
    """aws-do-eks and others: a port that believes announced sizes. Random bytes, HTTP, HTTP/2 with huge lengths.

    Reported in InternLM/lmdeploy#4804.
    """
    seed = 20260101
    chaos = random.Random(seed)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    attacks = [
        *(chaos.randbytes(chaos.randint(1, 4096)) for _ in range(100)),
        *(preface + chaos.randbytes(chaos.randint(1, 4096)) for _ in range(100)),
        # A frame that announces 16 MiB, a DATA frame for a stream that does not exist, a gRPC length of 4 GiB.
        preface + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(1024),
        preface + b"\x00\x00\x05\x00\x00\x00\x00\x00\x01\x00\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
    ]
    with CoordinatorProcess(tmp_path) as process, RecordingClient(process.address) as member:
        member.client.wait_attached(30)
        before = psutil.Process(process.pid).memory_info().rss
        for attack in attacks:
            # The server may hang up in the middle, which is its right.
            with (
                socket.create_connection((process.address.host, process.address.port)) as stranger,
                contextlib.suppress(OSError),
            ):
                stranger.sendall(attack)
        with OperatorClient(process.address, PLAIN) as operator:
            assert operator.list().alive == 1, f"seed {seed}"
        assert member.detachments == []
        assert psutil.Process(process.pid).memory_info().rss - before < 64 * MIB
