"""Scripted faults against the coordinator's machine, and a storm of malformed and misplaced messages.

Reports: nicholicaron/ft-diloco's operator log (a half-started quorum, boundaries out of phase, lone commits),
pytorch/torchft#35 (survivors sit out a timeout), learning-at-home/hivemind#169 (joiners choke one donor).
"""

from __future__ import annotations

import math
import random

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protos.recovery.v1 import common_pb2, coordinator_pb2, operations_pb2
from recovery.control.wire import from_proto, to_proto
from recovery.errors import PeerUnreachable
from recovery.events import WorkerStalled
from recovery.types import NO_VERSION, Version
from tests.unit.control.script import Script, failure, fingerprint_of

COMMITTED = coordinator_pb2.VERDICT_COMMITTED


def no_donor(script: Script, name: str) -> coordinator_pb2.NoDonor:
    found = script.heard_only(name, coordinator_pb2.NoDonor)
    assert found
    assert isinstance(found[-1], coordinator_pb2.NoDonor)
    return found[-1]


def test_a_worker_that_flaps_does_not_keep_the_others_from_committing() -> None:
    script = Script(gather_max_wait_seconds=10.0)
    version = script.start("a", "b", "f")
    for life in range(20):
        script.arrive("a", "b", at=version)
        script.detach("f")  # in every single boundary
        roster = script.roster("a")
        assert [member.worker.worker_id for member in roster.members] == ["a", "b"]
        script.vote("a", "b", epoch=roster.epoch, at=version)
        for name in ("a", "b"):
            assert script.outcome(name).verdict == COMMITTED
            script.applied(name, version.next(), epoch=roster.epoch)
        version = version.next()
        script.attach("f", incarnation=f"life{life}")
        script.received("f", script.ticket("f"))
        script.wait(3.0)
    assert script.sealed == Version(1, 20)
    assert script.durable.num_aborted == 0


def test_a_flapping_member_of_the_roster_costs_an_epoch_each_time_and_no_more() -> None:
    script = Script()
    version = script.start("a", "b", "f")
    for life in range(5):
        script.arrive("a", "b", "f", at=version)
        script.detach("f")
        assert script.outcome("a").verdict == coordinator_pb2.VERDICT_ABORTED
        version = script.step("a", "b", at=version)
        script.attach("f", incarnation=f"life{life}")
        script.received("f", script.ticket("f"))
    assert (script.durable.num_committed, script.durable.num_aborted) == (5, 5)


def test_a_stalled_trainer_is_shown_and_not_waited_for() -> None:
    script = Script(stall_after_seconds=10.0, gather_max_wait_seconds=100.0)
    version = script.start("a", "s")
    script.advertise("s", 4, seconds=0.0)
    script.arrive("a", at=version)
    script.wait(9.0)
    script.advertise("s", 4, seconds=0.0)
    assert not script.heard_only("a", coordinator_pb2.Roster)
    script.wait(1.0)
    assert len(script.roster("a").members) == 1
    assert [event.worker_id for event in script.events if isinstance(event, WorkerStalled)] == ["s"]
    (status,) = [w for w in script.machine.status(script.now).workers if w.worker.worker_id == "s"]
    assert status.stalled
    assert status.alive
    assert "stands still at 4" in status.waiting_for


def test_a_gathering_follows_the_announced_progress() -> None:
    script = Script(gather_max_wait_seconds=100.0)
    version = script.step("a", "slow", at=script.start("a", "slow"))
    script.advertise("slow", 6, of=10, seconds=2.0)
    script.arrive("a", at=version)
    script.wait(11.9)  # 4 steps of 2 s, times 1.5
    assert not script.heard_only("a", coordinator_pb2.Roster)
    script.wait(0.1)
    roster = script.roster("a")
    assert list(roster.missing) == ["slow"]


