"""The joiner's machine, line by line: what it refuses to believe and what it waits for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from protos.recovery.v1 import peer_pb2
from protos.recovery.v1.peer_pb2 import DonorLetter
from recovery.errors import BadConfiguration, DonorBusy, DonorLost, DonorRefused, NoDonorLeft
from recovery.protocol import joiner_io as io
from recovery.protocol.joiner import JoinerMachine
from recovery.protocol.joiner_config import JoinerConfig
from recovery.protocol.letters import failure_message
from recovery.protocol.manifest_pieces import PIECE_BYTES, cut_manifest
from recovery.protocol.ports import OUTER, PRIVATE, Attempt
from recovery.state.manifest import Manifest, encode, manifest_digest
from recovery.types import Cut, Fingerprint, PartClass, RunId, Version
from tests.support.memory_donor import HOST, VERSION, MemoryDonor, MemorySnapshots, attempt

VALUES = {"outer_params": {"w": torch.arange(5000, dtype=torch.int32)}}
SNAPSHOTS = MemorySnapshots("d0", VALUES, {"inner": {"m": torch.ones(10)}})


def order(*names: str) -> Attempt:
    def no_link(scope: str, host: str, lanes: int, cancelled: object) -> object:
        raise AssertionError("machines open nothing")

    donors = [MemoryDonor(dataclasses.replace(SNAPSHOTS, name=name), no_link) for name in names]  # type: ignore[arg-type]
    return attempt(donors)


def opened(manifest: Manifest | None = None, *, lanes: int = 2, num_bytes: int | None = None) -> DonorLetter:
    encoded = encode(manifest or SNAPSHOTS.outer_manifest)
    letter = peer_pb2.Opened(
        lanes=lanes,
        scope="s",
        data_host=HOST,
        manifest_digest=manifest_digest(encoded),
        manifest_bytes=len(encoded) if num_bytes is None else num_bytes,
    )
    return DonorLetter(opened=letter)


def pieces(manifest: Manifest | None = None, role: peer_pb2.ManifestRole.ValueType = OUTER) -> list[DonorLetter]:
    return list(cut_manifest(role, encode(manifest or SNAPSHOTS.outer_manifest)))


def started(*names: str, config: JoinerConfig | None = None) -> JoinerMachine:
    machine = JoinerMachine(order(*names), config or JoinerConfig(lanes=2))
    assert all(isinstance(action, io.Dial) for action in machine.start(0.0))
    for name in names:
        machine.handle(io.Dialled(name), 0.0)
    return machine


def hear(machine: JoinerMachine, name: str, *letters: DonorLetter, now: float = 0.0) -> list[io.JoinerAction]:
    actions = []
    for letter in letters:
        actions += machine.handle(io.Heard(name, letter), now)
    return actions


def only(actions: list[io.JoinerAction], kind: type) -> object:
    (found,) = (action for action in actions if isinstance(action, kind))
    return found


def test_without_donors_it_fails_at_once() -> None:
    machine = JoinerMachine(dataclasses.replace(order("d0"), donors=()), JoinerConfig())
    (fail,) = machine.start(0.0)
    assert isinstance(fail, io.Fail)
    assert isinstance(fail.error, NoDonorLeft)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run_id": RunId("other")}, "run 'other'"),
        ({"fingerprint": Fingerprint(b"\1" * 32)}, "fingerprint"),
        ({"cut": Cut(Version(1, 2))}, "L1.k2"),
        ({"cut": Cut(Version(2, 3))}, "L2.k3"),
    ],
)
def test_a_manifest_of_something_else_is_not_believed(change: dict[str, object], reason: str) -> None:
    machine = started("d0")
    other = dataclasses.replace(SNAPSHOTS.outer_manifest, **change)  # type: ignore[arg-type]
    actions = hear(machine, "d0", opened(other), *pieces(other))
    assert isinstance(only(actions, io.Drop), io.Drop)
    assert reason in str(machine.failures["d0"])
    assert machine.failures["d0"].kind == "ManifestRejected"
    assert not any(isinstance(action, io.Prepare) for action in actions)


def test_private_parts_have_no_place_among_replicated_ones() -> None:
    part = dataclasses.replace(SNAPSHOTS.outer_manifest.parts[0], part_class=PartClass.PRIVATE_KEPT)
    other = dataclasses.replace(SNAPSHOTS.outer_manifest, parts=(part,))
    machine = started("d0")
    hear(machine, "d0", opened(other), *pieces(other))
    assert machine.failures["d0"].kind == "ManifestRejected"


@pytest.mark.parametrize(
    "letters",
    [
        [opened(num_bytes=0)],
        [opened(num_bytes=2**40)],
        [opened(lanes=0)],
        [opened(lanes=65)],
        [opened(), opened()],
        [*pieces()],
        [opened(num_bytes=10), *pieces()],
        [opened(num_bytes=10**6), *pieces()],
        [opened(), DonorLetter(manifest=peer_pb2.ManifestPiece(role=OUTER, offset=1, data=b"x"))],
        [opened(), DonorLetter(manifest=peer_pb2.ManifestPiece(role=OUTER, data=b"x" * (PIECE_BYTES + 1)))],
        [opened(), DonorLetter(manifest=peer_pb2.ManifestPiece(role=OUTER, data=b"x", last=True))],
        [opened(), *pieces(role=PRIVATE)],
        [DonorLetter()],
    ],
    ids=[
        "empty", "huge", "no lanes", "many lanes", "twice", "unasked", "longer", "shorter", "gap", "large piece",
        "other bytes", "other role", "nothing",
    ],
)  # fmt: skip
def test_what_does_not_keep_to_the_agreement_ends_the_donor(letters: list[DonorLetter]) -> None:
    """As reported in pytorch/pytorch#113376."""
    machine = started("d0", "d1")
    assert isinstance(only(hear(machine, "d0", *letters), io.Drop), io.Drop)
    assert set(machine.failures) == {"d0"}


