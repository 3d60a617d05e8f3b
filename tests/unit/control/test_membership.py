"""What a worker's state is to the run: a table, and properties over random states (pytorch/torchtitan#834)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.recovery.v1 import coordinator_pb2
from recovery.control.membership import Member, Standing, is_foreign, placed, refusal
from recovery.control.policy import RunPolicy
from recovery.control.record import (
    COMMITTED,
    EpochClosed,
    EpochOpened,
    HistoryRecord,
    LineageBegun,
    RunSettled,
    VersionSealed,
)
from recovery.errors import LayoutMismatch, RunRefused
from recovery.types import NO_VERSION, Incarnation, Version, WorkerId, WorkerRef

GOOD, BAD = b"good", b"bad"


def record_at(lineage: int, step: int, *, unsealed: bool = False) -> HistoryRecord:
    record = HistoryRecord("run")
    for number in range(1, lineage + 1):
        record.apply(LineageBegun(Version(number, 0), "origin", NO_VERSION, 0, "a", "i", 0.0))
        record.apply(VersionSealed(Version(number, 0), GOOD))
    record.apply(VersionSealed(Version(lineage, step), GOOD))
    if unsealed:
        record.apply(EpochOpened(9, Version(lineage, step), (("a", "i"), ("b", "i"))))
        record.apply(EpochClosed(9, COMMITTED, Version(lineage, step + 1), b"d", (("a", "i"),), ""))
    return record


def member(name: str, held: Version = NO_VERSION, fingerprint: bytes = GOOD, *, poisoned: bool = False) -> Member:
    ref = WorkerRef(WorkerId(name), Incarnation("i"))
    made = Member(ref, coordinator_pb2.Hello(), 0.0, held=held, fingerprint=fingerprint if held != NO_VERSION else b"")
    made.poisoned_in_a_row = 2 * poisoned
    return made


@pytest.mark.parametrize(
    ("held", "fingerprint", "standing", "why"),
    [
        (NO_VERSION, b"", Standing.QUEUED, "fresh"),
        (Version(2, 5), GOOD, Standing.READY, ""),
        (Version(2, 5), BAD, Standing.QUEUED, "diverged"),
        (Version(2, 5), b"", Standing.APPLYING, ""),
        (Version(2, 4), GOOD, Standing.QUEUED, "behind"),
        (Version(1, 99), GOOD, Standing.QUEUED, "behind"),
        (Version(2, 6), GOOD, Standing.FOREIGN, ""),
        (Version(3, 0), GOOD, Standing.FOREIGN, ""),
    ],
)
def test_standing_beside_a_sealed_history(held: Version, fingerprint: bytes, standing: Standing, why: str) -> None:
    found = placed(record_at(2, 5), member("x", held, fingerprint), beginning=None)
    assert found == (standing, why)


def test_standing_beside_an_unsealed_commit() -> None:
    record = record_at(1, 5, unsealed=True)
    before, after = Version(1, 5), Version(1, 6)

    def standing(who: Member) -> Standing:
        return placed(record, who, beginning=None)[0]

    assert standing(member("a", after)) is Standing.APPLIED
    assert standing(member("a", after, b"")) is Standing.APPLYING, "its digest pass goes on"
    assert standing(member("a", before)) is Standing.APPLYING
    assert standing(member("b", before)) is Standing.QUEUED, "its vote is not part of the commit"


def test_a_joiner_whose_first_transfer_is_not_whole_is_fresh_and_not_diverged() -> None:
    assert placed(record_at(1, 5), member("j", poisoned=True), beginning=None) == (Standing.QUEUED, "fresh")


def test_a_poisoned_worker_is_never_ready() -> None:
    found = placed(record_at(1, 5), member("x", Version(1, 5), poisoned=True), beginning=None)
    assert found == (Standing.QUEUED, "diverged")


def test_while_a_lineage_begins_nobody_is_ready() -> None:
    record = record_at(1, 5)
    holder = member("x", Version(1, 5))
    assert placed(record, holder, beginning=("y", "i")) == (Standing.QUEUED, "behind")
    assert placed(record, holder, beginning=("x", "i")) == (Standing.ORIGIN, "")


def test_without_history_a_state_is_foreign_unless_this_process_was_told_to_begin_it() -> None:
    record = HistoryRecord("run")
    assert is_foreign(record, Version(1, 0), ("a", "i"))
    record.apply(LineageBegun(Version(1, 0), "origin", NO_VERSION, 0, "a", "i", 0.0))
    assert not is_foreign(record, Version(1, 0), ("a", "i"))
    assert is_foreign(record, Version(1, 0), ("a", "another life"))
    assert is_foreign(record, Version(1, 1), ("a", "i"))
    assert not is_foreign(record, NO_VERSION, ("b", "i"))


versions = st.builds(Version, st.integers(0, 4), st.integers(0, 8)).map(lambda v: v if v.lineage else NO_VERSION)


@given(versions, st.sampled_from([GOOD, BAD, b""]), st.integers(1, 3), st.integers(0, 6), st.booleans())
def test_only_the_committed_version_with_its_fingerprint_gives_authority(
    held: Version, fingerprint: bytes, lineage: int, step: int, unsealed: bool
) -> None:
    """As reported in learning-at-home/hivemind#415."""
    record = record_at(lineage, step, unsealed=unsealed)
    standing, why = placed(record, member("x", held, fingerprint), beginning=None)
    if standing is Standing.READY:
        assert (held, fingerprint) == (record.sealed, GOOD)
        assert not unsealed
    if standing is Standing.APPLIED:
        assert held == record.committed
        assert unsealed
    assert (standing is Standing.QUEUED) == bool(why)


def hello(**fields: object) -> coordinator_pb2.Hello:
    good: dict[str, object] = {
        "protocol": 1,
        "run_id": "run",
        "numerics_id": "torch-2.13.0/cpu/AVX2",
        "layout_digest": b"l" * 32,
        **fields,
    }
    made = coordinator_pb2.Hello(**good)  # type: ignore[arg-type]
    made.worker.worker_id = "w"
    return made


def settled() -> HistoryRecord:
    record = HistoryRecord("run")
    record.apply(RunSettled("torch-2.13.0/cpu/AVX2", b"l" * 32))
    return record


def test_a_member_like_the_first_is_not_refused() -> None:
    assert refusal(hello(), RunPolicy(run_id="run"), settled()) is None
    assert refusal(hello(numerics_id="other"), RunPolicy(run_id="run"), HistoryRecord("run")) is None
    assert refusal(hello(numerics_id="other"), RunPolicy(run_id="run", strict_numerics=False), settled()) is None


def test_each_refusal_names_the_thing_and_the_remedy() -> None:
    policy = RunPolicy(run_id="run")
    other = refusal(hello(numerics_id="torch-2.13.0/cpu/AVX512"), policy, settled())
    assert isinstance(other, RunRefused)
    assert "ATEN_CPU_CAPABILITY=avx2" in str(other)
    layout = refusal(hello(layout_digest=b"m" * 32), policy, settled())
    assert isinstance(layout, LayoutMismatch)
    assert b"m".hex() in str(layout)
    assert "'theirs'" in str(refusal(hello(run_id="theirs"), policy, settled()))
    assert "protocol 7" in str(refusal(hello(protocol=7), policy, settled()))
    ranked = hello()
    ranked.worker.local_rank = 1
    assert "local rank 0" in str(refusal(ranked, policy, settled()))
