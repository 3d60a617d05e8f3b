"""The newest failed checkpoint stays in the worker's standing until one succeeds; events go on to the user's sink."""

from __future__ import annotations

from recovery.clock import ManualClock
from recovery.events import CheckpointSaved, CheckpointSaveFailed, Recorder
from recovery.types import Cut, Version
from recovery.worker.standing import Standing
from recovery.worker.troubles import Troubles


def test_a_failed_checkpoint_is_a_trouble_until_one_succeeds() -> None:
    standing, user = Standing(ManualClock()), Recorder()
    clock = ManualClock(0.0)
    sink = Troubles(standing, user, clock)
    sink(CheckpointSaveFailed(url="file:///x", reason="disk\nfull " * 100))
    clock.advance(60.0)
    sink(CheckpointSaveFailed(url="file:///x", reason="disk\nfull " * 100))
    assert standing.read().trouble.startswith("checkpoint: failing since 1970-01-01T00:00:00+00:00, disk full disk")
    assert len(standing.read().trouble) <= 300
    sink(CheckpointSaved(url="file:///x", cut=Cut(Version(1, 2)), num_bytes=1, took_seconds=0.1))
    assert standing.read().trouble == ""
    assert [type(event) for event in user.events] == [CheckpointSaveFailed, CheckpointSaveFailed, CheckpointSaved]
