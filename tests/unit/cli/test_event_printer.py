"""The coordinator's log: one line an event, whole and as it was said, with its time."""

from __future__ import annotations

from datetime import datetime

import pytest

from recovery.cli.coordinator import EventPrinter
from recovery.cli.output import Output
from recovery.events import WorkerRejected


def test_an_event_is_one_line_whatever_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "[127.0.0.1]:4 [bold]closed[/bold] [/nothing] " + "and so on, " * 40
    with EventPrinter(Output(as_json=False)) as printer:
        printer(WorkerRejected(worker_id="w0", reason=reason))
        printer(WorkerRejected(worker_id="w1", reason="short"))
    first, second = capsys.readouterr().out.splitlines()
    assert reason in first
    assert datetime.fromisoformat(first.split(" ")[0]).tzinfo is not None
    assert second.endswith('WorkerRejected {"worker_id": "w1", "reason": "short"}')