def test_a_late_starter_is_told_that_the_phase_ends() -> None:
    script = Script()
    version = script.start("a")
    script.attach("late")
    script.received("late", script.ticket("late"))
    script.arrive("a", at=version)
    (told,) = script.heard_only("late", coordinator_pb2.PhaseEnding)
    assert isinstance(told, coordinator_pb2.PhaseEnding)
    assert from_proto(told.version) == version
    script.arrive("late", at=version, weight=0.25)
    weights = {member.worker.worker_id: member.weight for member in script.roster("a").members}
    assert weights == {"a": 1.0, "late": 0.25}


@pytest.mark.parametrize("weight", [0.0, math.nan, -1.0, 7.0, math.inf])
def test_weights_that_mean_nothing_do_not_make_an_average_of_nothing(weight: float) -> None:
    script = Script()
    version = script.start("a", "b")
    script.arrive("a", "b", at=version, weight=weight)
    assert [member.weight for member in script.roster("a").members] == [1.0, 1.0]


def test_joiners_share_the_slots_queue_with_a_position_and_are_called() -> None:
    script = Script(max_donors=1)
    script.start("a")
    for name in ("j1", "j2", "j3", "j4"):
        script.attach(name)
    first, second = script.ticket("j1"), script.ticket("j2")
    assert first.donors[0].private_parts
    assert (no_donor(script, "j3").queue_position, no_donor(script, "j4").queue_position) == (1, 2)
    script.received("j1", first)
    # Two donors now: the new one has slots of its own.
    assert {donor.worker.worker_id for donor in script.ticket("j3").donors} <= {"a", "j1"}
    assert script.ticket("j4")
    script.received("j2", second)


def test_a_failed_donor_gives_way_and_the_transfer_goes_on() -> None:
    script = Script(max_donors=1)
    script.start("a", "b")
    script.attach("j")
    ticket = script.ticket("j")
    (donor,) = ticket.donors
    report = coordinator_pb2.RecoveryReport(
        transfer_id=ticket.transfer_id, attempt=ticket.attempt, failure=failure(common_pb2.NEXT_ACTION_OTHER_DONOR)
    )
    report.donor_failures.add(worker_id=donor.worker.worker_id, failure=report.failure)
    script.say("j", report)
    again = script.ticket("j")
    assert again.transfer_id == ticket.transfer_id
    assert again.attempt == ticket.attempt + 1
    assert again.donors[0].worker.worker_id != donor.worker.worker_id
    assert f"transfer/{ticket.transfer_id}/{ticket.attempt}/{donor.worker.worker_id}" in script.scopes


def test_a_state_that_is_behind_by_the_time_it_arrives_is_based_anew() -> None:
    """As reported in NousResearch/nousnet#33."""
    script = Script()
    version = script.start("a")
    script.attach("j")
    ticket = script.ticket("j")
    script.step("a", at=version)
    script.received("j", ticket)
    again = script.ticket("j")
    assert from_proto(again.version) == version.next()
    assert again.reason == "behind"


def test_a_joiner_goes_on_while_the_coordinator_restarts() -> None:
    script = Script()
    version = script.start("a")
    script.attach("j")
    running = script.ticket("j")
    script.restart()
    script.attach("a", version)
    script.attach("j")
    fresh = script.ticket("j")
    assert fresh.transfer_id != running.transfer_id
    script.received("j", running)  # it went on with its donors
    assert not script.waiting_for("j")


def test_a_ticket_lost_with_its_stream_is_replaced_when_the_worker_asks() -> None:
    script = Script()
    script.start("a")
    script.attach("j")
    lost = script.ticket("j")
    script.detach("j")
    script.attach("j")
    assert not script.heard_only("j", coordinator_pb2.Ticket), "its attempt may be under way"
    script.say("j", coordinator_pb2.RecoveryRequest(reason="fresh"))
    again = script.ticket("j")
    assert (again.transfer_id, again.attempt) != (lost.transfer_id, lost.attempt)


