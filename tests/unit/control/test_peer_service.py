"""Conversations and probes between two workers over real sockets: letters, ends with reasons, addresses."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest

from protos.recovery.v1 import peer_pb2, peer_pb2_grpc
from recovery.control import conversation as conversation_module
from recovery.control.peer_client import dial, dial_at_once
from recovery.control.peer_probe import probe, probe_any
from recovery.control.peer_service import DonorConversation, PeerServer
from recovery.control.rpc_errors import status_code
from recovery.control.security import SecurityConfig
from recovery.errors import BadConfiguration, DonorBusy, DonorLost, MisuseError, PeerUnreachable, RunRefused
from recovery.types import MIB, Address, Incarnation, WorkerId, WorkerRef

PLAIN = SecurityConfig()
DONOR = WorkerRef(WorkerId("w1"), Incarnation("i1"))
JOINER = WorkerRef(WorkerId("w2"), Incarnation("i2"))


def letter(pull_id: int) -> peer_pb2.JoinerLetter:
    return peer_pb2.JoinerLetter(pull=peer_pb2.PullBatch(pulls=[peer_pb2.Pull(pull_id=pull_id)]))


def answer(lanes: int) -> peer_pb2.DonorLetter:
    return peer_pb2.DonorLetter(opened=peer_pb2.Opened(lanes=lanes))


class Donor:
    """A peer server whose conversations a test takes out and plays by hand."""

    def __init__(self, worker: WorkerRef = DONOR, **options: object) -> None:
        self.conversations: queue.SimpleQueue[DonorConversation] = queue.SimpleQueue()
        self.server = PeerServer("127.0.0.1", 0, self.conversations.put, PLAIN, worker=worker, run_id="run", **options)  # type: ignore[arg-type]

    def next(self) -> DonorConversation:
        return self.conversations.get(timeout=30)


@pytest.fixture
def donor() -> Iterator[Donor]:
    found = Donor()
    with found.server:
        yield found


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def peer_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("donor-", "peer-server"))]


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


# Addresses


def test_the_first_address_that_answers_is_taken(donor: Donor) -> None:
    dead = Address("127.0.0.1", closed_port())
    found = probe_any([dead, donor.server.address], PLAIN, run_id="run", expected=DONOR)
    assert found.address == donor.server.address
    assert found.receiver == DONOR


def test_an_ipv6_address_works_like_any_other() -> None:
    with socket.socket(socket.AF_INET6) as check:
        try:
            check.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
    with PeerServer("::1", 0, lambda side: side.send(answer(6)), PLAIN) as server:
        assert str(server.address).startswith("[::1]:")
        joiner = dial([server.address], PLAIN)
        assert joiner.receive(30) == answer(6)
        joiner.close("")


def test_every_address_that_fails_is_named_with_its_reason(donor: Donor) -> None:
    """As reported in GradientHQ/parallax#286."""
    dead = Address("127.0.0.1", closed_port())
    beyond = Address("192.0.2.1", 4711)
    with pytest.raises(PeerUnreachable) as caught:
        dial([dead, beyond], PLAIN, run_id="run", expected=DONOR)
    assert str(caught.value).startswith("w1 cannot be reached: ")
    assert f"{dead}: connection refused" in str(caught.value)
    assert "192.0.2.1:4711" in str(caught.value)
    assert "--insecure" in str(caught.value)
    with pytest.raises(PeerUnreachable, match="gave no address"):
        dial([], PLAIN)


def test_an_address_that_swallows_everything_costs_its_time_and_no_more(donor: Donor) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        swallowing = Address(*silent.getsockname())
        joiner = dial([swallowing, donor.server.address], PLAIN, run_id="run", timeout_seconds=0.3)
        assert donor.next() is not None
        joiner.close("")


def test_loopback_is_refused_for_a_peer_on_another_machine(donor: Donor) -> None:
    with pytest.raises(PeerUnreachable, match="is loopback, and the peer is on another machine"):
        dial([donor.server.address], PLAIN, run_id="run", peer_is_remote=True)


def test_an_address_that_passed_to_another_process_is_not_taken(donor: Donor) -> None:
    restarted = WorkerRef(DONOR.worker_id, Incarnation("i0"))
    with pytest.raises(PeerUnreachable, match="another incarnation"):
        dial([donor.server.address], PLAIN, run_id="run", expected=restarted)


def test_a_peer_of_another_run_is_refused(donor: Donor) -> None:
    with pytest.raises(RunRefused, match="belongs to run 'run', the probe to run 'other'"):
        dial([donor.server.address], PLAIN, run_id="other")


# Probes


