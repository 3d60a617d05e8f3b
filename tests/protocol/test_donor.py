"""The donor's machine: what it lends, what it refuses, and that nothing a joiner says makes it do anything else."""

from __future__ import annotations

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.recovery.v1 import common_pb2, peer_pb2
from protos.recovery.v1.peer_pb2 import DonorLetter, JoinerLetter
from recovery.errors import BadConfiguration, DonorBusy, DonorLost, DonorRefused, LayoutMismatch
from recovery.protocol import donor_io as io
from recovery.protocol.donor import DonorConfig, DonorMachine
from recovery.protocol.letters import PROTOCOL, error_of, failure_message, version_message, worker_message
from recovery.protocol.planner import ChunkKey
from recovery.protocol.ports import OUTER, PRIVATE
from recovery.state.manifest import manifest_digest
from recovery.types import KIB, MIB
from tests.support.memory_donor import HOST, VERSION, MemorySnapshots, worker

SNAPSHOTS = MemorySnapshots(
    "d0", {"outer_params": {"w": torch.arange(2 * MIB, dtype=torch.int32)}}, {"inner": {"m": torch.ones(1000)}}
)
LEASE = SNAPSHOTS.lease_outer(VERSION, "j")


def open_letter(**fields: object) -> JoinerLetter:
    values: dict[str, object] = {
        "protocol": PROTOCOL,
        "run_id": "run",
        "transfer_id": "t1",
        "attempt": 1,
        "joiner": worker_message(worker("joiner")),
        "donor": worker_message(worker("d0")),
        "version": version_message(VERSION),
        "lanes": 2,
        "data_host": HOST,
        **fields,
    }
    return JoinerLetter(open=peer_pb2.Open(**values))  # type: ignore[arg-type]


def lent(role: peer_pb2.ManifestRole.ValueType = OUTER) -> io.Lent:
    lease = LEASE if role == OUTER else SNAPSHOTS.lease_private("j", VERSION).result()
    encoded = lease.manifest_bytes
    return io.Lent(role, lease.manifest, encoded, manifest_digest(encoded), False)


def serving(**config: object) -> DonorMachine:
    machine = DonorMachine(DonorConfig(data_host=HOST, **config), "scope")  # type: ignore[arg-type]
    machine.start(0.0)
    assert isinstance(machine.handle(io.Heard(open_letter()), 0.0)[0], io.Admit)
    machine.handle(lent(), 0.0)
    machine.handle(io.LinkOpened(), 0.0)
    return machine


def pull(
    pull_id: int = 1, *, offset: int = 0, num_bytes: int = 1000, part: int = 0, lane: int = 0, role: int = 1
) -> peer_pb2.Pull:
    return peer_pb2.Pull(
        pull_id=pull_id,
        role=peer_pb2.ManifestRole.ValueType(role),
        part=part,
        offset=offset,
        num_bytes=num_bytes,
        lane=lane,
    )


def ask(machine: DonorMachine, *pulls: peer_pb2.Pull, now: float = 0.0) -> list[io.DonorAction]:
    return machine.handle(io.Heard(JoinerLetter(pull=peer_pb2.PullBatch(pulls=pulls))), now)


def letters(actions: list[io.DonorAction]) -> list[DonorLetter]:
    return [action.letter for action in actions if isinstance(action, io.Say)]


def finish(actions: list[io.DonorAction]) -> io.Finish:
    (found,) = (action for action in actions if isinstance(action, io.Finish))
    return found


