"""One job after the other on a thread of its own: what the saver and the uploader have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from recovery.errors import MisuseError

T = TypeVar("T")


class Background(Generic[T]):
    """Owns one named thread and the jobs that wait for it. ``start`` and ``end``: the owner's; the rest: any thread."""

    def __init__(
        self,
        name: str,
        work: Callable[[T], None],
        *,
        choose: Callable[[Sequence[T]], T] = lambda waiting: waiting[0],
        done: Callable[[T], None] = lambda job: None,
    ) -> None:
        """Store references.

        Args:
            name: The thread's.
            work: Does one job, on the thread. It must not raise: what goes wrong is its own to tell.
            choose: Which of those that wait comes next; the oldest if not given.
            done: Told of each job after it has stopped counting as in flight, on the thread.
        """
        self._name = name
        self._work = work
        self._choose = choose
        self._done = done
        self._changed = threading.Condition()
        self._waiting: list[T] = []
        self._busy = 0
        self._ending = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; a second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    @property
    def running(self) -> bool:
        """Whether jobs are taken."""
        return self._thread is not None and not self._ending

    @property
    def in_flight(self) -> int:
        """Jobs that wait or are under way."""
        with self._changed:
            return len(self._waiting) + self._busy

    def put(self, job: T, *, once: bool = False) -> None:
        """Have a job done; with ``once``, one that waits already is not queued again.

        Raises:
            MisuseError: not started, or ended.
        """
        with self._changed:
            if not self.running:
                raise MisuseError(f"{self._name} is not running: start it first, and give it nothing after its end")
            if not (once and job in self._waiting):
                self._waiting.append(job)
            self._changed.notify_all()

    def wait_below(self, limit: int, timeout_seconds: float | None = None) -> bool:
        """Return whether fewer than ``limit`` jobs are in flight within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._waiting) + self._busy < limit, timeout_seconds)

    def end(self, timeout_seconds: float) -> bool | None:
        """End the thread after what is in flight.

        Returns:
            Whether it ended within the time; None: it was never started, or was ended before.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return None
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        thread.join(timeout_seconds)
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ending)
                if not self._waiting:
                    return
                job = self._choose(self._waiting)
                self._waiting.remove(job)
                self._busy = 1
            self._work(job)
            with self._changed:
                self._busy = 0
                self._changed.notify_all()
            self._done(job)
