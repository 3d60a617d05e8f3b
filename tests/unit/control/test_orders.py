"""What operators ask: once done, however often asked; each answered, also when the worker is lost or slow."""

from __future__ import annotations

import pytest

from protos.recovery.v1 import common_pb2, coordinator_pb2, operations_pb2
from recovery.control.inputs import OperationRequest
from recovery.control.orders import OBEY_SECONDS
from recovery.control.wire import duration, from_proto, to_proto
from recovery.errors import (
    BadConfiguration,
    DonorRefused,
    LayoutMismatch,
    NoDonorLeft,
    PeerUnreachable,
)
from recovery.events import OrderDone
from recovery.types import Version
from tests.unit.control.script import Script, failure, fingerprint_of


def ordered(script: Script, name: str) -> coordinator_pb2.Order:
    found = script.heard_only(name, coordinator_pb2.Order)
    assert found, f"{name} got no order"
    assert isinstance(found[-1], coordinator_pb2.Order)
    return found[-1]


def test_verify_names_the_damaged_tensors() -> None:
    script = Script()
    version = script.start("a", "b")
    script.operate("v", operations_pb2.VerifyRequest(worker_id="b"))
    order = ordered(script, "b")
    assert order.verify.fingerprint == fingerprint_of(version)
    assert order.verify.reference.worker.worker_id == "a"
    script.say(
        "b",
        coordinator_pb2.OrderResult(
            order_id=order.order_id, version=to_proto(version), fingerprint=b"x", different=["outer_params/w"]
        ),
    )
    (answer,) = script.answers["v"]
    assert isinstance(answer, operations_pb2.VerifyResponse)
    assert list(answer.different) == ["outer_params/w"]
    assert answer.expected_fingerprint == fingerprint_of(version)
    assert [event.order for event in script.events if isinstance(event, OrderDone)] == ["verify"]


def test_save_goes_to_a_ready_worker_when_none_is_named() -> None:
    script = Script()
    script.start("a", "b")
    script.operate("s", operations_pb2.SaveRequest())
    order = ordered(script, "a")
    script.say("a", coordinator_pb2.OrderResult(order_id=order.order_id, detail="file:///x"))
    (answer,) = script.answers["s"]
    assert isinstance(answer, operations_pb2.SaveResponse)
    assert answer.detail == "file:///x"


def test_a_failed_order_is_answered_with_the_workers_own_error() -> None:
    script = Script()
    script.start("a", "b")
    script.operate("s", operations_pb2.SaveRequest(worker_id="b"))
    order = ordered(script, "b")
    told = failure(common_pb2.NEXT_ACTION_STOP, "LayoutMismatch", "other model")
    script.say("b", coordinator_pb2.OrderResult(order_id=order.order_id, failure=told))
    (answer,) = script.answers["s"]
    assert isinstance(answer, LayoutMismatch)
    assert str(answer) == "other model"


def test_a_lost_worker_and_a_slow_one_end_the_order() -> None:
    script = Script()
    script.start("a", "b", "c")
    request = operations_pb2.SaveRequest(worker_id="c")
    request.timeout.FromSeconds(30)
    script.operate("slow", request)
    script.operate("lost", operations_pb2.SaveRequest(worker_id="b"))
    script.detach("b")
    (lost,) = script.answers["lost"]
    assert isinstance(lost, PeerUnreachable)
    assert "b was lost" in str(lost)
    script.wait(29.0)
    assert "slow" not in script.answers
    script.wait(1.0)
    (slow,) = script.answers["slow"]
    assert "in time" in str(slow)