def test_nobody_is_committed_past_while_the_coordinator_was_away() -> None:
    script = Script()
    version = script.step("a", "b", "c", at=script.start("a", "b", "c"))
    script.restart()
    for name in ("a", "b"):
        script.attach(name, version)
    script.arrive("a", "b", at=version)
    assert not script.heard_only("a", coordinator_pb2.Roster), "c may be on its way back"
    script.wait(script.policy.return_wait_seconds - 0.1)
    assert not script.heard_only("a", coordinator_pb2.Roster), "c may still be on its way back"
    script.wait(0.1)
    assert len(script.roster("a").members) == 2


def test_a_restarted_coordinator_waits_no_longer_than_a_phase_for_who_has_not_come_back() -> None:
    script = Script()
    version = script.step("a", "b", "c", at=script.start("a", "b", "c"))
    script.restart()
    for name in ("a", "b"):
        script.attach(name, version)
        script.advertise(name, 10, of=10, seconds=0.25)
    script.arrive("a", "b", at=version)
    assert "c at the boundary" in script.waiting_for("a")
    script.wait(2.4)
    assert not script.heard_only("a", coordinator_pb2.Roster)
    script.wait(0.1)
    assert [member.worker.worker_id for member in script.roster("a").members] == ["a", "b"]


def test_a_member_that_comes_back_within_that_time_is_in_the_roster() -> None:
    script = Script()
    version = script.step("a", "b", "c", at=script.start("a", "b", "c"))
    script.restart()
    for name in ("a", "b"):
        script.attach(name, version)
        script.advertise(name, 10, of=10, seconds=0.25)
    script.arrive("a", "b", at=version)
    script.wait(2.4)
    script.attach("c", version)
    script.wait(1.0)
    assert not script.heard_only("a", coordinator_pb2.Roster), "c is here again, and in its phase"
    script.arrive("c", at=version)
    assert len(script.roster("a").members) == 3


def test_an_unsealed_step_whose_holders_died_is_not_committed() -> None:
    script = Script(gather_max_wait_seconds=2.0)
    version = script.start("a", "b")
    script.arrive("a", at=version)
    script.wait(2.0)
    epoch = script.roster("a").epoch
    script.vote("a", epoch=epoch, at=version)
    script.detach("a")
    script.wait(5.0)
    (begin,) = script.heard_only("b", coordinator_pb2.BecomeOrigin)
    assert isinstance(begin, coordinator_pb2.BecomeOrigin)
    assert from_proto(begin.version) == Version(2, 0)
    script.applied("b", Version(2, 0), fingerprint_of(version))
    assert script.durable.lineages[-1].lost_steps == 1
    # The dead one was only cut off, and holds the lost step.
    script.attach("a", version.next(), undecided_epoch=0)
    assert script.ticket("a").reason == "behind"
    script.say("a", coordinator_pb2.OutcomeQuery(epoch=epoch))
    assert script.outcome("a").verdict == coordinator_pb2.VERDICT_EXCLUDED


def test_a_resume_with_other_bytes_than_offered_is_void() -> None:
    script = Script()
    version = script.start("a")
    script.step("a", at=version)
    script.detach("a")
    script.attach("x")
    script.wait(5.0)
    held = Version(1, 1)
    script.say(
        "x",
        coordinator_pb2.RecoveryReport(
            version=to_proto(held), fingerprint=fingerprint_of(held), source=coordinator_pb2.RECOVERY_SOURCE_DISK
        ),
    )
    assert script.heard_only("x", coordinator_pb2.BecomeOrigin)
    script.applied("x", Version(2, 1), b"other bytes".ljust(32))
    assert script.sealed == Version(1, 1)
    script.attach("a", held)
    assert script.waiting_for("a") == ""


