"""A run machine that does what a test says, in place of the one that decides in production."""

from __future__ import annotations

import threading
from collections.abc import Callable

from protos.recovery.v1 import coordinator_pb2, operations_pb2
from recovery.control.inputs import Answer, Attached, Detached, Effect, Input, Operated, Tell
from recovery.control.wire import duration
from recovery.types import WorkerRef

Script = Callable[[Input], list[Effect]]


def welcoming(event: Input) -> list[Effect]:
    """Welcome every worker; answer every List with an empty run; else nothing."""
    match event:
        case Attached(worker=worker):
            return [Tell(worker, coordinator_pb2.CoordinatorMessage(welcome=coordinator_pb2.Welcome()))]
        case Operated(request_id=request_id, request=operations_pb2.ListRequest()):
            return [Answer(request_id, operations_pb2.ListResponse(run_id="scripted"))]
        case _:
            return []


class ScriptedMachine:
    """Hands each input to a script and remembers it. ``wait_for`` lets a test's thread wait for an input."""

    def __init__(self, script: Script = welcoming) -> None:
        self.script = script
        self.inputs: list[Input] = []
        self.wakeup: float | None = None
        self._changed = threading.Condition()

    def handle(self, event: Input, now: float, /) -> list[Effect]:
        with self._changed:
            self.inputs.append(event)
            self._changed.notify_all()
        return self.script(event)

    def next_wakeup(self) -> float | None:
        return self.wakeup

    def wait_for(self, wanted: Callable[[Input], bool], timeout_seconds: float = 30.0) -> Input:
        """Return the first input that is ``wanted``, waiting for it; fails the test if none comes."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(wanted, self.inputs)), timeout_seconds), self.inputs
            return next(event for event in self.inputs if wanted(event))

    def attached(self, worker_id: str, nth: int = 1) -> WorkerRef:
        """Return the worker's reference once its ``nth`` hello came."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._hellos(worker_id)) >= nth, 30.0), self.inputs
            return self._hellos(worker_id)[nth - 1].worker

    def detached(self, worker_id: str, timeout_seconds: float = 30.0) -> Detached:
        """Return the worker's end, waiting for it."""
        found = self.wait_for(
            lambda event: isinstance(event, Detached) and event.worker.worker_id == worker_id, timeout_seconds
        )
        assert isinstance(found, Detached)
        return found

    def _hellos(self, worker_id: str) -> list[Attached]:
        return [event for event in self.inputs if isinstance(event, Attached) and event.worker.worker_id == worker_id]


def hello(worker_id: str = "w0", run_id: str = "run", incarnation: str = "i1") -> coordinator_pb2.Hello:
    """Return a fresh worker's hello."""
    message = coordinator_pb2.Hello(protocol=1, run_id=run_id, donor_slots=2, numerics_id="none")
    message.worker.worker_id = worker_id
    message.worker.incarnation = incarnation
    message.worker.num_local_ranks = 1
    return message


def tell(worker: WorkerRef, seconds: float = 1.0) -> Tell:
    """Return an effect that a worker can recognise: a PhaseEnding whose deadline is ``seconds``."""
    ending = coordinator_pb2.PhaseEnding(deadline=duration(seconds))
    return Tell(worker, coordinator_pb2.CoordinatorMessage(phase_ending=ending))
