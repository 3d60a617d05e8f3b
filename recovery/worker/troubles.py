"""What failed without stopping training, kept where operators see it: the newest failed checkpoint."""

from __future__ import annotations

from datetime import UTC, datetime

from recovery.clock import Clock
from recovery.events import CheckpointSaved, CheckpointSaveFailed, Event, EventSink
from recovery.worker.standing import Standing

_LONGEST = 300


class Troubles:
    """An event sink in front of the user's: notes in the worker's standing what operators should know."""

    def __init__(self, standing: Standing, sink: EventSink, clock: Clock) -> None:
        self._standing = standing
        self._sink = sink
        self._clock = clock
        self._since = ""

    def __call__(self, event: Event, /) -> None:
        match event:
            case CheckpointSaveFailed():
                self._since = self._since or datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(
                    timespec="seconds"
                )
                reason = " ".join(event.reason.split())
                self._standing.update(trouble=f"checkpoint: failing since {self._since}, {reason}"[:_LONGEST])
            case CheckpointSaved():
                self._since = ""
                self._standing.update(trouble="")
            case _:
                pass
        self._sink(event)
