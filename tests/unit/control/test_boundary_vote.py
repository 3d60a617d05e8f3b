"""The decisions of a boundary as pure functions: tables, and properties over random votes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.control.boundary_vote import Ending, gather_verdict, member_deadline, seal_verdict, tally
from recovery.control.record import Voter

A, B, C = ("a", "1"), ("b", "1"), ("c", "1")
ALL = (A, B, C)


@pytest.mark.parametrize(
    ("live", "votes", "minimum", "ending"),
    [
        (ALL, {}, 1, Ending.UNDECIDED),
        (ALL, {A: b"x", B: b"x"}, 1, Ending.UNDECIDED),
        (ALL, {A: b"x", B: b"x", C: b"x"}, 1, Ending.COMMIT),
        ((A, B), {A: b"x", B: b"x"}, 1, Ending.COMMIT),
        ((A, B), {A: b"x", B: b"x", C: b"x"}, 3, Ending.COMMIT),
        ((A, B), {A: b"x", B: b"x"}, 3, Ending.ABORT),
        ((A, B), {A: b"x"}, 1, Ending.ABORT),
        ((A, B), {A: b"x", C: b"x"}, 1, Ending.UNDECIDED),
        ((), {A: b"x"}, 1, Ending.UNDECIDED),
        ((), {}, 1, Ending.ABORT),
        (ALL, {A: b"x", B: b"x", C: b"y"}, 1, Ending.COMMIT),
        (ALL, {A: b"x", B: b"y", C: b"z"}, 1, Ending.TIE),
        ((A, B), {A: b"x", B: b"y"}, 1, Ending.TIE),
    ],
)
def test_how_an_epoch_ends(live: tuple[Voter, ...], votes: dict[Voter, bytes], minimum: int, ending: Ending) -> None:
    assert tally(ALL, live, votes, minimum).ending is ending


def test_a_minority_is_named() -> None:
    result = tally(ALL, ALL, {A: b"x", B: b"x", C: b"y"}, 1)
    assert (result.digest, result.voters, result.excluded) == (b"x", (A, B), (C,))


votes_of_three = st.dictionaries(st.sampled_from(ALL), st.sampled_from([b"x", b"y"]))


@given(st.sets(st.sampled_from(ALL)), votes_of_three, st.integers(1, 4))
def test_a_commit_has_a_strict_majority_of_votes_and_no_live_member_missing(
    live: set[Voter], votes: dict[Voter, bytes], minimum: int
) -> None:
    result = tally(ALL, live, votes, minimum)
    if result.ending is Ending.COMMIT:
        assert live <= votes.keys()
        assert len(result.voters) >= minimum
        assert 2 * len(result.voters) > len(votes)
        assert {votes[voter] for voter in result.voters} == {result.digest}
        assert live & votes.keys(), "somebody lives who can apply it"


@given(st.sets(st.sampled_from(ALL)), votes_of_three, st.integers(1, 4), st.sampled_from(ALL))
def test_a_decided_epoch_stays_decided_when_a_voter_dies(
    live: set[Voter], votes: dict[Voter, bytes], minimum: int, dying: Voter
) -> None:
    before = tally(ALL, live, votes, minimum)
    after = tally(ALL, live - {dying}, votes, minimum)
    if before.ending is Ending.COMMIT and live & votes.keys() - {dying}:
        assert (after.ending, after.digest) == (Ending.COMMIT, before.digest)


@pytest.mark.parametrize(
    ("remaining", "until"),
    [(None, 130.0), (0.0, 101.0), (10.0, 115.0), (100.0, 130.0)],
)
def test_waits_follow_the_announced_progress(remaining: float | None, until: float) -> None:
    assert member_deadline(100.0, remaining_seconds=remaining, factor=1.5, min_wait=1.0, max_wait=30.0) == until


def test_a_gathering_ends_when_all_are_there_or_the_time_is_over() -> None:
    def verdict(arrived: set[str], now: float, minimum: int = 1) -> tuple[bool, float | None]:
        found = gather_verdict(arrived, {"b": 110.0, "c": 120.0}, (), 0.0, minimum, now)
        return found.close, found.until

    assert verdict({"a"}, 100.0) == (False, 120.0)
    assert verdict({"a", "c"}, 100.0) == (False, 110.0)
    assert verdict({"a", "b", "c"}, 100.0) == (True, None)
    assert verdict({"a"}, 120.0) == (True, None)
    assert verdict({"a"}, 120.0, minimum=2) == (False, None), "too few: for ever"
    assert verdict(set(), 120.0) == (False, None), "never without anybody"


def test_members_that_a_restarted_coordinator_has_not_seen_are_waited_for() -> None:
    assert not gather_verdict({"a"}, {}, ("b",), 106.0, 1, 100.0).close
    assert gather_verdict({"a"}, {}, ("b",), 106.0, 1, 106.0).close
    assert gather_verdict({"a", "b"}, {}, ("b",), 106.0, 1, 100.0).close


@pytest.mark.parametrize(
    ("reports", "outstanding", "enough", "fingerprint", "tie"),
    [
        ({}, {"a"}, True, b"", False),
        ({"a": b"x"}, set(), False, b"x", False),
        ({"a": b"x"}, {"b"}, False, b"", False),
        ({"a": b"x"}, {"b"}, True, b"x", False),
        ({"a": b"x", "b": b"x"}, {"c"}, False, b"x", False),
        ({"a": b"x", "b": b"y"}, {"c"}, False, b"", False),
        ({"a": b"x", "b": b"y"}, {"c"}, True, b"", True),
        ({"a": b"x", "b": b"y"}, set(), False, b"", True),
        ({"a": b"x", "b": b"y", "c": b"y"}, set(), False, b"y", False),
    ],
)
def test_what_a_version_is(
    reports: dict[str, bytes], outstanding: set[str], enough: bool, fingerprint: bytes, tie: bool
) -> None:
    found = seal_verdict(reports, outstanding, enough)
    assert (found.fingerprint, bool(found.tie)) == (fingerprint, tie)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([b"x", b"y"])), st.sets(st.sampled_from("efg"), max_size=3)
)
def test_a_seal_cannot_be_overturned_by_those_who_have_not_reported(
    reports: dict[str, bytes], outstanding: set[str]
) -> None:
    found = seal_verdict(reports, outstanding, False)
    if found.fingerprint:
        for other in (b"x", b"y"):
            later = seal_verdict(reports | dict.fromkeys(outstanding, other), set(), False)
            assert later.fingerprint == found.fingerprint