def test_it_opens_lends_and_sends_in_the_order_asked() -> None:
    machine = DonorMachine(DonorConfig(data_host=HOST), "scope")
    machine.start(0.0)
    (admit,) = machine.handle(io.Heard(open_letter(lanes=3)), 0.0)
    assert isinstance(admit, io.Admit)
    assert admit.version == VERSION
    actions = machine.handle(lent(), 0.0)
    opened, piece = letters(actions)
    assert (opened.opened.lanes, opened.opened.scope) == (3, "scope")
    assert piece.manifest.data == LEASE.manifest_bytes
    assert piece.manifest.last
    assert io.OpenLink("scope", 3) in actions
    # Asked before the link is there: sent when it is.
    assert ask(machine, pull(1, lane=2), pull(2, lane=0)) == []
    sends = machine.handle(io.LinkOpened(), 0.0)
    assert [(send.pull_id, send.lane, send.tag) for send in sends if isinstance(send, io.Send)] == [
        (1, 2, 5),
        (2, 0, 6),
    ]
    assert [type(action) for action in ask(machine, pull(3, lane=1))] == [io.Send]
    for number in (1, 2, 3):
        machine.handle(io.Sent(number), 0.0)
    assert machine.sent_bytes == 3000
    done = machine.handle(io.Heard(JoinerLetter(goodbye=peer_pb2.JoinerGoodbye(done=True))), 0.0)
    assert finish(done) == io.Finish()
    assert machine.handle(io.Tick(), 1e9) == []


@pytest.mark.parametrize(
    "letter",
    [
        JoinerLetter(pull=peer_pb2.PullBatch(pulls=[pull()])),
        JoinerLetter(goodbye=peer_pb2.JoinerGoodbye(done=True)),
        JoinerLetter(),
        open_letter(protocol=99),
    ],
    ids=["pull", "goodbye", "empty", "protocol"],
)
def test_whoever_does_not_open_properly_is_refused(letter: JoinerLetter) -> None:
    machine = DonorMachine(DonorConfig(data_host=HOST), "scope")
    machine.start(0.0)
    actions = machine.handle(io.Heard(letter), 0.0)
    assert letters(actions)[0].WhichOneof("kind") == "refused"
    assert finish(actions).error is not None


def test_a_refusal_says_why_and_when_to_come_again() -> None:
    machine = DonorMachine(DonorConfig(data_host=HOST), "scope")
    machine.handle(io.Heard(open_letter()), 0.0)
    actions = machine.handle(io.NotLent(OUTER, DonorBusy("no free slot", 2.5)), 0.0)
    refused = letters(actions)[0].refused
    error = error_of("d0", refused.failure, refused.retry_after.ToTimedelta().total_seconds())
    assert isinstance(error, DonorBusy)
    assert error.retry_after_seconds == 2.5
    assert "no free slot" in str(error)


@pytest.mark.parametrize(
    "wrong",
    [
        pull(0),
        pull(1, lane=2),
        pull(1, part=1),
        pull(1, num_bytes=0),
        pull(1, role=2),
        pull(1, role=0),
        pull(1, offset=4 * MIB - 10, num_bytes=20),
        pull(1, offset=8 * MIB),
        pull(1, offset=2**63, num_bytes=4),
        pull(1, num_bytes=2**32 - 1),
    ],
    ids=["id", "lane", "part", "empty", "not lent", "no role", "two chunks", "beyond", "far beyond", "huge"],
)
def test_a_pull_outside_of_what_is_lent_ends_the_conversation(wrong: peer_pb2.Pull) -> None:
    actions = ask(serving(), wrong)
    assert letters(actions)[0].goodbye.failure.kind == "DonorRefused"
    assert isinstance(finish(actions).error, DonorRefused)
    assert not any(isinstance(action, io.Send) for action in actions)


def test_pull_ids_are_used_once() -> None:
    machine = serving()
    ask(machine, pull(5))
    assert finish(ask(machine, pull(5)))


def test_a_joiner_that_asks_for_too_much_is_refused() -> None:
    by_count = serving(max_pulls=3)
    assert not [a for a in ask(by_count, pull(1), pull(2), pull(3)) if isinstance(a, io.Finish)]
    assert "at most" in str(finish(ask(by_count, pull(4))).error)
    by_bytes = serving(max_pulled_bytes=MIB)
    assert finish(ask(by_bytes, pull(1, num_bytes=MIB), pull(2, num_bytes=1)))


