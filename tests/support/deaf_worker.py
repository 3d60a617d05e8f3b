"""A worker whose averaging goes deaf at a named place: ``python -m tests.support.deaf_worker '<json>'``.

Plan and commands as in ``tests.support.worker_process``. A halt whose plan has ``"cut": true`` does not halt: at that
place nothing reaches the connections of the averaging's present group any more. The worker says ``data_cut`` with their
number, and ``dropped`` once packets vanished there.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from typing import Any

from recovery.events import Event
from recovery.worker import Agent
from tests.support import deaf_sockets, worker_process


class RememberedAgent(Agent):
    """The process's agent, for whoever cuts its connections."""

    present: Agent

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        type(self).present = self


class DeafHalt(worker_process.Halt):
    """Cuts connections at a place, in place of standing still there."""

    def __call__(self, event: Event, /) -> None:
        plan = self._plan
        due = plan is not None and plan.get("cut") and plan["event"] == type(event).__name__
        if plan is None or not due or any(getattr(event, key) != value for key, value in plan["when"].items()):
            if not due:
                super().__call__(event)
            return
        self._plan = None
        handle = RememberedAgent.present._groups._handle
        sockets = [] if handle is None else [each.dup() for each in handle.sockets._sockets]
        deaf_sockets.cut(sockets)
        self._voice.say("data_cut", connections=len(sockets))
        threading.Thread(target=self._watch, args=(sockets,), daemon=True).start()
        super().__call__(event)

    def _watch(self, sockets: list[socket.socket]) -> None:
        poll = threading.Event()
        while not (packets := deaf_sockets.dropped(sockets)):
            poll.wait(0.02)
        self._voice.say("dropped", packets=packets)


def main(plan: dict[str, Any]) -> int:
    """Run the worker with the parts of above."""
    worker_process.Halt = DeafHalt  # type: ignore[misc]
    worker_process.Agent = RememberedAgent  # type: ignore[attr-defined]
    return worker_process.main(plan)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
