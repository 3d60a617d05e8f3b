"""What the demo's processes tell the demo: JSON lines on a pipe, and the record that keeps them all in order.

A worker process writes one JSON object a line. ``type`` says which:

========  ============================================================================================================
hello     the process runs; ``pid``
event     one of ``recovery.events``; ``event`` is its class, ``fields`` its fields
state     the training thread holds a state that it did not make itself; digests and learning rates of that state
inner     one inner step was taken; digests and learning rates are those *before* it, ``loss`` is the step's
applied   one outer step was applied; digests are those after it
held      the training thread stands still inside a boundary, on the demo's order
flipped   bits of the outer copy were inverted on the demo's order; ``names`` of the parameters
error     the process ends by a named error
done      the process ends because it was told to
========  ============================================================================================================
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from recovery.types import Cut, Version

DEMO = "demo"
"""Source of what the demo itself did: kills, starts, orders and their answers."""
COORDINATOR = "coordinator"

T = TypeVar("T")

_VERSION = re.compile(r"L(\d+)\.k(\d+)(?:\+(\d+))?")


class ScenarioFailed(Exception):
    """The demo cannot go on: a process ended by itself, or something expected did not happen in time."""


def parse_version(text: str) -> Version:
    """Return the version that ``str(Version)`` or ``str(Cut)`` wrote."""
    return parse_cut(text).version


def parse_cut(text: str) -> Cut:
    """Return the cut that ``str(Cut)`` wrote; a version alone is the cut at its boundary.

    Raises:
        ValueError: another form.
    """
    match = _VERSION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a version such as L1.k3, nor a cut such as L1.k3+2")
    return Cut(Version(int(match[1]), int(match[2])), int(match[3] or 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One thing that happened, where, and when."""

    seconds: float
    """Since the demo's start."""
    source: str
    """A worker's id, ``coordinator`` or ``demo``."""
    launch: int = 0
    """Which process of the worker: 1 for the first, 2 after a restart."""
    kind: str
    """A class name of ``recovery.events``, or a report's type, or what the demo did."""
    fields: Mapping[str, object] = field(default_factory=dict)

    @property
    def process(self) -> tuple[str, int]:
        """Names one process of one worker."""
        return self.source, self.launch

    def text(self, name: str) -> str:
        """Return the field as a string; empty if it is absent."""
        value = self.fields.get(name)
        return "" if value is None else str(value)

    def number(self, name: str) -> float:
        """Return the field as a float; zero if it is absent or no number."""
        value = self.fields.get(name)
        return float(value) if isinstance(value, int | float) else 0.0

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the field's items as strings; empty if it is absent or no list."""
        value = self.fields.get(name)
        return tuple(str(item) for item in value) if isinstance(value, list | tuple) else ()

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return the field's items as floats; empty if it is absent or no list."""
        value = self.fields.get(name)
        return tuple(float(item) for item in value) if isinstance(value, list | tuple) else ()

    @property
    def version(self) -> Version:
        """The field ``version``."""
        return parse_version(self.text("version"))

    def to_json(self) -> str:
        """Return the entry as one line of JSON."""
        where = {"seconds": round(self.seconds, 4), "source": self.source, "launch": self.launch}
        return json.dumps({**where, "type": self.kind, "fields": dict(self.fields)})


class Record:
    """Everything that happened, in order of arrival. Any thread may add; waiters are woken at each entry."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._start = monotonic()
        self._entries: list[Entry] = []
        self._failure: str | None = None
        self._changed = threading.Condition()
        self._listeners: list[Callable[[Entry], None]] = []

    @property
    def seconds(self) -> float:
        """Seconds since the demo's start; later entries have no smaller number."""
        return self._monotonic() - self._start

    def listen(self, listener: Callable[[Entry], None]) -> None:
        """Call ``listener`` with each later entry, in order, on the adding thread; it must return at once."""
        with self._changed:
            self._listeners.append(listener)

    def add(self, source: str, kind: str, fields: Mapping[str, object] | None = None, *, launch: int = 0) -> Entry:
        """Append an entry stamped with the present time and return it."""
        with self._changed:
            entry = Entry(seconds=self.seconds, source=source, launch=launch, kind=kind, fields=dict(fields or {}))
            self._entries.append(entry)
            for listener in self._listeners:
                listener(entry)
            self._changed.notify_all()
        return entry

    def add_line(self, source: str, line: str, *, launch: int) -> Entry:
        """Append what a worker process wrote as one line.

        Raises:
            ValueError: the line is not a JSON object with a ``type``.
        """
        message = json.loads(line)
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise ValueError(f"{source} wrote a line that is no report: {line[:200]!r}")  # noqa: TRY004
        kind = message.pop("type")
        if kind == "event":
            return self.add(source, str(message["event"]), message["fields"], launch=launch)
        return self.add(source, kind, message, launch=launch)

    def fail(self, reason: str) -> None:
        """Make every present and later ``wait_for`` raise; the first reason stays."""
        with self._changed:
            if self._failure is None:
                self._failure = reason
            self._changed.notify_all()

    def entries(self) -> list[Entry]:
        """Return a copy of all entries."""
        with self._changed:
            return list(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries())

    def wait_for(self, what: str, find: Callable[[Sequence[Entry]], T | None], *, timeout_seconds: float) -> T:
        """Return what ``find`` finds in the entries, as soon as it finds something.

        Args:
            what: Named in the error; completes "... did not happen".
            find: Gets all entries; returns None for "not yet". Called under the record's lock: it must not add.
            timeout_seconds: The longest wait.

        Raises:
            ScenarioFailed: it was not found in time, or ``fail`` was called.
        """
        deadline = self._monotonic() + timeout_seconds
        with self._changed:
            while True:
                found = find(self._entries)
                if found is not None:
                    return found
                if self._failure is not None:
                    raise ScenarioFailed(f"while waiting for {what}: {self._failure}")
                remaining = deadline - self._monotonic()
                if remaining <= 0:
                    raise ScenarioFailed(f"{what} did not happen within {timeout_seconds:.0f} s")
                self._changed.wait(remaining)
