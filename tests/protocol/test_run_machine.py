"""Scripted faults of boundaries against the coordinator's machine.

Reports: nicholicaron/ft-diloco's operator log (a half-started quorum, boundaries out of phase, lone commits),
pytorch/torchft#35 (survivors sit out a timeout).
"""

from __future__ import annotations

import math

import pytest

from protos.recovery.v1 import common_pb2, coordinator_pb2, operations_pb2
from recovery.control.wire import from_proto, to_proto
from recovery.errors import PeerUnreachable
from recovery.events import WorkerStalled
from recovery.types import Version
from tests.unit.control.script import Script, failure, fingerprint_of

COMMITTED = coordinator_pb2.VERDICT_COMMITTED


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
    asked = script.no_donor("x")
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
