"""What becomes of conversations between two workers when either is killed, frozen or cut off."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from protos.recovery.v1 import coordinator_pb2, peer_pb2
from recovery.control.peer_client import dial
from recovery.control.peer_probe import probe
from recovery.control.peer_service import DonorConversation, PeerServer
from recovery.errors import DonorLost
from recovery.types import Address
from tests.support.coordinator_processes import (
    DONOR,
    FOUND_SECONDS,
    JOINER,
    becomes_true,
    pull,
)
from tests.support.coordinators import PLAIN, RecordingClient, coordinator
from tests.support.cut_proxy import CutProxy
from tests.support.processes import ChildProcess


@pytest.fixture
def donor() -> Iterator[tuple[ChildProcess, Address]]:
    with ChildProcess(["-c", DONOR]) as process:
        yield process, Address.parse(process.line("listening").split()[1])


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_a_lost_donor_ends_the_joiners_conversation(donor: tuple[ChildProcess, Address], fault: str) -> None:
    process, address = donor
    joiner = dial([address], PLAIN)
    joiner.send(pull(3))
    answer = joiner.receive(30)
    assert answer is not None
    assert answer.opened.lanes == 3
    getattr(process, fault)()
    with pytest.raises(DonorLost, match="donor at"):
        # A frozen process answers neither this letter nor the keepalive's pings.
        joiner.send(pull(4))
        assert joiner.receive(FOUND_SECONDS) is not None, "the loss was not noticed"
    joiner.close("it is gone")


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_a_lost_joiner_ends_the_donors_conversation(fault: str) -> None:
    conversations: queue.SimpleQueue[DonorConversation] = queue.SimpleQueue()
    with (
        PeerServer("127.0.0.1", 0, conversations.put, PLAIN) as server,
        ChildProcess(["-c", JOINER, str(server.address)]) as process,
    ):
        process.line("sent")
        side = conversations.get(timeout=30)
        assert side.receive(30) is not None
        getattr(process, fault)()
        with pytest.raises(DonorLost, match="joiner at"):
            assert side.receive(FOUND_SECONDS) is not None, "the loss was not noticed"


def test_a_cut_path_ends_a_conversation_on_both_sides() -> None:
    conversations: queue.SimpleQueue[DonorConversation] = queue.SimpleQueue()
    with PeerServer("127.0.0.1", 0, conversations.put, PLAIN) as server, CutProxy(server.address) as proxy:
        joiner = dial([proxy.address], PLAIN)
        joiner.send(pull(1))
        side = conversations.get(timeout=30)
        assert side.receive(30) == pull(1)
        proxy.cut()
        with pytest.raises(DonorLost, match=r"donor at .* is lost"):
            assert joiner.receive(FOUND_SECONDS) is not None, "the loss was not noticed"
        with pytest.raises(DonorLost, match="joiner at"):
            assert side.receive(FOUND_SECONDS) is not None, "the loss was not noticed"
        assert proxy.swallowed > 0
        joiner.close("")


def test_one_lost_conversation_does_not_touch_another(donor: tuple[ChildProcess, Address]) -> None:
    process, address = donor
    with PeerServer("127.0.0.1", 0, lambda side: side.send(peer_pb2.DonorLetter()), PLAIN) as healthy:
        first, second = dial([address], PLAIN), dial([healthy.address], PLAIN)
        process.kill()
        with pytest.raises(DonorLost):
            assert first.receive(FOUND_SECONDS) is not None
        assert second.receive(30) is not None
        assert second.ended is None
        first.close("")
        second.close("")


def test_the_advertised_address_is_the_one_that_is_bound() -> None:
    """aws-do-eks#50: a listener on whatever the host name resolves to. Only the interface that was named may answer.

    Reported in meta-pytorch/torchft#329.
    """
    with PeerServer("127.0.0.2", 0, lambda side: None, PLAIN) as server:
        assert server.address.host == "127.0.0.2"
        assert probe(server.address, PLAIN).address == server.address
        listening = {
            found.laddr.ip.removeprefix("::ffff:")
            for found in psutil.Process().net_connections("tcp")
            if found.status == psutil.CONN_LISTEN and found.laddr.port == server.address.port
        }
        assert listening == {"127.0.0.2"}


def test_no_descriptor_and_no_thread_stays_behind(tmp_path: Path) -> None:
    own = psutil.Process(os.getpid())

    def once(number: int) -> None:
        with coordinator(tmp_path / str(number)) as server, RecordingClient(server.address) as member:
            member.client.wait_attached(30)
            member.client.key_value().set("s", "k", b"")
            member.client.send(coordinator_pb2.WorkerMessage(vote=coordinator_pb2.Vote(epoch=1)))
        with PeerServer("127.0.0.1", 0, lambda side: side.send(peer_pb2.DonorLetter()), PLAIN) as peer:
            conversation = dial([peer.address], PLAIN)
            conversation.receive(30)
            conversation.close("")

    for number in range(3):
        once(number)
    descriptors, threads = own.num_fds(), threading.active_count()
    for number in range(3, 13):
        once(number)
    assert own.num_fds() <= descriptors + 2
    assert becomes_true(lambda: threading.active_count() <= threads), threading.enumerate()