def test_a_drained_worker_is_no_donor_also_after_a_restart() -> None:
    script = Script()
    version = script.start("a", "b")
    script.operate("d", operations_pb2.DrainRequest(worker_id="a", drained=True))
    order = ordered(script, "a")
    assert order.drain.drained
    assert "d" not in script.answers, "answered before the worker obeyed"
    script.say("a", coordinator_pb2.OrderResult(order_id=order.order_id))
    (answer,) = script.answers["d"]
    assert isinstance(answer, operations_pb2.DrainResponse)
    assert answer.obeyed
    script.attach("x")
    assert [donor.worker.worker_id for donor in script.ticket("x").donors] == ["b"]
    script.restart()
    script.attach("a", version)
    script.attach("y")
    (told,) = script.heard_only("y", coordinator_pb2.NoDonor)
    assert isinstance(told, coordinator_pb2.NoDonor)
    assert told.reason == "every donor is drained: a"
    script.operate("e", operations_pb2.DrainRequest(worker_id="a", drained=False))
    assert [donor.worker.worker_id for donor in script.ticket("y").donors] == ["a"]


def test_a_drain_that_the_worker_does_not_answer_is_in_force_and_says_so() -> None:
    script = Script()
    script.start("a", "b")
    script.operate("slow", operations_pb2.DrainRequest(worker_id="a", drained=True))
    script.wait(OBEY_SECONDS)
    (slow,) = script.answers["slow"]
    assert isinstance(slow, operations_pb2.DrainResponse)
    assert not slow.obeyed
    script.detach("b")
    script.operate("gone", operations_pb2.DrainRequest(worker_id="b", drained=True))
    (gone,) = script.answers["gone"]
    assert isinstance(gone, operations_pb2.DrainResponse)
    assert not gone.obeyed
    assert [worker.drained for worker in script.machine.status(script.now).workers] == [True, True]


def test_rate_and_cancel_are_answered_when_their_workers_obey() -> None:
    script = Script()
    script.start("a")
    script.operate("r", operations_pb2.SetRateRequest(worker_id="a", bytes_per_second=1000))
    order = ordered(script, "a")
    assert order.rate.bytes_per_second == 1000
    assert "r" not in script.answers
    script.say("a", coordinator_pb2.OrderResult(order_id=order.order_id))
    assert isinstance(script.answers["r"][0], operations_pb2.SetRateResponse)
    script.operate("r2", operations_pb2.SetRateRequest(worker_id="a", bytes_per_second=2000))
    script.wait(OBEY_SECONDS)
    assert isinstance(script.answers["r2"][0], PeerUnreachable)
    script.attach("x")
    ticket = script.ticket("x")
    script.operate("c", operations_pb2.CancelRequest(transfer_id=ticket.transfer_id))
    order = ordered(script, "x")
    assert order.cancel.transfer_id == ticket.transfer_id
    script.say("x", coordinator_pb2.OrderResult(order_id=order.order_id))
    (answer,) = script.answers["c"]
    assert isinstance(answer, operations_pb2.CancelResponse)
    assert answer.detail == "x obeys"
    script.say(
        "x",
        coordinator_pb2.RecoveryReport(
            transfer_id=ticket.transfer_id,
            attempt=ticket.attempt,
            failure=failure(common_pb2.NEXT_ACTION_OTHER_DONOR),
        ),
    )
    assert not script.heard_only("x", coordinator_pb2.Ticket), "cancelled means cancelled"
    script.operate("c2", operations_pb2.CancelRequest(transfer_id=ticket.transfer_id))
    assert isinstance(script.answers["c2"][0], BadConfiguration)


