"""One named thread that runs jobs in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from recovery.errors import MisuseError

Job = Callable[[], object]


class ServiceThread:
    """Runs jobs one after the other on a thread of its own.

    A job that raises ends nothing but itself: its error is kept and raised at the owner's next ``submit``. Jobs whose
    outcome somebody waits for hand their expected errors over themselves.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closed = False

    def start(self) -> None:
        """The thread runs. Jobs submitted earlier are run now."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """``job`` will run after those submitted before it.

        Raises:
            MisuseError: the thread is closed.
            BaseException: what an earlier job raised.
        """
        if self._closed:
            raise MisuseError(f"{self._name} is closed")
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._jobs.put(job)

    def close(self) -> None:
        """Jobs submitted so far have run, and the thread has ended. Safe twice."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - thread's root: the owner gets it at the next submit
                self._error = error
            del job  # it may hold tensors of an old version
