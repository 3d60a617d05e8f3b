"""A storm of malformed and misplaced messages against the coordinator's machine."""

from __future__ import annotations

import math
import random

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protos.recovery.v1 import coordinator_pb2
from recovery.types import NO_VERSION, Version
from tests.unit.control.script import Script

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
