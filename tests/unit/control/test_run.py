"""The coordinator's machine, told line by line: boundaries, votes, what is durable."""

from __future__ import annotations

from protos.recovery.v1 import common_pb2, coordinator_pb2, operations_pb2
from recovery.control.wire import from_proto
from recovery.errors import RecoveryError
from recovery.types import Version
from tests.unit.control.script import Script, failure, fingerprint_of

COMMITTED = coordinator_pb2.VERDICT_COMMITTED
ABORTED = coordinator_pb2.VERDICT_ABORTED
EXCLUDED = coordinator_pb2.VERDICT_EXCLUDED
PAUSED = coordinator_pb2.VERDICT_PAUSED


def test_a_run_commits_boundary_after_boundary() -> None:
    script = Script()
    version = script.start("a", "b", "c")
    for _ in range(3):
        version = script.step("a", "b", "c", at=version)
    assert version == Version(1, 3)
    assert script.sealed == version
    assert script.durable.num_committed == 3


def test_a_group_is_used_again_while_its_members_stay() -> None:
    script = Script()
    version = script.start("a", "b")
    script.arrive("a", "b", at=version)
    first = script.roster("a")
    script.vote("a", "b", epoch=first.epoch, at=version)
    for name in ("a", "b"):
        script.applied(name, version.next(), epoch=first.epoch)
    script.arrive("a", "b", at=version.next())
    second = script.roster("a")
    assert second.epoch == first.epoch + 1
    assert second.group_id == first.group_id
    script.say(
        "a", coordinator_pb2.EpochFailure(epoch=second.epoch, failure=failure(common_pb2.NEXT_ACTION_OTHER_DONOR))
    )
    assert f"epoch/{first.group_id}" in script.scopes
    script.arrive("a", "b", at=version.next())
    assert script.roster("a").group_id not in (0, first.group_id)


def test_a_member_that_died_after_its_peers_voted_does_not_matter() -> None:
    script = Script()
    version = script.start("a", "b", "c")
    script.arrive("a", "b", "c", at=version)
    epoch = script.roster("a").epoch
    script.vote("a", "b", epoch=epoch, at=version)
    script.detach("c")
    assert script.outcome("a").verdict == COMMITTED
    assert script.outcome("b").verdict == COMMITTED


def test_a_member_lost_before_its_vote_frees_the_others() -> None:
    script = Script()
    version = script.start("a", "b", "c")
    script.arrive("a", "b", "c", at=version)
    epoch = script.roster("a").epoch
    script.vote("a", epoch=epoch, at=version)
    script.detach("c")
    assert script.outcome("a").verdict == ABORTED
    assert script.outcome("b").verdict == ABORTED
    script.arrive("a", "b", at=version)
    roster = script.roster("a")
    assert [member.worker.worker_id for member in roster.members] == ["a", "b"]
    script.vote("a", "b", epoch=roster.epoch, at=version)
    assert script.outcome("a").verdict == COMMITTED


def test_the_outcome_is_durable_before_it_is_told_and_answered_after_a_restart() -> None:
    script = Script()
    version = script.start("a", "b")
    script.arrive("a", "b", at=version)
    epoch = script.roster("a").epoch
    script.vote("a", "b", epoch=epoch, at=version)
    script.restart()
    script.told.clear()
    for name in ("a", "b"):
        script.attach(name, version, undecided_epoch=epoch)
        outcome = script.outcome(name)
        assert (outcome.verdict, from_proto(outcome.version)) == (COMMITTED, version.next())
        script.applied(name, version.next(), epoch=epoch)
    assert script.sealed == version.next()


def test_votes_that_a_restart_forgot_are_answered_aborted() -> None:
    script = Script()
    version = script.start("a", "b")
    script.arrive("a", "b", at=version)
    epoch = script.roster("a").epoch
    script.vote("a", epoch=epoch, at=version)
    script.restart()
    script.attach("a", version, undecided_epoch=epoch)
    assert script.outcome("a").verdict == ABORTED
    script.attach("b", version)
    assert script.step("a", "b", at=version) == version.next()


