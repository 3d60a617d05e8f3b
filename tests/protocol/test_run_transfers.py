"""Scripted faults of transfers against the coordinator's machine: donors, tickets, savers, data positions.

Reports: learning-at-home/hivemind#169 (joiners choke one donor).
"""

from __future__ import annotations

from protos.recovery.v1 import common_pb2, coordinator_pb2, operations_pb2
from recovery.control.wire import from_proto, to_proto
from recovery.types import NO_VERSION, Version
from tests.unit.control.script import Script, failure, fingerprint_of


def test_joiners_share_the_slots_queue_with_a_position_and_are_called() -> None:
    script = Script(max_donors=1)
    script.start("a")
    for name in ("j1", "j2", "j3", "j4"):
        script.attach(name)
    first, second = script.ticket("j1"), script.ticket("j2")
    assert first.donors[0].private_parts
    assert (script.no_donor("j3").queue_position, script.no_donor("j4").queue_position) == (1, 2)
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
