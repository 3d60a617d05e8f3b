"""Whatever a worker or operator with valid credentials sends, the production machine takes it or refuses it.

The shell ends the coordinator when its machine raises, so one malformed message must never make it raise.
"""

from __future__ import annotations

import random

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protos.recovery.v1 import coordinator_pb2, operations_pb2
from recovery.control.inputs import Attached, Detached, Input, Operated, Received, Tick
from recovery.control.policy import RunPolicy
from recovery.control.record import HistoryRecord
from recovery.control.run import RunMachine
from recovery.types import Incarnation, WorkerId, WorkerRef
from tests.support.scripted_machine import hello

SCHEDULES = 300
STEPS = 60
WORKERS = [WorkerRef(WorkerId(f"w{number}"), Incarnation("i1")) for number in range(3)]

VALUES: dict[int, list[object]] = {
    FieldDescriptor.TYPE_STRING: ["", "w0", "w1", "run", "../x", "\x00é", "a" * 300],
    FieldDescriptor.TYPE_BYTES: [b"", b"f" * 32, b"x", bytes(32)],
    FieldDescriptor.TYPE_DOUBLE: [0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e300],
    FieldDescriptor.TYPE_BOOL: [True, False],
    FieldDescriptor.TYPE_ENUM: [0, 1, 2, 3, 4],
    FieldDescriptor.TYPE_UINT32: [0, 1, 2, 2**32 - 1],
    FieldDescriptor.TYPE_INT32: [0, 1, -1, 999_999_999],
    FieldDescriptor.TYPE_UINT64: [0, 1, 2, 3, 2**63, 2**64 - 1],
    FieldDescriptor.TYPE_INT64: [0, 1, -1, 2**63 - 1, 10**11],
}

REQUESTS = [
    operations_pb2.ListRequest,
    operations_pb2.ResyncRequest,
    operations_pb2.VerifyRequest,
    operations_pb2.SaveRequest,
    operations_pb2.DrainRequest,
    operations_pb2.CancelRequest,
    operations_pb2.SetRateRequest,
    operations_pb2.RollbackRequest,
    operations_pb2.AdoptRequest,
]


def fill(message: Message, chance: random.Random, depth: int = 0) -> None:
    """Set a random choice of fields, submessages too, to values at the edges of their types."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() < (0.8 if field.containing_oneof else 0.4):
            continue
        for _ in range(chance.randint(0, 3) if field.is_repeated else 1):
            if field.message_type is not None:
                if depth > 4:
                    continue
                child = getattr(message, field.name)
                if field.is_repeated:
                    child = child.add()
                else:
                    child.SetInParent()
                fill(child, chance, depth + 1)
            elif field.is_repeated:
                getattr(message, field.name).append(chance.choice(VALUES[field.type]))
            else:
                setattr(message, field.name, chance.choice(VALUES[field.type]))


def hostile_input(chance: random.Random, step: int) -> Input:
    worker = chance.choice(WORKERS)
    kind = chance.random()
    if kind < 0.6:
        message = coordinator_pb2.WorkerMessage()
        fill(message, chance)
        return Received(worker, message)
    if kind < 0.7:
        said = hello(worker.worker_id)
        if chance.random() < 0.7:
            fill(said, chance)
            said.run_id, said.protocol = "run", 1
        return Attached(worker, said)
    if kind < 0.9:
        request = chance.choice(REQUESTS)()
        fill(request, chance)
        return Operated(f"r{step}", request)
    return Detached(worker, "x") if kind < 0.95 else Tick()


@pytest.mark.parametrize("first_seed", range(0, SCHEDULES, 50))
def test_no_message_makes_the_machine_raise(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        chance = random.Random(seed)
        machine = RunMachine(RunPolicy(run_id="run", origin_wait_seconds=0), HistoryRecord("run", 1, "", b""))
        now = 1000.0
        for worker in WORKERS:
            machine.handle(Attached(worker, hello(worker.worker_id)), now)
        for step in range(STEPS):
            now += 5 * chance.random()
            event = hostile_input(chance, step)
            try:
                machine.handle(event, now)
                machine.next_wakeup()
            except Exception as error:
                raise AssertionError(f"seed {seed}, step {step}: {type(event).__name__}") from error