def test_who_misses_a_commit_becomes_a_joiner() -> None:
    script = Script(gather_max_wait_seconds=3.0)
    version = script.start("a", "b", "c")
    script.arrive("a", "b", at=version)
    assert not script.heard_only("a", coordinator_pb2.Roster)
    assert "c" in script.waiting_for("a")
    script.wait(3.0)
    roster = script.roster("a")
    assert list(roster.missing) == ["c"]
    script.vote("a", "b", epoch=roster.epoch, at=version)
    script.applied("a", version.next())
    script.applied("b", version.next())
    assert script.ticket("c").reason == "behind"


def test_a_minority_average_is_excluded_and_healed() -> None:
    script = Script()
    version = script.start("a", "b", "c")
    script.arrive("a", "b", "c", at=version)
    epoch = script.roster("a").epoch
    script.vote("a", "b", epoch=epoch, at=version)
    script.vote("c", epoch=epoch, at=version, digest=b"other")
    assert script.outcome("a").verdict == COMMITTED
    assert script.outcome("c").verdict == EXCLUDED
    script.applied("a", version.next())
    script.applied("b", version.next())
    assert script.ticket("c").reason == "diverged"


def test_two_that_disagree_are_retried_once_and_then_a_person_chooses() -> None:
    script = Script()
    version = script.start("a", "b")
    for verdict in (ABORTED, PAUSED):
        script.arrive("a", "b", at=version)
        epoch = script.roster("a").epoch
        script.vote("a", epoch=epoch, at=version, digest=b"one")
        script.vote("b", epoch=epoch, at=version, digest=b"two")
        assert script.outcome("a").verdict == verdict
    status = script.machine.status(script.now)
    assert "recovery rollback --worker" in status.paused
    script.arrive("a", "b", at=version)
    assert not script.heard_only("a", coordinator_pb2.Roster)
    script.operate("r1", operations_pb2.RollbackRequest(request_id="r1", worker_id="b"))
    assert not script.machine.status(script.now).paused
    script.applied("b", Version(2, 0))
    (answer,) = script.answers["r1"]
    assert isinstance(answer, operations_pb2.RollbackResponse)
    assert from_proto(answer.version) == Version(2, 0)
    script.received("a", script.ticket("a"))
    assert script.step("a", "b", at=Version(2, 0)) == Version(2, 1)


def test_a_diverged_state_is_replaced_after_the_seal() -> None:
    script = Script()
    version = script.start("a", "b", "c")
    script.arrive("a", "b", "c", at=version)
    epoch = script.roster("a").epoch
    script.vote("a", "b", "c", epoch=epoch, at=version)
    script.applied("a", version.next())
    script.applied("c", version.next(), fingerprint_of(version.next(), "x"))
    script.applied("b", version.next())
    assert script.sealed == version.next()
    assert script.machine.record.sealed_fingerprint == fingerprint_of(version.next())
    assert script.ticket("c").reason == "diverged"


def break_epoch(script: Script, names: str, version: Version, *accusers: tuple[str, str]) -> int:
    """All arrive, and the averaging fails: each accuser names its suspect. Returns the epoch."""
    script.arrive(*names, at=version)
    epoch = script.roster(names[0]).epoch
    failed = failure(common_pb2.NEXT_ACTION_OTHER_DONOR)
    for name, suspect in accusers:
        script.say(name, coordinator_pb2.EpochFailure(epoch=epoch, failure=failed, suspect_worker_id=suspect))
    return epoch


