"""What the coordinator tells and believes of joiners that take longer than a phase."""

from __future__ import annotations

from protos.recovery.v1 import common_pb2, coordinator_pb2
from recovery.control.wire import from_proto, to_proto
from tests.unit.control.script import Script, failure, fingerprint_of


def test_a_ticket_tells_the_outer_period_once_it_is_known() -> None:
    script = Script()
    version = script.start("a")
    script.attach("early")
    ticket = script.ticket("early")
    assert not ticket.HasField("outer_period")
    script.received("early", ticket)
    version = script.step("a", "early", at=version)
    script.wait(40.0)
    script.step("a", "early", at=version)
    script.attach("j")
    assert script.ticket("j").outer_period.ToTimedelta().total_seconds() == 40.0


def test_a_joiner_may_arrive_at_a_newer_version_than_its_ticket_named() -> None:
    script = Script()
    version = script.start("a")
    script.attach("j")
    ticket = script.ticket("j")
    newest = script.step("a", at=script.step("a", at=version))
    assert from_proto(ticket.version) < newest
    script.say(
        "j",
        coordinator_pb2.RecoveryReport(
            transfer_id=ticket.transfer_id,
            attempt=ticket.attempt,
            version=to_proto(newest),
            fingerprint=fingerprint_of(newest),
            source=coordinator_pb2.RECOVERY_SOURCE_PEERS,
        ),
    )
    assert script.waiting_for("j") == ""
    script.arrive("a", "j", at=newest)
    assert len(script.roster("j").members) == 2


def test_a_joiner_that_arrived_late_gets_a_ticket_for_the_rest() -> None:
    script = Script()
    version = script.start("a")
    script.attach("j")
    ticket = script.ticket("j")
    newest = script.step("a", at=version)
    script.received("j", ticket)  # at the version that the ticket named
    again = script.ticket("j")
    assert (from_proto(again.version), again.reason) == (newest, "behind")
    assert again.transfer_id == ticket.transfer_id


def test_status_shows_what_a_joiner_says_of_its_link() -> None:
    script = Script()
    script.start("a")
    script.attach("j")
    ticket = script.ticket("j")
    script.say("j", coordinator_pb2.Advertisement(waiting_for="the commit of L1.k3; the run is at L1.k4 at 2 MB/s"))
    assert script.waiting_for("j").endswith("attempt 1): the commit of L1.k3; the run is at L1.k4 at 2 MB/s")
    script.say(
        "j",
        coordinator_pb2.RecoveryReport(
            transfer_id=ticket.transfer_id,
            attempt=ticket.attempt,
            failure=failure(common_pb2.NEXT_ACTION_NEXT_SOURCE, "CannotKeepUp", "too slow"),
        ),
    )
    script.say("j", coordinator_pb2.Advertisement(waiting_for="not admitted: the link brings 1 MB/s"))
    assert script.waiting_for("j") == "not admitted: the link brings 1 MB/s"
    assert not script.heard_only("j", coordinator_pb2.Ticket), "it holds no donor's slot while it waits"
    script.say("j", coordinator_pb2.RecoveryRequest(reason="fresh"))
    assert script.ticket("j")
