"""Which congestion control a link's sockets use, as its path shows: the system's, or one that does not mind loss.

A path that loses nothing but what its own queue overflows is filled best by the system's (cubic) over some sockets at
once: BBR gives up a few per cent of it, most of them in the fifth of a second every ten seconds in which all of its
sockets nearly stop to measure. A path that loses packets at random starves cubic, and BBR fills it. Which of the two a
path is shows in where it loses: with its queue full, or with its queue empty.
"""

from __future__ import annotations

import logging

from recovery.transport.sockets import PathState, SocketSet

logger = logging.getLogger(__name__)

_LOSSY_SHARE = 0.0005
"""Of the segments sent between two looks; at a hundredth of it neither cares, at twenty times it cubic is at a half."""
_LEAST_SEGMENTS_LOST = 4
_EMPTY_QUEUE = 1.25
"""Round trips up to so many times the least seen: the queue has next to nothing in it."""


def loses_at_random(before: PathState, now: PathState) -> bool:
    """Return whether between two looks segments were lost while the path's queue was empty."""
    sent, lost = now.segments_sent - before.segments_sent, now.segments_lost - before.segments_lost
    if lost < _LEAST_SEGMENTS_LOST or lost < _LOSSY_SHARE * sent:
        return False
    return now.round_trip_seconds <= _EMPTY_QUEUE * now.least_round_trip_seconds


class PathWatch:
    """Changes a sender's sockets to ``wanted`` once their path is seen to lose at random. Not thread-safe.

    Args:
        sockets: Connected to another machine.
        wanted: For lossy paths; where it is not permitted the system's choice stays.
    """

    def __init__(self, sockets: SocketSet, wanted: str) -> None:
        self._sockets = sockets
        self._wanted = wanted
        self._before = sockets.path_state()
        self.in_force = ""
        """What was found in force after the change; empty: nothing was changed."""

    def look(self) -> None:
        """Judge what was sent since the last look. Called a few times a second."""
        if self.in_force:
            return
        before, self._before = self._before, self._sockets.path_state()
        if before is not None and self._before is not None and loses_at_random(before, self._before):
            self.in_force = self._sockets.choose_congestion_control(self._wanted)
            logger.info("the path loses packets that its queue has room for: congestion control %s", self.in_force)
