"""Nouns travel there and back unchanged; what no sender makes is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.recovery.v1 import common_pb2
from recovery import errors
from recovery.control import wire
from recovery.control.wire import from_proto, to_proto
from recovery.errors import BadConfiguration, RecoveryError
from recovery.types import (
    NO_VERSION,
    Address,
    Cut,
    DigestAlgorithm,
    Incarnation,
    PartClass,
    Version,
    WorkerId,
    WorkerRef,
)

UINT64 = st.integers(0, 2**64 - 1)
IDS = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,50}", fullmatch=True)
VERSIONS = st.builds(Version, UINT64, UINT64)


def error_classes() -> list[type[RecoveryError]]:
    found, pending = [], [RecoveryError]
    while pending:
        kind = pending.pop()
        found.append(kind)
        pending.extend(kind.__subclasses__())
    return found


@given(VERSIONS, UINT64)
def test_versions_and_cuts_round_trip(version: Version, inner_step: int) -> None:
    assert from_proto(to_proto(version)) == version
    assert from_proto(to_proto(Cut(version, inner_step))) == Cut(version, inner_step)


def test_an_absent_version_is_no_version() -> None:
    assert from_proto(common_pb2.Version()) == NO_VERSION
    assert from_proto(common_pb2.Cut()) == Cut(NO_VERSION)


@given(IDS, IDS, st.integers(1, 2**16), st.data())
def test_worker_refs_round_trip(worker_id: str, incarnation: str, num_local_ranks: int, data: st.DataObject) -> None:
    local_rank = data.draw(st.integers(0, num_local_ranks - 1))
    ref = WorkerRef(WorkerId(worker_id), Incarnation(incarnation), local_rank, num_local_ranks)
    assert from_proto(to_proto(ref)) == ref


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "node-7.example.org"])
def test_addresses_round_trip(host: str) -> None:
    assert from_proto(to_proto(Address(host, 4711))) == Address(host, 4711)


@pytest.mark.parametrize(
    "message",
    [
        common_pb2.WorkerRef(worker_id="../etc", incarnation="i"),
        common_pb2.WorkerRef(worker_id="w", incarnation=""),
        common_pb2.WorkerRef(worker_id="w" * 201, incarnation="i"),
        common_pb2.WorkerRef(worker_id="w", incarnation="i", local_rank=2, num_local_ranks=2),
        common_pb2.Address(host="", port=1),
        common_pb2.Address(host="h", port=0),
        common_pb2.Address(host="h", port=65536),
        common_pb2.Address(host="h" * 256, port=1),
    ],
)
def test_what_no_sender_makes_is_refused(message: common_pb2.WorkerRef | common_pb2.Address) -> None:
    with pytest.raises(BadConfiguration):
        from_proto(message)


def test_enumerations_round_trip_and_unknown_numbers_are_refused() -> None:
    for part_class in PartClass:
        assert wire.part_class(to_proto(part_class)) is part_class
    for algorithm in DigestAlgorithm:
        assert wire.digest_algorithm(to_proto(algorithm)) is algorithm
    for number in (0, 99, -1):
        with pytest.raises(BadConfiguration, match=str(number)):
            wire.part_class(number)
        with pytest.raises(BadConfiguration, match=str(number)):
            wire.digest_algorithm(number)


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_every_error_comes_back_as_itself(kind: type[RecoveryError]) -> None:
    back = from_proto(to_proto(kind("worker w1: no room")))
    assert type(back) is kind
    assert str(back) == "worker w1: no room"


def test_every_branch_of_the_tree_has_its_next_action() -> None:
    assert to_proto(errors.DonorBusy("x")).next_action == common_pb2.NEXT_ACTION_SAME_DONOR
    assert to_proto(errors.DonorLost("x")).next_action == common_pb2.NEXT_ACTION_OTHER_DONOR
    assert to_proto(errors.NoDonorLeft("x")).next_action == common_pb2.NEXT_ACTION_NEXT_SOURCE
    assert to_proto(errors.LayoutMismatch("x")).next_action == common_pb2.NEXT_ACTION_STOP
    assert to_proto(errors.EpochAborted("x")).next_action == common_pb2.NEXT_ACTION_UNSPECIFIED


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (common_pb2.NEXT_ACTION_SAME_DONOR, errors.RetrySameDonor),
        (common_pb2.NEXT_ACTION_OTHER_DONOR, errors.TryOtherDonor),
        (common_pb2.NEXT_ACTION_NEXT_SOURCE, errors.TryNextSource),
        (common_pb2.NEXT_ACTION_STOP, errors.Stop),
        (common_pb2.NEXT_ACTION_UNSPECIFIED, RecoveryError),
    ],
)
def test_an_error_of_a_newer_release_still_says_what_to_do(
    action: common_pb2.NextAction.ValueType, expected: type[RecoveryError]
) -> None:
    back = from_proto(common_pb2.Failure(next_action=action, kind="InventedLater", message="m"))
    assert type(back) is expected


@given(st.text(max_size=3000))
def test_a_long_message_is_cut_to_what_a_trailer_carries(text: str) -> None:
    message = to_proto(errors.Stop(text * 10)).message
    assert len(message.encode()) <= wire.MAX_FAILURE_MESSAGE_BYTES
    if len((text * 10).encode()) <= wire.MAX_FAILURE_MESSAGE_BYTES:
        assert message == text * 10


@given(st.integers(0, 10**15))
def test_durations_keep_nanoseconds(nanos: int) -> None:
    message = wire.duration(nanos / 1e9)
    assert abs(wire.seconds(message) - nanos / 1e9) <= 1e-9
    assert 0 <= message.nanos < 10**9


def test_timestamps_are_utc_seconds() -> None:
    assert wire.timestamp(1.5).ToNanoseconds() == 1_500_000_000


def test_what_has_no_form_is_a_mistake_of_the_program() -> None:
    with pytest.raises(TypeError, match="Duration"):
        from_proto(wire.duration(1.0))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="int"):
        to_proto(7)  # type: ignore[call-overload]
