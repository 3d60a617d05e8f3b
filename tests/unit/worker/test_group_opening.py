"""A group being built can be left at once, whatever holds up its building, and what comes of it then is closed."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from recovery.errors import PeerUnreachable
from recovery.transport.process_group import GroupHandle
from recovery.worker.group_opening import GroupOpening

WAIT_SECONDS = 30.0


class FakeHandle:
    """Notes that it was closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def test_a_group_that_is_built_is_handed_out() -> None:
    handle = FakeHandle()
    opening = GroupOpening(lambda cancelled: cast(GroupHandle, handle), "test")
    opening.start()
    assert cast(object, opening.wait()) is handle
    opening.abandon("too late: it was handed out")
    assert not handle.closed.is_set()
    opening.close()
    assert opening.is_over


def test_an_error_reaches_whoever_waits() -> None:
    def build(cancelled: threading.Event) -> GroupHandle:
        raise PeerUnreachable("nobody came")

    opening = GroupOpening(build, "test")
    opening.start()
    with pytest.raises(PeerUnreachable, match="nobody came"):
        opening.wait()
    opening.close()


def test_whoever_waits_is_freed_while_connecting_stands_still() -> None:
    """Field report: pytorch/torchft#35, survivors wait for the timeout of a group that cannot come about."""
    handle, building, let_go = FakeHandle(), threading.Event(), threading.Event()

    def build(cancelled: threading.Event) -> GroupHandle:
        building.set()
        assert let_go.wait(WAIT_SECONDS)
        assert cancelled.is_set()
        return cast(GroupHandle, handle)

    opening = GroupOpening(build, "test")
    opening.start()
    assert building.wait(WAIT_SECONDS)
    freer = threading.Thread(target=lambda: opening.abandon("epoch 3 was aborted"))
    freer.start()
    with pytest.raises(PeerUnreachable, match="epoch 3 was aborted"):
        opening.wait()  # gloo's connecting, here ``build``, still stands
    assert not opening.is_over
    freer.join()
    let_go.set()
    opening.close()
    assert handle.closed.is_set()
