"""How a peer is found: addresses one after the other, dialling at once, probes that measure and prove a path."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator

import pytest

from recovery.control.peer_client import dial, dial_at_once
from recovery.control.peer_probe import probe, probe_any
from recovery.control.peer_service import DonorConversation, PeerServer
from recovery.errors import BadConfiguration, DonorLost, PeerUnreachable, RunRefused
from recovery.types import MIB, Address, Incarnation, WorkerRef
from tests.unit.control.peers import DONOR, JOINER, PLAIN, Donor, answer, closed_port, letter


@pytest.fixture
def donor() -> Iterator[Donor]:
    found = Donor()
    with found.server:
        yield found


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