@pytest.mark.parametrize(
    ("request_", "kind", "named"),
    [
        (operations_pb2.ResyncRequest(worker_id="nobody"), BadConfiguration, "attached are: a, b"),
        (operations_pb2.ResyncRequest(worker_id="a", from_worker_id="a"), DonorRefused, "'a' cannot be its own donor"),
        (
            operations_pb2.ResyncRequest(worker_id="a", from_worker_id="z"),
            BadConfiguration,
            "'z' is not attached; attached are: a, b",
        ),
        (operations_pb2.VerifyRequest(worker_id="z"), BadConfiguration, "'z' is not attached"),
        (operations_pb2.SaveRequest(worker_id="z"), BadConfiguration, "'z' is not attached"),
        (operations_pb2.DrainRequest(worker_id="z", drained=True), BadConfiguration, "'z' is not attached"),
        (operations_pb2.SetRateRequest(worker_id="z"), BadConfiguration, "'z' is not attached"),
        (operations_pb2.CancelRequest(transfer_id="t"), BadConfiguration, "'t'"),
        (operations_pb2.AdoptRequest(), BadConfiguration, "no attached worker holds a history"),
        (operations_pb2.RollbackRequest(worker_id="z"), BadConfiguration, "'z' is not attached"),
        (
            operations_pb2.RollbackRequest(worker_id="a", version=to_proto(Version(1, 9))),
            BadConfiguration,
            "holds L1.k0, not L1.k9",
        ),
        (operations_pb2.RollbackRequest(version=to_proto(Version(1, 9))), BadConfiguration, "not a sealed version"),
        (operations_pb2.SaveRequest(run_id="other"), BadConfiguration, "serves run 'run', not 'other'"),
        (operations_pb2.ListRequest(run_id="other"), BadConfiguration, "serves run 'run', not 'other'"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(request_: OperationRequest, kind: type[Exception], named: str) -> None:
    script = Script()
    script.start("a", "b")
    script.operate("q", request_)
    (answer,) = script.answers["q"]
    assert isinstance(answer, kind)
    assert named in str(answer)


def test_a_lone_worker_is_not_ordered_to_resync_from_nobody() -> None:
    script = Script()
    script.start("a")
    script.operate("q", operations_pb2.ResyncRequest(worker_id="a"))
    assert isinstance(script.answers["q"][0], NoDonorLeft)
    assert not script.heard_only("a", coordinator_pb2.Order)


def test_a_drained_worker_is_refused_as_donor_at_once_with_the_remedy() -> None:
    script = Script()
    script.start("a", "b", "c")
    script.operate("d", operations_pb2.DrainRequest(worker_id="b", drained=True))
    script.operate("q", operations_pb2.ResyncRequest(worker_id="c", from_worker_id="b"))
    assert isinstance(script.answers["q"][0], DonorRefused)
    assert "recovery drain b --undo" in str(script.answers["q"][0])
    assert not script.heard_only("c", coordinator_pb2.Order)
    script.operate("e", operations_pb2.DrainRequest(worker_id="a", drained=True))
    script.operate("r", operations_pb2.ResyncRequest(worker_id="c"))
    assert isinstance(script.answers["r"][0], NoDonorLeft)


def test_a_resync_whose_time_is_over_no_longer_insists_on_its_donor() -> None:
    script = Script()
    script.start("a", "b", "c")
    script.operate("q", operations_pb2.ResyncRequest(worker_id="c", from_worker_id="b", timeout=duration(5.0)))
    script.say("c", coordinator_pb2.RecoveryRequest(reason="resync", from_worker_id="b"))
    script.operate("d", operations_pb2.DrainRequest(worker_id="b", drained=True))
    script.say(
        "c",
        coordinator_pb2.RecoveryReport(
            transfer_id=script.ticket("c").transfer_id, attempt=1, failure=to_proto(DonorRefused("b is drained"))
        ),
    )
    script.wait(6.0)
    assert isinstance(script.answers["q"][0], PeerUnreachable)
    assert [donor.worker.worker_id for donor in script.ticket("c").donors] == ["a"]


def test_rollback_to_a_checkpoint_asks_one_worker_after_the_other_and_never_the_last_holder() -> None:
    """As reported in learning-at-home/hivemind#446."""
    script = Script(offer_answer_seconds=10.0)
    version = script.start("a", "b")
    for _ in range(3):
        version = script.step("a", "b", at=version)
    script.operate("r", operations_pb2.RollbackRequest(version=to_proto(Version(1, 1))))
    assert not script.heard_only("a", coordinator_pb2.NoDonor)
    (asked,) = script.heard_only("b", coordinator_pb2.NoDonor)
    assert isinstance(asked, coordinator_pb2.NoDonor)
    assert asked.resume_from_disk
    assert from_proto(asked.resume_at) == Version(1, 1)
    script.say(
        "b",
        coordinator_pb2.RecoveryReport(
            version=to_proto(Version(1, 1)),
            fingerprint=fingerprint_of(Version(1, 1)),
            source=coordinator_pb2.RECOVERY_SOURCE_DISK,
        ),
    )
    script.applied("b", Version(2, 1))
    (answer,) = script.answers["r"]
    assert isinstance(answer, operations_pb2.RollbackResponse)
    assert from_proto(answer.version) == Version(2, 1)
    assert script.durable.lineages[-1].lost_steps == 2
    assert script.ticket("a").reason == "behind"


def test_a_rollback_that_nobody_can_serve_is_answered_and_the_run_goes_on() -> None:
    script = Script(offer_answer_seconds=10.0)
    version = script.start("a")
    version = script.step("a", at=version)
    script.operate("r", operations_pb2.RollbackRequest(version=to_proto(Version(1, 0))))
    (answer,) = script.answers["r"]
    assert isinstance(answer, NoDonorLeft)
    assert "has L1.k0 on its disk: `recovery ckpt list URL`" in str(answer)
    assert "a is not asked" in str(answer)
    assert script.step("a", at=version) == Version(1, 2)


def test_a_donor_that_is_just_taking_its_own_state_is_told_from_an_unknown_one() -> None:
    script = Script()
    version = script.start("a", "b", "c")
    script.detach("b")
    script.attach("b", incarnation="i2")
    script.operate("q", operations_pb2.ResyncRequest(worker_id="c", from_worker_id="b"))
    (answer,) = script.answers["q"]
    assert isinstance(answer, DonorRefused)
    assert f"does not hold {version} now (its state: joining)" in str(answer)
    assert "those that do (a)" in str(answer)


def between_commit_and_reports(script: Script) -> Version:
    """Everybody voted for the next version, and nobody has said that it holds it."""
    version = script.start("a", "b")
    script.arrive("a", "b", at=version)
    script.vote("a", "b", epoch=script.roster("a").epoch, at=version)
    return version.next()


def test_a_save_waits_for_the_moment_until_a_worker_reports_the_new_version() -> None:
    script = Script()
    coming = between_commit_and_reports(script)
    script.heard("b")
    script.operate("s", operations_pb2.SaveRequest())
    assert "s" not in script.answers
    for name in ("a", "b"):
        script.applied(name, coming)
    order = ordered(script, "a")
    script.say("a", coordinator_pb2.OrderResult(order_id=order.order_id, version=to_proto(coming)))
    (answer,) = script.answers["s"]
    assert isinstance(answer, operations_pb2.SaveResponse)
    assert from_proto(answer.version) == coming


def test_a_save_that_nobody_gets_ready_for_ends_with_the_remedy() -> None:
    script = Script(seal_wait_seconds=1000.0)
    between_commit_and_reports(script)
    script.operate("s", operations_pb2.SaveRequest(timeout=duration(5.0)))
    script.wait(4.0)
    assert "s" not in script.answers
    script.wait(1.0)
    (answer,) = script.answers["s"]
    assert isinstance(answer, NoDonorLeft)
    assert "a: applying" in str(answer)
    assert "recovery status" in str(answer)


def test_a_save_where_nobody_has_a_place_for_it_says_so_at_once() -> None:
    script = Script()
    script.attach("a", saves_checkpoints=False)
    script.operate("s", operations_pb2.SaveRequest())
    (answer,) = script.answers["s"]
    assert isinstance(answer, NoDonorLeft)
    assert "checkpoint_url" in str(answer)
