"""A process group while it is being built: on a thread of its own, because nothing can interrupt gloo's connecting."""

from __future__ import annotations

import threading
from collections.abc import Callable

from recovery.errors import PeerUnreachable
from recovery.transport.process_group import GroupHandle


class GroupOpening:
    """Builds a group; whoever waits for it can be freed at once, and what still comes of it then is closed.

    A member that is frozen, or out of reach of this one alone, lets gloo's connecting stand until its timeout. The
    thread ends by then; ``close`` waits for it.
    """

    def __init__(self, build: Callable[[threading.Event], GroupHandle], name: str) -> None:
        """Keep how the group is built: ``build`` gets an event that ends its rendezvous when set."""
        self._build = build
        self._changed = threading.Condition()
        self._cancelled = threading.Event()
        self._handle: GroupHandle | None = None
        self._error: BaseException | None = None
        self._abandoned = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def wait(self) -> GroupHandle:
        """Return the group, which belongs to the caller from then on.

        Raises:
            PeerUnreachable: ``abandon`` was called, or a member did not come.
            Exception: what else building it raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._handle is not None or self._error is not None or self._abandoned)
            if self._abandoned:
                raise PeerUnreachable(self._abandoned)
            if self._error is not None:
                raise self._error
            assert self._handle is not None
            return self._handle

    def abandon(self, reason: str) -> None:
        """Nobody wants the group any more; any thread. A group that was handed out already is left alone."""
        with self._changed:
            self._cancelled.set()
            if self._handle is None:
                self._abandoned = self._abandoned or reason
            self._changed.notify_all()

    def close(self) -> None:
        """Abandon, and wait for the thread: at most as long as gloo's timeout."""
        self.abandon("closed")
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        handle: GroupHandle | None = None
        error: BaseException | None = None
        try:
            handle = self._build(self._cancelled)
        except BaseException as raised:  # noqa: BLE001 - the thread's root: raised where the group is waited for
            error = raised
        with self._changed:
            wanted = not self._abandoned
            if wanted:
                self._handle, self._error = handle, error
            self._changed.notify_all()
        if not wanted and handle is not None:
            handle.close()
