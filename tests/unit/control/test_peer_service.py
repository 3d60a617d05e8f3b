"""Conversations between two workers over real sockets: letters, ends with reasons; the life of the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc
import pytest

from protos.recovery.v1 import peer_pb2, peer_pb2_grpc
from recovery.control import conversation as conversation_module
from recovery.control.peer_client import dial
from recovery.control.peer_probe import probe
from recovery.control.peer_service import DonorConversation, PeerServer
from recovery.control.rpc_errors import status_code
from recovery.control.security import SecurityConfig
from recovery.errors import BadConfiguration, DonorBusy, DonorLost, MisuseError
from recovery.types import MIB
from tests.unit.control.peers import DONOR, PLAIN, Donor, answer, letter, peer_threads


@pytest.fixture
def donor() -> Iterator[Donor]:
    found = Donor()
    with found.server:
        yield found


# Conversations


def test_letters_arrive_in_order_both_ways(donor: Donor) -> None:
    joiner = dial([donor.server.address], PLAIN, run_id="run", expected=DONOR)
    for number in range(500):
        joiner.send(letter(number))
    side = donor.next()
    for number in range(500):
        got = side.receive(30)
        assert got is not None
        assert got.pull.pulls[0].pull_id == number
        side.send(answer(number))
    for number in range(500):
        back = joiner.receive(30)
        assert back is not None
        assert back.opened.lanes == number
    joiner.close("done")


def test_nothing_in_time_is_none(donor: Donor) -> None:
    joiner = dial([donor.server.address], PLAIN, run_id="run")
    assert joiner.receive(0.01) is None
    assert donor.next().receive(0.01) is None
    joiner.close("done")


def test_letters_before_a_close_arrive_and_then_its_reason(donor: Donor) -> None:
    joiner = dial([donor.server.address], PLAIN, run_id="run")
    side = donor.next()
    side.send(answer(1))
    side.send(answer(2))
    side.close("no room for you")
    assert [joiner.receive(30), joiner.receive(30)] == [answer(1), answer(2)]
    with pytest.raises(DonorLost, match=r"donor w1 at 127\.0\.0\.1:\d+ closed the conversation: no room for you"):
        joiner.receive(30)
    with pytest.raises(DonorLost, match="no room for you"):
        joiner.send(letter(1))
    assert isinstance(joiner.ended, DonorLost)
    joiner.close("after it")


def test_the_joiners_close_reaches_the_donor_after_its_letters(donor: Donor) -> None:
    joiner = dial([donor.server.address], PLAIN, run_id="run")
    joiner.send(letter(1))
    joiner.close("have it from somebody else")
    joiner.close("again")
    side = donor.next()
    assert side.receive(30) == letter(1)
    with pytest.raises(DonorLost, match="joiner at"):
        side.receive(30)
    with pytest.raises(DonorLost):
        for number in range(2):
            side.send(answer(number))
            side.receive(30)
    with pytest.raises(DonorLost, match=r"this side closed the conversation.*somebody else"):
        joiner.receive(0)


def test_close_frees_a_receive_that_waits(donor: Donor) -> None:
    joiner = dial([donor.server.address], PLAIN, run_id="run")
    ended: list[str] = []

    def wait() -> None:
        with pytest.raises(DonorLost) as caught:
            joiner.receive(None)
        ended.append(str(caught.value))

    waiter = threading.Thread(target=wait)
    waiter.start()
    joiner.close("changed my mind")
    waiter.join(30)
    assert "changed my mind" in ended[0]


def test_the_end_of_the_server_ends_its_conversations_and_threads() -> None:
    donor = Donor()
    donor.server.start()
    joiner = dial([donor.server.address], PLAIN, run_id="run")
    side = donor.next()
    donor.server.close()
    donor.server.close()
    with pytest.raises(DonorLost, match="the donor is closing"):
        joiner.receive(30)
    with pytest.raises(DonorLost):
        side.receive(30)
    joiner.close("")
    assert peer_threads() == []


def test_a_failing_owner_ends_only_its_own_conversation() -> None:
    calls: list[int] = []

    def fail_first(side: DonorConversation) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ArithmeticError("a defect of the donor")
        side.send(answer(7))

    with PeerServer("127.0.0.1", 0, fail_first, PLAIN) as server:
        first = dial([server.address], PLAIN)
        with pytest.raises(DonorLost, match="ArithmeticError: a defect of the donor"):
            first.receive(30)
        second = dial([server.address], PLAIN)
        assert second.receive(30) == answer(7)
        first.close("")
        second.close("")


def test_more_conversations_than_the_donor_holds_are_told_to_come_later() -> None:
    donor = Donor(max_conversations=2)
    with donor.server:
        held = [dial([donor.server.address], PLAIN, run_id="run") for _ in range(2)]
        for _ in held:
            donor.next()
        third = dial([donor.server.address], PLAIN, run_id="run")
        with pytest.raises(DonorBusy, match="already has 2 conversations"):
            third.receive(30)
        third.close("")
        held[0].close("makes room")
        # The slot is free once the donor's side has seen the end.
        while True:
            again = dial([donor.server.address], PLAIN, run_id="run")
            try:
                again.send(letter(1))
                if again.receive(0.05) is None:
                    break
            except DonorBusy:
                again.close("")
        assert donor.next().receive(30) == letter(1)
        again.close("")
        held[1].close("")


def test_a_side_that_does_not_read_is_given_up(donor: Donor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_module, "MAX_WAITING_LETTERS", 8)
    joiner = dial([donor.server.address], PLAIN, run_id="run")
    big = peer_pb2.JoinerLetter(goodbye=peer_pb2.JoinerGoodbye(reason="x" * 500_000))
    donor.next()
    with pytest.raises(DonorLost, match="does not read: 8 letters are unsent"):
        while True:
            joiner.send(big)
    joiner.close("")


def test_a_letter_over_the_cap_is_not_sent(donor: Donor) -> None:
    joiner = dial([donor.server.address], PLAIN, run_id="run")
    with pytest.raises(MisuseError, match="more than 2097152"):
        joiner.send(peer_pb2.JoinerLetter(goodbye=peer_pb2.JoinerGoodbye(reason="x" * (3 * MIB))))
    joiner.send(letter(1))
    assert donor.next().receive(30) == letter(1)
    joiner.close("")


def test_a_stranger_with_a_letter_over_the_cap_ends_his_stream_not_the_donor(donor: Donor) -> None:
    channel = grpc.insecure_channel(str(donor.server.address))
    huge = peer_pb2.JoinerLetter(goodbye=peer_pb2.JoinerGoodbye(reason="x" * (3 * MIB)))
    with pytest.raises(grpc.RpcError) as caught:
        list(peer_pb2_grpc.PeerServiceStub(channel).Converse(iter([huge]), timeout=30))
    assert status_code(caught.value) is not grpc.StatusCode.DEADLINE_EXCEEDED
    channel.close()
    with pytest.raises(DonorLost):
        donor.next().receive(30)
    assert probe(donor.server.address, PLAIN, run_id="run").receiver == DONOR


def test_letters_come_from_many_threads(donor: Donor) -> None:
    joiner = dial([donor.server.address], PLAIN, run_id="run")

    def send(base: int) -> None:
        for number in range(100):
            joiner.send(letter(base + number))

    threads = [threading.Thread(target=send, args=(base,)) for base in (0, 100, 200)]
    for thread in threads:
        thread.start()
    side = donor.next()
    got = []
    for _ in range(300):
        found = side.receive(30)
        assert found is not None
        got.append(found.pull.pulls[0].pull_id)
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(300))
    joiner.close("")


# Life


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_what_cannot_be_advertised_is_not_bound(host: str) -> None:
    with pytest.raises(BadConfiguration, match="name one interface"):
        PeerServer(host, 0, lambda side: None, SecurityConfig(insecure=True)).start()


def test_a_taken_port_is_named(donor: Donor) -> None:
    port = donor.server.address.port
    with pytest.raises(BadConfiguration, match=rf"cannot listen on 127\.0\.0\.1:{port}"):
        PeerServer("127.0.0.1", port, lambda side: None, PLAIN).start()


def test_life_is_start_and_close_once() -> None:
    server = PeerServer("127.0.0.1", 0, lambda side: None, PLAIN)
    with pytest.raises(MisuseError):
        _ = server.address
    server.start()
    with pytest.raises(MisuseError):
        server.start()
    server.close()
    with pytest.raises(MisuseError):
        server.start()
    never: Callable[[], None] = PeerServer("127.0.0.1", 0, lambda side: None, PLAIN).close
    never()
