"""How a history begins, and goes on when all who held it are gone: origin, resume, adopt; who never is its source."""

from __future__ import annotations

from protos.recovery.v1 import common_pb2, coordinator_pb2, operations_pb2
from recovery.control.wire import from_proto, to_proto
from recovery.types import NO_VERSION, Version
from tests.unit.control.script import Script, failure, fingerprint_of

K0 = Version(1, 0)


def test_one_origin_is_named_and_the_others_get_its_state() -> None:
    script = Script()
    for name in ("b", "a", "c"):
        script.attach(name)
    assert not script.heard_only("a", coordinator_pb2.BecomeOrigin)
    script.wait(2.0)
    (origin,) = script.heard_only("a", coordinator_pb2.BecomeOrigin)
    assert isinstance(origin, coordinator_pb2.BecomeOrigin)
    assert from_proto(origin.version) == K0
    assert script.durable.newest_lineage == 1, "the lineage is stored before it is told"
    assert not script.heard_only("b", coordinator_pb2.Ticket)
    script.applied("a", K0)
    assert script.sealed == K0
    ticket = script.ticket("c")
    assert [donor.worker.worker_id for donor in ticket.donors] == ["a"]
    assert ticket.fingerprint == fingerprint_of(K0)
    assert ticket.reason == "fresh"


def test_all_gone_resumes_the_newest_checkpoint_under_a_new_lineage() -> None:
    """As reported in NousResearch/nousnet#357."""
    script = Script()
    version = script.start("a", "b")
    for _ in range(3):
        version = script.step("a", "b", at=version)
    script.detach("a")
    script.detach("b")
    script.attach("x")
    script.attach("y")
    (first,) = script.heard_only("x", coordinator_pb2.NoDonor)
    assert isinstance(first, coordinator_pb2.NoDonor)
    assert first.expected
    assert not first.resume_from_disk
    script.wait(5.0)
    (asked,) = script.heard_only("x", coordinator_pb2.NoDonor)
    assert isinstance(asked, coordinator_pb2.NoDonor)
    assert asked.resume_from_disk
    for name, held in (("x", Version(1, 1)), ("y", Version(1, 2))):
        report = coordinator_pb2.RecoveryReport(
            version=to_proto(held), fingerprint=fingerprint_of(held), source=coordinator_pb2.RECOVERY_SOURCE_DISK
        )
        script.say(name, report)
    (begin,) = script.heard_only("y", coordinator_pb2.BecomeOrigin)
    assert isinstance(begin, coordinator_pb2.BecomeOrigin)
    assert from_proto(begin.version) == Version(2, 2)
    assert script.durable.lineages[-1].lost_steps == 1
    assert script.durable.lineages[-1].parent == Version(1, 2)
    script.applied("y", Version(2, 2))
    assert script.ticket("x").reason == "fresh"
    # The old one thaws: however high its step, it is a joiner.
    script.attach("a", Version(1, 3), incarnation="i1")
    assert script.ticket("a").reason == "behind"
    assert script.sealed == Version(2, 2)


def test_all_gone_and_no_checkpoint_is_said_so() -> None:
    script = Script()
    script.start("a")
    script.detach("a")
    script.attach("x")
    script.wait(5.0)
    script.say("x", coordinator_pb2.RecoveryReport(failure=failure(common_pb2.NEXT_ACTION_NEXT_SOURCE)))
    last = script.heard_only("x", coordinator_pb2.NoDonor)[-1]
    assert isinstance(last, coordinator_pb2.NoDonor)
    assert not last.expected
    assert "checkpoint" in last.reason
    assert not script.heard_only("x", coordinator_pb2.BecomeOrigin)


def test_policy_refuse_turns_a_fresh_worker_away() -> None:
    script = Script(on_all_gone="refuse")
    script.start("a")
    script.detach("a")
    script.attach("x")
    script.wait(5.0)
    (rejected,) = script.heard_only("x", coordinator_pb2.Rejected)
    assert isinstance(rejected, coordinator_pb2.Rejected)
    assert "refuse" in rejected.failure.message
    assert "x" in script.dropped


def test_a_fresh_coordinator_names_no_origin_beside_an_unknown_history_until_adopt() -> None:
    script = Script()
    script.attach("a", Version(3, 17))
    script.attach("b", Version(3, 17))
    script.attach("fresh")
    script.wait(10.0)
    assert script.durable.newest_lineage == 0
    assert "recovery adopt" in script.waiting_for("fresh")
    script.operate("r", operations_pb2.AdoptRequest(request_id="r"))
    (begin,) = script.heard_only("a", coordinator_pb2.BecomeOrigin)
    assert isinstance(begin, coordinator_pb2.BecomeOrigin)
    assert from_proto(begin.version) == Version(4, 17)
    script.applied("a", Version(4, 17))
    (answer,) = script.answers["r"]
    assert isinstance(answer, operations_pb2.AdoptResponse)
    assert script.ticket("b").reason == "behind"
    assert script.ticket("fresh").reason == "fresh"


def test_an_unknown_history_is_turned_away_after_its_deadline() -> None:
    script = Script()
    script.attach("a", Version(3, 17))
    script.wait(60.0)
    (rejected,) = script.heard_only("a", coordinator_pb2.Rejected)
    assert isinstance(rejected, coordinator_pb2.Rejected)
    assert "recovery adopt" in rejected.failure.message


def test_a_fresh_worker_alone_in_a_run_with_history_is_never_its_origin() -> None:
    """As reported in nicholicaron/ft-diloco (operator's log)."""
    script = Script()
    version = script.start("a", "b")
    script.step("a", "b", at=version)
    script.detach("a")
    script.detach("b")
    script.attach("x")
    script.wait(100000.0)
    assert not script.heard_only("x", coordinator_pb2.BecomeOrigin)
    script.restart()
    script.attach("x", NO_VERSION, incarnation="i2")
    script.wait(100000.0)
    assert not script.heard_only("x", coordinator_pb2.BecomeOrigin)