def test_a_refusal_is_passed_on_and_busy_donors_say_when_to_come_again() -> None:
    machine = started("d0", "d1")
    refused = peer_pb2.Refused(failure=failure_message(DonorBusy("no slot")))
    refused.retry_after.FromMilliseconds(700)
    for name in ("d0", "d1"):
        assert hear(machine, name, DonorLetter(refused=refused))
        actions = machine.handle(io.Quiet(name), 0.0)
    error = only(actions, io.Fail)
    assert isinstance(error, io.Fail)
    assert isinstance(error.error, DonorBusy)
    assert error.error.retry_after_seconds == pytest.approx(0.7)


def test_each_donors_reason_is_in_the_last_error() -> None:
    machine = started("d0", "d1")
    machine.handle(io.Ended("d0", DonorLost("its stream ended")), 0.0)
    machine.handle(io.Quiet("d0"), 0.0)
    hear(machine, "d1", DonorLetter(goodbye=peer_pb2.DonorGoodbye(failure=failure_message(DonorRefused("drained")))))
    fail = only(machine.handle(io.Quiet("d1"), 0.0), io.Fail)
    assert isinstance(fail, io.Fail)
    assert "d0: DonorLost: its stream ended" in str(fail.error)
    assert "d1: DonorRefused: d1: drained" in str(fail.error)
    assert machine.handle(io.Tick(), 1.0) == []


@pytest.mark.parametrize("stage", ["opened", "manifest"])
def test_a_donor_that_owes_an_answer_has_a_deadline(stage: str) -> None:
    machine = started("d0", config=JoinerConfig(lanes=1, progress_seconds=10))
    if stage == "manifest":
        hear(machine, "d0", opened(), now=5.0)
    assert not any(isinstance(action, io.Drop) for action in machine.handle(io.Tick(), 9.9))
    actions = machine.handle(io.Tick(), 15.1)
    assert isinstance(only(actions, io.Drop), io.Drop)
    assert "no progress for" in str(machine.failures["d0"])


def pulling(config: JoinerConfig | None = None) -> tuple[JoinerMachine, io.Post]:
    machine = started("d0", config=config)
    prepare = only(hear(machine, "d0", opened(), *pieces()), io.Prepare)
    assert isinstance(prepare, io.Prepare)
    machine.handle(io.LinkOpened("d0", 2), 0.0)
    actions = machine.handle(io.Prepared(OUTER, frozenset(), frozenset()), 0.0)
    kinds = [type(action) for action in actions]
    assert kinds.index(io.Post) < kinds.index(io.Say), "receives are posted before their bytes are asked for"
    post = only(actions, io.Post)
    assert isinstance(post, io.Post)
    return machine, post