def test_a_checkpoint_of_a_step_that_was_left_behind_is_not_resumed() -> None:
    script = Script()
    version = script.start("a", "b")
    for _ in range(2):
        version = script.step("a", "b", at=version)
    script.detach("a")
    script.detach("b")
    script.attach("x")
    script.wait(5.0)
    script.heard("x")
    bad = coordinator_pb2.RecoveryReport(
        version=to_proto(Version(1, 2)), fingerprint=b"wrong".ljust(32), source=coordinator_pb2.RECOVERY_SOURCE_DISK
    )
    script.say("x", bad)
    asked = no_donor(script, "x")
    assert asked.resume_from_disk
    assert from_proto(asked.resume_at) == Version(1, 1), "an older one may be good"


def test_a_worker_that_nobody_can_average_with_is_left_out() -> None:
    script = Script()
    version = script.start("a", "b", "z")
    for _ in range(3):
        script.arrive("a", "b", "z", at=version)
        epoch = script.roster("a").epoch
        told = failure(common_pb2.NEXT_ACTION_OTHER_DONOR)
        script.say("a", coordinator_pb2.EpochFailure(epoch=epoch, failure=told, suspect_worker_id="z"))
    script.arrive("a", "b", "z", at=version)
    assert [member.worker.worker_id for member in script.roster("a").members] == ["a", "b"]


def test_a_vote_is_given_once() -> None:
    script = Script()
    version = script.start("a", "b")
    script.arrive("a", "b", at=version)
    epoch = script.roster("a").epoch
    script.vote("a", epoch=epoch, at=version, digest=b"first")
    script.vote("a", epoch=epoch, at=version, digest=b"second")
    script.vote("b", epoch=epoch, at=version, digest=b"first")
    outcome = script.outcome("a")
    assert (outcome.verdict, outcome.digest) == (COMMITTED, b"first")


def test_an_epoch_that_does_not_end_is_ended() -> None:
    script = Script(max_epoch_seconds=30.0)
    version = script.start("a", "b")
    script.arrive("a", "b", at=version)
    epoch = script.roster("a").epoch
    script.vote("a", epoch=epoch, at=version)
    script.wait(30.0)
    outcome = script.outcome("a")
    assert outcome.verdict == coordinator_pb2.VERDICT_ABORTED
    assert "no vote from b within 30 s" in outcome.reason


def test_the_data_position_comes_back_to_the_next_process_of_the_same_name() -> None:
    script = Script()
    version = script.start("a", "b")
    script.arrive("a", "b", at=version)
    epoch = script.roster("a").epoch
    script.vote("a", "b", epoch=epoch, at=version)
    for name in ("a", "b"):
        script.say(
            name,
            coordinator_pb2.Applied(
                epoch=epoch,
                version=to_proto(version.next()),
                fingerprint=fingerprint_of(version.next()),
                tokens=2**64 - 1,
                data_position=f"position of {name}".encode(),
            ),
        )
    script.restart()
    script.attach("b", NO_VERSION, incarnation="i2")
    script.attach("a", version.next())
    ticket = script.ticket("b")
    assert ticket.data_position.position == b"position of b"
    assert from_proto(ticket.data_position.version) == version.next()


def test_a_run_that_went_back_gives_back_the_positions_of_the_step_at_which_it_goes_on() -> None:
    script = Script(save_every_steps=0)
    version = script.start("a", "b")
    for _ in range(3):
        script.arrive("a", "b", at=version)
        epoch = script.roster("a").epoch
        for name in ("a", "b"):
            position = f"{name} at {version.next()}".encode()
            script.say(
                name,
                coordinator_pb2.Vote(epoch=epoch, version=to_proto(version), digest=b"same", data_position=position),
            )
        version = version.next()
        script.applied("a", version, epoch=epoch)
        script.applied("b", version, epoch=epoch)
    script.restart()
    script.attach("a")
    script.attach("b")
    script.wait(script.policy.expected_return_seconds)
    kept = Version(1, 1)
    script.say(
        "a",
        coordinator_pb2.RecoveryReport(
            source=coordinator_pb2.RECOVERY_SOURCE_DISK, version=to_proto(kept), fingerprint=fingerprint_of(kept)
        ),
    )
    script.wait(script.policy.offer_wait_seconds)
    (begin,) = script.heard_only("a", coordinator_pb2.BecomeOrigin)
    assert isinstance(begin, coordinator_pb2.BecomeOrigin)
    assert begin.data_position.position == b"a at L1.k1"
    script.applied("a", from_proto(begin.version), fingerprint_of(kept))
    ticket = script.ticket("b")
    assert from_proto(ticket.version) == Version(2, 1)
    assert ticket.data_position.position == b"b at L1.k1"
    assert from_proto(ticket.data_position.version) == kept