def test_a_member_whose_path_is_broken_is_left_out_and_the_next_boundaries_cost_one_epoch() -> None:
    """Field report: learning-at-home/hivemind#415 and pytorch/torchft#63, one bad member keeps all from committing."""
    script = Script()
    version = script.start("a", "b", "v")
    # The victim itself is the first to report, and cannot say whom it does not reach: all of them.
    break_epoch(script, "abv", version, ("v", ""), ("a", "v"))
    # From then on nobody even connects, and nobody knows to whom it did not: it will be the same one.
    break_epoch(script, "abv", version, ("b", ""))
    break_epoch(script, "abv", version, ("a", ""))
    script.arrive("a", "b", "v", at=version)
    roster = script.roster("a")
    assert [member.worker.worker_id for member in roster.members] == ["a", "b"]
    script.vote("a", "b", epoch=roster.epoch, at=version)
    version = version.next()
    script.applied("a", version, epoch=roster.epoch)
    script.applied("b", version, epoch=roster.epoch)
    # It takes the state from its peers and is back; its path is still broken: one epoch tells.
    script.received("v", script.ticket("v"))
    break_epoch(script, "abv", version, ("a", ""))
    script.arrive("a", "b", "v", at=version)
    roster = script.roster("a")
    assert [member.worker.worker_id for member in roster.members] == ["a", "b"]
    script.vote("a", "b", epoch=roster.epoch, at=version)
    version = version.next()
    script.applied("a", version, epoch=roster.epoch)
    script.applied("b", version, epoch=roster.epoch)
    # Mended: it takes part, and is cleared.
    script.received("v", script.ticket("v"))
    script.step("a", "b", "v", at=version)
    version = version.next()
    break_epoch(script, "abv", version, ("a", "v"))
    script.arrive("a", "b", "v", at=version)
    assert len(script.roster("a").members) == 3


def test_blame_for_another_boundary_or_from_a_stranger_counts_for_nothing() -> None:
    script = Script()
    version = script.start("a", "b", "v")
    for _ in range(3):
        epoch = break_epoch(script, "abv", version, ("a", ""))
        failed = failure(common_pb2.NEXT_ACTION_OTHER_DONOR)
        script.attach("x")
        for number in (epoch + 1000, 0):
            script.say("b", coordinator_pb2.EpochFailure(epoch=number, failure=failed, suspect_worker_id="v"))
        script.say("x", coordinator_pb2.EpochFailure(epoch=epoch, failure=failed, suspect_worker_id="v"))
        script.say("b", coordinator_pb2.EpochFailure(epoch=epoch, failure=failed, suspect_worker_id="b"))
    script.arrive("a", "b", "v", at=version)
    assert len(script.roster("a").members) == 3


def test_fewer_than_the_minimum_never_commit_and_say_so() -> None:
    script = Script(min_participants=2, gather_max_wait_seconds=5.0)
    version = script.start("a", "b")
    script.detach("b")
    script.arrive("a", at=version)
    script.wait(1000.0)
    assert not script.heard_only("a", coordinator_pb2.Roster)
    assert "1 more participants" in script.waiting_for("a")
    script.attach("b", incarnation="i2")
    script.received("b", script.ticket("b"))
    assert script.heard_only("b", coordinator_pb2.PhaseEnding)
    script.arrive("b", at=version, weight=0.0)
    assert len(script.roster("a").members) == 2


def test_resync_is_one_order_and_one_answer_each() -> None:
    script = Script()
    script.start("a", "b")
    request = operations_pb2.ResyncRequest(request_id="r1", worker_id="b", from_worker_id="a")
    script.operate("r1", request)
    script.operate("r1", request)
    script.operate("r2", operations_pb2.ResyncRequest(request_id="r2", worker_id="b", from_worker_id="a"))
    (order,) = script.heard_only("b", coordinator_pb2.Order)
    assert isinstance(order, coordinator_pb2.Order)
    script.say("b", coordinator_pb2.RecoveryRequest(reason="resync", from_worker_id="a"))
    ticket = script.ticket("b")
    assert ticket.reason == "resync"
    script.received("b", ticket)
    script.say(
        "b",
        coordinator_pb2.OrderResult(order_id=order.order_id, version=ticket.version, fingerprint=ticket.fingerprint),
    )
    assert len(script.answers["r1"]) == len(script.answers["r2"]) == 1
    script.operate("r1", request)
    assert len(script.answers["r1"]) == 2
    script.operate("r1", operations_pb2.ResyncRequest(request_id="r1", worker_id="a"))
    assert isinstance(script.answers["r1"][-1], RecoveryError)
