"""The side stream, on a machine without a device: the order of calls, with torch.cuda replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from recovery.snapshot.device import SideStream, device_of
from tests.unit.snapshot.trainee import Trainee


def test_without_a_device_nothing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", lambda: pytest.fail("asked for a device"))
    side = SideStream(device_of(Trainee(width=4).state))
    side.mark()
    with side.after_mark():
        pass


def test_copies_come_after_the_mark_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        def record(self, stream: object) -> None:
            calls.append(f"record on {stream}")

    class Stream:
        def __init__(self, device: torch.device) -> None:
            calls.append(f"new stream on {device}")

        def wait_event(self, event: object) -> None:
            calls.append("side waits for the mark")

        def synchronize(self) -> None:
            calls.append("host waits for side")

    @contextmanager
    def use(stream: object) -> Iterator[None]:
        calls.append("side is current")
        yield
        calls.append("side is no longer current")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"training's on {device}")
    side = SideStream(torch.device("cuda", 1))
    with side.after_mark():
        calls.append("no mark yet: training's own stream")
    side.mark()
    with side.after_mark():
        calls.append("copy")
    assert calls == [
        "no mark yet: training's own stream",
        "record on training's on cuda:1",
        "new stream on cuda:1",
        "side waits for the mark",
        "side is current",
        "copy",
        "side is no longer current",
        "host waits for side",
    ]