@pytest.mark.parametrize("payload_bytes", [0, 1, MIB])
def test_a_probe_measures(donor: Donor, payload_bytes: int) -> None:
    found = probe(donor.server.address, PLAIN, run_id="run", sender=JOINER, payload_bytes=payload_bytes)
    assert found.round_trip_seconds > 0
    assert (found.bytes_per_second > 0) == (payload_bytes > 0)


def test_a_probe_over_its_cap_is_refused_on_both_sides(donor: Donor) -> None:
    with pytest.raises(BadConfiguration, match="1048577"):
        probe(donor.server.address, PLAIN, payload_bytes=MIB + 1)


def test_a_path_that_works_both_ways_is_proved(donor: Donor) -> None:
    own = Donor(JOINER)
    with own.server:
        back = [Address("127.0.0.1", closed_port()), own.server.address]
        assert probe(donor.server.address, PLAIN, run_id="run", sender=JOINER, dial_back=back).receiver == DONOR


def test_a_way_back_to_somebody_else_is_none(donor: Donor) -> None:
    """What the joiner calls its own address (loopback, for one) may be another worker's at the donor's end."""
    with pytest.raises(PeerUnreachable, match=r"one-way path.*is worker w1 .*not w2"):
        probe(donor.server.address, PLAIN, run_id="run", sender=JOINER, dial_back=[donor.server.address])


def test_dialling_at_once_needs_no_answer_before_the_first_letter(donor: Donor) -> None:
    own = Donor(JOINER)
    with own.server:
        joiner = dial_at_once(
            [donor.server.address], PLAIN, run_id="run", sender=JOINER, expected=DONOR, dial_back=[own.server.address]
        )
        assert joiner.round_trip_seconds is not None
        assert joiner.round_trip_seconds < 1.0
        joiner.send(letter(1))
        other_end = donor.next()
        assert other_end.receive(30) == letter(1)
        other_end.send(answer(2))
        assert joiner.receive(30) == answer(2)
        joiner.close("done")


@pytest.mark.parametrize("wrong", ["worker", "run", "way back", "nobody"])
def test_what_was_dialled_at_once_ends_if_it_is_not_what_was_meant(donor: Donor, wrong: str) -> None:
    dead = Address("127.0.0.1", closed_port())
    joiner = dial_at_once(
        [dead if wrong == "nobody" else donor.server.address],
        PLAIN,
        run_id="other" if wrong == "run" else "run",
        sender=JOINER,
        expected=JOINER if wrong == "worker" else DONOR,
        dial_back=[dead] if wrong == "way back" else (),
    )
    said = {
        "worker": (PeerUnreachable, "is worker w1 of another incarnation or name, not w2"),
        "run": (RunRefused, "belongs to run 'run'"),
        "way back": (PeerUnreachable, f"one-way path: w2 reaches the peer at .*{dead}: connection refused"),
        "nobody": (DonorLost, "connection refused"),
    }
    error, text = said[wrong]
    with pytest.raises(error, match=text):
        while True:
            joiner.receive(30)
    joiner.close("done")


def test_of_several_addresses_the_first_to_answer_is_taken(donor: Donor) -> None:
    """One that leads nowhere is not waited for, whatever its place."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes connections and says nothing
        nowhere = Address("127.0.0.1", silent.getsockname()[1])
        found = probe_any([nowhere, donor.server.address], PLAIN, run_id="run", expected=DONOR, timeout_seconds=100)
    assert found.address == donor.server.address


def test_a_donor_is_dialled_over_ipv6() -> None:
    with socket.socket(socket.AF_INET6) as check:
        try:
            check.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
    conversations: queue.SimpleQueue[DonorConversation] = queue.SimpleQueue()
    with PeerServer("::1", 0, conversations.put, PLAIN, worker=DONOR, run_id="run") as server:
        dead = Address("127.0.0.1", closed_port())
        for addresses in ([server.address], [dead, server.address]):
            joiner = dial_at_once(addresses, PLAIN, run_id="run", sender=JOINER, expected=DONOR)
            assert joiner.round_trip_seconds is not None
            joiner.send(letter(1))
            assert conversations.get(timeout=30).receive(30) == letter(1)
            joiner.close("done")


def test_a_one_way_path_is_named(donor: Donor) -> None:
    dead = Address("127.0.0.1", closed_port())
    with pytest.raises(PeerUnreachable) as caught:
        probe(donor.server.address, PLAIN, run_id="run", sender=JOINER, dial_back=[dead])
    assert str(caught.value).startswith(f"one-way path: w2 reaches the peer at {donor.server.address}, but not the")
    assert f"{dead}: connection refused" in str(caught.value)


def test_a_probe_that_asks_for_too_many_ways_back_is_refused(donor: Donor) -> None:
    back = [Address("127.0.0.1", 1)] * 9
    with pytest.raises(BadConfiguration, match="8 addresses"):
        probe(donor.server.address, PLAIN, run_id="run", dial_back=back)


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
