"""Keys and values of a link's two ends as letters: who sees what, when a wait ends, what is refused."""

from __future__ import annotations

import socket
import threading

import pytest

from protos.recovery.v1.peer_pb2 import Meeting
from recovery.errors import DonorRefused, MisuseError, PeerUnreachable
from recovery.protocol.meeting import MeetingPoint
from recovery.transport.process_group import DONOR_RANK, JOINER_RANK, GlooLink, open_gloo_link
from recovery.types import KIB

LONG_SECONDS = 60.0


def pair() -> tuple[MeetingPoint, MeetingPoint]:
    def tell_far(letter: Meeting) -> None:
        far.heard(letter)

    near = MeetingPoint(tell_far)
    far = MeetingPoint(near.heard)
    return near, far


def has_address(host: str) -> bool:
    """Return whether this machine has it: some have no IPv6."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        try:
            trial.bind((host, 0))
        except OSError:
            return False
    return True


def test_what_one_end_sets_both_have() -> None:
    near, far = pair()
    near.set("s", "a", b"1")
    assert near.get("s", ["a"], 0.001) == far.get("s", ["a"], 0.001) == [b"1"]
    assert far.exists("s", ["a"])
    assert not far.exists("s", ["a", "b"])


def test_a_wait_ends_when_the_last_key_is_heard() -> None:
    near, far = pair()
    found: list[list[bytes]] = []
    waiter = threading.Thread(target=lambda: found.append(far.get("s", ["a", "b"], LONG_SECONDS)))
    waiter.start()
    near.set("s", "b", b"2")
    near.set("s", "a", b"1")
    waiter.join(LONG_SECONDS)
    assert found == [[b"1", b"2"]]


def test_a_wait_for_a_key_that_nobody_sets_names_it() -> None:
    with pytest.raises(PeerUnreachable, match="'s' has not set b"):
        pair()[0].wait("s", ["b"], 0.01)


def test_the_conversations_end_ends_every_wait() -> None:
    near, _ = pair()
    errors: list[str] = []

    def wait() -> None:
        try:
            near.wait("s", ["a"], LONG_SECONDS)
        except PeerUnreachable as error:
            errors.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    near.end("the donor left")
    near.end("again")
    waiter.join(LONG_SECONDS)
    assert errors == ["the other end of 's' left: the donor left"]


@pytest.mark.parametrize(
    "letters",
    [
        [Meeting(key="a", value=bytes(64 * KIB + 1))],
        [Meeting(key="a" * 257, value=b"")],
        [Meeting(key=str(number), value=b"") for number in range(1025)],
        [Meeting(key=str(number), value=bytes(64 * KIB)) for number in range(17)],
    ],
    ids=["long value", "long key", "many keys", "many bytes"],
)
def test_an_end_that_sets_more_than_any_link_has_to_tell_is_refused(letters: list[Meeting]) -> None:
    near, _ = pair()
    with pytest.raises(DonorRefused):
        for letter in letters:
            near.heard(letter)


def test_a_value_that_is_set_again_counts_once() -> None:
    near, _ = pair()
    for number in range(100):
        near.heard(Meeting(key="a", value=bytes(64 * KIB - number)))
    assert len(near.get("s", ["a"], 0.001)[0]) == 64 * KIB - 99


def test_nothing_is_decided_between_two() -> None:
    near, _ = pair()
    for call in (
        lambda: near.add("s", "a", 1),
        lambda: near.compare_set("s", "a", b"", b"1"),
        lambda: near.delete("s", "a"),
    ):
        with pytest.raises(MisuseError):
            call()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_link_needs_nobody_else(host: str) -> None:
    if not has_address(host):
        pytest.skip(f"this machine has no {host}")
    near, far = pair()
    links: list[GlooLink] = []

    def open_end(point: MeetingPoint, rank: int) -> None:
        links.append(open_gloo_link(point, "s", rank=rank, host=host, lanes=2, timeout_seconds=LONG_SECONDS))

    threads = [threading.Thread(target=open_end, args=each) for each in ((near, DONOR_RANK), (far, JOINER_RANK))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_SECONDS)
    assert [len(link.endpoints()) for link in links] == [2, 2]
    for link in links:
        link.close()
