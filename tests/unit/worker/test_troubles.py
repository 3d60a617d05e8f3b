"""The newest failed checkpoint stays in the worker's standing until one succeeds; events go on to the user's sink."""

from __future__ import annotations

from recovery.clock import SystemClock
from recovery.events import CheckpointSaved, CheckpointSaveFailed, Recorder
from recovery.types import Cut, Version
from recovery.worker.standing import Standing
from recovery.worker.troubles import Troubles


def test_a_failed_checkpoint_is_a_trouble_until_one_succeeds() -> None:
    standing, user = Standing(SystemClock()), Recorder()
    sink = Troubles(standing, user)
    sink(CheckpointSaveFailed(url="file:///x", reason="disk full " * 100))
    assert standing.read().trouble.startswith("a checkpoint failed: disk full")
    assert len(standing.read().trouble) <= 300
    sink(CheckpointSaved(url="file:///x", cut=Cut(Version(1, 2)), num_bytes=1, took_seconds=0.1))
    assert standing.read().trouble == ""
    assert [type(event) for event in user.events] == [CheckpointSaveFailed, CheckpointSaved]