def test_complaints_are_judged_by_the_memory_and_by_the_guard() -> None:
    machine = serving()
    ask(machine, pull(1, num_bytes=4 * MIB), pull(2, offset=4 * MIB, num_bytes=4 * MIB))
    closed = letters(machine.handle(io.ViewsClosed(OUTER, (1,)), 0.0))[0].closed
    assert list(closed.void_pull_ids) == [1]

    def complain(chunk: int, *pull_ids: int) -> list[io.DonorAction]:
        complaint = peer_pb2.Complaint(chunk=peer_pb2.ChunkId(role=OUTER, part=0, chunk=chunk), pull_ids=pull_ids)
        return machine.handle(io.Heard(JoinerLetter(complaint=complaint)), 0.0)

    assert letters(complain(0, 1))[0].answer.blame == peer_pb2.BLAME_VOID
    assert complain(1, 2) == [io.Recheck(ChunkKey(OUTER, 0, 1))]
    assert complain(1, 2) == [], "one check answers both"
    answer = letters(machine.handle(io.Rechecked(ChunkKey(OUTER, 0, 1), True), 0.0))[0].answer
    assert answer.blame == peer_pb2.BLAME_LINK
    complain(1, 2)
    actions = machine.handle(io.Rechecked(ChunkKey(OUTER, 0, 1), False), 0.0)
    assert letters(actions)[0].answer.blame == peer_pb2.BLAME_MEMORY
    assert letters(actions)[1].goodbye.failure.kind == "DonorMemoryChanged"
    assert finish(actions).error is not None


def test_unknown_chunks_are_refused() -> None:
    machine = serving()
    chunk = peer_pb2.ChunkId(role=OUTER, part=0, chunk=2)
    assert finish(machine.handle(io.Heard(JoinerLetter(acknowledge=peer_pb2.Acknowledge(chunks=[chunk]))), 0.0))


def test_private_parts_are_lent_at_the_wanted_version_or_later() -> None:
    machine = serving()
    want = JoinerLetter(want_private=peer_pb2.WantPrivate(not_before=common_pb2.Version(lineage=1, outer_step=2)))
    assert machine.handle(io.Heard(want), 0.0) == [io.Capture(VERSION)]
    actions = machine.handle(lent(PRIVATE), 0.0)
    assert letters(actions)[0].manifest.role == PRIVATE
    assert [type(a) for a in ask(machine, pull(1, role=2, num_bytes=4000))] == [io.Send]


def test_asking_twice_for_private_parts_at_once_is_refused() -> None:
    machine = serving()
    want = JoinerLetter(want_private=peer_pb2.WantPrivate(not_before=version_message(VERSION)))
    machine.handle(io.Heard(want), 0.0)
    assert finish(machine.handle(io.Heard(want), 0.0))


def test_a_joiner_that_takes_nothing_is_given_up_but_its_lease_stays() -> None:
    machine = serving(progress_seconds=5.0)
    ask(machine, pull(1, num_bytes=64 * KIB), now=100.0)
    assert machine.handle(io.Tick(moved=10), 104.0) == []
    assert machine.handle(io.Tick(moved=20), 108.0) == [], "a trickle is progress"
    assert machine.handle(io.Tick(moved=20), 112.0) == []
    actions = machine.handle(io.Tick(moved=20), 113.1)
    assert finish(actions).grace
    assert "took nothing for" in str(finish(actions).error)


def test_an_idle_joiner_is_not_hurried() -> None:
    machine = serving(progress_seconds=5.0)
    ask(machine, pull(1))
    machine.handle(io.Sent(1), 1.0)
    assert machine.handle(io.Tick(), 1000.0) == []


