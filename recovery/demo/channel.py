"""A demo worker's two ends of its private channel: reports out on standard output, commands in on standard input."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

DEMO_GONE_EXIT_CODE = 3
"""Exit code of a process that ended because its channel to the demo did."""


class ReportWriter:
    """Writes JSON lines to one file descriptor. Any thread may write; lines never mix."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    @classmethod
    def take_standard_output(cls) -> ReportWriter:
        """Return a writer to the present standard output; whatever else prints goes to standard error from now on."""
        descriptor = os.dup(1)
        os.dup2(2, 1)
        return cls(descriptor)

    def write(self, report: Mapping[str, object]) -> None:
        """Write one line. If nobody reads any more the process ends: a worker does not outlive its demo."""
        data = memoryview((json.dumps(report) + "\n").encode())
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except BrokenPipeError:
                os._exit(DEMO_GONE_EXIT_CODE)


@dataclass(frozen=True, slots=True)
class FlipOrder:
    """Which bits to invert: ``num_tensors`` parameters chosen by ``seed``."""

    seed: int
    num_tensors: int


class CommandReader:
    """Reads the demo's commands, one JSON object a line, on a thread of its own.

    ``{"command": "flip", "seed": 1, "num_tensors": 3}``, ``{"command": "hold", "stage": "averaging"}``,
    ``{"command": "go_on"}``, ``{"command": "finish", "at": 12}``.
    """

    def __init__(self, descriptor: int = 0, *, on_end: Callable[[], None] | None = None) -> None:
        self._descriptor = descriptor
        self._on_end = on_end if on_end is not None else _end_process
        self._changed = threading.Condition()
        self._flip: FlipOrder | None = None
        self._hold_at = ""
        self._go_on = False
        self._finish_at: int | None = None
        # A daemon: it is blocked in a read that only the demo can end, and so can never be joined from here.
        self._thread = threading.Thread(target=self._read, name="demo-commands", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    @property
    def finish_at(self) -> int | None:
        """Outer step at which the worker is to end; None: it trains on."""
        with self._changed:
            return self._finish_at

    def take_flip(self) -> FlipOrder | None:
        """Return the flip ordered since the last call, once."""
        with self._changed:
            order, self._flip = self._flip, None
            if order is not None:
                self._go_on = False
            return order

    def take_hold(self, stage: str) -> bool:
        """Return True once after a hold at ``stage`` was ordered."""
        with self._changed:
            ordered = stage == self._hold_at
            if ordered:
                self._hold_at, self._go_on = "", False
            return ordered

    def wait_go_on(self, timeout_seconds: float) -> bool:
        """Return True once the demo said go on; False after ``timeout_seconds`` without it."""
        with self._changed:
            return self._changed.wait_for(lambda: self._go_on, timeout_seconds)

    def _read(self) -> None:
        # os.read and not sys.stdin: a buffered reader's lock, held here for ever, would abort the interpreter's end.
        pending = b""
        while data := os.read(self._descriptor, 65536):
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        self._on_end()

    def _take(self, message: Mapping[str, object]) -> None:
        with self._changed:
            match message:
                case {"command": "flip", "seed": int(seed), "num_tensors": int(num_tensors)}:
                    self._flip = FlipOrder(seed, num_tensors)
                case {"command": "hold", "stage": str(stage)}:
                    self._hold_at = stage
                case {"command": "go_on"}:
                    self._go_on = True
                case {"command": "finish", "at": int(at)}:
                    self._finish_at = at
                case _:
                    raise ValueError(f"unknown command {message!r}")
            self._changed.notify_all()


def _end_process() -> None:
    os._exit(DEMO_GONE_EXIT_CODE)
