"""A mailbox keeps order and capacity, and ends once: for those who wait to put as for those who wait to take."""

from __future__ import annotations

import threading

import pytest

from recovery.control.mailbox import Mailbox
from recovery.errors import DonorBusy, DonorLost


def test_letters_come_in_order_then_the_end() -> None:
    mailbox: Mailbox[int] = Mailbox(3)
    assert [mailbox.offer(number) for number in range(4)] == [True, True, True, False]
    mailbox.end(DonorLost("gone"))
    mailbox.end(DonorBusy("too late"))
    assert [mailbox.take(0) for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(DonorLost, match="gone"):
            mailbox.take(None)
    assert not mailbox.offer(1)
    assert not mailbox.put(1)
    assert str(mailbox.ended) == "gone"


def test_an_end_may_discard_what_was_not_taken() -> None:
    mailbox: Mailbox[int] = Mailbox(3)
    mailbox.offer(1)
    mailbox.end(DonorLost("gone"), discard=True)
    with pytest.raises(DonorLost):
        mailbox.take(0)


def test_nothing_in_time_is_none() -> None:
    assert Mailbox[int](1).take(0) is None
    assert Mailbox[int](1).take(0.01) is None


def test_the_end_frees_who_waits_for_room_and_who_waits_for_letters() -> None:
    full: Mailbox[int] = Mailbox(1)
    empty: Mailbox[int] = Mailbox(1)
    full.offer(0)
    results: list[object] = []
    started = threading.Barrier(3)

    def put() -> None:
        started.wait()
        results.append(full.put(1))

    def take() -> None:
        started.wait()
        with pytest.raises(DonorLost):
            empty.take(None)
        results.append("taken")

    threads = [threading.Thread(target=put), threading.Thread(target=take)]
    for thread in threads:
        thread.start()
    started.wait()
    full.end(DonorLost("gone"))
    empty.end(DonorLost("gone"))
    for thread in threads:
        thread.join()
    assert sorted(map(str, results)) == ["False", "taken"]


def test_room_lets_the_next_one_in() -> None:
    mailbox: Mailbox[int] = Mailbox(1)
    mailbox.offer(0)
    putter = threading.Thread(target=lambda: mailbox.put(1))
    putter.start()
    assert mailbox.take(None) == 0
    assert mailbox.take(None) == 1
    putter.join()