def test_one_saver_is_named_for_each_seal_and_stays_the_same() -> None:
    script = Script(save_every_steps=2)
    version = script.start("a", "b")
    savers: list[str] = []
    for _ in range(4):
        script.arrive("a", "b", at=version)
        epoch = script.roster("a").epoch
        script.vote("a", "b", epoch=epoch, at=version)
        script.applied("a", version.next())
        script.applied("b", version.next())
        version = version.next()
        savers += [name for name in "ab" if script.heard_only(name, coordinator_pb2.SaverAssignment)]
    assert savers == ["a", "a"]


def test_a_worker_without_a_place_for_checkpoints_is_never_named_to_save() -> None:
    script = Script()
    script.attach("a", saves_checkpoints=False)
    script.attach("b")
    script.wait(script.policy.origin_wait_seconds)
    script.applied("a", Version(1, 0))
    assert script.heard_only("a", coordinator_pb2.SaverAssignment) == []
    script.received("b", script.ticket("b"))
    script.operate("s", operations_pb2.SaveRequest())
    assert script.heard_only("b", coordinator_pb2.Order)
    script.heard("a")
    script.arrive("a", "b", at=Version(1, 0))
    script.vote("a", "b", epoch=script.roster("a").epoch, at=Version(1, 0))
    script.applied("a", Version(1, 1), epoch=1)
    script.applied("b", Version(1, 1), epoch=1)
    assert script.heard_only("a", coordinator_pb2.SaverAssignment) == []
    assert script.heard_only("b", coordinator_pb2.SaverAssignment) != []


KINDS = [
    kind
    for kind in coordinator_pb2.WorkerMessage.DESCRIPTOR.oneofs_by_name["kind"].fields
    if kind.message_type is not None
]
ODD_VALUES: dict[int, list[object]] = {
    FieldDescriptor.CPPTYPE_UINT64: [0, 1, 2, 2**63, 2**64 - 1],
    FieldDescriptor.CPPTYPE_UINT32: [0, 1, 2**32 - 1],
    FieldDescriptor.CPPTYPE_INT64: [0, -5, 2**62],
    FieldDescriptor.CPPTYPE_INT32: [0, -1, 999_999_999],
    FieldDescriptor.CPPTYPE_DOUBLE: [0.0, -1.0, math.nan, math.inf, 1e300],
    FieldDescriptor.CPPTYPE_BOOL: [False, True],
    FieldDescriptor.CPPTYPE_ENUM: [0, 1, 2, 3, 4, 99],
    FieldDescriptor.CPPTYPE_STRING: ["", "a", "b", "zz", "x" * 300, "\x00"],
}


def scribble(message: Message, source: random.Random, depth: int = 0) -> None:
    """Fill a message with values that no honest worker sends."""
    for field in message.DESCRIPTOR.fields:
        if source.random() < 0.3 or depth > 3:
            continue
        if field.cpp_type == field.CPPTYPE_MESSAGE:
            part = getattr(message, field.name)
            scribble(part.add() if field.is_repeated else part, source, depth + 1)
            continue
        value = b"bytes" if field.type == field.TYPE_BYTES else source.choice(ODD_VALUES[field.cpp_type])
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)


