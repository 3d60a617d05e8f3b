"""Which donors a joiner gets. Reports: PsycheFoundation/nousnet#593, #156; learning-at-home/hivemind#169, #415."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from recovery.control.matching import DonorView, JoinerView, Match, match


def donor(name: str, *, region: str = "", holds: bool = True, drained: bool = False, free: int = 1) -> DonorView:
    return DonorView(name, region, holds, drained, free)


def matched(
    joiner: JoinerView,
    *candidates: DonorView,
    rates: dict[tuple[str, str], float] | None = None,
    max_donors: int = 3,
    max_failures: int = 3,
) -> Match:
    return match(joiner, candidates, rates or {}, max_donors=max_donors, max_failures=max_failures)


J = JoinerView("j", "eu", {})


def test_measured_goes_before_unknown_before_failed() -> None:
    rates = {("j", "slow"): 1.0, ("j", "fast"): 9.0, ("j", "failed"): 99.0}
    joiner = JoinerView("j", "", {"failed": 1})
    found = matched(joiner, donor("failed"), donor("unknown"), donor("slow"), donor("fast"), rates=rates, max_donors=4)
    assert found.donors == ("fast", "slow", "unknown"), "one that failed is left out while others are there"
    assert matched(joiner, donor("failed")).donors == ("failed",), "and asked again when nobody else is"


def test_the_own_region_and_free_slots_break_ties() -> None:
    found = matched(J, donor("a", region="us"), donor("b", region="eu"), donor("c", region="eu", free=4))
    assert found.donors == ("c", "b", "a")


def test_only_holders_of_the_sealed_version_that_are_not_drained() -> None:
    assert matched(J, donor("old", holds=False), donor("good")).donors == ("good",)
    found = matched(J, donor("old", holds=False))
    assert found.expected
    assert "no live worker holds" in found.reason
    found = matched(J, donor("a", drained=True))
    assert found.expected
    assert found.reason == "every donor is drained: a"


def test_a_joiner_is_not_its_own_donor() -> None:
    assert not matched(J, donor("j")).donors


def test_full_donors_are_waited_for() -> None:
    found = matched(J, donor("a", free=0), donor("b", free=0))
    assert found.waits_for_slot
    assert found.expected
    assert "a, b" in found.reason


def test_one_budget_a_donor_and_the_end_only_when_all_are_exhausted() -> None:
    joiner = JoinerView("j", "", {"a": 3, "b": 3})
    assert matched(joiner, donor("a"), donor("b"), donor("c")).donors == ("c",)
    found = matched(joiner, donor("a"), donor("b"))
    assert not found.donors
    assert not found.expected
    assert found.reason == "every donor failed 3 times: a, b"


def test_a_wanted_donor_is_the_only_one() -> None:
    joiner = JoinerView("j", "", {}, wanted_donor="b")
    assert matched(joiner, donor("a"), donor("b")).donors == ("b",)
    assert "not attached" in matched(joiner, donor("a")).reason
    assert "does not hold" in matched(joiner, donor("a"), donor("b", holds=False)).reason


views = st.builds(
    DonorView,
    worker_id=st.sampled_from([f"w{i}" for i in range(6)]),
    region=st.sampled_from(["", "eu"]),
    holds_sealed=st.booleans(),
    drained=st.booleans(),
    free_slots=st.integers(-1, 3),
)


@given(
    st.lists(views, unique_by=lambda view: view.worker_id, max_size=6),
    st.dictionaries(st.sampled_from([f"w{i}" for i in range(6)]), st.integers(0, 4)),
    st.randoms(use_true_random=False),
)
def test_a_ticket_names_only_fit_donors_and_does_not_depend_on_order(
    candidates: list[DonorView], failures: dict[str, int], random: object
) -> None:
    joiner = JoinerView("w0", "eu", failures)
    found = matched(joiner, *candidates)
    by_name = {view.worker_id: view for view in candidates}
    for name in found.donors:
        view = by_name[name]
        assert name != "w0"
        assert view.holds_sealed
        assert not view.drained
        assert view.free_slots > 0
        assert failures.get(name, 0) < 3
    assert len(found.donors) <= 3
    assert bool(found.donors) != bool(found.reason)
    assert matched(joiner, *reversed(candidates)) == found