def test_a_trickle_is_progress_and_standing_still_is_not() -> None:
    """As reported in learning-at-home/hivemind#455."""
    machine, _ = pulling(JoinerConfig(lanes=2, progress_seconds=10))
    for second in range(1, 100):
        assert not any(isinstance(action, io.Drop) for action in machine.handle(io.Tick({"d0": second}), 5.0 * second))
    assert any(isinstance(action, io.Drop) for action in machine.handle(io.Tick({"d0": 99}), 5.0 * 99 + 10.1))
    assert "bytes" in str(machine.failures["d0"])


def test_private_parts_may_take_until_the_donors_next_boundary() -> None:
    machine, post = pulling(JoinerConfig(lanes=2, progress_seconds=10, private_seconds=100))
    for pulled in post.pulls:
        machine.handle(io.Arrived("d0", pulled.pull_id), 1.0)
    actions = machine.handle(io.Checked(post.flight, True, True), 1.0)
    want = [action.letter for action in actions if isinstance(action, io.Say)]
    assert any(letter.WhichOneof("kind") == "want_private" for letter in want)
    assert not any(isinstance(action, io.Drop) for action in machine.handle(io.Tick(), 90.0))
    assert any(isinstance(action, io.Drop) for action in machine.handle(io.Tick(), 101.5))
    assert "private parts" in str(machine.failures["d0"])


def test_void_bytes_that_are_right_all_the_same_count() -> None:
    machine, post = pulling()
    void = DonorLetter(closed=peer_pb2.Closed(void_pull_ids=[pulled.pull_id for pulled in post.pulls]))
    hear(machine, "d0", void)
    for pulled in post.pulls:
        machine.handle(io.Arrived("d0", pulled.pull_id), 1.0)
    machine.handle(io.Checked(post.flight, True, True), 1.0)
    assert machine.verified_bytes == machine.total_bytes


def test_void_bytes_that_are_torn_are_asked_again_without_a_complaint() -> None:
    machine, post = pulling()
    hear(machine, "d0", DonorLetter(closed=peer_pb2.Closed(void_pull_ids=[post.pulls[0].pull_id])))
    for pulled in post.pulls:
        machine.handle(io.Arrived("d0", pulled.pull_id), 1.0)
    actions = machine.handle(io.Checked(post.flight, False, False), 1.0)
    assert isinstance(only(actions, io.Post), io.Post)
    said = [action.letter.WhichOneof("kind") for action in actions if isinstance(action, io.Say)]
    assert said == ["pull"]


def test_answers_to_nothing_are_ignored() -> None:
    machine, _ = pulling()
    for chunk in (0, 7):
        answer = peer_pb2.ComplaintAnswer(
            chunk=peer_pb2.ChunkId(role=OUTER, part=0, chunk=chunk), blame=peer_pb2.BLAME_MEMORY
        )
        assert hear(machine, "d0", DonorLetter(answer=answer)) == []
    assert machine.failures == {}


def test_what_arrives_unasked_is_ignored() -> None:
    machine, post = pulling()
    before = machine.payload_bytes
    machine.handle(io.Arrived("d0", 10**6), 1.0)
    machine.handle(io.Arrived("d0", post.pulls[0].pull_id), 1.0)
    once = machine.payload_bytes
    machine.handle(io.Arrived("d0", post.pulls[0].pull_id), 1.0)
    assert before < once == machine.payload_bytes


@pytest.mark.parametrize("wrong", [{"lanes": 65}, {"lanes": -1}, {"progress_seconds": 0.0}, {"private_seconds": 1.0}])
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadConfiguration):
        JoinerConfig(**wrong)  # type: ignore[arg-type]


def test_the_joiner_says_what_it_waits_for() -> None:
    machine = started("d0", "d1")
    assert machine.waits_for() == "d0: awaiting its answer; d1: awaiting its answer"
    assert Version(1, 3) == VERSION