def test_a_stream_without_open_ends() -> None:
    machine = DonorMachine(DonorConfig(data_host=HOST, open_seconds=3.0), "scope")
    machine.start(0.0)
    assert machine.handle(io.Tick(), 2.9) == []
    assert finish(machine.handle(io.Tick(), 3.1)).error is not None


def test_a_lost_joiner_keeps_its_lease_and_a_stopped_one_does_not() -> None:
    assert finish(serving().handle(io.Ended(DonorLost("gone")), 0.0)).grace
    goodbye = JoinerLetter(goodbye=peer_pb2.JoinerGoodbye(done=False, reason="overtaken"))
    assert finish(serving().handle(io.Heard(goodbye), 0.0)).grace
    stopped = serving().handle(io.Stopped(DonorRefused("drained")), 0.0)
    assert not finish(stopped).grace
    assert "drained" in letters(stopped)[0].goodbye.failure.message


def test_an_unreadable_lease_is_said_with_its_reason() -> None:
    machine = serving()
    ask(machine, pull(1))
    actions = machine.handle(io.Unreadable(1, DonorBusy("the version is being closed")), 0.0)
    assert letters(actions)[0].pull_refused.failure.kind == "DonorBusy"
    assert finish(actions).error is not None


@pytest.mark.parametrize(
    "wrong", [{"max_lanes": 0}, {"max_lanes": 65}, {"progress_seconds": 0.0}, {"grace_seconds": -1.0}]
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadConfiguration):
        DonorConfig(data_host=HOST, **wrong)  # type: ignore[arg-type]


def test_errors_cross_the_stream_with_their_class() -> None:
    error = error_of("d0", failure_message(LayoutMismatch("two models")))
    assert isinstance(error, LayoutMismatch)
    assert str(error) == "d0: two models"
    for kind in ("NoSuchError", "", "EpochAborted", "RecoveryError"):
        assert isinstance(error_of("d0", common_pb2.Failure(kind=kind)), DonorRefused)


def parsed(data: bytes) -> JoinerLetter:
    letter = JoinerLetter()
    try:
        letter.ParseFromString(data)
    except DecodeError:  # bytes that are no letter never reach a machine
        return JoinerLetter()
    return letter


LETTERS = st.one_of(
    st.builds(
        lambda ids: JoinerLetter(
            pull=peer_pb2.PullBatch(
                pulls=[pull(i, offset=o, num_bytes=n, part=p, lane=lane, role=role) for i, o, n, p, lane, role in ids]
            )
        ),
        st.lists(
            st.tuples(
                st.integers(0, 50),
                st.integers(0, 2**64 - 1) | st.integers(0, 8 * MIB),
                st.integers(0, 2**32 - 1) | st.integers(1, 5000),
                st.integers(0, 2),
                st.integers(0, 3),
                st.integers(0, 2),
            ),
            max_size=4,
        ),
    ),
    st.binary(max_size=40).map(parsed),
    st.builds(
        lambda role, part, chunk: JoinerLetter(
            complaint=peer_pb2.Complaint(
                chunk=peer_pb2.ChunkId(role=peer_pb2.ManifestRole.ValueType(role), part=part, chunk=chunk)
            )
        ),
        st.integers(0, 2),
        st.integers(0, 3),
        st.integers(0, 2**32 - 1),
    ),
    st.just(open_letter()),
)


@settings(max_examples=200, deadline=None)
@given(said=st.lists(LETTERS, max_size=12))
def test_nothing_a_joiner_says_reads_outside_of_what_is_lent(said: list[JoinerLetter]) -> None:
    machine = serving()
    over = False
    for letter in said:
        for action in machine.handle(io.Heard(letter), 0.0):
            assert not over
            if isinstance(action, io.Send):
                part = LEASE.manifest.parts[action.part]
                assert 0 <= action.offset < action.offset + action.num_bytes <= part.num_bytes
                assert action.lane < 2
        over = over or machine._phase.value == "over"
