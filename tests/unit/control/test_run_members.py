"""Who may attach to a run, under which name, and what is shown of whom."""

from __future__ import annotations

from protos.recovery.v1 import coordinator_pb2
from tests.unit.control.script import Script


def test_a_lost_worker_is_forgotten_in_time_and_counted() -> None:
    script = Script(forget_after_seconds=60.0)
    script.start("a", "b", "c")
    script.detach("b")
    script.detach("c")
    script.wait(59.0)
    listed = script.machine.status(script.now)
    assert [(worker.worker.worker_id, worker.alive) for worker in listed.workers] == [
        ("a", True),
        ("b", False),
        ("c", False),
    ]
    assert "it is gone" in listed.workers[1].waiting_for
    script.attach("c", incarnation="i2")  # a new process of the name takes the lost one's place
    script.wait(1.0)
    listed = script.machine.status(script.now)
    assert [(worker.worker.worker_id, worker.alive) for worker in listed.workers] == [("a", True), ("c", True)]
    assert listed.gone == 1
    script.attach("b")
    assert script.ticket("b").donors


def test_a_workers_trouble_is_shown() -> None:
    script = Script()
    script.start("a")
    script.advertise("a", 1, trouble="a checkpoint failed: disk full")
    assert script.machine.status(script.now).workers[0].trouble == "a checkpoint failed: disk full"
    script.advertise("a", 2)
    assert script.machine.status(script.now).workers[0].trouble == ""


def test_strangers_are_refused_by_name() -> None:
    """As reported in learning-at-home/hivemind#624."""
    script = Script()
    script.start("a")
    cases: dict[str, dict[str, object]] = {
        "ATEN_CPU_CAPABILITY=avx2": {"numerics_id": "torch-2.13.0/cpu/AVX512"},
        "run 'other'": {"run_id": "other"},
        "layout": {"layout_digest": b"x" * 32},
        "protocol 2": {"protocol": 2},
    }
    for index, (named, hello) in enumerate(cases.items()):
        name = f"s{index}"
        script.attach(name, **hello)  # type: ignore[arg-type]
        (rejected,) = script.heard_only(name, coordinator_pb2.Rejected)
        assert isinstance(rejected, coordinator_pb2.Rejected)
        assert named in rejected.failure.message
        assert name in script.dropped


def test_the_same_name_twice() -> None:
    """As reported in meta-pytorch/torchft#63."""
    script = Script()
    script.start("a", "b")
    script.attach("b", incarnation="i2")
    (rejected,) = script.heard_only("b", coordinator_pb2.Rejected)
    assert isinstance(rejected, coordinator_pb2.Rejected)
    assert "taken" in rejected.failure.message
    script.wait(10.0)
    script.attach("b", incarnation="i3")
    heard = script.heard("b")
    assert any(isinstance(message, coordinator_pb2.Evicted) for message in heard)
    assert any(isinstance(message, coordinator_pb2.Ticket) for message in heard)


def test_another_number_of_inner_steps_is_refused_by_name() -> None:
    script = Script()
    script.attach("a", inner_steps_per_phase=10)
    script.attach("b", inner_steps_per_phase=20)
    (told,) = script.heard_only("b", coordinator_pb2.Rejected)
    assert isinstance(told, coordinator_pb2.Rejected)
    assert told.failure.message == (
        "worker b takes 20 inner steps in a phase, worker a takes 10: start it with inner_steps_per_phase=10"
    )
    script.attach("b", inner_steps_per_phase=10)
    script.detach("a")
    script.detach("b")
    script.attach("c", inner_steps_per_phase=20)
    assert not script.heard_only("c", coordinator_pb2.Rejected), "all ended, to go on with another number"


def test_the_coordinators_number_of_inner_steps_goes_before_that_of_workers() -> None:
    script = Script(inner_steps_per_phase=5)
    script.attach("a", inner_steps_per_phase=10)
    (told,) = script.heard_only("a", coordinator_pb2.Rejected)
    assert isinstance(told, coordinator_pb2.Rejected)
    assert "this run's coordinator was told 5" in told.failure.message


def test_a_joiner_that_never_had_a_state_is_not_called_poisoned() -> None:
    script = Script()
    script.start("a")
    script.attach("j")
    script.ticket("j")
    for _ in range(2):
        script.say("j", coordinator_pb2.Advertisement(poisoned=True, waiting_for="not admitted: the link is too slow"))
    (status,) = [w for w in script.machine.status(script.now).workers if w.worker.worker_id == "j"]
    assert not status.poisoned
    assert status.waiting_for.endswith("not admitted: the link is too slow")