@pytest.mark.parametrize("seed", range(60))
def test_no_message_of_a_worker_brings_the_machine_down(seed: int) -> None:
    source = random.Random(seed)
    script = Script(adopt_wait_seconds=5.0)
    version = script.start("a", "b", "c")
    for _ in range(150):
        name = source.choice("abc")
        if source.random() < 0.1:
            script.attach(name, source.choice([NO_VERSION, version, Version(1, 2**40)]), incarnation="i1")
        elif source.random() < 0.05:
            script.detach(name)
        kind = source.choice(KINDS)
        assert kind.message_type is not None
        message = coordinator_pb2.WorkerMessage()
        part = getattr(message, kind.name)
        scribble(part, source)
        script.say(name, part)
        if source.random() < 0.3:
            script.wait(source.uniform(0.0, 3.0))
        script.machine.status(script.now)
    assert script.sealed >= version


def test_epochs_are_counted_on_from_what_a_worker_remembers() -> None:
    script = Script()
    script.attach("a", last_epoch=41, undecided_epoch=42)
    script.attach("liar", last_epoch=2**64 - 1)
    script.wait(2.0)
    script.applied("a", Version(1, 0))
    script.arrive("a", at=Version(1, 0))
    assert script.roster("a").epoch == 43


def test_members_that_a_void_beginning_called_off_are_welcomed_again() -> None:
    script = Script()
    version = script.step("a", "b", "c", at=script.start("a", "b", "c"))
    script.arrive("a", "b", at=version)
    script.operate("r", operations_pb2.RollbackRequest(worker_id="c"))
    script.heard("a")
    script.detach("c")
    script.wait(2.0)
    assert isinstance(script.answers["r"][0], PeerUnreachable)
    (welcome,) = script.heard_only("a", coordinator_pb2.Welcome)
    assert isinstance(welcome, coordinator_pb2.Welcome)
    assert welcome.current
    assert script.step("a", "b", at=version) == version.next(), "the older history goes on"


def test_a_restarted_coordinator_does_not_seal_on_the_word_of_the_first_that_comes_back() -> None:
    script = Script()
    version = script.start("a", "b", "c")
    script.arrive("a", "b", "c", at=version)
    epoch = script.roster("a").epoch
    script.vote("a", "b", "c", epoch=epoch, at=version)
    script.restart()
    script.attach("c", version.next(), fingerprint=b"damaged".ljust(32))
    assert script.sealed == version
    script.attach("a", version.next())
    script.attach("b", version.next())
    assert script.machine.record.sealed_fingerprint == fingerprint_of(version.next())
    assert script.ticket("c").reason == "diverged"


def test_a_voter_whose_state_is_replaced_meanwhile_is_not_counted_on_to_apply() -> None:
    script = Script()
    version = script.start("a", "b", "c")
    script.arrive("a", "b", "c", at=version)
    epoch = script.roster("a").epoch
    script.vote("a", "c", epoch=epoch, at=version)
    script.detach("c")
    script.attach("c", version, fingerprint=b"damaged".ljust(32), undecided_epoch=epoch)
    script.received("c", script.ticket("c"))
    script.arrive("c", at=version)
    script.vote("b", epoch=epoch, at=version)
    assert script.durable.epochs[epoch].voters == (("a", "i1"), ("b", "i1"))
    script.applied("a", version.next())
    script.applied("b", version.next())
    assert script.ticket("c").reason == "behind"


def test_an_arrival_during_an_epoch_that_the_member_withdrew_from_is_kept() -> None:
    script = Script(max_epoch_seconds=30.0)
    version = script.start("a", "b")
    script.arrive("a", "b", at=version)
    epoch = script.roster("a").epoch
    script.vote("b", epoch=epoch, at=version)
    script.say("b", coordinator_pb2.RecoveryRequest(reason="resync"))
    script.received("b", script.ticket("b"))
    script.arrive("b", at=version)
    script.wait(30.0)
    assert script.outcome("a").verdict == coordinator_pb2.VERDICT_ABORTED
    assert not script.heard_only("b", coordinator_pb2.Roster), "the other is given its time"
    script.arrive("a", at=version)
    assert len(script.roster("b").members) == 2
