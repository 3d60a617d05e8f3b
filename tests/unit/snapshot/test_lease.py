"""The book of leases: deadlines, grace, taking up again."""

from __future__ import annotations

import pytest

from recovery.clock import ManualClock
from recovery.errors import DonorRefused, MisuseError
from recovery.snapshot.lease import LeaseBook, LeaseRecord


class Fixture:
    def __init__(self, grace_seconds: float = 5.0) -> None:
        self.clock = ManualClock()
        self.ended: list[tuple[str, str]] = []
        self.times_empty = 0
        self.book = LeaseBook(
            [3, 1],
            self.clock,
            deadline_seconds=10.0,
            grace_seconds=grace_seconds,
            on_ended=self._note,
            on_empty=self._emptied,
        )

    def _note(self, record: LeaseRecord, reason: str) -> None:
        self.ended.append((record.holder, reason))

    def _emptied(self) -> None:
        self.times_empty += 1


def test_a_silent_holder_loses_its_lease_by_the_deadline() -> None:
    f = Fixture()
    silent = f.book.take("silent", until_boundary=False)
    busy = f.book.take("busy", until_boundary=False)
    f.clock.advance(9.9)
    f.book.use(busy, busy.generation)
    f.book.expire()
    assert len(f.book) == 2
    f.clock.advance(0.1)
    f.book.expire()
    assert [holder for holder, _ in f.ended] == ["silent"]
    assert "10 s" in f.ended[0][1]
    with pytest.raises(DonorRefused, match=r"silent ended: .*nothing for 10 s"):
        f.book.use(silent, silent.generation)
    assert f.times_empty == 0
    f.clock.advance(10)
    f.book.expire()
    assert f.times_empty == 1
    assert not f.book.records()


def test_a_lost_holder_takes_its_lease_up_again_with_what_it_acknowledged() -> None:
    f = Fixture()
    old = f.book.take("joiner", until_boundary=False)
    first = old.generation
    f.book.acknowledge(old, 0, 2)
    f.book.release(old, first, "stream lost", grace=True)
    f.clock.advance(4.9)
    f.book.expire()
    assert f.book.holds("joiner")
    again = f.book.take("joiner", until_boundary=False)
    assert again is old
    assert bytes(again.acknowledged[0]) == b"\0\0\1"
    with pytest.raises(DonorRefused, match="took its lease up again"):
        f.book.use(again, first)
    f.book.release(again, first, "the old stream's end is noticed late", grace=False)
    assert f.book.holds("joiner"), "only the present holder can give it up"
    f.clock.advance(9.9)
    f.book.expire()
    assert f.book.holds("joiner"), "no longer in grace"
    f.book.release(again, again.generation, "done", grace=False)
    f.book.release(again, again.generation, "done", grace=False)
    assert f.ended == [("joiner", "done")]
    assert f.times_empty == 1


def test_grace_ends() -> None:
    f = Fixture()
    record = f.book.take("joiner", until_boundary=False)
    record.on_closed.append(lambda: None)
    f.book.release(record, record.generation, "stream lost", grace=True)
    assert record.on_closed == [], "nobody is there to be told"
    f.clock.advance(5.0)
    f.book.expire()
    assert f.ended == [("joiner", "its holder was lost and did not come back in 5 s")]


def test_without_grace_a_lost_holder_is_gone_at_once() -> None:
    f = Fixture(grace_seconds=0.0)
    record = f.book.take("joiner", until_boundary=False)
    f.book.release(record, record.generation, "stream lost", grace=True)
    assert f.ended == [("joiner", "stream lost")]


def test_a_new_lease_of_the_same_holder_begins_without_acknowledgements() -> None:
    f = Fixture()
    record = f.book.take("joiner", until_boundary=False)
    f.book.acknowledge(record, 1, 0)
    f.book.end_all("closing")
    fresh = f.book.take("joiner", until_boundary=False)
    assert fresh is not record
    assert not any(fresh.acknowledged[1])


@pytest.mark.parametrize("place", [(2, 0), (-1, 0), (0, 3), (1, 1), (0, -1)])
def test_acknowledging_what_is_not_there_is_refused(place: tuple[int, int]) -> None:
    f = Fixture()
    record = f.book.take("joiner", until_boundary=False)
    with pytest.raises(MisuseError, match="does not exist"):
        f.book.acknowledge(record, *place)
