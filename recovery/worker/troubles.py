"""What failed without stopping training, kept where operators see it: the newest failed checkpoint."""

from __future__ import annotations

from recovery.events import CheckpointSaved, CheckpointSaveFailed, Event, EventSink
from recovery.worker.standing import Standing

_LONGEST = 300


class Troubles:
    """An event sink in front of the user's: notes in the worker's standing what operators should know."""

    def __init__(self, standing: Standing, sink: EventSink) -> None:
        self._standing = standing
        self._sink = sink

    def __call__(self, event: Event, /) -> None:
        match event:
            case CheckpointSaveFailed():
                self._standing.update(trouble=f"a checkpoint failed: {event.reason}"[:_LONGEST])
            case CheckpointSaved():
                self._standing.update(trouble="")
            case _:
                pass
        self._sink(event)
