"""Versions that workers publish themselves: committed by everybody's reports or a majority's, never by a minority's."""

from __future__ import annotations

from protos.recovery.v1 import coordinator_pb2
from recovery.control.wire import to_proto
from recovery.types import Version
from tests.unit.control.script import Script, fingerprint_of


def publish(script: Script, *names: str, version: Version, flavour: str = "", position: bytes = b"") -> None:
    for name in names:
        script.say(
            name,
            coordinator_pb2.Applied(
                version=to_proto(version), fingerprint=fingerprint_of(version, flavour), data_position=position
            ),
        )


def test_a_version_that_everybody_published_is_sealed_at_once() -> None:
    script = Script()
    first = script.start("a", "b", "c")
    publish(script, "a", "b", version=first.next())
    assert script.sealed == first
    publish(script, "c", version=first.next(), position=b"here")
    assert script.sealed == first.next()
    assert script.durable.seals[first.next()] == fingerprint_of(first.next())
    assert script.durable.positions["c"].position == b"here"
    for name in ("a", "b", "c"):
        assert script.heard_only(name, coordinator_pb2.Sealed)


def test_a_version_published_by_a_majority_is_sealed_after_a_while_and_the_others_recover() -> None:
    script = Script(seal_wait_seconds=10.0)
    first = script.start("a", "b", "c")
    publish(script, "a", "b", version=first.next())
    script.wait(9.0)
    assert script.sealed == first
    script.wait(1.5)
    assert script.sealed == first.next()
    assert script.ticket("c").version.outer_step == first.next().outer_step


def test_a_minority_never_publishes() -> None:
    """Field report: nicholicaron/ft-diloco, nodes that met no peer committed alone: one run became many."""
    script = Script(seal_wait_seconds=10.0)
    first = script.start("a", "b")
    publish(script, "a", version=first.next())
    script.wait(1000.0)
    assert script.sealed == first
    script.detach("b")
    assert script.sealed == first.next()


def test_fewer_than_the_minimum_never_publish() -> None:
    script = Script(min_participants=2)
    first = script.start("a", "b")
    script.detach("b")
    publish(script, "a", version=first.next())
    script.wait(1000.0)
    assert script.sealed == first


def test_a_worker_without_the_present_state_has_no_say() -> None:
    script = Script()
    first = script.start("a", "b")
    publish(script, "a", "b", version=first.next())
    script.attach("z")
    publish(script, "z", version=first.next().next())
    script.wait(100.0)
    assert script.sealed == first.next()
    skipped = first.next().next().next()
    publish(script, "a", "b", version=skipped)
    script.wait(100.0)
    assert script.sealed == first.next()


def test_two_that_publish_different_states_wait_for_an_operator() -> None:
    script = Script()
    first = script.start("a", "b")
    publish(script, "a", version=first.next())
    publish(script, "b", version=first.next(), flavour="other")
    assert script.sealed == first
    assert "recovery rollback --worker" in script.durable.paused
    publish(script, "a", version=first.next())
    assert script.sealed == first


def test_one_of_three_that_publishes_another_state_recovers() -> None:
    script = Script()
    first = script.start("a", "b", "c")
    publish(script, "a", "c", version=first.next())
    publish(script, "b", version=first.next(), flavour="other")
    assert script.sealed == first.next()
    assert script.ticket("b").reason == "diverged"


def test_reports_lost_with_the_coordinator_are_said_again_and_all_are_waited_for() -> None:
    script = Script()
    first = script.start("a", "b")
    publish(script, "a", "b", version=first.next())
    second = first.next().next()
    publish(script, "a", version=second)
    script.restart()
    script.attach("a", first.next())
    publish(script, "a", version=second)
    # A coordinator that has just come back does not take the first to return for the whole run.
    script.wait(1.0)
    assert script.sealed == first.next()
    script.attach("b", first.next())
    publish(script, "b", version=second)
    assert script.sealed == second


def test_a_publisher_that_missed_the_seal_reports_again() -> None:
    script = Script()
    first = script.start("a", "b")
    publish(script, "a", "b", version=first.next())
    script.restart()
    # It does not know yet that its version was sealed, so it still says that it holds the one before.
    script.attach("a", first)
    publish(script, "a", version=first.next())
    assert script.heard_only("a", coordinator_pb2.Ticket) == []
    script.attach("b", first.next())
    publish(script, "a", "b", version=first.next().next())
    assert script.sealed == first.next().next()
