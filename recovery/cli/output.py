"""Where commands write: rich text for people, one JSON object a line for programs."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable
from typing import Any

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.message import Message
from rich.console import Console, RenderableType
from rich.text import Text

PLAIN_WIDTH = 200
"""Columns of a table that goes to a file or a pipe: wide enough that nothing is folded."""


class Output:
    """Standard output of one command."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        terminal = sys.stdout.isatty()
        self._console = Console(width=None if terminal else PLAIN_WIDTH, highlight=False, emoji=False)

    def show(self, value: dict[str, Any], *text: RenderableType) -> None:
        """Write ``value`` as JSON, or ``text`` for people."""
        if self.as_json:
            sys.stdout.write(json.dumps(value) + "\n")
        else:
            for part in text:
                # A line stays one line, however long: whoever searches a log finds all of it.
                self._console.print(part, soft_wrap=isinstance(part, str | Text))
        # Whoever reads a pipe sees each line when it happens.
        sys.stdout.flush()


def plain(message: Message) -> dict[str, Any]:
    """Return a message as values that JSON has: bytes in hex, durations in seconds, times in ISO 8601, absent as null.

    Unlike protobuf's own JSON form, numbers of 64 bits stay numbers.
    """
    return {field.name: _plain_field(message, field) for field in message.DESCRIPTOR.fields}


def _plain_field(message: Message, field: Any) -> object:
    value = getattr(message, field.name)
    if isinstance(value, (str, bytes, int, float)):
        return _plain_value(value)
    if isinstance(value, Message):
        return _plain_value(value) if message.HasField(field.name) else None
    items: Iterable[object] = value
    return [_plain_value(item) for item in items]


def _plain_value(value: object) -> object:
    match value:
        case bytes():
            return value.hex()
        case duration_pb2.Duration():
            return value.seconds + value.nanos / 1e9
        case timestamp_pb2.Timestamp():
            return value.ToDatetime(datetime.UTC).isoformat()
        case Message():
            return plain(value)
        case _:
            return value
